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


def gaps(content: bytes, wanted: Iterable[str]) -> list[str]:
    """Return the rows of ``wanted`` that are not in RECORD, whose ``content`` is given."""
    return [row for row in wanted if not _has(content, _encoded(row))]


def rows(content: bytes) -> dict[str, str]:
    """Return path → row, in the file's order."""
    lines = [line.removesuffix(b"\r") for line in content.split(b"\n")]
    return {_path(line): _decoded(line) for line in lines if line}


def edit(content: bytes, *, put: Mapping[str, str], drop: Iterable[str] = ()) -> bytes:
    """Return RECORD with the rows in ``put`` (path → row) replaced or appended, some dropped."""
    end = b"\r" if b"\r\n" in content else b""
    gone = set(drop)
    # Other paths may have the same key: that of a quoted path ends at its first comma.
    affected = {_encoded(_quoted(p)).partition(b",")[0].strip(b'"') for p in (*put, *gone)}
    # Not splitlines(): a path may hold characters that it takes for line ends.
    lines: list[bytes | None] = [*content.removesuffix(b"\n").split(b"\n")] if content else []
    seen = set()
    # Of thousands of rows only these few are taken apart.
    keys = [line and line.partition(b",")[0].strip(b'"') for line in lines]
    for number in [n for n, key in enumerate(keys) if key in affected]:
        path = _path(lines[number] or b"")
        seen.add(path)
        if path in gone:
            lines[number] = None
        elif path in put:
            lines[number] = _encoded(put[path]) + end
    lines += [_encoded(row) + end for path, row in put.items() if path not in seen]
    return b"\n".join([*(line for line in lines if line is not None), b""])


def _has(content: bytes, row: bytes) -> bool:
    """Tell whether a line of RECORD is ``row``."""
    # From the end, where most rows of the overlay are: to take thousands of lines apart costs more.
    at = content.rfind(row)
    while at >= 0:
        end = at + len(row)
        ended = content[end : end + 1] in (b"", b"\n") or content[end : end + 2] == b"\r\n"
        if ended and content[at - 1 : at] in (b"", b"\n"):
            return True
        at = content.rfind(row, 0, end - 1)
    return False


def _hash(raw: bytes) -> str:
    text = binascii.b2a_base64(raw, newline=False).rstrip(b"=")
    return f"sha256={text.translate(_URL_SAFE).decode()}"


def _path(line: bytes) -> str:
    if not line.startswith(b'"'):
        return _decoded(line.partition(b",")[0])
    import csv  # hardly a path needs it

    return next(csv.reader([_decoded(line)]))[0]


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _decoded(content: bytes) -> str:
    return content.decode("utf-8", "surrogateescape")


def _quoted(path: str) -> str:
    if "," not in path and '"' not in path and "\r" not in path and "\n" not in path:
        return path
    return '"' + path.replace('"', '""') + '"'
