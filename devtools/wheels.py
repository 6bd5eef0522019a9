"""The released SGLang wheels, fetched once from the package registry into a cache folder."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / ".cache"


def wheel(release: str) -> Path:
    """Return the wheel of sglang ``release``, fetching it if the cache has none."""
    folder = CACHE / "wheels" / release
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            fetched = Path(scratch) / "fetched"
            fetched.mkdir()
            subprocess.run(
                [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
                + ["--only-binary=:all:", "--dest", str(fetched), f"sglang=={release}"],
                check=True,
            )
            fetched.replace(folder)
    return next(folder.glob("sglang-*.whl"))


def tree(release: str) -> Path:
    """Return a folder with the wheel of ``release`` unpacked. To be read, never changed."""
    folder = CACHE / "trees" / release
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            unpacked = Path(scratch) / "unpacked"
            with zipfile.ZipFile(wheel(release)) as archive:
                archive.extractall(unpacked)
            unpacked.replace(folder)
    return folder
