"""What stands on the disk below a site-packages folder, in one number each."""

from __future__ import annotations

import hashlib
import stat
from pathlib import Path

PACKAGE = "sglang_overlay"
# It holds the time of the apply, so going back to an older overlay writes another one.
_RECEIPT = f"{PACKAGE}/_state/receipt.json"
_CACHE = "__pycache__"


def digest(site: Path) -> str:
    """Return one SHA-256 over everything of SGLang's and the overlay's below ``site``.

    Path, kind, mode and bytes of every file of the entries whose name begins with ``sglang``. Two
    trees with one digest are the same byte for byte, but for bytecode: a server that ran between
    two looks wrote some, and the engine sees to it that none is left of text that is gone.
    """
    total = hashlib.sha256()
    tops = [top for top in site.iterdir() if top.name.startswith("sglang")]
    paths = {path for top in tops for path in (top, *top.rglob("*"))}
    for path in sorted(paths):
        name, mode = path.relative_to(site).as_posix(), path.lstat().st_mode
        if name == _RECEIPT or _is_bytecode(path):
            continue
        if stat.S_ISLNK(mode):
            content = str(path.readlink()).encode()
        else:
            content = path.read_bytes() if stat.S_ISREG(mode) else b""
        total.update(f"{name}\0{mode:o}\0".encode() + hashlib.sha256(content).digest())
    return total.hexdigest()


def _is_bytecode(path: Path) -> bool:
    # The folder is made with its first file; a server that is killed leaves a NAME.pyc.NUMBER.
    return path.name == _CACHE or (path.parent.name == _CACHE and ".pyc" in path.name)


def place(site: Path) -> str:
    """Return what names this folder on this machine: two names of one host have the same.

    The number of the machine's boot, and the folder's device and inode.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    found = site.stat()
    return f"{boot}:{found.st_dev}:{found.st_ino}"


def fingerprint(site: Path) -> str | None:
    """Return the fingerprint of the overlay in ``site`` as a live server states it, or None.

    SHA-256 over the package's Python files, sorted by relative path: for each its path in UTF-8,
    a NUL byte and the 32 raw bytes of its SHA-256.
    """
    package = site / PACKAGE
    files = {path.relative_to(package).as_posix(): path for path in package.rglob("*.py")}
    if not files:
        return None
    total = hashlib.sha256()
    for name in sorted(files):
        total.update(name.encode() + b"\0" + hashlib.sha256(files[name].read_bytes()).digest())
    return total.hexdigest()
