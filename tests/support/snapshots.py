"""Everything that makes a tree what it is, taken down so that two moments can be compared.

"Byte-identical" means content, mode, owner, mtime, extended attributes and link targets. Inode
numbers and link counts are left out: replacing a file gives it a new inode on purpose.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One name in a tree.

    ``kind`` is file, folder, link or special; ``content`` a sha256 in hex, or a link's target;
    ``mtime_ns`` is nanoseconds since the epoch, and 0 for a folder whose time was not asked for.
    """

    kind: str
    content: str
    mode: str
    owner: str
    mtime_ns: int
    xattrs: tuple[tuple[str, bytes], ...]


Snapshot = Mapping[str, Entry]


def snapshot(
    folder: Path,
    *,
    folder_times: bool = False,
    leave_out: Callable[[str], bool] = lambda path: False,
) -> dict[str, Entry]:
    """Take down ``folder`` and all below it, keyed by relative path (``.`` is the folder itself).

    Args:
        folder: what to look at. No link in it is followed.
        folder_times: take down the mtime of folders too. Whoever adds or removes a name changes
            it, so it only means something where nothing did, or where it was put back.
        leave_out: paths for which this is true are not taken down, nor is anything below them.
    """
    found = {".": _entry(folder, folder_times=folder_times)}
    _walk(folder, "", found, folder_times, leave_out)
    return found


def differences(before: Snapshot, after: Snapshot) -> list[str]:
    """Return a line for each path that differs, in words: nothing if the two are identical."""
    lines = []
    for path in sorted({*before, *after}):
        old, new = before.get(path), after.get(path)
        if old is None:
            assert new is not None
            lines.append(f"+ {path}: new {new.kind}")
        elif new is None:
            lines.append(f"- {path}: {old.kind} is gone")
        elif old != new:
            changed = (
                f"{f.name} {_short(getattr(old, f.name))} -> {_short(getattr(new, f.name))}"
                for f in fields(Entry)
                if getattr(old, f.name) != getattr(new, f.name)
            )
            lines.append(f"! {path}: {', '.join(changed)}")
    return lines


def assert_identical(before: Snapshot, after: Snapshot, what: str = "the tree") -> None:
    """Fail with a readable list where ``after`` is not ``before``."""
    found = differences(before, after)
    assert not found, f"{what} differs in {len(found)} places:\n" + "\n".join(found[:40])


def _walk(
    folder: Path,
    prefix: str,
    found: dict[str, Entry],
    folder_times: bool,
    leave_out: Callable[[str], bool],
) -> None:
    for item in sorted(os.scandir(folder), key=lambda one: one.name):
        path = prefix + item.name
        if leave_out(path):
            continue
        found[path] = _entry(Path(item.path), folder_times=folder_times)
        if found[path].kind == "folder":
            _walk(Path(item.path), f"{path}/", found, folder_times, leave_out)


def _entry(path: Path, *, folder_times: bool) -> Entry:
    status = path.lstat()
    kind, content = "special", ""
    if stat.S_ISDIR(status.st_mode):
        kind = "folder"
    elif stat.S_ISLNK(status.st_mode):
        kind, content = "link", str(path.readlink())
    elif stat.S_ISREG(status.st_mode):
        kind, content = "file", hashlib.sha256(path.read_bytes()).hexdigest()
    timed = kind != "folder" or folder_times
    return Entry(
        kind=kind,
        content=content,
        mode=oct(stat.S_IMODE(status.st_mode)),
        owner=f"{status.st_uid}:{status.st_gid}",
        mtime_ns=status.st_mtime_ns if timed else 0,
        xattrs=_xattrs(path),
    )


def _xattrs(path: Path) -> tuple[tuple[str, bytes], ...]:
    names = sorted(os.listxattr(path, follow_symlinks=False))
    return tuple((name, os.getxattr(path, name, follow_symlinks=False)) for name in names)


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 24 else f"{text[:12]}…{text[-8:]}"
