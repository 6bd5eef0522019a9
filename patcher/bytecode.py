"""Compiled bytecode: which pycs belong to a source file, and which would win over it wrongly.

Python accepts a pyc by what its header says (PEP 552): the source's mtime and size, the source's
hash, or, for unchecked hashes, nothing at all. The last kind keeps running old code for ever.
"""

from __future__ import annotations

import _imp
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

HEADER_LENGTH = 16
_HASHED = 0b01
_CHECKED = 0b10


def beside(source: str | Path) -> list[Path]:
    """Return the pycs in the ``__pycache__`` next to ``source``, of every version and level."""
    return _named(f"{os.path.dirname(source)}/__pycache__", source)


def belongs(pyc: Path, source: Path) -> bool:
    """Tell whether ``pyc`` is what Python would name the bytecode of ``source``."""
    return pyc.parent.parent == source.parent and pyc.name.partition(".")[0] == source.stem


def in_prefix(source: str | Path) -> list[Path]:
    """Return the pycs of ``source`` below PYTHONPYCACHEPREFIX, where this run has one."""
    if sys.pycache_prefix is None:
        return []
    import importlib.util  # hardly a host needs it

    return _named(os.path.dirname(importlib.util.cache_from_source(str(source))), source)


def outvotes(pyc: Path, source: bytes) -> bool:
    """Tell whether Python would run ``pyc`` though it was compiled from other text than ``source``.

    Only unchecked-hash pycs can: the others are compared with the source when it is imported.
    """
    header = _header(pyc)
    if not is_unchecked(header):
        return False
    # The key of the hash is the magic number of the Python version that compiled the file.
    key = int.from_bytes(header[:4], "little")
    return header[8:16] != _imp.source_hash(key, source)


def is_unchecked(header: bytes) -> bool:
    """Tell whether a pyc that starts with ``header`` is run without a look at its source."""
    flags = int.from_bytes(header[4:8], "little")
    whole = len(header) >= HEADER_LENGTH
    return whole and bool(flags & _HASHED) and not flags & _CHECKED


def claims(pyc: Path, source: os.stat_result) -> bool:
    """Tell whether ``pyc`` is of the kind that goes by time and size, and has those of ``source``.

    Python runs such a pyc without a look at the text: if the text was replaced by another of the
    same size within one second, or its time was set back, the pyc is wrong.
    """
    header = _header(pyc)
    stamp = (int(source.st_mtime) & 0xFFFFFFFF, source.st_size & 0xFFFFFFFF)
    return (
        len(header) == HEADER_LENGTH
        and not int.from_bytes(header[4:8], "little") & _HASHED
        and (
            int.from_bytes(header[8:12], "little"),
            int.from_bytes(header[12:16], "little"),
        )
        == stamp
    )


def _header(pyc: Path) -> bytes:
    try:
        with pyc.open("rb") as stream:
            return stream.read(HEADER_LENGTH)
    except OSError:
        return b""


def _named(folder: str, source: str | Path) -> list[Path]:
    if not os.path.isdir(folder):
        return []
    from pathlib import Path  # not for a glance

    stem = os.path.splitext(os.path.basename(source))[0]
    names = [n for n in os.listdir(folder) if n.startswith(f"{stem}.") and n.endswith(".pyc")]
    return [Path(f"{folder}/{name}") for name in sorted(names)]
