"""Manifests: what is read back, and the full text of what is refused."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from patcher import manifest, source
from patcher.errors import Refused

SHA = "0" * 64
SOUND: dict[str, Any] = {
    "schema": 1,
    "release": "0.5.12",
    "family": "sglang-x",
    "requires": {"torch": "2.11.0"},
    "files": {"sglang/a.py": {"before": SHA, "after": SHA.replace("0", "f")}},
    "witnesses": {"sglang/b.py": SHA},
}


def test_what_is_rendered_reads_back() -> None:
    for one in source.locate().manifests:
        assert manifest.parse(manifest.render(one), origin="memory") == one


def changed(path: str, value: object) -> bytes:
    document = copy.deepcopy(SOUND)
    *parents, last = path.split("|")
    place = document
    for name in parents:
        place = place[name]
    place[last] = value
    return json.dumps(document).encode()


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("schema", 2, "schema is 2, needed 1"),
        ("release", "", "release is '', needed a non-empty text"),
        ("family", 7, "family is 7, needed a non-empty text"),
        ("requires", [], "requires is [], needed an object of texts"),
        ("requires|torch", None, "requires.torch is None, needed a non-empty text"),
        ("files", None, "files is None, needed an object keyed by path"),
        ("files|sglang/a.py", "x", "files.sglang/a.py is 'x', needed an object"),
        (
            "files|sglang/a.py|after",
            "abc",
            "files.sglang/a.py.after is 'abc', needed a sha256 of 64 hex digits",
        ),
        (
            "witnesses|sglang/b.py",
            SHA + "0",
            f"witnesses.sglang/b.py is '{SHA}0', needed a sha256 of 64 hex digits",
        ),
        (
            "witnesses|sglang/../x.py",
            SHA,
            "witnesses.sglang/../x.py is not a plain path below sglang/",
        ),
        (
            "witnesses|/etc/passwd",
            SHA,
            "witnesses./etc/passwd is not a plain path below sglang/",
        ),
        (
            "witnesses|sglang/a.py",
            SHA,
            "witnesses.sglang/a.py is also in files, needed in one of the two",
        ),
    ],
)
def test_a_fault_names_the_field(path: str, value: object, message: str) -> None:
    with pytest.raises(Refused) as refusal:
        manifest.parse(changed(path, value), origin="x.json")
    assert [fault.message for fault in refusal.value.faults] == [message]
    assert {(f.code, f.path) for f in refusal.value.faults} == {("manifest-invalid", "x.json")}


def test_every_fault_is_reported_at_once() -> None:
    document = {"schema": 3, "files": {"../x": {}}, "witnesses": {}, "requires": {}}
    with pytest.raises(Refused) as refusal:
        manifest.parse(json.dumps(document).encode(), origin="x.json")
    assert len(refusal.value.faults) == 6


@pytest.mark.parametrize("text", [b"", b"[]", b"{", b"\xff", b"null"])
def test_what_is_no_manifest_is_refused(text: bytes) -> None:
    with pytest.raises(Refused) as refusal:
        manifest.parse(text, origin="x.json")
    assert refusal.value.faults[0].code == "manifest-invalid"
