"""The receipt: what was put into a site, and where the originals are kept.

It lies in ``sglang_overlay/_state/`` with the originals beside it. Every revert and upgrade works
from it, so that a newer engine can take back what an older one did.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from patcher import bounds
from patcher.errors import Refused, refuse
from patcher.value import Value, plain

if TYPE_CHECKING:
    from pathlib import Path

SCHEMA = 1
PACKAGE = "sglang_overlay"
STATE = f"{PACKAGE}/_state"
PATH = f"{STATE}/receipt.json"
# The folder beside the package in which a change is staged; while it is there, one is unfinished.
STAGING = ".sglang_overlay.txn"


class Kept(Value):
    """A file that was replaced or removed.

    ``before`` and ``after`` are digests (None: removed); ``original`` is where the first is kept,
    relative to site-packages.
    """

    before: str
    after: str | None
    original: str


class Folder(Value):
    """The time of a folder and a digest of its names, as they were before the first change."""

    mtime_ns: int
    names: str


class Receipt(Value):
    """One applied overlay.

    ``files`` and ``bytecode`` are keyed by path relative to the package's folder, ``overlay``
    (path → sha256) and ``record`` by path relative to site-packages. ``applied_at`` is in seconds
    since the epoch.
    """

    overlay_version: str
    fingerprint: str
    release: str
    family: str
    applied_at: float
    files: Mapping[str, Kept]
    bytecode: Mapping[str, Kept]
    overlay: Mapping[str, str]
    record: Mapping[str, Kept]
    folders: Mapping[str, Folder]

    def version_key(self) -> tuple[int, ...]:
        """The overlay's version as a tuple that sorts."""
        return version_key(self.overlay_version)

    def originals(self) -> dict[str, str]:
        """Where the originals are kept, relative to site-packages → their sha256."""
        kept = [*self.files.values(), *self.bytecode.values(), *self.record.values()]
        return {one.original: one.before for one in kept}


def version_key(version: str) -> tuple[int, ...]:
    """Return the overlay's own version, ``1.2.3``, as a tuple that sorts."""
    return tuple(int(part) for part in version.split("."))


def original_name(path: str) -> str:
    """Return where the original of ``path`` is kept; the ending keeps compilers away from it.

    All lie in one folder: each folder more would have to be made, and made durable.
    """
    return f"{STATE}/originals/{path.replace('/', '@')}.orig"


def load(root: Path) -> Receipt | None:
    """Read the receipt in the site-packages folder ``root``; None where there is none.

    Raises:
        Refused: it is damaged, or written by an engine that is newer than this one.
    """
    place = root / PATH
    if not os.path.lexists(place):
        return None
    if not place.is_file():
        raise _unreadable(str(place), "it is not a file")
    return parse(place.read_bytes(), origin=str(place))


def parse(text: bytes, *, origin: str) -> Receipt:
    """Read the receipt that the file ``origin`` holds.

    Raises:
        Refused: it is damaged, or written by an engine that is newer than this one.
    """
    try:
        return _read(json.loads(text))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _unreadable(origin, str(error)) from error


def render(receipt: Receipt) -> bytes:
    """Return the JSON text of ``receipt``."""
    # One line a field: with an indent, Python's slow encoder would write it.
    fields = {"schema": SCHEMA, **plain(receipt)}
    lines = [f" {json.dumps(name)}: {json.dumps(value)}" for name, value in fields.items()]
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


def _unreadable(origin: str, why: str) -> Refused:
    return refuse(
        "receipt-unreadable",
        f"cannot be read by this engine: {why}",
        path=origin,
        hint="Use the overlay version that applied it. If the file is damaged, run "
        "`pip install --force-reinstall --no-deps sglang==VERSION`: that removes the overlay.",
    )


def _read(document: dict[str, Any]) -> Receipt:
    if document["schema"] != SCHEMA:
        raise ValueError(f"schema {document['schema']}, known is {SCHEMA}")
    receipt = Receipt(
        overlay_version=_text(document["overlay_version"]),
        fingerprint=_text(document["fingerprint"]),
        release=_text(document["release"]),
        family=_text(document["family"]),
        applied_at=float(document["applied_at"]),
        files=_kept(document["files"], "sglang/"),
        bytecode=_kept(document["bytecode"], "sglang/", f"{PACKAGE}/"),
        overlay={
            bounds.plain(path, f"{PACKAGE}/"): _text(sha)
            for path, sha in document["overlay"].items()
        },
        record=_kept(document["record"], "sglang-"),
        folders={
            path if path == "." else bounds.plain(path): _folder(row)
            for path, row in document["folders"].items()
        },
    )
    receipt.version_key()
    return receipt


def _kept(rows: dict[str, Any], *prefixes: str) -> dict[str, Kept]:
    return {
        bounds.plain(path, *prefixes): Kept(
            before=_text(row["before"]),
            after=None if row["after"] is None else _text(row["after"]),
            original=bounds.plain(row["original"], f"{STATE}/originals/"),
        )
        for path, row in rows.items()
    }


def _folder(row: dict[str, Any]) -> Folder:
    return Folder(mtime_ns=int(row["mtime_ns"]), names=_text(row["names"]))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not a text")
    return value
