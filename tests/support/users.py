"""Run the command lines as a user who owns nothing, on folders that everybody may read.

pytest's own folders are closed to others, and so may be a checkout or an interpreter below a home
folder: the product is copied to an open place, with click and unidiff beside it. Where the tests do
not run as root there is no other user to become, and a tree without write permission says the same.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_NOBODY = "65534"
_PARTS = ("apply.py", "verify_install.py", "commandline.py", "patcher", "patches", "overlay")


@contextmanager
def open_folder() -> Iterator[Path]:
    """Give a scratch folder that every user may read."""
    folder = Path(tempfile.mkdtemp(prefix="overlay-open-"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        for path in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
            path.chmod(0o755)
        shutil.rmtree(folder)


def ship(folder: Path) -> Path:
    """Copy the product and what it imports into ``folder``, which must not exist."""
    ignore = shutil.ignore_patterns("__pycache__")
    folder.mkdir()
    sources = [ROOT / part for part in _PARTS]
    for name in ("click", "unidiff"):
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        sources.append(Path(spec.origin).parent)
    for source in sources:
        if source.is_dir():
            shutil.copytree(source, folder / source.name, ignore=ignore)
        else:
            shutil.copy(source, folder / source.name)
    return folder


def close(tree: Path) -> None:
    """Take every permission to write away from ``tree``."""
    for path in (tree, *tree.rglob("*")):
        path.chmod(path.stat().st_mode & ~0o222)


def run(product: Path, script: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run ``script`` of a shipped product as another user, with Python free to write bytecode."""
    environment = {
        key: value
        for key, value in os.environ.items()
        if key not in ("PYTHONDONTWRITEBYTECODE", "PYTHONPATH")
    }
    return subprocess.run(
        [*_become(), _python(), str(product / script), *options],
        env={**environment, "HOME": "/nonexistent"},
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
    )


def _become() -> list[str]:
    if os.geteuid() != 0:
        return []
    return ["setpriv", "--reuid", _NOBODY, "--regid", _NOBODY, "--clear-groups"]


@functools.cache
def _python() -> str:
    """Return a Python that the other user may run."""
    # It must be able to start itself: setpriv gives its powers up only with the first exec, so an
    # interpreter below a closed home folder starts once, and never again.
    code = (
        "import subprocess, sys; "
        "sys.exit(sys.version_info < (3, 10) or subprocess.call([sys.executable, '-c', '']))"
    )
    for python in (sys.executable, "/usr/local/bin/python3", "/usr/bin/python3"):
        try:
            done = subprocess.run(
                [*_become(), python, "-c", code], capture_output=True, check=False, cwd="/"
            )
        except FileNotFoundError:
            continue
        if done.returncode == 0:
            return python
    raise AssertionError("no Python 3.10 that another user may run: put one in /usr/local/bin")
