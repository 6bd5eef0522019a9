"""Damaged and hostile patches: each is refused with its code and line, and nothing is dropped."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from patcher.diff import FilePatch, parse, unified
from patcher.errors import Refused

PROSE = b"Count twice\n\nWhy: once is not enough\n\n"
VALID = PROSE + (
    b"--- a/sglang/srt/first.py\n"  # line 5
    b"+++ b/sglang/srt/first.py\n"
    b"@@ -1,3 +1,4 @@\n"
    b" import os\n"
    b"+import sys\n"
    b" \n"
    b" one = 1\n"
    b"@@ -20,3 +21,3 @@ def second():\n"  # line 12
    b"     a = 1\n"
    b"-    b = 2\n"
    b"+    b = 3\n"
    b"     c = 3\n"
    b"--- a/sglang/srt/other.py\n"  # line 17
    b"+++ b/sglang/srt/other.py\n"
    b"@@ -7,2 +7,2 @@\n"
    b" x = 1\n"
    b"-y = 2\n"
    b"\\ No newline at end of file\n"
    b"+y = 3\n"
)
LINES = VALID.splitlines(keepends=True)
FIRST, SECOND = b"".join(LINES[4:16]), b"".join(LINES[16:])


def faults(text: bytes) -> list[tuple[str, int]]:
    """Return code and line of each fault that `parse` finds."""
    with pytest.raises(Refused) as caught:
        parse(text, origin="0001-count.patch")
    found = []
    for fault in caught.value.faults:
        where = re.match(r"0001-count\.patch, line (\d+): \S", fault.message)
        assert where, fault
        assert fault.hint
        assert fault.path == "0001-count.patch"
        found.append((fault.code, int(where[1])))
    return found


def swap(old: bytes, new: bytes) -> bytes:
    assert VALID.count(old) == 1, "the damage must be one damage"
    return VALID.replace(old, new)


def name(old: bytes, new: bytes | None = None) -> bytes:
    """Return the valid patch with other names in its second section."""
    lines = [*LINES]
    lines[16] = b"--- " + old + b"\n"
    lines[17] = b"+++ " + (old.replace(b"a/", b"b/", 1) if new is None else new) + b"\n"
    return b"".join(lines)


DAMAGED = {
    "no bytes": (b"", [("patch-empty", 1)]),
    "prose only": (PROSE, [("patch-empty", 4)]),
    "garbage": (b"\x89PNG\x1a\n\xff\xfe\n", [("patch-empty", 2)]),
    "byte order mark": (b"\xef\xbb\xbf" + VALID, [("patch-bom", 1)]),
    "byte order mark at the first section": (
        b"\xef\xbb\xbf" + FIRST,
        [("patch-bom", 1), ("patch-file-header", 2)],
    ),
    "NUL in a line": (swap(b"b = 3", b"b = \0"), [("patch-nul", 15)]),
    "NUL in the prose": (swap(b"twice", b"twice\0"), [("patch-nul", 1)]),
    "NUL in a name": (
        name(b"a/sglang/srt/other.py\0.txt"),
        [
            ("patch-nul", 17),
            ("patch-nul", 18),
            ("patch-path-unsafe", 17),
            ("patch-path-unsafe", 18),
        ],
    ),
    "cut off inside the last line": (VALID[:-1], [("patch-truncated", 23)]),
    "cut off inside a hunk": (b"".join(LINES[:14]), [("patch-hunk-count", 15)]),
    "cut off behind a hunk header": (b"".join(LINES[:12]), [("patch-hunk-count", 13)]),
    "cut off behind the names": (b"".join(LINES[:6]), [("patch-file-header", 5)]),
    "carriage return in the prose": (
        swap(b"twice\n", b"twice\r\n"),
        [("patch-carriage-return", 1)],
    ),
    "carriage return in a name": (
        swap(b"--- a/sglang/srt/other.py\n", b"--- a/sglang/srt/other.py\r\n"),
        [("patch-carriage-return", 17)],
    ),
    "carriage return in a hunk header": (
        swap(b"+7,2 @@\n", b"+7,2 @@\r\n"),
        [("patch-carriage-return", 19)],
    ),
    "carriage return in a hunk's section name": (
        swap(b"second():\n", b"second():\r\n"),
        [("patch-carriage-return", 12)],
    ),
    "text between hunks": (swap(b"@@ -20", b"hello\n@@ -20"), [("patch-stray-text", 12)]),
    "blank line between hunks": (swap(b"@@ -20", b"\n@@ -20"), [("patch-stray-text", 12)]),
    "text between sections": (
        swap(b"--- a/sglang/srt/other", b"hello\nworld\n--- a/sglang/srt/other"),
        [("patch-stray-text", 17)],
    ),
    "text behind the last hunk": (VALID + b"hello\n", [("patch-stray-text", 24)]),
    "mail signature": (VALID + b"-- \n2.39.2\n", [("patch-stray-text", 24)]),
    "blank line behind the last hunk": (VALID + b"\n", [("patch-stray-text", 24)]),
    "text inside a hunk": (
        swap(b"-    b = 2\n", b"hello\n-    b = 2\n"),
        [("patch-hunk-count", 14)],
    ),
    "text between names and hunk": (
        swap(b"@@ -7", b"hello\n@@ -7"),
        [("patch-file-header", 17), ("patch-stray-text", 19)],
    ),
    "diff line in the prose": (swap(b"Why:", b"+++Why:"), [("patch-stray-text", 3)]),
    "marker in the prose": (LINES[21] + VALID, [("patch-stray-text", 1)]),
    "damaged header of the second hunk": (
        swap(b"@@ -20,3 +21,3 @@", b"@ -20,3 +21,3 @@"),
        [("patch-stray-text", 12)],
    ),
    "letters in a hunk header": (swap(b"-20,3", b"-2O,3"), [("patch-hunk-header", 12)]),
    "leading zero in a hunk header": (swap(b"-20,3", b"-020,3"), [("patch-hunk-header", 12)]),
    "huge number in a hunk header": (
        swap(b"-20,3", b"-" + b"9" * 5000 + b",3"),
        [("patch-hunk-header", 12)],
    ),
    "no blank before a hunk's section name": (
        swap(b"@@ def", b"@@def"),
        [("patch-hunk-header", 12)],
    ),
    "blank behind a hunk header": (swap(b"+7,2 @@\n", b"+7,2 @@ \n"), [("patch-hunk-header", 19)]),
    "combined diff": (swap(b"@@ -20,3", b"@@@ -20,3 -20,3"), [("patch-hunk-header", 12)]),
    "hunk at line 0": (swap(b"-1,3 +1,4", b"-0,3 +0,4"), [("patch-hunk-header", 7)]),
    "lost header of the second hunk": (
        b"".join(LINES[:11] + LINES[12:]),
        [("patch-hunk-count", 12)],
    ),
    "old count too large": (swap(b"-20,3", b"-20,4"), [("patch-hunk-count", 17)]),
    "old count too small": (swap(b"-20,3", b"-20,2"), [("patch-hunk-count", 16)]),
    "new count too large": (swap(b"+21,3", b"+21,4"), [("patch-hunk-count", 17)]),
    "new count too small": (swap(b"+21,3", b"+21,2"), [("patch-hunk-count", 16)]),
    "both counts too large": (swap(b"-20,3 +21,3", b"-20,4 +21,4"), [("patch-hunk-count", 17)]),
    "both counts too small": (swap(b"-20,3 +21,3", b"-20,2 +21,2"), [("patch-hunk-count", 16)]),
    "counts of nothing": (
        swap(b"-7,2 +7,2", b"-7,0 +7,0"),
        [("patch-hunk-empty", 19), ("patch-hunk-count", 20)],
    ),
    "context lost before the next section": (
        swap(b"     c = 3\n", b""),
        [("patch-hunk-count", 16)],
    ),
    "stripped trailing blanks": (swap(b"\n \n", b"\n\n"), [("patch-hunk-line", 10)]),
    "stripped trailing blanks, CRLF": (swap(b"\n \n", b"\n\r\n"), [("patch-hunk-line", 10)]),
    "hunk that changes nothing": (
        swap(b"-    b = 2\n+    b = 3\n", b"     b = 2\n"),
        [("patch-hunk-empty", 12)],
    ),
    "hunk that replaces a line by itself": (
        swap(b"+    b = 3", b"+    b = 2"),
        [("patch-hunk-empty", 12)],
    ),
    "overlapping hunks": (
        swap(b"-20,3 +21,3", b"-3,3 +4,3"),
        [("patch-hunk-order", 12)],
    ),
    "hunks out of order": (
        PROSE + b"".join(LINES[4:6] + LINES[11:16] + LINES[6:11]),
        [("patch-hunk-position", 7), ("patch-hunk-order", 12)],
    ),
    "hunk lost as a whole": (
        b"".join(LINES[:6] + LINES[11:]),
        [("patch-hunk-position", 7)],
    ),
    "shifted hunk": (swap(b"+21,3", b"+22,3"), [("patch-hunk-position", 12)]),
    "parent folder": (
        name(b"a/../etc/passwd"),
        [("patch-path-unsafe", 17), ("patch-path-unsafe", 18)],
    ),
    "parent folder inside sglang": (
        name(b"a/sglang/../../x.py"),
        [("patch-path-unsafe", 17), ("patch-path-unsafe", 18)],
    ),
    "absolute": (
        name(b"/etc/passwd", b"/etc/passwd"),
        [("patch-path-unsafe", 17), ("patch-path-unsafe", 18)],
    ),
    "absolute behind the prefix": (
        name(b"a//etc/passwd"),
        [("patch-path-unsafe", 17), ("patch-path-unsafe", 18)],
    ),
    "backslashes": (
        name(b"a/sglang\\srt\\other.py"),
        [("patch-path-unsafe", 17), ("patch-path-unsafe", 18)],
    ),
    "drive letter": (
        name(b"a/C:/sglang/x.py"),
        [("patch-path-unsafe", 17), ("patch-path-unsafe", 18)],
    ),
    "empty component": (
        name(b"a/sglang//other.py"),
        [("patch-path-unsafe", 17), ("patch-path-unsafe", 18)],
    ),
    "folder": (name(b"a/sglang/"), [("patch-path-unsafe", 17), ("patch-path-unsafe", 18)]),
    "dot component": (
        name(b"a/sglang/./x.py"),
        [("patch-path-unsafe", 17), ("patch-path-unsafe", 18)],
    ),
    "quoted name": (
        name(b'"a/sglang/x.py"', b'"b/sglang/x.py"'),
        [("patch-path-unsafe", 17), ("patch-path-unsafe", 18)],
    ),
    "blank behind a name": (
        name(b"a/sglang/x.py ", b"b/sglang/x.py"),
        [("patch-path-unsafe", 17)],
    ),
    "empty name": (name(b"", b""), [("patch-path-unsafe", 17), ("patch-path-unsafe", 18)]),
    "name that is not UTF-8": (
        name(b"a/sglang/\xff.py"),
        [("patch-path-unsafe", 17), ("patch-path-unsafe", 18)],
    ),
    "outside of sglang": (
        name(b"a/torch/x.py"),
        [("patch-path-outside", 17), ("patch-path-outside", 18)],
    ),
    "beside sglang": (
        name(b"a/sglang_overlay/x.py"),
        [("patch-path-outside", 17), ("patch-path-outside", 18)],
    ),
    "sglang itself": (name(b"a/sglang"), [("patch-path-outside", 17), ("patch-path-outside", 18)]),
    "no prefix": (
        name(b"sglang/x.py", b"sglang/x.py"),
        [("patch-file-header", 17), ("patch-file-header", 18)],
    ),
    "swapped prefixes": (
        name(b"b/sglang/x.py", b"a/sglang/x.py"),
        [("patch-file-header", 17), ("patch-file-header", 18)],
    ),
    "time stamp": (
        name(b"a/sglang/x.py\t2026-01-01", b"b/sglang/x.py"),
        [("patch-file-header", 17)],
    ),
    "two names": (
        name(b"a/sglang/x.py", b"b/sglang/y.py"),
        [("patch-path-mismatch", 17)],
    ),
    "created file": (name(b"/dev/null", b"b/sglang/x.py"), [("patch-dev-null", 17)]),
    "deleted file": (name(b"a/sglang/x.py", b"/dev/null"), [("patch-dev-null", 18)]),
    "the same file twice": (name(b"a/sglang/srt/first.py"), [("patch-duplicate-file", 17)]),
    "old name lost": (b"".join(LINES[:16] + LINES[17:]), [("patch-file-header", 17)]),
    "new name lost": (b"".join(LINES[:17] + LINES[18:]), [("patch-file-header", 18)]),
    "first old name lost": (b"".join(LINES[:4] + LINES[5:]), [("patch-file-header", 5)]),
    "hunks without names": (
        PROSE + b"".join(LINES[6:16]),
        [("patch-file-header", 5)],
    ),
    "git header": (
        PROSE + b"diff --git a/sglang/x.py b/sglang/x.py\nindex 12ab..34cd 100644\n" + FIRST,
        [("patch-git-extension", 5), ("patch-git-extension", 6)],
    ),
    "git header between sections": (
        PROSE + FIRST + b"diff --git a/sglang/x.py b/sglang/x.py\n" + SECOND,
        [("patch-git-extension", 17)],
    ),
    "mode change": (
        PROSE + FIRST + b"old mode 100644\nnew mode 100755\n",
        [("patch-git-extension", 17), ("patch-git-extension", 18)],
    ),
    "rename": (
        PROSE + b"similarity index 100%\nrename from sglang/x.py\nrename to sglang/y.py\n",
        [
            ("patch-git-extension", 5),
            ("patch-git-extension", 6),
            ("patch-git-extension", 7),
            ("patch-empty", 7),
        ],
    ),
    "git binary patch": (
        PROSE + FIRST + b"GIT binary patch\nliteral 3\nKcmZQzU|?Wk0000004*|\n\n",
        [("patch-git-extension", 17)],
    ),
    "binary files": (
        PROSE + FIRST + b"Binary files a/sglang/x.so and b/sglang/x.so differ\n",
        [("patch-git-extension", 17)],
    ),
    "two markers": (
        swap(LINES[21], LINES[21] * 2),
        [("patch-newline-marker", 23)],
    ),
    "two markers at the end": (VALID + LINES[21] * 2, [("patch-newline-marker", 25)]),
    "marker at the start of a hunk": (
        swap(b"     a = 1\n", LINES[21] + b"     a = 1\n"),
        [("patch-newline-marker", 13)],
    ),
    "old line behind the old file's end": (
        swap(b"-7,2 +7,2", b"-7,3 +7,2").replace(b"+y = 3\n", b"-z = 1\n+y = 3\n"),
        [("patch-newline-marker", 23)],
    ),
    "context behind the old file's end": (
        swap(b"-7,2 +7,2", b"-7,3 +7,3").replace(b"+y = 3\n", b"+y = 3\n z = 1\n"),
        [("patch-newline-marker", 24)],
    ),
    "hunk behind the file's end": (
        VALID + b"@@ -20,2 +20,2 @@\n x\n-y\n+z\n",
        [("patch-newline-marker", 25)],
    ),
    "marker in other words": (
        swap(LINES[21], b"\\ No newline at end of\n"),
        [("patch-hunk-count", 22)],
    ),
    "several faults, each with its line": (
        VALID.replace(b"-20,3", b"-2O,3").replace(b"b/sglang/srt/other", b"b/torch/other") + b"\n",
        [("patch-hunk-header", 12), ("patch-path-outside", 18), ("patch-stray-text", 24)],
    ),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damage_is_refused_with_its_code_and_line(case: str) -> None:
    text, expected = DAMAGED[case]
    assert faults(text) == expected


def test_the_undamaged_patch_is_accepted() -> None:
    assert_accounted_for(VALID, parse(VALID, origin="0001-count.patch"))


def test_a_patch_converted_to_crlf_is_refused_at_every_header() -> None:
    found = faults(VALID.replace(b"\n", b"\r\n"))
    assert {code for code, _ in found} == {"patch-carriage-return"}
    assert {line for _, line in found} >= {1, 5, 6, 7, 12, 17, 18, 19}


def assert_accounted_for(text: bytes, parsed: tuple[FilePatch, ...]) -> None:
    """Render what was parsed along ``text``, and fail unless that uses up every line of it."""
    lines = text.split(b"\n")
    assert lines.pop() == b""
    while not lines[0].startswith(b"--- "):
        lines.pop(0)
    for file in parsed:
        assert lines.pop(0) == b"--- a/" + file.path.encode()
        assert lines.pop(0) == b"+++ b/" + file.path.encode()
        for hunk in file.hunks:
            header = lines.pop(0)
            numbers = re.match(rb"@@ -(\d+),?(\d*) \+\d+,?(\d*) @@", header)
            assert numbers
            assert int(numbers[1]) == hunk.source_start
            assert int(numbers[2] or 1) == len(hunk.source)
            assert int(numbers[3] or 1) == len(hunk.target)
            source, target, added = [*hunk.source], [*hunk.target], 0
            while source or target:
                line = lines.pop(0)
                end = b"" if lines and lines[0] == b"\\ No newline at end of file" else b"\n"
                if not end:
                    lines.pop(0)
                if line[:1] in (b" ", b"-"):
                    assert source.pop(0) == line[1:] + end
                if line[:1] in (b" ", b"+"):
                    assert target.pop(0) == line[1:] + end
                added += line[:1] == b"+"
            assert added == hunk.added
    assert not lines


def accepts(text: bytes) -> bool:
    """Parse ``text``; fail unless it is refused or read to the last line."""
    try:
        parsed = parse(text, origin="0001-count.patch")
    except Refused:
        return False
    assert_accounted_for(text, parsed)
    return True


def test_no_line_of_the_diff_can_be_lost_or_doubled_unnoticed() -> None:
    marker = 21  # without it the diff says something else, and says it well
    for at in range(len(PROSE.splitlines()), len(LINES)):
        doubled = [*LINES[: at + 1], *LINES[at:]]
        assert not accepts(b"".join(doubled)), LINES[at]
        assert accepts(b"".join(LINES[:at] + LINES[at + 1 :])) == (at == marker), LINES[at]


def test_a_patch_cut_off_anywhere_is_refused() -> None:
    whole = {len(VALID), len(PROSE + FIRST), len(b"".join(LINES[:11]))}  # at the end of a hunk
    for size in range(len(VALID) + 1):
        assert accepts(VALID[:size]) == (size in whole), VALID[:size]


def flip_bits(bits: range) -> int:
    """Flip each of the bits in each byte of the valid patch; return how many were accepted."""
    accepted = 0
    for at, byte in enumerate(VALID):
        for bit in bits:
            accepted += accepts(VALID[:at] + bytes([byte ^ 1 << bit]) + VALID[at + 1 :])
    return accepted


def test_a_flipped_bit_is_refused_or_read_as_it_stands() -> None:
    # Some must be accepted, or the check behind acceptance has never run.
    assert flip_bits(range(1)) > 20


@pytest.mark.full
def test_every_flipped_bit_is_refused_or_read_as_it_stands() -> None:
    assert flip_bits(range(8)) > 160


contents = st.lists(
    st.sampled_from(
        [b"", b"a", b"b", b"  c", b"- d", b"+ e", b"-- f", b"++ g", b"@@ -1 +1 @@", b"\r"]
    ),
    max_size=30,
).map(lambda lines: b"".join(line + b"\n" for line in lines))


@st.composite
def patches(draw: st.DrawFn) -> bytes:
    text = PROSE
    for at in range(draw(st.integers(1, 3))):
        before, after = draw(contents), draw(contents)
        if draw(st.booleans()):
            before, after = before[:-1], after + b"z"
        text += unified(before, after, path=f"sglang/m{at}.py").encode()
    return text


@st.composite
def mutations(draw: st.DrawFn) -> bytes:
    text = draw(patches())
    lines = text.splitlines(keepends=True)
    at = draw(st.integers(0, len(lines) - 1))
    kind = draw(st.sampled_from(["lose", "double", "swap", "flip", "cut", "insert"]))
    if kind == "lose":
        del lines[at]
    elif kind == "double":
        lines.insert(at, lines[at])
    elif kind == "swap":
        lines[at - 1], lines[at] = lines[at], lines[at - 1]
    elif kind == "insert":
        lines.insert(at, draw(st.binary(max_size=8)))
    elif kind == "cut":
        lines[at:] = [lines[at][: draw(st.integers(0, len(lines[at])))]]
    else:
        line = bytearray(lines[at])
        line[draw(st.integers(0, len(line) - 1))] ^= draw(st.integers(1, 255))
        lines[at] = bytes(line)
    return b"".join(lines)


@given(mutations())
@settings(max_examples=200, deadline=None)
def test_a_mutated_patch_is_refused_or_read_as_it_stands(text: bytes) -> None:
    accepts(text)


@pytest.mark.full
@given(mutations())
@settings(max_examples=4_000, deadline=None)
def test_many_mutated_patches_are_refused_or_read_as_they_stand(text: bytes) -> None:
    accepts(text)
