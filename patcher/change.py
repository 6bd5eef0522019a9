"""One change to one file, as plans name it and a transaction carries it out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Change:
    """One path, taken from what stands there now to what shall stand there.

    ``content`` is written as a new file with the mode, owner and xattrs of ``like``; ``clone``
    names an existing file to be put there as it is; with neither, the path is removed.
    ``expect`` is the digest that the plan saw at ``target`` (None: nothing there).
    """

    target: Path
    expect: str | None
    content: bytes | None = None
    clone: Path | None = None
    like: Path | None = None
