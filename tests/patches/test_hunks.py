"""The patches are hooks: few lines, no logic, one place each, and they say why they are there."""

from __future__ import annotations

import io
import keyword
import re
import tokenize
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from sglang_overlay import mask_table

from tests.support import trees

FAMILY = Path(__file__).parents[2] / "patches" / "sglang-0.5.11-0.5.12"
MARK = "# Modified by the DDTree overlay for SGLang."
MOST_ADDED = 15
LOGIC = set(keyword.kwlist) - {"from", "import", "as", "None", "True", "False"}
STATEMENT = re.compile(
    r"""\s*(
        \#.*                                       # a comment
      | (from\s+[\w.]+\s+)?import\s+[\w.]+(\s+as\s+\w+)?
      | @[\w.]+(\(.*\))?                           # a decorator
      | (\w+\s*=\s*)?[\w.]+\(.*\)                  # a call
    )?\s*""",
    re.VERBOSE,
)


@dataclass
class Hunk:
    """One hunk: the file that it changes, what it expects there, and the lines that it adds."""

    file: str
    source: list[str] = field(default_factory=list)
    added: list[str] = field(default_factory=list)


def hunks(text: str) -> list[Hunk]:
    found: list[Hunk] = []
    file = ""
    for line in text.splitlines(keepends=True):
        if line.startswith("+++ b/"):
            file = line[6:].strip()
        elif line.startswith("@@ "):
            found.append(Hunk(file))
        elif found and not line.startswith("--- a/"):
            if line[0] == "+":
                found[-1].added.append(line[1:])
            else:
                found[-1].source.append(line[1:])
    return found


def faults(hunk: Hunk) -> list[str]:
    """Return what makes ``hunk`` more than a hook."""
    found = []
    if len(hunk.added) > MOST_ADDED:
        found.append(f"{len(hunk.added)} added lines")
    for line in hunk.added:
        tokens = tokenize.generate_tokens(io.StringIO(line.strip() + "\n").readline)
        words = {token.string for token in tokens if token.type == tokenize.NAME}
        if words & LOGIC or not STATEMENT.fullmatch(line):
            found.append(line.strip())
    return found


PATCHES = [FAMILY / name for name in (FAMILY / "series").read_text().split()]
HUNKS = [(path, hunk) for path in PATCHES for hunk in hunks(path.read_text())]
IDS = [f"{path.stem}-{Path(hunk.file).stem}-{n}" for n, (path, hunk) in enumerate(HUNKS)]


def test_the_series_names_every_patch() -> None:
    assert sorted(path.name for path in FAMILY.glob("*.patch")) == [path.name for path in PATCHES]
    assert HUNKS


@pytest.mark.parametrize(("path", "hunk"), HUNKS, ids=IDS)
def test_a_hunk_is_an_import_a_decorator_or_a_call(path: Path, hunk: Hunk) -> None:
    assert faults(hunk) == []


@pytest.mark.parametrize(("path", "hunk"), HUNKS, ids=IDS)
def test_a_hunk_fits_at_exactly_one_place_of_every_release(path: Path, hunk: Hunk) -> None:
    block = "".join(hunk.source)
    places = {
        release: (trees.tree(release) / hunk.file).read_text().count(block)
        for release in mask_table.RELEASES
    }
    assert set(places.values()) == {1}, places


@pytest.mark.parametrize("path", PATCHES, ids=lambda path: path.stem)
def test_every_changed_file_says_that_it_was_changed(path: Path) -> None:
    changed = {hunk.file for hunk in hunks(path.read_text())}
    added = {
        (hunk.file, line.strip())
        for other in PATCHES
        for hunk in hunks(other.read_text())
        for line in hunk.added
    }
    assert {file for file in changed if (file, MARK) not in added} == set()


@pytest.mark.parametrize("path", PATCHES, ids=lambda path: path.stem)
def test_a_patch_says_why_how_and_until_when(path: Path) -> None:
    header = path.read_text().split("\n--- a/")[0]
    subject, *paragraphs = header.split("\n\n")
    assert 0 < len(subject) <= 72
    starts = [paragraph.split(":")[0] for paragraph in paragraphs if paragraph.strip()]
    assert starts == ["Why", "How", "Upstream", "Remove when"]


@pytest.mark.parametrize(
    "added",
    [
        ["if ready:\n"],
        ["x = a and b(c)\n"],
        ["hook = lambda batch: 0\n"],
        ["def hook(): ...\n"],
        ["return hooks.resolve(backend)\n"],
        ["x = 1 + 2\n"],
        ["# a comment\n"] * 16,
    ],
)
def test_planted_logic_is_found(added: list[str]) -> None:
    assert faults(Hunk("f.py", added=added)) != []


def test_a_hook_is_not_a_fault() -> None:
    added = [f"{MARK}\n", "from sglang_overlay.srt import hooks as h\n", "\n", "    @h.one\n"]
    assert faults(Hunk("f.py", added=[*added, "    spec = h.verify_input(self, batch)\n"])) == []
