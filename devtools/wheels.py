"""The released SGLang wheels, fetched once from the package registry into a cache folder."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / ".cache"


def wheel(release: str) -> Path:
    """Return the wheel of sglang ``release``, fetching it if the cache has none."""

    def fetch(folder: Path) -> None:
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
            + ["--only-binary=:all:", "--dest", str(folder), f"sglang=={release}"],
            check=True,
        )

    return next(_cached(CACHE / "wheels" / release, fetch).glob("sglang-*.whl"))


def tree(release: str) -> Path:
    """Return a folder with the wheel of ``release`` unpacked. To be read, never changed."""

    def unpack(folder: Path) -> None:
        with zipfile.ZipFile(wheel(release)) as archive:
            archive.extractall(folder)

    return _cached(CACHE / "trees" / release, unpack)


def _cached(folder: Path, fill: Callable[[Path], None]) -> Path:
    """Return ``folder``; fill it beside its place and move it there whole, if it is not there."""
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            made = Path(scratch) / "made"
            made.mkdir()
            fill(made)
            made.replace(folder)
    return folder
