"""What a process says about the overlay that it loaded."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import sglang_overlay
from sglang_overlay import identity, mask_table, upstream
from sglang_overlay.identity import Identity
from sglang_overlay.mask_policy import Drafts, Traits, Verdict, judge


def test_the_fingerprint_is_the_documented_digest(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.py").write_bytes(b"b = 1\n")
    (tmp_path / "sub" / "a.py").write_bytes(b"a = 1\n")
    (tmp_path / "note.txt").write_bytes(b"not code")
    expected = hashlib.sha256()
    for name, body in (("b.py", b"b = 1\n"), ("sub/a.py", b"a = 1\n")):
        expected.update(name.encode() + b"\0" + hashlib.sha256(body).digest())
    assert identity.fingerprint(tmp_path) == expected.hexdigest()


@pytest.mark.parametrize("change", ["edit", "add", "rename"])
def test_any_change_of_code_changes_the_fingerprint(tmp_path: Path, change: str) -> None:
    module = tmp_path / "a.py"
    module.write_text("a = 1\n")
    before = identity.fingerprint(tmp_path)
    if change == "edit":
        module.write_text("a = 2\n")
    elif change == "add":
        (tmp_path / "b.py").write_text("")
    else:
        module.rename(tmp_path / "c.py")
    assert identity.fingerprint(tmp_path) != before


def test_the_loaded_fingerprint_is_that_of_the_package_on_disk() -> None:
    package = Path(str(sglang_overlay.__file__)).parent
    assert identity.loaded_fingerprint() == identity.fingerprint(package)


def test_an_identity_names_release_verdict_and_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream, "release", lambda: "0.5.12")
    judgement = judge(mask_table.newest_rows()["FlashMLABackend"], Traits(topk=1))
    drafts = Drafts(algorithm="DFLASH", width=1)
    found = identity.identify(Verdict(drafts=drafts, judgements=(judgement,)))
    assert found == Identity(
        overlay=sglang_overlay.__version__,
        fingerprint=identity.loaded_fingerprint(),
        release="0.5.12",
        verify_backend="FlashMLABackend",
        mask_policy="chain: right without a mask",
        verify_path="causal",
    )


def sample(**changes: object) -> Identity:
    fields: dict[str, object] = {
        "overlay": "1.2",
        "fingerprint": "0123456789abcdef",
        "release": "0.5.12",
        "verify_backend": "TritonAttnBackend",
        "mask_policy": "tree: mask honoured",
        "verify_path": "stock-mask",
    }
    return Identity(**(fields | changes))  # type: ignore[arg-type]


def test_the_start_up_line_is_one_line_with_everything() -> None:
    assert sample().line() == (
        "DDTree overlay 1.2 (fingerprint 0123456789ab) on SGLang 0.5.12: verify backend "
        "TritonAttnBackend, mask policy 'tree: mask honoured', verify path stock-mask, "
        "tree size none"
    )
    assert sample(tree_size=16).line().endswith("tree size 16")
    assert sample(allow_dropped_mask=True).line().endswith(", dropped masks allowed")


def test_server_info_gets_plain_values_and_the_metric_gets_texts() -> None:
    assert json.loads(json.dumps(sample().as_dict()))["tree_size"] is None
    assert set(map(type, sample().as_labels().values())) == {str}
    assert sample().as_labels()["tree_size"] == "none"
