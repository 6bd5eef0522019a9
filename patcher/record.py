"""The RECORD of an installed distribution: which files are its own, and what they hash to.

pip and uv remove exactly what RECORD lists, so the overlay's files are listed in sglang's. Rows
are edited one by one and every other byte is kept: order, quoting, line ends. Format: PyPA,
"Recording installed projects".
"""

from __future__ import annotations

import binascii
import hashlib
from collections.abc import Iterable, Mapping

_URL_SAFE = bytes.maketrans(b"+/", b"-_")


def row(path: str, content: bytes) -> str:
    """Return the RECORD row for ``path`` (relative to site-packages) with ``content``."""
    return row_of(path, hashlib.sha256(content).hexdigest(), len(content))


def row_of(path: str, sha256: str, size: int) -> str:
    """Return the RECORD row for ``path``, given the sha256 of its content in hex and its size."""
    return f"{_quoted(path)},{_hash(bytes.fromhex(sha256))},{size}"


def bare_row(path: str) -> str:
    """Return a row without hash and size, as RECORD has for itself and pip for bytecode."""
    return f"{_quoted(path)},,"


def lists(line: str, sha256: str) -> bool:
    """Tell whether the row ``line`` has the hash ``sha256``, given in hex."""
    return f",{_hash(bytes.fromhex(sha256))}," in line


def lines(content: bytes) -> frozenset[str]:
    """Return every row, for a quick look whether some are there."""
    return frozenset(_lines(content))


def rows(content: bytes) -> dict[str, str]:
    """Return path → row, in the file's order."""
    return {_path(line): line for line in _lines(content)}


def edit(content: bytes, *, put: Mapping[str, str], drop: Iterable[str] = ()) -> bytes:
    """Return RECORD with the rows in ``put`` (path → row) replaced or appended, some dropped."""
    newline = "\r\n" if b"\r\n" in content else "\n"
    gone = set(drop)
    lines, seen = [], set()
    for line in _lines(content):
        path = _path(line)
        seen.add(path)
        if path not in gone:
            lines.append(put.get(path, line))
    lines += [line for path, line in put.items() if path not in seen]
    return "".join(line + newline for line in lines).encode("utf-8", "surrogateescape")


def _hash(raw: bytes) -> str:
    text = binascii.b2a_base64(raw, newline=False).rstrip(b"=")
    return f"sha256={text.translate(_URL_SAFE).decode()}"


def _lines(content: bytes) -> list[str]:
    # Not splitlines(): a path may hold characters that it takes for line ends.
    text = content.decode("utf-8", "surrogateescape").replace("\r\n", "\n")
    return [line for line in text.split("\n") if line]


def _path(line: str) -> str:
    if not line.startswith('"'):
        return line.partition(",")[0]
    import csv  # hardly a path needs it

    return next(csv.reader([line]))[0]


def _quoted(path: str) -> str:
    if not any(character in path for character in ',"\r\n'):
        return path
    return '"' + path.replace('"', '""') + '"'
