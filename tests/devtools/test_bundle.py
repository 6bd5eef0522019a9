"""The one-file bundle: the same commands with nothing but a bare Python."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from devtools import bundle
from tests.support.sites import slim_site
from tests.support.snapshots import assert_identical, snapshot

RELEASE = "0.5.12.post1"


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dist") / "sglang-overlay.pyz"
    path.write_bytes(bundle.build())
    return path


def run(archive: Path, *words: str) -> subprocess.CompletedProcess[str]:
    # -I and -S: no environment, no site-packages: what is not in the bundle is not there.
    return subprocess.run(
        [sys.executable, "-I", "-S", str(archive), *words],
        capture_output=True,
        text=True,
        check=False,
        cwd=archive.parent,
    )


def test_the_whole_path(archive: Path, tmp_path: Path) -> None:
    site = slim_site(RELEASE, tmp_path / "site-packages")
    before = snapshot(site)
    states = []
    for words in (["status"], ["apply"], ["apply"], ["status"], ["revert"]):
        done = run(archive, *words, "--target", str(site), "--json")
        assert done.returncode == 0, done.stderr
        document = json.loads(done.stdout)
        states.append((document["state_after"], document["changed"]))
        if words == ["status"] and document["state_after"] == "patched":
            checked = run(archive, "verify", "--target", str(site), "--skip", "import,gpu")
            assert checked.returncode == 0, checked.stdout + checked.stderr
    assert states == [
        ("pristine", False),
        ("patched", True),
        ("patched", False),
        ("patched", False),
        ("pristine", True),
    ]
    assert_identical(before, snapshot(site))


def test_its_hints_name_the_bundle(archive: Path, tmp_path: Path) -> None:
    site = slim_site(RELEASE, tmp_path / "site-packages")
    said = run(archive, "verify", "--target", str(site), "--skip", "import,gpu").stdout
    assert f"Run `python3 {archive} apply --target {site}`" in said


def test_it_installs_what_the_checkout_installs(archive: Path, tmp_path: Path) -> None:
    from patcher import engine
    from patcher.engine import Request

    one, two = (slim_site(RELEASE, tmp_path / name) for name in ("one", "two"))
    run(archive, "apply", "--target", str(one))
    engine.apply(Request(target=str(two)))

    def contents(site: Path) -> dict[str, str]:
        entries = snapshot(site, leave_out=lambda path: path.endswith("receipt.json"))
        return {path: entry.content for path, entry in entries.items()}

    assert contents(one) == contents(two)


def test_usage(archive: Path) -> None:
    assert run(archive).returncode == 2
    assert run(archive, "nonsense").returncode == 2
    assert run(archive, "--help").returncode == 0
    shown = run(archive, "apply", "--help")
    assert shown.returncode == 0
    assert "--while-running" in shown.stdout


def test_the_same_inputs_give_the_same_bytes() -> None:
    assert bundle.build() == bundle.build()
