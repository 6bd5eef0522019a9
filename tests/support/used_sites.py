"""Sites as they come out of use, an earlier overlay to meet on them, and what must always hold."""

from __future__ import annotations

import difflib
import json
import os
import py_compile
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from devtools import manifests, wheels
from patcher import files, manifest, receipt, record, transaction
from patcher.source import Source
from tests.support.runs import ROOT
from tests.support.sites import manifest_of, slim_site
from tests.support.snapshots import Entry, Snapshot

_CHANGED = re.compile(r"^\+\+\+ b/(\S+)", re.MULTILINE)
_EARLIER_HOOK = "sglang/version.py"
# What a small product keeps of the overlay: modules at three depths.
_FEW = {"__init__.py", "switches.py", "py.typed", "attention/__init__.py", "attention/mask.py"}
_FEW |= {"attention/kernels/__init__.py"}
_HEADER = "Mark the version module\n\nWhy: a test\n\nHow: a comment\n\nUpstream: no\n\n"


def lived_in_site(release: str, folder: Path) -> Path:
    """Make ``folder`` a slim site that has been used: bytecode, odd modes and owners, xattrs.

    Every file that the overlay changes has bytecode of two optimisation levels, listed in RECORD
    without a hash as pip does. The folder has mode 775, one file 640, one an extended attribute,
    and for root one has another owner.
    """
    slim_site(release, folder)
    hooked = sorted(manifest_of(release).files)
    listing = next(folder.glob("sglang-*.dist-info/RECORD"))
    rows = {}
    for path in hooked:
        for level in (0, 2):
            pyc = py_compile.compile(str(folder / path), optimize=level, doraise=True)
            assert pyc is not None
            name = Path(pyc).relative_to(folder).as_posix()
            rows[name] = record.bare_row(name)
    listing.write_bytes(record.edit(listing.read_bytes(), put=rows))
    folder.chmod(0o775)
    (folder / hooked[0]).chmod(0o640)
    os.setxattr(folder / hooked[1], "user.origin", b"kept by every change")
    if os.geteuid() == 0:
        os.chown(folder / hooked[2], 12345, 23456)
    return folder


def small_checkout(folder: Path, release: str) -> Path:
    """Make ``folder`` a checkout with today's engine and little to do, for exhaustive tests.

    It has a few modules at three depths, and those patches that change nothing but the first three
    hooked files, to which `lived_in_site` gives an odd mode, an extended attribute and an owner.
    """
    _copy_checkout(ROOT, folder)
    package = folder / "overlay" / "sglang_overlay"
    for path in sorted(package.rglob("*"), reverse=True):
        if path.is_dir():
            if not any(path.iterdir()):
                path.rmdir()
        elif path.relative_to(package).as_posix() not in _FEW:
            path.unlink()
    own = manifest_of(release)
    family = folder / "patches" / own.family
    few = set(sorted(own.files)[:3])
    names = (family / "series").read_text().split()
    kept = [name for name in names if set(_CHANGED.findall((family / name).read_text())) <= few]
    for name in {*names} - {*kept}:
        (family / name).unlink()
    (family / "series").write_text("\n".join(kept) + "\n")
    _make_manifest(family, release)
    return folder


def earlier_checkout(folder: Path, release: str, *, of: Path = ROOT) -> Path:
    """Make ``folder`` a checkout of an overlay 0.0.1 for ``release``, differing in every way.

    It has one module that the checkout ``of`` has not, lacks none, another text in one, does not
    hook what that one's last patch hooks, and hooks a file that it does not.
    """
    _copy_checkout(of, folder)
    package = folder / "overlay" / "sglang_overlay"
    _edit(package / "__init__.py", lambda text: _with_version(text, "0.0.1"))
    _edit(package / "switches.py", lambda text: text + "\n# As it was in 0.0.1.\n")
    (package / "retired.py").write_text('"""A module that the next version no longer has."""\n')
    family = folder / "patches" / manifest_of(release).family
    names = (family / "series").read_text().split()
    (family / names[-1]).unlink()
    mark = "9001-version-mark.patch"
    (family / mark).write_text(_HEADER + "Remove when: now\n\n" + _marking_diff(release))
    (family / "series").write_text("\n".join([*names[:-1], mark]) + "\n")
    _make_manifest(family, release)
    return folder


def hooks_without_modules(site: Path, checkouts: Sequence[Path], release: str) -> list[str]:
    """Say which hooked files of ``site`` would not find what they import, as it stands now.

    ``checkouts`` are the overlays in question, the newest last. A hooked file needs every module
    of an overlay that patches it so, each whole, in either overlay's text; a hook that only the
    newest has needs the newest's own.
    """
    sources = [Source(checkout) for checkout in checkouts]
    texts: dict[str, set[str]] = {}
    for source in sources:
        for path, content in source.overlay.items():
            texts.setdefault(path, set()).add(files.digest(content))
    wrong = []
    for path in sorted({path for source in sources for path in _after(source, release)}):
        found = files.digest_path(site / path)
        owners = [source for source in sources if _after(source, release).get(path) == found]
        lacking = [
            [name for name in owner.overlay if files.digest_path(site / name) not in texts[name]]
            for owner in owners
        ]
        if owners == sources[-1:]:
            own = sources[-1].overlay
            lacking = [[n for n in own if files.digest_path(site / n) != files.digest(own[n])]]
        if lacking and all(lacking):
            wrong.append(f"{path} is hooked, but the overlay lacks {lacking[-1]}")
    return wrong


def leftovers(*folders: Path) -> list[str]:
    """Return what an unfinished change has left in or beside ``folders``."""
    found = [path for one in folders for path in one.rglob(f"*{transaction.STAGING}*")]
    found += [path for one in folders for path in one.parent.glob(f"*{transaction.STAGING}*")]
    return sorted(map(str, found))


def patched_view(tree: Snapshot, site: Path) -> dict[str, Entry]:
    """Return the snapshot of a patched ``site`` without what legitimately differs between runs.

    That is when the files that were written got their times, and what the receipt says of times.
    """
    view = dict(tree)
    applied = receipt.load(site)
    assert applied is not None, f"{site} has no receipt"
    written = {*applied.files, *applied.overlay, *applied.record, receipt.PATH}
    for path in written:
        view[path] = replace(view[path], mtime_ns=0)
    text = json.loads((site / receipt.PATH).read_bytes())
    del text["applied_at"], text["folders"]
    content = files.digest(json.dumps(text, sort_keys=True).encode())
    view[receipt.PATH] = replace(view[receipt.PATH], content=content)
    return view


def _copy_checkout(checkout: Path, folder: Path) -> None:
    folder.mkdir()
    for script in ("apply.py", "commandline.py"):
        shutil.copy2(checkout / script, folder)
    for name in ("patcher", "overlay", "patches"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(checkout / name, folder / name, ignore=ignored)


def _make_manifest(family: Path, release: str) -> None:
    shutil.rmtree(family / "manifests")
    (family / "manifests").mkdir()
    made = manifest.render(manifests.make(family, release))
    (family / "manifests" / f"{release}.json").write_bytes(made)


def _after(source: Source, release: str) -> dict[str, str]:
    own = next(one for one in source.manifests if one.release == release)
    return {path: row.after for path, row in own.files.items()}


def _edit(path: Path, change: Callable[[str], str]) -> None:
    path.write_text(change(path.read_text()))


def _with_version(text: str, version: str) -> str:
    head, _, _ = text.partition("__version__")
    return f'{head}__version__ = "{version}"\n'


def _marking_diff(release: str) -> str:
    tree = wheels.tree(release)
    old = (tree / _EARLIER_HOOK).read_text().splitlines(keepends=True)
    new = ["# Modified by the DDTree overlay for SGLang.\n", *old]
    lines = difflib.unified_diff(old, new, f"a/{_EARLIER_HOOK}", f"b/{_EARLIER_HOOK}")
    return "".join(lines)
