"""Unified diffs, read and applied without tolerance: bytes in, bytes out, nothing lost in silence.

`parse` takes a patch only when two readings of it agree: the grammar's, which reports every fault
with its line, and unidiff's, whose parsed set must render to the very bytes that were read. `apply`
knows no fuzz: the old lines of a hunk must stand at exactly one place of the file.
"""

from __future__ import annotations

import io
import re
from collections import Counter
from typing import Any

from patcher.errors import Fault, Refused, refuse
from patcher.grammar import (
    DIFF_STARTS,
    HUNK_HEADER,
    NO_NEWLINE,
    check,
    show,
    split_lines,
    split_sides,
)
from patcher.value import Value

_OTHER_FILE = (
    "The file is not the one that the patch was made for: it was edited, or is of another release."
    " Reinstall sglang, or use the overlay for that release."
)

_COMMON = 100  # occurrences in a file from which on a line does not help to find a place


class Hunk(Value):
    """One change: the lines ``source`` become the lines ``target``.

    ``source_start`` is the 1-based line at which the patch saw ``source`` (for an empty ``source``
    the line before it, 0 at the top). Lines carry their line end; the last line of a file may lack
    one. ``added`` counts the lines that the patch marks with ``+``.
    """

    source_start: int
    source: tuple[bytes, ...]
    target: tuple[bytes, ...]
    added: int


class FilePatch(Value):
    """All changes that the patch file named ``origin`` makes to the file at ``path``.

    ``path`` is in POSIX form and relative to site-packages.
    """

    path: str
    hunks: tuple[Hunk, ...]
    origin: str


def parse(text: bytes, *, origin: str) -> tuple[FilePatch, ...]:
    """Return the file patches in ``text``, the content of the patch file named ``origin``.

    Raises `Refused` with every fault found, each with its line number, if anything in ``text`` is
    neither prose above the diff nor part of a well-formed change to an existing file of sglang.
    Lines of the patched files are not decoded: they may be in any encoding.
    """
    faults = check(text, origin=origin)
    if faults:
        raise Refused(faults)
    _, body = split_header(text)
    sections = _read_with_unidiff(body, origin)
    rendered = "".join(str(section) for section in sections).encode("latin-1")
    if rendered != _spell_out_counts(body):
        raise _lossy(origin, "unidiff reads something else than the file says")
    return tuple(_file_patch(section, origin) for section in sections)


def split_header(text: bytes) -> tuple[bytes, bytes]:
    """Split a patch file before its first diff line into prose and diff."""
    lines = split_lines(text)
    at = next((i for i, line in enumerate(lines) if line.startswith(DIFF_STARTS)), len(lines))
    return b"".join(lines[:at]), b"".join(lines[at:])


def apply(patch: FilePatch, content: bytes) -> bytes:
    """Return ``content`` with all hunks of ``patch`` applied.

    The old lines of each hunk must occur at exactly one place of ``content``, at whatever line,
    and the places must come in the order of the hunks. Raises `Refused` with one fault for each
    hunk that does not fit: ``hunk-mismatch``, ``hunk-ambiguous`` or ``hunk-misplaced``. Each hunk
    costs a search of the whole file, which is what proves that its place is the only one.
    """
    faults: list[Fault] = []
    pieces: list[bytes] = []
    done = 0  # offset behind the block that was replaced last
    for number, hunk in enumerate(patch.hunks, start=1):
        block = b"".join(hunk.source)
        places = _places(block, content)
        if not places:
            faults.append(_mismatch(patch, number, content))
        elif len(places) > 1:
            faults.append(_ambiguous(patch, number, content, places))
        elif problem := _misfit(hunk, content, places[0], done):
            faults.append(_misplaced(patch, number, content, places[0], problem))
        else:
            pieces += content[done : places[0]], *hunk.target
            done = places[0] + len(block)
    if faults:
        raise Refused(faults)
    return b"".join([*pieces, content[done:]])


def unified(before: bytes, after: bytes, *, path: str) -> str:
    """Return the unified diff from ``before`` to ``after``; empty if they are equal.

    Bytes that are not UTF-8 become lone surrogates: encode with ``errors="surrogateescape"`` to
    get them back.
    """
    # Here and not at the top: only a run that prints a diff needs it.
    import difflib

    lines = difflib.unified_diff(
        [line.decode(errors="surrogateescape") for line in split_lines(before)],
        [line.decode(errors="surrogateescape") for line in split_lines(after)],
        fromfile=f"a/{path}",
        tofile=f"b/{path}",
    )
    marker = "\n" + NO_NEWLINE.decode()
    return "".join(line if line.endswith("\n") else line + marker for line in lines)


def _lossy(origin: str, reason: str) -> Refused:
    return refuse(
        "patch-lossy",
        f"{origin}: {reason}; nothing of it was used",
        path=origin,
        hint="Install another release of unidiff, or write the patch anew with `diff -u`.",
    )


def _read_with_unidiff(body: bytes, origin: str) -> list[Any]:
    try:
        # Here and not at the top: a run that finds nothing to do must not pay for this import.
        import unidiff
    except ImportError:
        raise refuse(
            "dependency-missing",
            "the Python package unidiff, which reads patches, is not installed",
            hint="Run: python -m pip install 'unidiff>=0.7.5,<2'",
        ) from None
    try:
        # Latin-1 maps each byte to one character and back, so no encoding gets in the way.
        return list(unidiff.PatchSet(io.StringIO(body.decode("latin-1"), newline="\n")))
    except unidiff.UnidiffParseError as error:
        raise _lossy(origin, f"unidiff cannot read it ({error})") from error


def _spell_out_counts(body: bytes) -> bytes:
    """Write out counts of 1 in hunk headers, as unidiff does: ``@@ -3 +3,2 @@`` is legal too."""

    def spell_out(header: re.Match[bytes]) -> bytes:
        old, old_count, new, new_count, section = header.groups()
        tail = b" " + section if section else b""
        return b"@@ -%b,%b +%b,%b @@%b\n" % (old, old_count or b"1", new, new_count or b"1", tail)

    return HUNK_HEADER.sub(spell_out, body)


def _file_patch(section: Any, origin: str) -> FilePatch:
    hunks = []
    for hunk in section:
        body = [str(line).encode("latin-1") for line in hunk]
        source, target = split_sides(body)
        added = sum(line.startswith(b"+") for line in body)
        hunks.append(
            Hunk(source_start=hunk.source_start, source=source, target=target, added=added)
        )
    path = section.source_file.removeprefix("a/")
    return FilePatch(path=path, hunks=tuple(hunks), origin=origin)


def _places(block: bytes, content: bytes) -> list[int]:
    """Return up to two offsets of ``content`` at which ``block`` stands as whole lines."""
    if not block:
        # Nothing holds an insertion without context in place, unless the file is empty.
        return [0, len(content)] if content else [0]
    if not block.endswith(b"\n"):
        start = len(content) - len(block)
        return [start] if content.endswith(block) and _starts_line(content, start) else []
    places: list[int] = []
    at = content.find(block)
    while at >= 0 and len(places) < 2:
        if _starts_line(content, at):
            places.append(at)
        # Go on behind this line, which holds no other line start.
        at = content.find(block, content.index(b"\n", at) + 1)
    return places


def _starts_line(content: bytes, at: int) -> bool:
    return at == 0 or content[at - 1 : at] == b"\n"


def _misfit(hunk: Hunk, content: bytes, place: int, done: int) -> str:
    """Return why a hunk cannot be applied at the only place where it matches, if so."""
    if place < done:
        return "that is before the end of the hunk above it"
    unterminated = bool(hunk.target) and not hunk.target[-1].endswith(b"\n")
    if unterminated and place + len(b"".join(hunk.source)) < len(content):
        return "it is to end the file there, but more lines follow"
    return ""


def _name(patch: FilePatch, number: int) -> str:
    start = patch.hunks[number - 1].source_start
    return f"hunk {number} of {patch.origin} (made for line {start} of {patch.path})"


def _line_at(content: bytes, offset: int) -> int:
    return content.count(b"\n", 0, offset) + 1


def _mismatch(patch: FilePatch, number: int, content: bytes) -> Fault:
    hunk = patch.hunks[number - 1]
    lines = split_lines(content)
    start = _closest(hunk, lines)
    found = lines[start : start + len(hunk.source)]
    same = next((i for i, line in enumerate(found) if line != hunk.source[i]), len(found))
    shown = show(found[same]) if same < len(found) else "the end of the file"
    return Fault(
        code="hunk-mismatch",
        path=patch.path,
        message=f"{_name(patch, number)} matches nowhere; it comes closest at line {start + 1}, but"
        f" line {start + same + 1} should be {show(hunk.source[same])} and is {shown}",
        hint=_OTHER_FILE,
    )


def _closest(hunk: Hunk, lines: list[bytes]) -> int:
    """Return the index where most lines of the hunk match; at a draw, the nearest to its own.

    Every pair of equal lines votes for the start that it implies. A line that is common in the file
    tells nothing about the place and has no vote: all of them together would take hunk times file.
    """
    index: dict[bytes, list[int]] = {}
    for at, line in enumerate(lines):
        index.setdefault(line, []).append(at)
    expected = min(max(hunk.source_start - 1, 0), len(lines))
    votes = Counter(
        at - i
        for i, line in enumerate(hunk.source)
        if len(index.get(line, ())) <= _COMMON
        for at in index.get(line, ())
        if at >= i
    )
    return max(votes, key=lambda at: (votes[at], -abs(at - expected)), default=expected)


def _ambiguous(patch: FilePatch, number: int, content: bytes, places: list[int]) -> Fault:
    first, second = (_line_at(content, place) for place in places)
    return Fault(
        code="hunk-ambiguous",
        path=patch.path,
        message=f"{_name(patch, number)} matches at more than one place: at line {first}, at line"
        f" {second}",
        hint="Give the hunk more lines of context; if the file was edited, reinstall sglang.",
    )


def _misplaced(patch: FilePatch, number: int, content: bytes, place: int, problem: str) -> Fault:
    return Fault(
        code="hunk-misplaced",
        path=patch.path,
        message=f"{_name(patch, number)} matches at line {_line_at(content, place)} only, and"
        f" {problem}",
        hint=_OTHER_FILE,
    )
