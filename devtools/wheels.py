"""The released SGLang wheels, fetched once from the package registry into a cache folder."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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

    return next(cached(CACHE / "wheels" / release, fetch).glob("sglang-*.whl"))


def tree(release: str) -> Path:
    """Return a folder with the wheel of ``release`` unpacked. To be read, never changed."""

    def unpack(folder: Path) -> None:
        with zipfile.ZipFile(wheel(release)) as archive:
            archive.extractall(folder)

    return cached(CACHE / "trees" / release, unpack)


def cached(folder: Path, fill: Callable[[Path], object]) -> Path:
    """Return ``folder``; if it is not there, fill it beside its place and move it there whole.

    Of several processes that want the same folder one fills it; the others wait for that.
    """
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.parent):
        if not folder.is_dir():
            with tempfile.TemporaryDirectory(prefix=".making-", dir=folder.parent) as scratch:
                made = Path(scratch) / "made"
                made.mkdir()
                fill(made)
                made.replace(folder)
    return folder


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of ``folder``; the end of the process lets go of it too."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
