"""The operator's page names what the program can say."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from patcher import errors
from patcher.change import Verb
from patcher.states import FileState, TreeState

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "operations.md").read_text()
FAMILIES = (
    "patch-",
    "hunk-",
    "series-",
)  # named as families: they speak of the product's own files


def codes() -> set[str]:
    """Collect every code that the engine can give to a fault."""
    found = set()
    for module in sorted((ROOT / "patcher").glob("*.py")):
        for node in ast.walk(ast.parse(module.read_text())):
            if not isinstance(node, ast.Call):
                continue
            named = [k.value for k in node.keywords if k.arg == "code"]
            first = node.args[:1] if getattr(node.func, "id", "") == "refuse" else []
            literals = [v.value for v in (*named, *first) if isinstance(v, ast.Constant)]
            found |= {value for value in literals if isinstance(value, str)}
    return found | {errors.LEFT_OPEN, "io-error"}


def test_every_code_is_on_the_page() -> None:
    single = {code for code in codes() if not code.startswith(FAMILIES)}
    assert len(single) > 20
    assert sorted(code for code in single if f"`{code}`" not in PAGE) == []


def test_the_page_names_no_code_that_is_gone() -> None:
    table = PAGE.partition("## Refusals")[2].partition("\n## ")[0]
    first_cells = "".join(line.split("|")[1] for line in table.splitlines() if line.count("|") > 3)
    named = set(re.findall(r"`([a-z]+(?:-[a-z]+)*)`", first_cells)) - {"code"}
    assert sorted(named - codes()) == []


@pytest.mark.parametrize("words", [TreeState, FileState, Verb])
def test_every_state_and_action_is_on_the_page(words: type[TreeState | FileState | Verb]) -> None:
    assert [one.value for one in words if f"`{one.value}`" not in PAGE] == []
