"""Release manifests: for one SGLang release, what each file is before and after the series.

A manifest is generated from the released wheel (devtools/manifests.py) and read here. It is how a
release is told from another: by content, never by its version string.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from patcher.errors import Fault, Refused
from patcher.value import Value

SCHEMA = 1
_VERSION = re.compile(rb'^__version__ = "(\d+(?:\.\d+)*)"$', re.MULTILINE)
_HEX = "0123456789abcdef"
_PATH = re.compile(r"sglang(/[A-Za-z0-9_][A-Za-z0-9_.-]*)+\Z")


class Digests(Value):
    """The sha256 of a file, in hex, as released and with the series applied."""

    before: str
    after: str


class Manifest(Value):
    """What one release looks like.

    ``files`` are those that the series changes, ``witnesses`` those that the overlay builds on
    without changing them: both must be as released. ``requires`` are the exact pins of the wheel's
    own metadata for the packages that the overlay's behaviour depends on. Paths are relative to
    the folder that holds ``sglang/``.
    """

    release: str
    family: str
    requires: Mapping[str, str]
    files: Mapping[str, Digests]
    witnesses: Mapping[str, str]


def parse(text: bytes, *, origin: str) -> Manifest:
    """Read a manifest.

    Raises:
        Refused: with every fault, each naming the field by its dotted path.
    """
    try:
        document = json.loads(text)
    except ValueError as error:
        raise Refused([_fault(origin, "", f"is not JSON: {error}")]) from error
    if not isinstance(document, dict):
        raise Refused([_fault(origin, "", f"is a {type(document).__name__}, needed an object")])
    reader = _Reader(origin)
    if document.get("schema") != SCHEMA:
        reader.fault("schema", f"is {document.get('schema')!r}, needed {SCHEMA}")
    manifest = Manifest(
        release=reader.text(document, "release"),
        family=reader.text(document, "family"),
        requires=reader.texts(document, "requires"),
        files={
            path: Digests(
                before=reader.sha256(row, "before", f"files.{path}"),
                after=reader.sha256(row, "after", f"files.{path}"),
            )
            for path, row in reader.paths(document, "files").items()
            if reader.is_object(row, f"files.{path}")
        },
        witnesses={
            path: reader.sha256({"": sha}, "", f"witnesses.{path}")
            for path, sha in reader.paths(document, "witnesses").items()
        },
    )
    for path in manifest.files.keys() & manifest.witnesses.keys():
        reader.fault(f"witnesses.{path}", "is also in files, needed in one of the two")
    if reader.faults:
        raise Refused(reader.faults)
    return manifest


def render(manifest: Manifest) -> bytes:
    """Return the JSON text of ``manifest``, the same for the same content."""
    document = {
        "schema": SCHEMA,
        "release": manifest.release,
        "family": manifest.family,
        "requires": dict(sorted(manifest.requires.items())),
        "files": {
            path: {"before": row.before, "after": row.after}
            for path, row in sorted(manifest.files.items())
        },
        "witnesses": dict(sorted(manifest.witnesses.items())),
    }
    return (json.dumps(document, indent=2) + "\n").encode()


def fingerprint(manifests: Iterable[Manifest], overlay: Mapping[str, str]) -> str:
    """Return a sha256 over all that is installed: what the files become, and the overlay's own.

    ``overlay`` is path → sha256 of each of its files.
    """
    lines = [f"{path} {digest}" for path, digest in sorted(overlay.items())]
    for manifest in sorted(manifests, key=lambda one: one.release):
        lines += [f"{manifest.release} {p} {row.after}" for p, row in manifest.files.items()]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def overlay_version(init: bytes) -> str | None:
    """Return the version that the overlay's ``__init__.py`` with text ``init`` names, if it does.

    Nothing of the overlay is ever imported here.
    """
    found = _VERSION.search(init)
    return found[1].decode() if found else None


def _fault(origin: str, field: str, what: str) -> Fault:
    return Fault(
        code="manifest-invalid",
        message=f"{field} {what}".strip(),
        path=origin,
        hint="This copy of the overlay is damaged: get it again, or run `make manifests`.",
    )


class _Reader:
    """Takes typed values out of a JSON document and collects what is wrong with it."""

    def __init__(self, origin: str) -> None:
        self.origin = origin
        self.faults: list[Fault] = []

    def fault(self, field: str, what: str) -> None:
        self.faults.append(_fault(self.origin, field, what))

    def text(self, document: Mapping[str, Any], key: str, field: str = "") -> str:
        value = document.get(key)
        if isinstance(value, str) and value:
            return value
        self.fault(field or key, f"is {value!r}, needed a non-empty text")
        return ""

    def is_object(self, value: object, field: str) -> bool:
        if isinstance(value, dict):
            return True
        self.fault(field, f"is {value!r}, needed an object")
        return False

    def texts(self, document: Mapping[str, Any], field: str) -> dict[str, str]:
        value = document.get(field)
        if not isinstance(value, dict):
            self.fault(field, f"is {value!r}, needed an object of texts")
            return {}
        return {key: self.text(value, key, f"{field}.{key}") for key in value}

    def paths(self, document: Mapping[str, Any], field: str) -> dict[str, Any]:
        value = document.get(field)
        if not isinstance(value, dict):
            self.fault(field, f"is {value!r}, needed an object keyed by path")
            return {}
        for path in value:
            if not _PATH.match(path) or ".." in path.split("/"):
                self.fault(f"{field}.{path}", "is not a plain path below sglang/")
        return value

    def sha256(self, row: Mapping[str, Any], key: str, field: str) -> str:
        value = row.get(key)
        if isinstance(value, str) and len(value) == 64 and not value.strip(_HEX):
            return value
        dotted = f"{field}.{key}" if key else field
        self.fault(dotted, f"is {value!r}, needed a sha256 of 64 hex digits")
        return ""
