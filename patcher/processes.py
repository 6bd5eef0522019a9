"""Live processes that run SGLang from a given tree, as far as /proc tells (Linux).

A server keeps the code it imported and may import more of it later. It counts as one of the
tree's if it calls itself sglang (SGLang titles its processes so) and maps a file of the tree,
runs its environment's Python, or has the tree on its PYTHONPATH. The product's own commands, which
name sglang too, do not count.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

from patcher.files import read
from patcher.site import Site
from patcher.value import Value

_PROC = "/proc"
_TITLE_LENGTH = 80
_MARK = "patcher/probe.py"  # a file of this product, beside its commands and in its bundle
_PROBE = '"""Run by `patcher.trial`'  # how the code begins that the import check hands to Python


class Process(Value):
    """One process: its number, what it calls itself, and when it started (epoch seconds).

    ``certain`` is false where another user's process could not be looked into.
    """

    pid: int
    title: str
    started_at: float
    certain: bool

    def __str__(self) -> str:
        doubt = "" if self.certain else " (another user's: whose SGLang it runs is not known)"
        return f"{self.pid} {self.title[:_TITLE_LENGTH]}{doubt}"


def visible() -> bool:
    """Tell whether this system shows its processes in a way that `find` can read."""
    return os.path.isdir(_PROC)


def find(site: Site) -> tuple[Process, ...]:
    """Return the live processes that run SGLang from ``site``; none where there is no /proc."""
    if not visible():
        return ()
    booted = _boot_time()
    own = _ancestry()
    return tuple(
        found
        for pid in sorted(int(name) for name in os.listdir(_PROC) if name.isdigit())
        if pid not in own and (found := _examine(pid, site, booted))
    )


def _examine(pid: int, site: Site, booted: float) -> Process | None:
    try:
        line = read(f"{_PROC}/{pid}/cmdline")
        if b"sglang" not in line:
            return None
        words = line.decode("utf-8", "replace").split("\0")
        title = " ".join(words).strip()
        if not words[0]:
            return None
        folder = Path(f"{_PROC}/{pid}")
        started_at = booted + _start_ticks(folder) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        return None  # gone since it was listed
    try:
        certain = _uses(folder, words[0], site)
    except PermissionError:
        return Process(pid=pid, title=title, started_at=started_at, certain=False)
    except OSError:
        return None
    if not certain or _is_product(folder, words[1:]):
        return None
    return Process(pid=pid, title=title, started_at=started_at, certain=True)


def _uses(folder: Path, word: str, site: Site) -> bool:
    executable = (folder / "exe").readlink()
    if not executable.name.startswith(("python", "pypy")):
        return False
    homes = {executable.parent.parent}
    if Path(word).is_absolute():  # a virtual environment's Python is a link: its own name tells
        homes.add(Path(word).parent.parent)
    homes.discard(Path("/"))  # /bin/python3: everything lies below that
    if any(site.root.is_relative_to(home) for home in homes):
        return True
    roots = [str(base) for base in site.bases]
    environment = (folder / "environ").read_bytes().decode("utf-8", "replace").split("\0")
    search_path = next((e[11:] for e in environment if e.startswith("PYTHONPATH=")), "")
    if any(os.path.realpath(entry) in roots for entry in search_path.split(":") if entry):
        return True
    maps = (folder / "maps").read_text(errors="replace")
    return any(f"{root}/" in maps for root in roots)


def _is_product(folder: Path, words: list[str]) -> bool:
    """Tell whether a Python called with ``words`` runs this product: checkout, bundle or probe."""
    script = _script(words)
    if script.startswith(_PROBE):
        return True
    place = f"{folder}/cwd/{script}" if script and not script.startswith("/") else script
    beside = os.path.join(os.path.dirname(place.rstrip("/")), _MARK)
    if not os.path.isfile(place):
        return os.path.isdir(place) and os.path.isfile(beside)  # fleet/
    if os.path.isfile(beside):
        return True
    import zipfile  # only where such a process is found

    try:
        with zipfile.ZipFile(place) as archive:
            return _MARK in archive.namelist()
    except (OSError, zipfile.BadZipFile):
        return False


def _script(words: list[str]) -> str:
    """Return what a Python called with ``words`` runs: a file or folder, or the code of ``-c``."""
    left = iter(words)
    for word in left:
        if not word.startswith("-"):
            return word
        if word == "--check-hash-based-pycs":
            next(left, "")
        elif word == "-":
            return ""
        for at, letter in enumerate(word[1:] if word[1] != "-" else "", 2):
            if letter in "cmWX":  # the rest of the word, or the next one, belongs to it
                value = word[at:] or next(left, "")
                if letter in "cm":
                    return value if letter == "c" else ""
                break
    return ""


def _start_ticks(folder: Path) -> int:
    # The command's name, in brackets, may hold spaces and brackets of its own.
    return int((folder / "stat").read_text().rpartition(")")[2].split()[19])


def _boot_time() -> float:
    # Not the "btime" of /proc/stat: whole seconds would make a server that was started right
    # after an apply look older than the apply.
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)


def _ancestry() -> set[int]:
    return set(_parents(os.getpid()))


def _parents(pid: int) -> Iterator[int]:
    while pid > 0:
        yield pid
        try:
            text = read(f"{_PROC}/{pid}/stat").decode(errors="replace")
        except OSError:
            return
        pid = int(text.rpartition(")")[2].split()[1])
