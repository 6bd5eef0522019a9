"""One change to one file, as plans name it and a transaction carries it out."""

from __future__ import annotations

from pathlib import Path

from patcher.value import Value


class Change(Value):
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
