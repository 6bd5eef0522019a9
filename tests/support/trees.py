"""Site folders with a real SGLang in them: as released, and with the overlay applied to a copy."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
_CACHE = REPOSITORY / ".cache"


def wheel(release: str) -> Path:
    """Return the wheel of ``release`` as the package index serves it, downloaded once."""
    folder = _CACHE / "wheels" / release
    if not folder.exists():
        _make(folder, lambda empty: _download(release, empty))
    (found,) = folder.glob("*.whl")
    return found


def tree(release: str) -> Path:
    """Return a site folder with the unpacked wheel of ``release``; shared, never change it."""
    folder = _CACHE / "trees" / release
    if not folder.exists():
        _make(folder, lambda empty: zipfile.ZipFile(wheel(release)).extractall(empty))
    return folder


@cache
def patched(release: str) -> Path:
    """Return a copy of the tree of ``release`` with the overlay applied, one per overlay text."""
    folder = _CACHE / "patched" / f"{release}-{_fingerprint()}"
    if not folder.exists():
        _make(folder, lambda empty: _apply(release, empty))
    return folder


def _download(release: str, folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
    subprocess.run([*command, "-d", str(folder), f"sglang=={release}"], check=True)


def _apply(release: str, folder: Path) -> None:
    shutil.copytree(tree(release), folder, dirs_exist_ok=True)
    command = [sys.executable, str(REPOSITORY / "apply.py"), "--target", str(folder)]
    subprocess.run(command, check=True)


def _fingerprint() -> str:
    """Return a digest over everything that applying depends on."""
    digest = hashlib.sha256()
    roots = [REPOSITORY / name for name in ("apply.py", "overlay", "patcher", "patches")]
    files = [path for root in roots for path in (root.rglob("*") if root.is_dir() else [root])]
    for path in sorted(files):
        if path.is_file() and path.suffix != ".pyc":
            digest.update(str(path.relative_to(REPOSITORY)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _make(folder: Path, fill: Callable[[Path], object]) -> None:
    """Fill ``folder`` beside its place and move it there whole; a concurrent maker may win."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".making-", dir=folder.parent) as scratch:
        made = Path(scratch) / "made"
        made.mkdir()
        fill(made)
        try:
            made.rename(folder)
        except OSError:
            if not folder.exists():
                raise
