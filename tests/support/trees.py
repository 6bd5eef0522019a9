"""Site folders with a real SGLang in them: as released, and with the overlay applied to a copy."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

from devtools.wheels import CACHE, ROOT, cached, tree, wheel

__all__ = ["patched", "tree", "wheel"]


@cache
def patched(release: str) -> Path:
    """Return a copy of the tree of ``release`` with the overlay applied, one per overlay text."""
    folder = CACHE / "patched" / f"{release}-{_fingerprint()}"
    return cached(folder, lambda empty: _apply(release, empty))


def _apply(release: str, folder: Path) -> None:
    shutil.copytree(tree(release), folder, dirs_exist_ok=True)
    command = [sys.executable, str(ROOT / "apply.py"), "--target", str(folder)]
    subprocess.run(command, check=True)


def _fingerprint() -> str:
    """Return a digest over everything that applying depends on."""
    digest = hashlib.sha256()
    roots = [ROOT / name for name in ("apply.py", "overlay", "patcher", "patches")]
    files = [path for root in roots for path in (root.rglob("*") if root.is_dir() else [root])]
    for path in sorted(files):
        if path.is_file() and path.suffix != ".pyc":
            digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]
