"""The verdict as a whole: what is run, what it adds up to, and that nothing is ever written."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
from sglang_overlay import switches

from patcher import lock, receipt, state, verify
from patcher.checks import Check, Expect, Scene, Status
from patcher.receipt import STAGING
from patcher.states import TreeState
from patcher.verify import Request, Verdict
from tests.support.sites import patched_site, slim_site, snapshot

RELEASE = "0.5.12.post1"
QUICK = frozenset({"import", "gpu"})


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A patched site that no test changes."""
    return patched_site(RELEASE, tmp_path_factory.mktemp("patched") / "site")


def statuses(verdict: Verdict) -> dict[str, str]:
    return {check.name: check.status.value for check in verdict.checks}


def test_a_patched_tree_passes(patched: Path) -> None:
    verdict = verify.verify(Request(target=str(patched), skip=QUICK))
    assert verdict.exit_code == 0
    assert verdict.state is TreeState.PATCHED
    assert verdict.release == RELEASE
    assert statuses(verdict) == {
        "files": "passed",
        "record": "passed",
        "bytecode": "passed",
        "leftovers": "passed",
        "pins": "skipped",
        "import": "skipped",
        "gpu": "skipped",
        "processes": "passed",
    }


def test_a_pristine_tree_passes_where_it_is_expected(tmp_path: Path) -> None:
    site = slim_site(RELEASE, tmp_path / "site")
    asked = Request(target=str(site), expect=Expect.PRISTINE, skip=QUICK)
    verdict = verify.verify(asked)
    assert (verdict.exit_code, verdict.state) == (0, TreeState.PRISTINE)
    assert verify.verify(Request(target=str(site), skip=QUICK)).exit_code == 1


def test_nothing_of_the_tree_is_written(patched: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    before = snapshot(patched)
    for expect in Expect:
        verify.verify(Request(target=str(patched), expect=expect))
    assert snapshot(patched) == before


def test_an_interrupted_run_is_the_state_and_a_failure(tmp_path: Path) -> None:
    site = slim_site(RELEASE, tmp_path / "site")
    (site / STAGING).mkdir()
    verdict = verify.verify(Request(target=str(site), expect=Expect.PRISTINE, skip=QUICK))
    assert (verdict.exit_code, verdict.state) == (1, TreeState.INTERRUPTED)
    assert statuses(verdict)["leftovers"] == "failed"
    assert (site / STAGING).is_dir()


@pytest.mark.parametrize("name", verify.OPTIONAL)
def test_a_required_check_fails_where_it_would_be_skipped(
    patched: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "_HOST", {name: skipped})
    monkeypatch.setattr(verify, "_TREE", {})
    asked = Request(target=str(patched))
    assert verify.verify(asked).exit_code == 0
    verdict = verify.verify(Request(target=str(patched), require=frozenset({name})))
    assert verdict.exit_code == 1
    assert verdict.checks[0].message == f"no such thing here, but it is required (--require {name})"


def skipped(scene: Scene) -> Check:
    assert scene.survey.site.installed
    return Check(name="some", status=Status.SKIPPED, message="no such thing here")


def test_a_check_that_is_left_out_is_not_run(
    patched: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "_HOST", {"gpu": skipped, "pins": skipped})
    verdict = verify.verify(Request(target=str(patched), skip=frozenset({"gpu"})))
    assert [check.message for check in verdict.checks[-2:]] == [
        "left out as asked (--skip)",
        "no such thing here",
    ]


@pytest.mark.parametrize(
    ("status", "code"),
    [(Status.PASSED, 0), (Status.SKIPPED, 0), (Status.WARNING, 0), (Status.FAILED, 1)],
)
def test_only_a_failure_decides(status: Status, code: int) -> None:
    check = Check(name="files", status=status, message="")
    passed = Check(name="record", status=Status.PASSED, message="")
    verdict = Verdict(target="", overlay_version="", expect=Expect.PATCHED, checks=(check, passed))
    assert verdict.exit_code == code


def test_a_target_that_is_nothing_is_an_error(tmp_path: Path) -> None:
    verdict = verify.verify(Request(target=str(tmp_path / "absent")))
    assert verdict.exit_code == 1
    assert [fault.code for fault in verdict.errors] == ["target-missing"]
    assert verdict.checks == ()
    assert "nothing could be verified" in verify.to_text(verdict)


def test_a_damaged_receipt_is_an_error(tmp_path: Path) -> None:
    site = patched_site(RELEASE, tmp_path / "site")
    (site / receipt.PATH).write_text("{")
    verdict = verify.verify(Request(target=str(site), skip=QUICK))
    assert [fault.code for fault in verdict.errors] == ["receipt-unreadable"]
    assert verdict.target == str(site)


def test_a_run_that_changes_the_tree_is_waited_for(patched: Path) -> None:
    with lock.hold(patched, exclusive=True, wait=0):
        verdict = verify.verify(Request(target=str(patched), wait=0, skip=QUICK))
    assert [fault.code for fault in verdict.errors] == ["locked"]


def test_the_lock_is_free_while_the_host_is_looked_at(
    patched: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(scene: Scene) -> Check:
        with lock.hold(scene.survey.site.root, exclusive=True, wait=0):
            return skipped(scene)

    monkeypatch.setattr(verify, "_HOST", {"import": check})
    assert verify.verify(Request(target=str(patched))).errors == ()


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("1", "a server started from this environment runs SGLang as released"),
        ("yes", "a server started from this environment ends at once"),
    ],
)
def test_the_switch_is_warned_of(
    patched: Path, value: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(switches.DISABLE, value)
    verdict = verify.verify(Request(target=str(patched), skip=QUICK))
    assert verdict.exit_code == 0
    assert len(verdict.warnings) == 1
    assert told in verdict.warnings[0]
    assert f"warning: {switches.DISABLE}={value} is set" in verify.to_text(verdict)


@pytest.mark.parametrize("environment", [{}, {switches.DISABLE: "0"}, {switches.DISABLE: ""}])
def test_a_switch_that_is_off_is_no_warning(environment: dict[str, str]) -> None:
    assert verify.switched_off(environment) == ()


def test_the_json_form_is_stable(patched: Path) -> None:
    verdict = verify.verify(Request(target=str(patched), skip=QUICK))
    document = json.loads(verify.to_json(verdict))
    assert list(document) == [
        "schema",
        "command",
        "target",
        "release",
        "overlay_version",
        "expect",
        "state",
        "checks",
        "errors",
        "warnings",
    ]
    assert document["schema"] == 1
    assert document["command"] == "verify"
    assert document["expect"] == "patched"
    assert document["state"] == "patched"
    assert all(list(row) == ["name", "status", "message", "hint"] for row in document["checks"])


def test_the_text_form_names_what_failed_and_what_to_do(tmp_path: Path) -> None:
    site = slim_site(RELEASE, tmp_path / "site")
    text = verify.to_text(verify.verify(Request(target=str(site), skip=QUICK)))
    assert "FAILED   files" in text
    assert f"→ Run `python apply.py --target {site}`." in text
    assert text.splitlines()[-1].startswith(f"sglang {RELEASE} in {site} is pristine, expected pat")
    assert "1 failed" in text


def test_bytecode_that_would_win_is_seen_from_the_whole(tmp_path: Path, patched: Path) -> None:
    site = shutil.copytree(patched, tmp_path / "site")
    path = site / "sglang/srt/speculative/dflash_utils.py"
    os.utime(path)  # a new time alone is no fault: the text is what counts
    assert verify.verify(Request(target=str(site), skip=QUICK)).exit_code == 0


def test_a_disk_that_fails_is_an_error(patched: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), "/some/file")

    monkeypatch.setattr(state, "survey", fail)
    (error,) = verify.verify(Request(target=str(patched), skip=QUICK)).errors
    assert (error.code, error.path) == ("io-error", "/some/file")
