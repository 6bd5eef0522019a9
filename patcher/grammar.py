r"""What a patch file may look like: prose, then file sections of counted hunks, and nothing else.

`check` reads a whole file and reports every departure with its line. It is stricter than any diff
parser on purpose: those skip what they do not know, and a skipped hunk is half a patch.

Lines are bytes and end at ``\n`` only, so a patched file may hold any encoding and any line ends.
A NUL byte is refused, because no Python source holds one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from patcher.errors import Fault

_COUNT = rb"(0|[1-9][0-9]{0,8})"
HUNK_HEADER = re.compile(
    rb"^@@ -%b(?:,%b)? \+%b(?:,%b)? @@(?: ([^\r\n]+))?\n" % (_COUNT, _COUNT, _COUNT, _COUNT),
    re.MULTILINE,
)
NO_NEWLINE = b"\\ No newline at end of file\n"
DIFF_STARTS = (b"--- ", b"+++ ", b"@@")

_BEYOND_UNIFIED = re.compile(
    rb"diff --git |index [0-9a-f]+\.\.|(old|new|deleted file|new file) mode [0-7]"
    rb"|(rename|copy) (from|to) |(dis)?similarity index [0-9]|GIT binary patch|Binary files? "
)
_COMPONENT = re.compile(r"(?!\.\.?$)[A-Za-z0-9_.][A-Za-z0-9_.+-]*")
_ROOT = "sglang/"
# How many old and new lines a line of a hunk stands for.
_WEIGHTS = {b" ": (1, 1), b"-": (1, 0), b"+": (0, 1)}


def check(text: bytes, *, origin: str) -> list[Fault]:
    """Return all faults of the patch file ``origin`` with content ``text``, in reading order."""
    return _Reader(text, origin).read()


def split_lines(text: bytes) -> list[bytes]:
    r"""Split after each ``\n``; `bytes.splitlines` would also split at a lone carriage return."""
    lines = text.split(b"\n")
    last = lines.pop()
    return [line + b"\n" for line in lines] + ([last] if last else [])


def split_sides(body: Sequence[bytes]) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
    """Return the old and the new lines of a well-formed hunk's body."""
    source: list[bytes] = []
    target: list[bytes] = []
    sides = {b" ": (source, target), b"-": (source,), b"+": (target,)}
    last: tuple[list[bytes], ...] = ()
    for line in body:
        if line == NO_NEWLINE:
            for side in last:
                side[-1] = side[-1][:-1]
        else:
            last = sides[line[:1]]
            for side in last:
                side.append(line[1:])
    return tuple(source), tuple(target)


def show(line: bytes) -> str:
    """Return a line for a message, line end included, on one line and not too long."""
    text = line.decode(errors="backslashreplace")
    return repr(text if len(text) <= 120 else text[:119] + "…")


class _Section:
    """How far the hunks of one file section have come."""

    def __init__(self) -> None:
        self.damaged = False  # a hunk was unreadable: the positions of later ones say nothing
        self.source_end = 1  # first line that the next hunk may touch
        self.shift = 0  # lines that the hunks so far add to the file
        self.ended: set[bytes] = set()  # kinds of line that may not follow any more

    def end(self, kind: bytes) -> None:
        """Note that the line just read, of this kind, is the last one of its side or sides."""
        self.ended |= {b" ", b"-", b"+"} if kind == b" " else {b" ", kind}

    def place(self, old: tuple[int, int], new: tuple[int, int]) -> Iterator[tuple[str, str]]:
        """Take in a hunk's start and count on both sides; yield what is wrong with them."""
        if (old[0] == 0 and old[1] > 0) or (new[0] == 0 and new[1] > 0):
            yield "patch-hunk-header", "a hunk at line 0; lines are counted from 1"
            self.damaged = True
            return
        # An empty side is said to start at the line before it.
        old_first = old[0] + (old[1] == 0)
        new_first = new[0] + (new[1] == 0)
        if old_first < self.source_end:
            yield "patch-hunk-order", "the hunk starts before the end of the one above it"
            self.damaged = True
        elif not self.damaged and new_first - old_first != self.shift:
            yield (
                "patch-hunk-position",
                f"the hunks above move old line {old_first} to {old_first + self.shift}, but this"
                f" one says {new_first}: a hunk is missing, or the header was edited",
            )
            self.damaged = True
        self.source_end = max(self.source_end, old_first + old[1])
        self.shift += new[1] - old[1]


class _Reader:
    """One pass over the lines of a patch file that notes all that is wrong with them."""

    def __init__(self, text: bytes, origin: str) -> None:
        self.text = text
        self.lines = split_lines(text)
        self.origin = origin
        self.at = 0  # index of the line to be read next
        self.faults: list[Fault] = []
        self.paths: dict[str, int] = {}  # path -> index of the line where its section starts

    def read(self) -> list[Fault]:
        self._read_bytes()
        self._read_prose()
        section: _Section | None = None
        while self.at < len(self.lines):
            if self._line().startswith((b"--- ", b"+++ ")):
                section = self._read_names()
            elif self._line().startswith(b"@@"):
                if section is None:
                    self._fault("patch-file-header", "a hunk without `--- ` and `+++ ` above it")
                section = section or _Section()
                self._read_hunk(section)
            else:
                self._read_stray()
                if section is not None:
                    section.damaged = True  # a hunk may be lost in what was skipped
        return self.faults

    def _fault(self, code: str, message: str, *, at: int | None = None, hint: str = "") -> None:
        line = (self.at if at is None else at) + 1
        self.faults.append(
            Fault(
                code=code,
                message=f"{self.origin}, line {line}: {message}",
                path=self.origin,
                hint=hint or "Fetch the patch again; if it was edited by hand, write it anew.",
            )
        )

    def _fault_beyond(self) -> None:
        self._fault(
            "patch-git-extension",
            f"{show(self._line())} is not part of a plain unified diff; a patch changes lines of"
            " existing files and nothing else",
            hint="Write it with `diff -u`: no modes, renames, binary data or `diff --git` lines.",
        )

    def _fault_carriage_return(self) -> None:
        self._fault(
            "patch-carriage-return",
            "a carriage return in a header line; those end in a plain line feed",
            hint="Fetch the patch without line end conversion (git: `core.autocrlf=false`).",
        )

    def _line(self, ahead: int = 0) -> bytes:
        """Return a line that is still to be read; empty behind the end."""
        index = self.at + ahead
        return self.lines[index] if index < len(self.lines) else b""

    def _read_bytes(self) -> None:
        """Check what concerns the file as a whole."""
        if self.text.startswith(b"\xef\xbb\xbf"):
            self._fault("patch-bom", "the file starts with a byte order mark", at=0)
        for at, line in enumerate(self.lines):
            if b"\0" in line:
                self._fault("patch-nul", "a NUL byte", at=at)
        if self.text and not self.text.endswith(b"\n"):
            self._fault("patch-truncated", "the last line has no end", at=len(self.lines) - 1)

    def _read_prose(self) -> None:
        """Read up to the first diff line; what else looks like a diff has lost its beginning."""
        while self.at < len(self.lines) and not self._line().startswith(DIFF_STARTS):
            line = self._line()
            if _BEYOND_UNIFIED.match(line):
                self._fault_beyond()
            elif line.startswith((b"---", b"+++", b"\\ ")):
                self._fault("patch-stray-text", f"a line of a diff in the prose: {show(line)}")
            elif b"\r" in line:
                self._fault_carriage_return()
            self.at += 1
        if self.at == len(self.lines):
            self._fault("patch-empty", "the patch changes no file", at=max(self.at - 1, 0))

    def _read_stray(self) -> None:
        """Skip, with one fault, the lines that stand where only a section or a hunk may start."""
        first, start = self._line(), self.at
        if first == NO_NEWLINE:
            self._fault("patch-newline-marker", "a second marker for a missing final newline")
        elif _BEYOND_UNIFIED.match(first):
            self._fault_beyond()
        elif first[:1] in _WEIGHTS and not first.startswith(b"-- "):
            self._fault(
                "patch-hunk-count",
                "more lines than the hunk's header counts, or a hunk without its header",
            )
        else:
            self._fault("patch-stray-text", f"{show(first)} belongs to no hunk")
        while self.at < len(self.lines) and not self._line().startswith(DIFF_STARTS):
            if self.at > start and _BEYOND_UNIFIED.match(self._line()):
                self._fault_beyond()
            self.at += 1

    def _read_names(self) -> _Section:
        """Read the two lines that start a file section."""
        start = self.at
        old = self._read_name(b"--- ", "a/")
        new = self._read_name(b"+++ ", "b/")
        if old and new and old != new:
            self._fault("patch-path-mismatch", f"a/{old} and b/{new} are two files", at=start)
        path = old or new
        if path:
            first = self.paths.setdefault(path, start)
            if first != start:
                self._fault(
                    "patch-duplicate-file",
                    f"a second section for {path}; the first is at line {first + 1}",
                    at=start,
                )
        if not self._line().startswith(b"@@"):
            self._fault("patch-file-header", "a file section without a hunk", at=start)
        return _Section()

    def _read_name(self, mark: bytes, prefix: str) -> str | None:
        """Read one of a section's two name lines; return its path if that can be used."""
        line = self._line()
        if not line.startswith(mark):
            self._fault("patch-file-header", f"a `{mark.decode()}` line is due here")
            return None
        name = line[len(mark) :].removesuffix(b"\n").decode(errors="backslashreplace")
        fault = _name_fault(name, prefix)
        if "\r" in name:
            self._fault_carriage_return()
        elif fault is not None:
            self._fault(*fault, hint=f"Names have the form {prefix}{_ROOT}folder/module.py.")
        self.at += 1
        return None if fault else name.removeprefix(prefix)

    def _read_hunk(self, section: _Section) -> None:
        """Read one hunk up to its counted end; a damaged one up to the next hunk or section."""
        start = self.at
        header = HUNK_HEADER.fullmatch(self._line())
        body: list[bytes] | None = None
        if header is None:
            if b"\r" in self._line():
                self._fault_carriage_return()
            else:
                self._fault("patch-hunk-header", f"damaged hunk header {show(self._line())}")
            self.at += 1
        else:
            old, new = _range(header[1], header[2]), _range(header[3], header[4])
            self.at += 1
            body = self._read_body(section, old[1], new[1])
        if body is None:
            section.damaged = True
            while self._line() and not (self._line().startswith(b"@@") or self._at_section()):
                self.at += 1
            return
        source, target = split_sides(body)
        if source == target:
            self._fault("patch-hunk-empty", "a hunk that changes nothing", at=start)
        for problem in section.place(old, new):
            self._fault(*problem, at=start)

    def _read_body(self, section: _Section, old_left: int, new_left: int) -> list[bytes] | None:
        """Return the lines of a hunk; None, with a fault, at one that cannot belong to it."""
        start = self.at
        body: list[bytes] = []
        while old_left or new_left or self._line() == NO_NEWLINE:
            line = self._line()
            old, new = _WEIGHTS.get(line[:1], (0, 0))
            old_left, new_left = old_left - old, new_left - new
            if line == NO_NEWLINE:
                if not body or body[-1] == NO_NEWLINE:
                    self._fault("patch-newline-marker", "a marker that belongs to no line")
                    return None
                section.end(body[-1][:1])
            elif line in (b"\n", b"\r\n"):
                self._fault(
                    "patch-hunk-line",
                    "a blank line inside a hunk; blank context is written as a single space",
                    hint="An editor removed trailing blanks: fetch or write the patch again.",
                )
                return None
            elif not (old or new) or old_left < 0 or new_left < 0 or self._at_section():
                self._fault(
                    "patch-hunk-count",
                    f"the hunk at line {start} does not have the lines that its header counts",
                )
                return None
            elif line[:1] in section.ended:
                self._fault("patch-newline-marker", "a line behind the marked end of the file")
                return None
            body.append(line)
            self.at += 1
        return body

    def _at_section(self) -> bool:
        """Tell whether the next two lines start a section, seen from inside a hunk.

        A hunk that lost a line would otherwise take these two as a removed and an added line, and
        claim the hunks of the next section.
        """
        return self._line().startswith(b"--- a/") and self._line(1).startswith(b"+++ b/")


def _range(start: bytes, count: bytes | None) -> tuple[int, int]:
    return int(start), 1 if count is None else int(count)


def _name_fault(name: str, prefix: str) -> tuple[str, str] | None:
    """Return code and message if ``name`` does not lead to a file inside sglang."""
    if name == "/dev/null":
        return "patch-dev-null", "a patch neither creates nor deletes files"
    if "\t" in name:
        return "patch-file-header", f"text behind the path: {name!r}"
    path = name.removeprefix(prefix)
    if not all(_COMPONENT.fullmatch(component) for component in path.split("/")):
        return "patch-path-unsafe", f"{name!r} is not a plain relative path"
    if path == name:
        return "patch-file-header", f"{name!r} does not start with {prefix}"
    if not path.startswith(_ROOT):
        return "patch-path-outside", f"{name!r} is not inside {_ROOT}"
    return None
