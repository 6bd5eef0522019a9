"""Keeping inside the target: what a file on the disk says about paths is checked before use.

A receipt and a journal lie in the tree, where whoever owns the tree can write them, while the
program may run as root. No path of theirs, and no link on the way, may lead out.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path


def plain(path: Any, *prefixes: str) -> str:
    """Return ``path`` if it is a plain relative path below one of ``prefixes`` (or any).

    Raises:
        ValueError: it is no text, absolute, empty, or has a part that leads elsewhere.
    """
    if not isinstance(path, str):
        raise ValueError(f"{path!r} is not a path")
    parts = path.split("/")
    if "\0" in path or any(part in ("", ".", "..") for part in parts):
        raise ValueError(f"{path!r} is not a plain relative path")
    if prefixes and not path.startswith(prefixes):
        raise ValueError(f"{path!r} is not below {' or '.join(prefixes)}")
    return path


def obstacle(path: str | Path) -> str:
    """Return what keeps ``path`` from being a file of its own tree; nothing if all is well.

    Its folders must be folders, not links to others, as far as they exist.
    """
    folder = os.path.dirname(path)
    while not os.path.lexists(folder):
        folder = os.path.dirname(folder)
    if not os.path.isdir(folder):
        return f"{folder} is in the way: it is not a folder"
    found = os.path.realpath(folder)
    return "" if found == folder else f"{folder} lies at {found}, behind a symbolic link"
