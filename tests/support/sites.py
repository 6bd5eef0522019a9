"""Folders that stand for an installed SGLang: real files of the released wheels, few of them."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from devtools import wheels
from patcher import engine, record, source
from patcher.manifest import Manifest

# What a wheel of any release has beside the files that the overlay knows.
_IDENTITY = ("sglang/__init__.py", "sglang/_version.py", "sglang/version.py")


def manifest_of(release: str) -> Manifest:
    """Return the manifest that this product ships for ``release``."""
    return next(one for one in source.locate().manifests if one.release == release)


def slim_site(release: str, folder: Path) -> Path:
    """Make ``folder`` a site-packages folder with the part of sglang ``release`` that matters here.

    It gets, from the real wheel and with the times of the unpacked tree: every file that the
    series changes, every witness, the package's ``__init__`` and version modules, and the whole
    dist-info. RECORD keeps the wheel's own rows, cut down to the files that are there, so that a
    check of all rows holds. It is enough to apply, verify and revert, in some 25 files instead of
    2,650; it is not enough to ``import sglang``. The caller owns the copy.

    Returns:
        ``folder``, which may exist if it is empty.
    """
    tree = wheels.tree(release)
    manifest = manifest_of(release)
    dist_info = next(tree.glob("sglang-*.dist-info"))
    for path in (*_IDENTITY, *manifest.files, *manifest.witnesses):
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(tree / path, target)
    shutil.copytree(dist_info, folder / dist_info.name)
    listing = folder / dist_info.name / "RECORD"
    content = listing.read_bytes()
    absent = [path for path in record.rows(content) if not (folder / path).exists()]
    listing.write_bytes(record.edit(content, put={}, drop=absent))
    return folder


def pip_site(release: str, folder: Path) -> Path:
    """Make ``folder`` a copy of what pip installs of sglang ``release``: all files, compiled.

    RECORD is pip's own, with rows without hashes for the bytecode and rows that lead out of
    site-packages for the scripts. The install is made once (half a minute) and kept in the cache.
    """
    master = wheels.CACHE / "installs" / f"{release}-py{sys.version_info[0]}{sys.version_info[1]}"
    wheels.cached(master, lambda empty: _install(release, empty))
    return Path(shutil.copytree(master, folder, symlinks=True))


def _install(release: str, folder: Path) -> None:
    """Let pip install the wheel of ``release``, and move what it made into the empty ``folder``."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        environment = Path(scratch) / "venv"
        venv.create(environment, with_pip=False, symlinks=True)
        subprocess.run(
            [sys.executable, "-m", "pip", "--python", str(environment / "bin" / "python")]
            + ["install", "--quiet", "--no-deps", "--disable-pip-version-check"]
            + [str(wheels.wheel(release))],
            env={k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"},
            check=True,
        )
        next(environment.glob("lib/python3*/site-packages")).replace(folder)


def patched_site(release: str, folder: Path) -> Path:
    """Make a `slim_site` and apply this product's overlay to it."""
    site = slim_site(release, folder)
    outcome = engine.apply(engine.Request(target=str(site)))
    assert outcome.exit_code == 0, outcome.errors
    return site


def snapshot(folder: Path) -> dict[str, tuple[object, ...]]:
    """Return all that a read-only run must leave as it is: path → what stands there.

    For every file, folder and link: inode, mode, owner, time, size, link count and content.
    """

    def look(path: Path) -> tuple[object, ...]:
        status = path.lstat()
        content = path.read_bytes() if stat.S_ISREG(status.st_mode) else b""
        owner = (status.st_uid, status.st_gid)
        return (status.st_ino, status.st_mode, owner, status.st_mtime_ns, status.st_nlink, content)

    return {str(path): look(path) for path in (folder, *sorted(folder.rglob("*")))}
