"""The command line of verify: options, streams, exit codes, and a user who may not write."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import verify_install
from patcher import engine, verify
from tests.support import users
from tests.support.sites import patched_site, slim_site, snapshot

RELEASE = "0.5.12.post1"


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A patched site that no test changes."""
    return patched_site(RELEASE, tmp_path_factory.mktemp("patched") / "site")


def run(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(users.ROOT / "verify_install.py"), *options],
        capture_output=True,
        text=True,
        check=False,
    )


def test_passes_and_lists_every_check(patched: Path) -> None:
    done = run("--target", str(patched), "--skip", "import,gpu")
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split()[:2] for line in done.stdout.splitlines()[:-1]] == [
        ["passed", "files"],
        ["passed", "record"],
        ["passed", "bytecode"],
        ["passed", "leftovers"],
        ["skipped", "pins"],
        ["skipped", "import"],
        ["skipped", "gpu"],
        ["passed", "processes"],
    ]


def test_a_failure_is_exit_code_1(tmp_path: Path) -> None:
    site = slim_site(RELEASE, tmp_path / "site")
    done = run("--target", str(site), "--skip", "import", "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout)["state"] == "pristine"
    asked = ("--target", str(site), "--skip", "import", "--expect", "pristine")
    assert run(*asked).returncode == 0


def test_a_unit_may_start_beside_one_that_is_still_to_be_restarted(tmp_path: Path) -> None:
    """As in a rolling restart: what runs beside this says nothing of what is about to start."""
    site = slim_site(RELEASE, tmp_path / "site")
    code = "print(flush=True); import time; time.sleep(120)"
    with subprocess.Popen(
        [sys.executable, "-S", "-c", code, "sglang::scheduler"],
        env={**os.environ, "PYTHONPATH": str(site)},
        stdout=subprocess.PIPE,
    ) as other:
        try:
            assert other.stdout is not None
            other.stdout.readline()
            assert engine.apply(engine.Request(target=str(site))).exit_code == 0
            told = run("--target", str(site), "--skip", "import,gpu")
            assert (told.returncode, "FAILED   processes" in told.stdout) == (1, True)
            unit = run("--target", str(site), "--skip", "import,gpu,processes")
            assert unit.returncode == 0, unit.stdout
        finally:
            other.kill()


def test_a_required_check_that_is_skipped_is_exit_code_1(patched: Path) -> None:
    done = run("--target", str(patched), "--skip", "import", "--require", "pins")
    assert done.returncode == 1
    assert "FAILED   pins" in done.stdout


QUICK = ("--skip", "import,gpu,pins")


def test_the_self_test_is_only_run_where_it_is_asked_for(patched: Path) -> None:
    """On this host no path can run: each row says why, and none counts as passed."""
    silent = run("--target", str(patched), *QUICK, "--json")
    assert "self-test" not in {check["name"] for check in json.loads(silent.stdout)["checks"]}
    done = run("--target", str(patched), *QUICK, "--self-test", "--json")
    assert done.returncode == 0, done.stdout
    found = json.loads(done.stdout)["checks"][-1]
    assert (found["name"], found["status"]) == ("self-test", "skipped")
    assert len(found["rows"]) >= 10
    told = {(row["status"], row["reason"]) for row in found["rows"]}
    assert told == {("skipped", "there is no CUDA device here")}


def test_a_required_self_test_fails_where_no_path_can_run(patched: Path) -> None:
    done = run("--target", str(patched), *QUICK, "--require", "self-test")
    assert done.returncode == 1
    assert "30 rows: 30 skipped, but it is required (--require self-test)" in done.stdout
    assert done.stdout.count("skipped: there is no CUDA device here") == 30


@pytest.mark.parametrize(
    ("planted", "told"),
    [
        ("def run(): return [dict(ROW, status='failed', reason='wrong')]", "failed: wrong"),
        ("import os\ndef run(): os.abort()", "ended with -6 in the self-test"),
        ("def run(): raise ValueError('boom')", "the self-test ends with ValueError: boom"),
        ("import sglang_overlay.absent", "importing sglang_overlay.self_test ends with Module"),
    ],
)
def test_a_self_test_that_fails_is_exit_code_1(planted: str, told: str, tmp_path: Path) -> None:
    site = patched_site(RELEASE, tmp_path / "site")
    row = {"engine": "flashmla", "cache_dtype": "bfloat16", "page_size": 64, "requests": 1}
    row |= {"context": 70, "heads": 8, "nodes": 16, "max_error": 0.5, "relative_error": 0.1}
    row |= {"microseconds": None, "stock_microseconds": None}
    module = site / "sglang_overlay" / "self_test" / "__init__.py"
    module.write_text(f"ROW = {row!r}\n{planted}\n")
    done = run("--target", str(site), *QUICK, "--self-test")
    assert done.returncode == 1
    (line,) = (line for line in done.stdout.splitlines() if " self-test " in line)
    assert line.split()[0] == "FAILED"
    assert told in done.stdout


def test_an_error_is_told_on_the_error_stream(tmp_path: Path) -> None:
    done = run("--target", str(tmp_path / "absent"))
    assert (done.returncode, done.stdout) == (1, "")
    assert "error [target-missing]" in done.stderr
    done = run("--target", str(tmp_path / "absent"), "--json")
    assert json.loads(done.stdout)["errors"][0]["code"] == "target-missing"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--expect", "perfect"], "'perfect' is not one of 'patched', 'pristine'"),
        (["--require", "files"], "'files' is not one of import, gpu, pins, processes, self-test"),
        (["--skip", "record"], "'record' is not one of import, gpu, pins, processes, self-test"),
        (["--skip", "gpu", "--require", "import,gpu"], "both required and skipped: gpu"),
        (["--fix"], "No such option"),
    ],
)
def test_wrong_usage_is_exit_code_2(options: list[str], told: str) -> None:
    done = run(*options)
    assert done.returncode == 2
    assert told in done.stderr


def test_names_may_be_repeated_or_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[verify.Request] = []

    def fake(request: verify.Request) -> verify.Verdict:
        asked.append(request)
        return verify.Verdict(target="", overlay_version="", expect=request.expect)

    monkeypatch.setattr(verify, "verify", fake)
    for options in (["--require", "import,gpu"], ["--require", "import", "--require", "gpu"]):
        monkeypatch.setattr(sys, "argv", ["verify_install.py", *options])
        assert verify_install.run() == 0
    assert [request.require for request in asked] == [frozenset({"import", "gpu"})] * 2


@pytest.mark.parametrize(
    ("problem", "code"), [(RuntimeError("planted"), 3), (KeyboardInterrupt(), 130)]
)
def test_a_bug_and_an_interruption_have_their_own_codes(
    problem: BaseException,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(request: verify.Request) -> verify.Verdict:
        raise problem

    monkeypatch.setattr(verify, "verify", fail)
    monkeypatch.setattr(sys, "argv", ["verify_install.py"])
    assert verify_install.run() == code
    assert ("planted" in capsys.readouterr().err) == (code == 3)


def test_a_bug_is_an_error_for_machines_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(request: verify.Request) -> verify.Verdict:
        raise RuntimeError("planted")

    monkeypatch.setattr(verify, "verify", fail)
    monkeypatch.setattr(sys, "argv", ["verify_install.py", "--json"])
    assert verify_install.run() == 3
    (error,) = json.loads(capsys.readouterr().out)["errors"]
    assert (error["code"], error["message"]) == ("bug", "planted")


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_report_that_cannot_be_written_is_no_success(patched: Path, form: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, str(users.ROOT / "verify_install.py"), "--target", str(patched)]
            + ["--skip", "import,gpu", *form],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr.startswith("the report could not be written: No space left on device\n")
    assert "passed   files" in done.stderr


def test_the_help_tells_the_exit_codes() -> None:
    done = run("--help")
    assert done.returncode == 0
    assert "0 nothing failed; 1 a check failed" in " ".join(done.stdout.split())


def test_another_user_may_verify_a_tree_that_nobody_may_write() -> None:
    with users.open_folder() as folder:
        site = patched_site(RELEASE, folder / "site")
        product = users.ship(folder / "product")
        users.close(site)
        before = snapshot(site)
        done = users.run(product, "verify_install.py", "--target", str(site), "--skip", "gpu")
        assert "passed   files" in done.stdout, done.stderr
        assert "FAILED   import" in done.stdout  # it ran: this small site lacks most of SGLang
        assert done.returncode == 1
        assert snapshot(site) == before


def test_a_file_that_this_user_may_not_read_is_an_error() -> None:
    with users.open_folder() as folder:
        site = patched_site(RELEASE, folder / "site")
        product = users.ship(folder / "product")
        (site / "sglang/srt/server_args.py").chmod(0)
        done = users.run(product, "verify_install.py", "--target", str(site), "--json")
        assert done.returncode == 1
        (error,) = json.loads(done.stdout)["errors"]
        assert error["code"] == "unreadable"
        assert error["path"] == str(site / "sglang/srt/server_args.py")
