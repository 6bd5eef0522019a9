"""The applier against two independent ones, and what its refusals say."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from patcher.diff import FilePatch, Hunk, apply, parse, split_header, unified
from patcher.errors import Fault, Refused

PATH = "sglang/srt/module.py"
NAMES = b"--- a/sglang/srt/module.py\n+++ b/sglang/srt/module.py\n"


def read_one(text: bytes) -> FilePatch:
    (patch,) = parse(text, origin="0001-topic.patch")
    return patch


def diff(before: bytes, after: bytes) -> bytes:
    return unified(before, after, path=PATH).encode(errors="surrogateescape")


def refusal(patch: FilePatch, content: bytes) -> tuple[Fault, ...]:
    with pytest.raises(Refused) as caught:
        apply(patch, content)
    return caught.value.faults


# Parsing


def test_parse_returns_paths_and_lines_as_bytes() -> None:
    prose = b"Topic\n\nWhy: it says -- and ++ too\n"
    body = (
        NAMES
        + b"@@ -1,2 +1,3 @@\n import os\n+import sys\n \n"
        b"@@ -9 +10 @@ class A:\n-x = '\xff'\r\n+x = '\x00fe'\r\n".replace(b"\x00", b"\xfe")
        + b"--- a/sglang/other.py\n+++ b/sglang/other.py\n"
        b"@@ -3,2 +3,2 @@\n y\n-z\n\\ No newline at end of file\n+z\n"
    )
    assert split_header(prose + body) == (prose, body)
    assert parse(prose + body, origin="0007-topic.patch") == (
        FilePatch(
            path=PATH,
            origin="0007-topic.patch",
            hunks=(
                Hunk(
                    source_start=1,
                    source=(b"import os\n", b"\n"),
                    target=(b"import os\n", b"import sys\n", b"\n"),
                    added=1,
                ),
                Hunk(
                    source_start=9,
                    source=(b"x = '\xff'\r\n",),
                    target=(b"x = '\xfefe'\r\n",),
                    added=1,
                ),
            ),
        ),
        FilePatch(
            path="sglang/other.py",
            origin="0007-topic.patch",
            hunks=(Hunk(source_start=3, source=(b"y\n", b"z"), target=(b"y\n", b"z\n"), added=1),),
        ),
    )


def test_a_count_of_one_may_be_written_or_left_out() -> None:
    short = read_one(NAMES + b"@@ -4 +4 @@ f\xc3\xbcr\n-a\n+b\n")
    assert short == read_one(NAMES + b"@@ -4,1 +4,1 @@ f\xc3\xbcr\n-a\n+b\n")


def test_both_sides_may_lack_the_final_newline() -> None:
    marker = b"\\ No newline at end of file\n"
    patch = read_one(NAMES + b"@@ -1,2 +1,2 @@\n-a\n+b\n c\n" + marker)
    assert (patch.hunks[0].source, patch.hunks[0].target) == ((b"a\n", b"c"), (b"b\n", b"c"))
    patch = read_one(NAMES + b"@@ -1 +1 @@\n-a\n" + marker + b"+b\n" + marker)
    assert (patch.hunks[0].source, patch.hunks[0].target) == ((b"a",), (b"b",))


def lose_last_hunk(monkeypatch: pytest.MonkeyPatch) -> None:
    import unidiff

    class Losing(unidiff.PatchSet):  # type: ignore[misc]  # untyped in the releases allowed
        def __init__(self, text: object) -> None:
            super().__init__(text)
            del self[-1][-1]

    monkeypatch.setattr(unidiff, "PatchSet", Losing)


def change_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import unidiff

    class Changing(unidiff.PatchSet):  # type: ignore[misc]
        def __init__(self, text: object) -> None:
            super().__init__(text)
            self[-1][-1][-1].value = "other\n"

    monkeypatch.setattr(unidiff, "PatchSet", Changing)


def reject_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    import unidiff

    def reject(text: object) -> None:
        raise unidiff.UnidiffParseError("no such diff")

    monkeypatch.setattr(unidiff, "PatchSet", reject)


@pytest.mark.parametrize("damage", [lose_last_hunk, change_a_line, reject_everything])
def test_a_patch_that_unidiff_reads_otherwise_is_refused(
    damage: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = NAMES + b"@@ -1 +1 @@\n-a\n+b\n@@ -5 +5 @@\n-c\n+d\n"
    read_one(text)
    assert callable(damage)
    damage(monkeypatch)
    with pytest.raises(Refused) as caught:
        read_one(text)
    assert [fault.code for fault in caught.value.faults] == ["patch-lossy"]


def test_a_missing_unidiff_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "unidiff", None)
    with pytest.raises(Refused) as caught:
        read_one(NAMES + b"@@ -1 +1 @@\n-a\n+b\n")
    (fault,) = caught.value.faults
    assert fault.code == "dependency-missing"
    assert "pip install 'unidiff" in fault.hint


def test_importing_the_engine_loads_no_parser_and_no_command_line() -> None:
    program = (
        "import sys, patcher.series; print(*{'unidiff', 'difflib', 'click', 'torch', 'sglang'}"
        " & set(sys.modules))"
    )
    root = Path(__file__).parents[2]
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=True
    )
    assert run.stdout.split() == []


# An oracle on lists of lines, which shares nothing with the engine: it reads the diff by itself,
# tries every place, and replaces from the last hunk to the first.


def to_lines(content: bytes) -> list[bytes]:
    return re.findall(rb"[^\n]*\n|[^\n]+", content)


def slow_apply(text: bytes, content: bytes) -> bytes | None:
    """Return what ``text``, a diff of one file, makes of ``content``; None if it does not fit."""
    hunks: list[tuple[list[bytes], list[bytes]]] = []
    for section in re.split(rb"(?m)^@@.*\n", text)[1:]:
        old, new = [], []
        for kind, line, marker in re.findall(rb"(?m)^([ +-])(.*\n)(\\.*\n)?", section):
            line_or_end = line[:-1] if marker else line
            if kind in b" -":
                old.append(line_or_end)
            if kind in b" +":
                new.append(line_or_end)
        hunks.append((old, new))
    lines = to_lines(content)
    found: list[tuple[int, list[bytes], list[bytes]]] = []
    for old, new in hunks:
        places = [at for at in range(len(lines) - len(old) + 1) if lines[at : at + len(old)] == old]
        if len(places) != 1:
            return None
        found.append((places[0], old, new))
    for (at, old, _), (following, _, _) in itertools.pairwise(found):
        if at + len(old) > following:
            return None
    for at, old, new in reversed(found):
        if new and not new[-1].endswith(b"\n") and at + len(old) != len(lines):
            return None
        lines[at : at + len(old)] = new
    return b"".join(lines)


def gnu_apply(text: bytes, content: bytes) -> bytes | None:
    """Return what GNU patch without fuzz makes of ``content``; None if it rejects a hunk."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "module.py").write_bytes(content)
        run = subprocess.run(
            ["patch", "-F0", "--binary", "-tNs", "-r", "-", "-o", "patched.py", "module.py"],
            cwd=folder,
            input=text,
            capture_output=True,
            check=False,
        )
        assert run.returncode in (0, 1), run.stderr
        patched = folder / "patched.py"
        # An empty result is no file at all to GNU patch.
        return None if run.returncode else patched.read_bytes() if patched.exists() else b""


def try_apply(text: bytes, content: bytes) -> bytes | None:
    patch = read_one(text)
    try:
        return apply(patch, content)
    except Refused:
        return None


few = st.sampled_from([b"", b"a", b"b", b"\t", b"--", b"++ x", b"@@", b"\xff", b"a\r", b"\\ No"])
many = st.integers(0, 10**6).map(lambda number: b"line %d" % number)


@st.composite
def edits(draw: st.DrawFn, words: st.SearchStrategy[bytes], unique: bool) -> tuple[bytes, bytes]:
    """Draw a file and an edited version of it."""
    before = draw(st.lists(words, max_size=40, unique=unique))
    after: list[bytes] = []
    for line in before:
        kind = draw(st.integers(0, 11))
        if kind == 0:
            continue
        after.append(draw(words) if kind == 1 else line)
        if kind == 2:
            after += draw(st.lists(words, min_size=1, max_size=3))
    if not before:
        after = draw(st.lists(words, max_size=3))
    ends = draw(st.tuples(st.booleans(), st.booleans()))
    return join(before, ends[0]), join(after, ends[1])


def join(lines: list[bytes], final_newline: bool) -> bytes:
    content = b"".join(line + b"\n" for line in lines)
    # Only a line with text can lack its line end: without text it would be no line.
    return content if final_newline or not lines or not lines[-1] else content[:-1]


@st.composite
def drifts(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """Draw a diff and a file that is near the one it was made for."""
    before, after = draw(edits(few, False))
    assume(before != after)
    lines = to_lines(before)
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(lines)))
        lines[at : at + draw(st.integers(0, 1))] = [draw(few) + b"\n"]
    return diff(before, after), b"".join(lines)


def check_round_trip(pair: tuple[bytes, bytes]) -> None:
    """Distinct lines match at one place, so the diff must take each side to the other."""
    before, after = pair
    assume(before != after)
    assert apply(read_one(diff(before, after)), before) == after
    if len(set(to_lines(after))) == len(to_lines(after)):
        assert apply(read_one(diff(after, before)), after) == before


@given(edits(many, True))
@settings(max_examples=100, deadline=None)
def test_a_diff_turns_either_file_into_the_other(pair: tuple[bytes, bytes]) -> None:
    check_round_trip(pair)


@pytest.mark.full
@given(edits(many, True))
@settings(max_examples=2_000, deadline=None)
def test_many_diffs_turn_either_file_into_the_other(pair: tuple[bytes, bytes]) -> None:
    check_round_trip(pair)


@given(drifts())
@settings(max_examples=200, deadline=None)
def test_the_result_is_that_of_the_slow_applier(drift: tuple[bytes, bytes]) -> None:
    assert try_apply(*drift) == slow_apply(*drift)


@pytest.mark.full
@given(drifts())
@settings(max_examples=4_000, deadline=None)
def test_many_results_are_those_of_the_slow_applier(drift: tuple[bytes, bytes]) -> None:
    assert try_apply(*drift) == slow_apply(*drift)


def check_gnu(drift: tuple[bytes, bytes]) -> None:
    """GNU patch must agree on every result, though not on every refusal.

    It takes the nearest of several places, and ties a hunk with little context to the file's ends.
    """
    ours, theirs = try_apply(*drift), gnu_apply(*drift)
    if ours is not None and theirs is not None:
        assert ours == theirs


def check_gnu_unchanged(pair: tuple[bytes, bytes]) -> None:
    """On the very file that a diff was made for, GNU patch always succeeds and must agree."""
    before, after = pair
    assume(before != after)
    text = diff(before, after)
    assert gnu_apply(text, before) == after
    assert try_apply(text, before) in (after, None)


@given(drifts())
@settings(max_examples=40, deadline=None)
def test_the_result_is_that_of_gnu_patch(drift: tuple[bytes, bytes]) -> None:
    check_gnu(drift)


@given(edits(few, False))
@settings(max_examples=40, deadline=None)
def test_gnu_patch_reads_our_diffs(pair: tuple[bytes, bytes]) -> None:
    check_gnu_unchanged(pair)


@pytest.mark.full
@given(drifts())
@settings(max_examples=800, deadline=None)
def test_many_results_are_those_of_gnu_patch(drift: tuple[bytes, bytes]) -> None:
    check_gnu(drift)


@pytest.mark.full
@given(edits(few, False))
@settings(max_examples=800, deadline=None)
def test_gnu_patch_reads_many_of_our_diffs(pair: tuple[bytes, bytes]) -> None:
    check_gnu_unchanged(pair)


# Places

MODULE = b"import os\n\n\ndef run():\n    return os\n"
PATCH = NAMES + b"@@ -3,3 +3,4 @@\n \n def run():\n+    # Modified.\n     return os\n"


@pytest.mark.parametrize("above", [0, 1, 7, 5000])
def test_a_hunk_fits_at_any_line(above: int) -> None:
    lines = b"".join(b"# %d\n" % number for number in range(above))
    patched = MODULE.replace(b"    return", b"    # Modified.\n    return")
    assert apply(read_one(PATCH), lines + MODULE) == lines + patched


def test_a_hunk_that_matches_twice_is_refused_even_at_its_own_line() -> None:
    (fault,) = refusal(read_one(PATCH), MODULE + MODULE)
    assert fault == Fault(
        code="hunk-ambiguous",
        path=PATH,
        message="hunk 1 of 0001-topic.patch (made for line 3 of sglang/srt/module.py) matches at"
        " more than one place: at line 3, at line 8",
        hint="Give the hunk more lines of context; if the file was edited, reinstall sglang.",
    )


def test_overlapping_matches_count_as_two() -> None:
    patch = read_one(NAMES + b"@@ -1,2 +1,3 @@\n a\n a\n+b\n")
    assert apply(patch, b"a\na\n") == b"a\na\nb\n"
    assert [fault.code for fault in refusal(patch, b"a\na\na\n")] == ["hunk-ambiguous"]


def test_a_match_inside_of_lines_does_not_count() -> None:
    patch = read_one(NAMES + b"@@ -1 +1 @@\n-a\n+b\n")
    assert apply(patch, b"ba\na\nca\n") == b"ba\nb\nca\n"
    assert [fault.code for fault in refusal(patch, b"ba\nca\n")] == ["hunk-mismatch"]


def test_an_insertion_without_context_fits_an_empty_file_only() -> None:
    patch = read_one(NAMES + b"@@ -0,0 +1 @@\n+a\n")
    assert apply(patch, b"") == b"a\n"
    assert [fault.code for fault in refusal(patch, b"b\n")] == ["hunk-ambiguous"]
    assert [fault.code for fault in refusal(patch, b"b")] == ["hunk-ambiguous"]


def test_a_file_can_be_emptied() -> None:
    assert apply(read_one(NAMES + b"@@ -1 +0,0 @@\n-a\n"), b"a\n") == b""


def test_hunks_keep_their_order() -> None:
    patch = read_one(NAMES + b"@@ -1 +1 @@\n-a\n+A\n@@ -5 +5 @@\n-b\n+B\n")
    assert apply(patch, b"x\na\nb\n") == b"x\nA\nB\n"
    (fault,) = refusal(patch, b"b\nx\na\n")
    assert fault.code == "hunk-misplaced"
    assert fault.message == (
        "hunk 2 of 0001-topic.patch (made for line 5 of sglang/srt/module.py) matches at line 1"
        " only, and that is before the end of the hunk above it"
    )


def test_hunks_that_come_to_overlap_are_refused() -> None:
    patch = read_one(NAMES + b"@@ -1,2 +1,2 @@\n-a\n+A\n m\n@@ -5,2 +5,2 @@\n m\n-b\n+B\n")
    assert [fault.code for fault in refusal(patch, b"a\nm\nb\n")] == ["hunk-misplaced"]


def test_the_last_hunk_may_not_end_the_file_in_its_middle() -> None:
    end = b"\\ No newline at end of file\n"
    patch = read_one(NAMES + b"@@ -1 +1 @@\n-a\n+b\n" + end)
    assert apply(patch, b"a\n") == b"b"
    (fault,) = refusal(patch, b"a\nc\n")
    assert fault.code == "hunk-misplaced"
    assert "it is to end the file there, but more lines follow" in fault.message


def test_line_ends_must_match_too() -> None:
    crlf = read_one(NAMES + b"@@ -1,2 +1,3 @@\n a\r\n+b\r\n c\r\n")
    assert apply(crlf, b"a\r\nc\r\n") == b"a\r\nb\r\nc\r\n"
    assert [fault.code for fault in refusal(crlf, b"a\nc\n")] == ["hunk-mismatch"]
    unterminated = read_one(NAMES + b"@@ -1 +1,2 @@\n-a\n\\ No newline at end of file\n+a\n+b\n")
    assert apply(unterminated, b"a") == b"a\nb\n"
    (fault,) = refusal(unterminated, b"a\n")
    assert fault.message.endswith("line 1 should be 'a' and is 'a\\n'")
    assert [fault.code for fault in refusal(unterminated, b"ba")] == ["hunk-mismatch"]


def test_a_mismatch_shows_the_first_line_that_differs_at_the_closest_place() -> None:
    edited = b"# new\n" + MODULE.replace(b"return os", b"return sys")
    (fault,) = refusal(read_one(PATCH), edited)
    assert fault == Fault(
        code="hunk-mismatch",
        path=PATH,
        message="hunk 1 of 0001-topic.patch (made for line 3 of sglang/srt/module.py) matches"
        " nowhere; it comes closest at line 4, but line 6 should be '    return os\\n' and is"
        " '    return sys\\n'",
        hint="The file is not the one that the patch was made for: it was edited, or is of another"
        " release. Reinstall sglang, or use the overlay for that release.",
    )


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "at line 1, but line 1 should be '\\n' and is the end of the file"),
        (b"x\n", "at line 2, but line 2 should be '\\n' and is the end of the file"),
        (b"1\n2\n3\n4\n", "at line 3, but line 3 should be '\\n' and is '3\\n'"),
        (b"\ndef run():\n", "at line 1, but line 3 should be '    return os\\n' and is the end of"),
        (
            b"\n\xff\n    return os\n",
            "at line 1, but line 2 should be 'def run():\\n' and is '\\\\xff",
        ),
    ],
)
def test_a_mismatch_is_shown_for_any_file(content: bytes, told: str) -> None:
    (fault,) = refusal(read_one(PATCH), content)
    assert told in fault.message


def test_at_a_draw_the_mismatch_is_shown_near_the_expected_line() -> None:
    content = b"def run():\n    pass\n" * 5
    patch = read_one(NAMES + b"@@ -7,2 +7 @@\n def run():\n-    return os\n")
    (fault,) = refusal(patch, content)
    assert "it comes closest at line 7, but line 8 should" in fault.message


def test_common_lines_do_not_decide_what_a_mismatch_shows() -> None:
    patch = read_one(NAMES + b"@@ -1,4 +1,3 @@\n \n \n \n-key = 1\n")
    (fault,) = refusal(patch, b"\n" * 500 + b"x\n\n\nkey = 1\n" + b"\n" * 500)
    assert "it comes closest at line 501, but line 501 should be '\\n' and is 'x" in fault.message


def test_a_very_long_line_is_shortened_in_the_message() -> None:
    patch = read_one(NAMES + b"@@ -1 +1 @@\n-" + b"a" * 10**6 + b"\n+b\n")
    (fault,) = refusal(patch, b"c" * 10**6 + b"\n")
    assert len(fault.message) < 500


def test_every_hunk_that_does_not_fit_is_reported() -> None:
    patch = read_one(
        NAMES
        + b"@@ -1 +1 @@\n-a\n+A\n@@ -3 +3 @@\n-b\n+B\n@@ -5 +5 @@\n-c\n+C\n@@ -7 +7 @@\n-d\n+D\n"
    )
    found = refusal(patch, b"d\nx\nb\nb\nc\n")
    assert [(fault.code, fault.message[:7]) for fault in found] == [
        ("hunk-mismatch", "hunk 1 "),
        ("hunk-ambiguous", "hunk 2 "),
        ("hunk-misplaced", "hunk 4 "),
    ]


# Writing


def test_unified_writes_what_diff_writes() -> None:
    assert unified(b"a\nb\nc", b"a\nB\nc\n", path=PATH) == (
        "--- a/sglang/srt/module.py\n+++ b/sglang/srt/module.py\n@@ -1,3 +1,3 @@\n a\n-b\n-c\n"
        "\\ No newline at end of file\n+B\n+c\n"
    )
    assert unified(b"a", b"a\n", path=PATH).endswith("-a\n\\ No newline at end of file\n+a\n")
    assert unified(b"a\rb\n", b"a\rc\n", path=PATH).endswith("@@ -1 +1 @@\n-a\rb\n+a\rc\n")
    assert unified(b"", b"a\n", path=PATH).endswith("@@ -0,0 +1 @@\n+a\n")
    assert unified(b"a\n", b"a\n", path=PATH) == ""
