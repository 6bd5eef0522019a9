"""Installs that share their files with a store: by hard link (uv, conda) or by symbolic link.

Whatever is done to the site, the store stays as it is, to the byte and to the link.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import used_sites
from tests.support.bench import RELEASE, Bench
from tests.support.sites import manifest_of
from tests.support.snapshots import assert_identical, snapshot


def share(store: Path, site: Path, link: Callable[[Path, Path], None]) -> Path:
    """Make ``site`` a tree of real folders whose files ``link`` makes from those in ``store``."""
    for folder, _, names in os.walk(store):
        into = site / Path(folder).relative_to(store)
        into.mkdir()
        for name in names:
            link(Path(folder) / name, into / name)
    return site


def hard(source: Path, target: Path) -> None:
    target.hardlink_to(source)


def symbolic(source: Path, target: Path) -> None:
    target.symlink_to(source.absolute())


def relative(source: Path, target: Path) -> None:
    target.symlink_to(os.path.relpath(source, target.parent))


@pytest.mark.parametrize(("link", "said"), [(hard, "hard link"), (symbolic, "symbolic links")])
def test_store_stays_as_it_is(
    link: Callable[[Path, Path], None], said: str, tmp_path: Path, bench: Bench
) -> None:
    store = used_sites.lived_in_site(RELEASE, tmp_path / "store")
    site = share(store, tmp_path / "site-packages", link)
    stored, pristine = snapshot(store, folder_times=True), snapshot(site)

    applied = bench.now.run("--target", site)
    assert applied.code == 0, applied.told
    assert said in applied.told
    assert_identical(stored, snapshot(store, folder_times=True), "the store after apply")
    hooked = manifest_of(RELEASE).files
    shared = [path for path in hooked if (site / path).samefile(store / path)]
    assert shared == [], "a hooked file is the store's own"

    reverted = bench.now.run("--target", site, "--revert")
    assert reverted.code == 0, reverted.told
    assert_identical(stored, snapshot(store, folder_times=True), "the store after revert")
    assert_identical(pristine, snapshot(site), "the site")


def test_relative_links_are_refused(tmp_path: Path, bench: Bench) -> None:
    store = used_sites.lived_in_site(RELEASE, tmp_path / "store")
    site = share(store, tmp_path / "site-packages", relative)
    stored, pristine = snapshot(store), snapshot(site)
    ended = bench.now.run("--target", site)
    assert ended.code == 1
    assert "relative symbolic link" in ended.told
    assert_identical(pristine, snapshot(site))
    assert_identical(stored, snapshot(store))


def test_edit_of_the_store_during_a_patched_time_is_not_undone(
    tmp_path: Path, bench: Bench
) -> None:
    """A linked original is the store's file: if that changes, revert must not present it as old."""
    store = used_sites.lived_in_site(RELEASE, tmp_path / "store")
    site = share(store, tmp_path / "site-packages", hard)
    assert bench.now.run("--target", site).code == 0
    hooked = min(manifest_of(RELEASE).files)
    with (store / hooked).open("ab") as stream:
        stream.write(b"# edited in the store\n")
    patched = snapshot(site)
    ended = bench.now.run("--target", site, "--revert")
    assert ended.code == 1
    assert "original" in ended.told
    assert_identical(patched, snapshot(site))


def test_patched_files_keep_what_the_installer_gave_them(tmp_path: Path, bench: Bench) -> None:
    site = used_sites.lived_in_site(RELEASE, tmp_path / "site-packages")
    pristine = snapshot(site)
    assert bench.now.run("--target", site).code == 0
    patched = snapshot(site)
    for path in manifest_of(RELEASE).files:
        was, now = pristine[path], patched[path]
        assert (now.mode, now.owner, now.xattrs) == (was.mode, was.owner, was.xattrs), path
        assert now.content != was.content, path
