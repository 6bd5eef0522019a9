"""The command line of apply.py, run as people and scripts run it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from patcher import source
from tests.support import users
from tests.support.sites import manifest_of, slim_site
from tests.support.snapshots import assert_identical, snapshot

ROOT = Path(__file__).resolve().parents[1]
RELEASE = "0.5.12.post1"


@pytest.fixture
def site(tmp_path: Path) -> Path:
    return slim_site(RELEASE, tmp_path / "site-packages")


def run(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "apply.py"), *options],
        capture_output=True,
        text=True,
        check=False,
    )


def answer(*options: str, code: int = 0) -> dict[str, Any]:
    done = run(*options, "--json")
    assert done.returncode == code, done.stderr + done.stdout
    document = json.loads(done.stdout)
    assert isinstance(document, dict)
    return document


def test_the_json_form_is_what_scripts_rely_on(site: Path) -> None:
    applied = answer("--target", str(site))
    files = applied.pop("files")
    assert applied == {
        "schema": 1,
        "command": "apply",
        "target": str(site),
        "release": RELEASE,
        "overlay_version": source.locate().version,
        "state_before": "pristine",
        "state_after": "patched",
        "changed": True,
        "errors": [],
        "warnings": [],
    }
    rows = {row["path"]: row for row in files}
    assert len(rows) == len(files)
    for path, digests in manifest_of(RELEASE).files.items():
        assert rows[path] == {
            "path": path,
            "state": "pristine",
            "action": "patch",
            "sha256_before": digests.before,
            "sha256_after": digests.after,
            "links": 1,
        }
    again = answer("--target", str(site))
    assert (again["changed"], again["state_before"]) == (False, "patched")
    assert {row["action"] for row in again["files"]} == {"keep"}
    reverted = answer("--target", str(site), "--revert")
    assert (reverted["command"], reverted["changed"]) == ("revert", True)
    assert reverted["state_after"] == "pristine"
    assert answer("--target", str(site), "--status")["state_after"] == "pristine"


def test_check_and_diff(site: Path) -> None:
    before = snapshot(site, folder_times=True)
    done = run("--target", str(site), "--check", "--diff")
    assert_identical(before, snapshot(site, folder_times=True))
    assert done.returncode == 0
    assert done.stdout.startswith("--- a/sglang/")
    assert "+from sglang_overlay.srt import hooks as overlay_hooks\n" in done.stdout
    assert "would go from pristine to patched" in done.stderr
    answer("--target", str(site))
    shown = answer("--target", str(site), "--status", "--diff")["diff"]
    assert shown == done.stdout


def test_a_refusal_says_what_to_do_and_changes_nothing(site: Path) -> None:
    target = site / "sglang/srt/server_args.py"
    target.write_bytes(target.read_bytes() + b"# mine\n")
    before = snapshot(site, folder_times=True)
    done = run("--target", str(site))
    assert (done.returncode, done.stdout) == (1, "")
    assert "error [file-modified]: sglang/srt/server_args.py" in done.stderr
    assert "→ Bring back the released file" in done.stderr
    refused = answer("--target", str(site), code=1)
    assert {"code", "path", "message", "hint"} == set(refused["errors"][0])
    assert refused["changed"] is False
    assert_identical(before, snapshot(site, folder_times=True))


def test_a_second_apply_needs_no_right_to_write() -> None:
    with users.open_folder() as folder:
        site = slim_site(RELEASE, folder / "site-packages")
        answer("--target", str(site))
        users.close(site)
        product = users.ship(folder / "product")
        before = snapshot(site, folder_times=True)
        again = users.run(product, "apply.py", "--target", str(site), "--json")
        assert again.returncode == 0, again.stderr
        document = json.loads(again.stdout)
        assert (document["changed"], document["state_after"]) == (False, "patched")
        refused = users.run(product, "apply.py", "--target", str(site), "--revert", "--json")
        assert refused.returncode == 1
        found = {row["code"] for row in json.loads(refused.stdout)["errors"]}
        assert found
        assert found <= {"not-owner", "not-writable"}
        assert_identical(before, snapshot(site, folder_times=True))


@pytest.mark.root
def test_another_user_is_told_each_reason_once() -> None:
    with users.open_folder() as folder:
        site = slim_site(RELEASE, folder / "site-packages")
        product = users.ship(folder / "product")
        refused = users.run(product, "apply.py", "--target", str(site), "--json")
        assert refused.returncode == 1, refused.stderr
        errors = json.loads(refused.stdout)["errors"]
        # Not that a file is immutable, which is for somebody who owns it.
        assert [row["code"] for row in errors] == ["not-writable", "not-owner"]
        assert re.search(r" and \d+ more$", errors[0]["message"])


@pytest.mark.root
def test_a_read_only_filesystem_is_named_as_such(tmp_path: Path) -> None:
    site = slim_site(RELEASE, tmp_path / "site-packages")
    subprocess.run(["mount", "--bind", site, site], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", site], check=True)
        (error,) = answer("--target", str(site), code=1)["errors"]
    finally:
        subprocess.run(["umount", site], check=True)
    assert (error["code"], error["path"]) == ("not-writable", str(site))
    assert error["message"] == "is on a read-only filesystem"
    assert "Remount" in error["hint"]


@pytest.mark.parametrize(
    "options",
    [
        ["--status", "--revert"],
        ["--wait", "soon"],
        ["--wait", "-1"],
        ["--wait", "nan"],
        ["--nonsense"],
        ["stray"],
    ],
)
def test_wrong_usage_is_2(options: list[str]) -> None:
    done = run(*options)
    assert done.returncode == 2
    assert "Usage:" in done.stderr


@pytest.mark.parametrize("script", ["apply.py", "verify_install.py"])
def test_version(script: str) -> None:
    command = [sys.executable, str(ROOT / script), "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == source.locate().version


@pytest.mark.parametrize("script", ["apply.py", "verify_install.py"])
@pytest.mark.parametrize("how", ["-I", "PYTHONSAFEPATH"])
def test_a_python_that_leaves_the_script_s_folder_out_finds_it(script: str, how: str) -> None:
    flags, more = (["-I"], {}) if how == "-I" else ([], {how: "1"})
    done = subprocess.run(
        [sys.executable, *flags, str(ROOT / script), "--version"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **more},
    )
    assert (done.returncode, done.stdout.strip()) == (0, source.locate().version), done.stderr


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_an_encoding_without_arrows_is_no_bug(form: list[str], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "verify_install.py"), "--target", str(tmp_path / "é 日本")]
        + ["--skip", "import,gpu", *form],
        capture_output=True,
        check=False,
        env={**os.environ, "PYTHONIOENCODING": "latin-1"},
    )
    assert done.returncode == 1, done.stderr
    site = slim_site(RELEASE, tmp_path / "site-packages")
    done = subprocess.run(
        [sys.executable, str(ROOT / "verify_install.py"), "--target", str(site)]
        + ["--skip", "import,gpu", *form],
        capture_output=True,
        check=False,
        env={**os.environ, "PYTHONIOENCODING": "latin-1"},
    )
    assert (done.returncode, done.stderr) == (1, b"")
    assert b"\\u2192 Run" in done.stdout or form


@pytest.mark.parametrize("closed", [">&-", ">&- 2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("script", ["apply.py", "verify_install.py"])
def test_closed_streams_are_no_fault(closed: str, script: str, site: Path) -> None:
    more = "" if script == "apply.py" else "--skip import,gpu --expect pristine"
    command = f"{sys.executable} {ROOT / script} --target {site} {more} {closed}"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    if script == "apply.py":
        assert answer("--target", str(site), "--status")["state_after"] == "patched"


def test_help_names_every_exit_code() -> None:
    done = run("--help")
    assert done.returncode == 0
    for word in ("0 done", "1 refused", "2 wrong usage", "3 a bug", "130 interrupted"):
        assert word in " ".join(done.stdout.split())


def test_without_target_it_takes_the_python_that_runs_it() -> None:
    reply = run("--status", "--json")
    document = json.loads(reply.stdout)
    assert document["state_after"] in {"absent", "foreign", "pristine", "patched"}
    assert Path(document["target"]).is_relative_to(Path(sys.prefix).resolve())


@pytest.mark.parametrize("lacking", ["click", "unidiff"])
def test_a_bare_host_is_told_the_one_command_to_run(tmp_path: Path, lacking: str) -> None:
    code = (
        "import runpy, sys\n"
        "class Without:\n"
        "    def __init__(self, finder): self.finder = finder\n"
        "    def find_spec(self, name, *rest):\n"
        f"        return None if name == {lacking!r} else self.finder.find_spec(name, *rest)\n"
        "sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]\n"
        f"sys.argv = ['apply.py']; sys.path.insert(0, {str(ROOT)!r})\n"
        f"runpy.run_path({str(ROOT / 'apply.py')!r}, run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"{lacking} is missing. Run `{sys.executable} -m pip install '{lacking}" in done.stderr


def test_a_bug_is_3_and_said_so(site: Path) -> None:
    code = (
        "import runpy, sys\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "from patcher import state\n"
        "def broken(*_): raise RuntimeError('planted')\n"
        "state.survey = broken\n"
        f"sys.argv = ['apply.py', '--target', {str(site)!r}, '--json']\n"
        f"runpy.run_path({str(ROOT / 'apply.py')!r}, run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert "RuntimeError: planted" in done.stderr
    assert json.loads(done.stdout)["errors"][0]["code"] == "bug"


def test_a_live_server_stops_a_revert_unless_told(site: Path) -> None:
    answer("--target", str(site))
    environment = {**os.environ, "PYTHONPATH": str(site)}
    server = subprocess.Popen(
        [sys.executable, "-c", "import time; print(flush=True); time.sleep(120)", "sglang::server"],
        env=environment,
        stdout=subprocess.PIPE,
    )
    try:
        assert server.stdout is not None
        server.stdout.readline()
        refused = answer("--target", str(site), "--revert", code=1)
        assert [row["code"] for row in refused["errors"]] == ["in-use"]
        assert f"process {server.pid} " in refused["errors"][0]["message"]
        told = answer("--target", str(site), "--revert", "--while-running")
        assert told["state_after"] == "pristine"
        assert any(f"process {server.pid} " in warning for warning in told["warnings"])
    finally:
        server.kill()
        server.communicate()
    assert answer("--target", str(site))["warnings"] == []
