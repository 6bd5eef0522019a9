"""The RECORD of an installed distribution: which files are its own, and what they hash to.

pip and uv remove exactly what RECORD lists, so the overlay's files are listed in sglang's. Rows
are edited one by one and every other byte is kept: order, quoting, line ends. Format: PyPA,
"Recording installed projects".
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
from collections.abc import Iterable, Mapping


def row(path: str, content: bytes) -> str:
    """Return the RECORD row for ``path`` (relative to site-packages) with ``content``."""
    return _join([path, _hash(hashlib.sha256(content).digest()), str(len(content))])


def bare_row(path: str) -> str:
    """Return a row without hash and size, as RECORD has for itself and pip for bytecode."""
    return _join([path, "", ""])


def lists(line: str, sha256: str) -> bool:
    """Tell whether the row ``line`` has the hash ``sha256``, given in hex."""
    return f",{_hash(bytes.fromhex(sha256))}," in line


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
    return f"sha256={base64.urlsafe_b64encode(raw).rstrip(b'=').decode()}"


def _lines(content: bytes) -> list[str]:
    # Not splitlines(): a path may hold characters that it takes for line ends.
    text = content.decode("utf-8", "surrogateescape").replace("\r\n", "\n")
    return [line for line in text.split("\n") if line]


def _path(line: str) -> str:
    return next(csv.reader([line]))[0] if line.startswith('"') else line.partition(",")[0]


def _join(fields: list[str]) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="").writerow(fields)
    return out.getvalue()
