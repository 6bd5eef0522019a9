"""Imports run one way, and nothing outside ``upstream.py`` decides by a version."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
OVERLAY = "sglang_overlay"

# What the modules of each part may not import, by prefix. A part is a path prefix; the longest that
# matches a file counts.
FORBIDDEN: dict[str, tuple[str, ...]] = {
    "patcher/": ("click", "torch", "triton", "sglang", OVERLAY, "apply", "verify_install"),
    "": ("torch", "triton", "sglang", OVERLAY, "apply", "verify_install"),  # the command lines
    "overlay/sglang_overlay/": (
        *("patcher", "click", "sglang"),
        *(f"{OVERLAY}.{part}" for part in ("srt", "self_test")),
    ),
    "overlay/sglang_overlay/switches.py": ("patcher", "click", "torch", "sglang", OVERLAY),
    "overlay/sglang_overlay/upstream.py": ("patcher", "click", "torch", f"{OVERLAY}."),
    "overlay/sglang_overlay/tree/": (
        *("patcher", "click", "sglang"),
        *(f"{OVERLAY}.{part}" for part in ("srt", "attention", "kvcache")),
    ),
    "overlay/sglang_overlay/kvcache/": (
        *("patcher", "click", "sglang"),
        *(f"{OVERLAY}.{part}" for part in ("srt", "attention", "tree")),
    ),
    # The self-test stands above the glue, and compares with SGLang through it alone.
    "overlay/sglang_overlay/self_test/": ("patcher", "click", "sglang"),
    "overlay/sglang_overlay/srt/": ("patcher", "click", f"{OVERLAY}.self_test"),
}
# Kernels are told what they may import: jit bodies need nothing else.
KERNELS = (
    *("__future__", "triton"),
    *(f"{OVERLAY}.{part}.kernels" for part in ("attention", "kvcache", "tree")),
)

VERSION_MODULES = ("packaging", "sglang.version", "sglang._version", "importlib.metadata")
VERSION_NAMES = {"__version__", "__version_tuple__", "version_tuple", "release"}


def sources() -> list[Path]:
    """Return every Python file of the product."""
    found = sorted(REPOSITORY.glob("*.py"))
    for folder in ("overlay", "patcher"):
        found += sorted((REPOSITORY / folder).rglob("*.py"))
    return found


def imported(source: str) -> Iterator[str]:
    """Yield the dotted names that ``source`` imports, at module level or in a function."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def within(name: str, prefix: str) -> bool:
    return name.startswith(prefix) if prefix.endswith(".") else f"{name}.".startswith(f"{prefix}.")


def wrong_imports(path: str, source: str) -> list[str]:
    """Return what the file at ``path`` (relative to the repository) imports and must not."""
    if "/kernels/" in path:
        return [name for name in imported(source) if not any(within(name, ok) for ok in KERNELS)]
    part = max((prefix for prefix in FORBIDDEN if path.startswith(prefix)), key=len)
    return [name for name in imported(source) if any(within(name, no) for no in FORBIDDEN[part])]


def version_tests(path: str, source: str) -> list[str]:
    """Return what in the file at ``path`` decides by a version, as text."""
    if path.endswith("/upstream.py"):
        return []
    found = [name for name in imported(source) if any(within(name, no) for no in VERSION_MODULES)]
    if path.startswith("patcher/"):
        # The engine reads which release it patches, and looks that up; it may not order releases.
        return [name for name in found if name.startswith("packaging")]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare) and _mentions_version(node):
            found.append(ast.unparse(node))
    return found


def _mentions_version(compared: ast.Compare) -> bool:
    for node in ast.walk(compared):
        if isinstance(node, ast.Attribute) and node.attr in VERSION_NAMES:
            return True
        if isinstance(node, ast.Name) and node.id in VERSION_NAMES - {"release"}:
            return True
    return False


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_imports_run_one_way(path: Path) -> None:
    assert wrong_imports(path.relative_to(REPOSITORY).as_posix(), path.read_text()) == []


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_nothing_decides_by_a_version(path: Path) -> None:
    assert version_tests(path.relative_to(REPOSITORY).as_posix(), path.read_text()) == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("patcher/site.py", "import click"),
        ("patcher/site.py", "def f():\n    import sglang.srt"),
        ("patcher/site.py", "from sglang_overlay import identity"),
        ("apply.py", "import torch"),
        ("overlay/sglang_overlay/mask_policy.py", "from sglang_overlay.srt import hooks"),
        ("overlay/sglang_overlay/mask_policy.py", "from sglang.srt.utils import is_cuda"),
        ("overlay/sglang_overlay/identity.py", "from sglang_overlay import srt"),
        ("overlay/sglang_overlay/self_test/case.py", "import sglang.srt"),
        ("overlay/sglang_overlay/srt/hooks.py", "from sglang_overlay import self_test"),
        ("overlay/sglang_overlay/switches.py", "from sglang_overlay import upstream"),
        ("overlay/sglang_overlay/tree/build.py", "from sglang.srt import utils"),
        ("overlay/sglang_overlay/kvcache/mover.py", "from sglang_overlay.tree import build"),
        ("overlay/sglang_overlay/attention/kernels/merge.py", "import torch"),
        ("overlay/sglang_overlay/srt/hooks.py", "from patcher import verify"),
    ],
)
def test_a_planted_import_is_found(path: str, source: str) -> None:
    assert wrong_imports(path, source) != []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("overlay/sglang_overlay/mask_policy.py", "import packaging.version"),
        ("overlay/sglang_overlay/srt/hooks.py", "from sglang.version import __version__"),
        ("overlay/sglang_overlay/srt/hooks.py", "if sglang.__version__ >= '0.5.12': pass"),
        ("overlay/sglang_overlay/srt/hooks.py", "x = upstream.release() == '0.5.11'"),
        ("apply.py", "from importlib.metadata import version"),
        ("patcher/site.py", "from packaging.version import Version"),
    ],
)
def test_a_planted_version_test_is_found(path: str, source: str) -> None:
    assert version_tests(path, source) != []


def test_what_is_allowed_is_not_found() -> None:
    hooks = "import functools\nfrom sglang_overlay import switches\nimport torch"
    assert wrong_imports("overlay/sglang_overlay/srt/hooks.py", hooks) == []
    assert wrong_imports("overlay/sglang_overlay/attention/kernels/m.py", "import triton") == []
    lookup = "rows = [row for row in ROWS if release in row.releases]"
    assert version_tests("overlay/sglang_overlay/mask_table.py", lookup) == []
