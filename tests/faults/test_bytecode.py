"""Old bytecode must not win over changed text, of any kind and wherever Python keeps it.

What Python would run is asked of Python itself: its source loader returns the code that an import
executes, from a pyc if it takes one for valid. Nothing here keeps Python from writing bytecode.
"""

from __future__ import annotations

import importlib.util
import os
import py_compile
import shutil
import subprocess
import sys
from pathlib import Path
from py_compile import PycInvalidationMode as Mode

import pytest

from tests.support import used_sites
from tests.support.bench import RELEASE
from tests.support.runs import ROOT
from tests.support.sites import slim_site
from tests.support.snapshots import assert_identical, snapshot

HOOKED = "sglang/srt/speculative/dflash_utils.py"
MODULE = "sglang_overlay/srt/hooks.py"
_ASK = """
import importlib.machinery, sys
code = importlib.machinery.SourceFileLoader("asked", sys.argv[1]).get_code("asked")
print(sys.argv[2] in str((code.co_names, code.co_consts)))
"""


def environment(prefix: Path | None) -> dict[str, str]:
    """Return one in which Python writes bytecode, below ``prefix`` if there is one."""
    skipped = {"PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX"}
    clean = {name: value for name, value in os.environ.items() if name not in skipped}
    return clean | ({"PYTHONPYCACHEPREFIX": str(prefix)} if prefix else {})


def runs(path: Path, word: str, *, level: int, prefix: Path | None) -> bool:
    """Tell whether the code that Python runs for ``path`` has ``word`` in it."""
    flags = ["-OO"] if level == 2 else []
    asked = subprocess.run(
        [sys.executable, *flags, "-c", _ASK, path, word],
        env=environment(prefix),
        capture_output=True,
        text=True,
        check=True,
    )
    return asked.stdout == "True\n"


def command(site: Path, *verb: str, prefix: Path | None, checkout: Path = ROOT) -> None:
    program = [sys.executable, "-B", str(checkout / "apply.py"), "--target", str(site), *verb]
    ended = subprocess.run(
        program, env=environment(prefix), capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr


def compiled(source: Path, mode: Mode, level: int, prefix: Path | None) -> Path:
    """Compile ``source`` to where Python looks for it, and return the pyc."""
    optimization = "2" if level == 2 else ""
    target = Path(importlib.util.cache_from_source(str(source), optimization=optimization))
    if prefix is not None:
        target = prefix / target.parents[1].relative_to("/") / target.name
    target.parent.mkdir(parents=True, exist_ok=True)
    py_compile.compile(
        str(source), str(target), invalidation_mode=mode, optimize=level, doraise=True
    )
    return target


@pytest.mark.parametrize("inside", [True, False], ids=["beside", "prefix"])
@pytest.mark.parametrize("level", [0, 2])
@pytest.mark.parametrize("mode", list(Mode), ids=lambda mode: mode.name.lower())
def test_patched_text_runs_then_the_original(
    mode: Mode, level: int, inside: bool, tmp_path: Path
) -> None:
    prefix = None if inside else tmp_path / "cache"
    site = slim_site(RELEASE, tmp_path / "site-packages")
    source = site / HOOKED
    source.touch()  # in the second in which all of this happens
    compiled(source, mode, level, prefix)
    pristine = snapshot(site)
    assert not runs(source, "overlay_hooks", level=level, prefix=prefix)

    command(site, prefix=prefix)
    assert runs(source, "overlay_hooks", level=level, prefix=prefix)
    # Somebody compiles the patched text ahead of time; that must not outlive it.
    compiled(source, mode, level, prefix)

    command(site, "--revert", prefix=prefix)
    assert not runs(source, "overlay_hooks", level=level, prefix=prefix)
    if inside:
        assert_identical(pristine, snapshot(site), "the site with its bytecode")


@pytest.mark.parametrize("inside", [True, False], ids=["beside", "prefix"])
@pytest.mark.parametrize("mode", list(Mode), ids=lambda mode: mode.name.lower())
def test_upgraded_module_of_the_same_size_in_the_same_second(
    mode: Mode, inside: bool, tmp_path: Path
) -> None:
    """Python compares the time in seconds and the size: both can be equal for another text."""
    prefix = None if inside else tmp_path / "cache"
    earlier = used_sites.earlier_checkout(tmp_path / "earlier", RELEASE)
    module = earlier / "overlay" / MODULE
    text = module.read_text()
    assert "def model_worker" in text
    module.write_text(text.replace("def model_worker", "def former_names"))
    site = slim_site(RELEASE, tmp_path / "site-packages")
    command(site, prefix=prefix, checkout=earlier)
    compiled(site / MODULE, mode, 0, prefix)
    assert runs(site / MODULE, "former_names", level=0, prefix=prefix)
    command(site, prefix=prefix)
    assert not runs(site / MODULE, "former_names", level=0, prefix=prefix)


@pytest.mark.parametrize("inside", [True, False], ids=["beside", "prefix"])
def test_bytecode_that_appears_on_a_patched_tree_is_noticed(inside: bool, tmp_path: Path) -> None:
    """An image build may put old, unchecked bytecode back after the apply: the next one heals."""
    prefix = None if inside else tmp_path / "cache"
    site = slim_site(RELEASE, tmp_path / "site-packages")
    pyc = compiled(site / HOOKED, Mode.UNCHECKED_HASH, 0, prefix)
    saved = shutil.copy2(pyc, tmp_path / "saved.pyc")
    command(site, prefix=prefix)
    shutil.copy2(saved, pyc)
    assert not runs(site / HOOKED, "overlay_hooks", level=0, prefix=prefix)
    command(site, prefix=prefix)
    assert runs(site / HOOKED, "overlay_hooks", level=0, prefix=prefix)
    patched = snapshot(site)
    command(site, prefix=prefix)
    assert_identical(patched, snapshot(site), "the healed site after another apply")
