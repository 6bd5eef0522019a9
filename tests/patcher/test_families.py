"""The shipped families: each fits its releases, and its manifests are those of the wheels."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from devtools import manifests, wheels
from patcher import manifest, series, source
from tests.conftest import RELEASES

PATCHES = Path(__file__).resolve().parents[2] / "patches"
FAMILIES = sorted(entry for entry in PATCHES.iterdir() if entry.is_dir())


def test_every_supported_release_has_one_family() -> None:
    listed = [release for family in FAMILIES for release in manifests.names(family / "releases")]
    assert sorted(listed) == sorted(RELEASES)
    assert sorted(one.release for one in source.locate().manifests) == sorted(RELEASES)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_the_manifests_are_up_to_date(family: Path) -> None:
    for release in manifests.names(family / "releases"):
        shipped = (family / "manifests" / f"{release}.json").read_bytes()
        assert shipped == manifest.render(manifests.make(family, release)), release


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_gnu_patch_without_fuzz_agrees(family: Path, tmp_path: Path) -> None:
    loaded = series.load(family, family=family.name)
    assert loaded.paths
    for release in manifests.names(family / "releases"):
        tree, copy = wheels.tree(release), tmp_path / release
        for path in loaded.paths:
            (copy / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(tree / path, copy / path)
        for patch in loaded.patches:
            subprocess.run(
                ["patch", "-p1", "-F0", "--quiet", "--no-backup-if-mismatch"]
                + ["-i", str(family / patch.name)],
                cwd=copy,
                check=True,
            )
        rendered = series.render(loaded, lambda path, tree=tree: (tree / path).read_bytes())  # type: ignore[misc]
        assert {path: (copy / path).read_bytes() for path in loaded.paths} == rendered


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_changed_file_says_so(family: Path) -> None:
    loaded = series.load(family, family=family.name)
    for release in manifests.names(family / "releases"):
        tree = wheels.tree(release)
        rendered = series.render(loaded, lambda path, tree=tree: (tree / path).read_bytes())  # type: ignore[misc]
        for path, content in rendered.items():
            assert b"# Modified by the DDTree overlay for SGLang." in content, path
            compile(content, path, "exec")
