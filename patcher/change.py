"""One change to one file: as plans name it, as a transaction carries it out, and as it is told."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from patcher.states import FileReport
from patcher.value import Value

if TYPE_CHECKING:
    from pathlib import Path


class Change(Value):
    """One path, taken from what stands there now to what shall stand there.

    ``content`` is written as a new file with the mode, owner and xattrs of ``like``; ``clone``
    names an existing file to be put there as it is; with neither, the path is removed.
    ``expect`` is the digest that the plan saw at ``target``, ``after`` the one that shall stand
    there (None: nothing).
    """

    target: Path
    expect: str | None
    after: str | None
    content: bytes | None = None
    clone: Path | None = None
    like: Path | None = None


class Verb(str, Enum):
    """What happens to a file."""

    KEEP = "keep"
    PATCH = "patch"
    RESTORE = "restore"
    ADD = "add"
    REPLACE = "replace"
    REMOVE = "remove"
    LEAVE = "leave"


class Action(Value):
    """One file and what happens to it. Digests are sha256 in hex; None means no file."""

    path: str
    state: str
    action: Verb
    sha256_before: str | None
    sha256_after: str | None
    links: int


def note(report: FileReport, verb: Verb, after: str | None) -> Action:
    """Return the `Action` for a surveyed file."""
    return Action(
        path=report.path,
        state=report.state.value,
        action=verb,
        sha256_before=report.digest,
        sha256_after=after,
        links=report.links,
    )
