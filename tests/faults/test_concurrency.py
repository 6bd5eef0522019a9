"""Several runs on one tree at a time, and signals in the middle of one."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from patcher import source
from tests.faults.test_kills import writing_calls
from tests.support import used_sites
from tests.support.bench import APPLY, REVERT, Bench, State, Task
from tests.support.runs import NAMING, ROOT


def start(site: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(ROOT / "apply.py"), "--target", str(site), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Where the tests run in the background, a shell has had it ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


@contextmanager
def locked(folder: Path, kind: int) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, kind)
        yield
    finally:
        os.close(descriptor)


def test_two_applies_one_changes(bench: Bench) -> None:
    bench.bring(State.PRISTINE)
    runs = [start(bench.site, "--json") for _ in range(2)]
    outcomes = [json.loads(run.communicate(timeout=60)[0]) for run in runs]
    assert [run.returncode for run in runs] == [0, 0], outcomes
    assert sorted(outcome["changed"] for outcome in outcomes) == [False, True]
    bench.assert_is(State.PATCHED)


def test_apply_against_revert_with_readers(bench: Bench) -> None:
    """Whoever comes last decides; every status in between sees a whole tree of one state."""
    bench.bring(State.PRISTINE)
    writers = [start(bench.site, "--json"), start(bench.site, "--revert", "--json")]
    readers = []
    while any(writer.poll() is None for writer in writers):
        reader = start(bench.site, "--status", "--json")
        readers.append(json.loads(reader.communicate(timeout=60)[0]))
    outcomes = [json.loads(writer.communicate(timeout=60)[0]) for writer in writers]
    assert [writer.returncode for writer in writers] == [0, 0], outcomes
    assert {reader["state_before"] for reader in readers} <= {"pristine", "patched"}
    last = State.PRISTINE if outcomes[1]["state_before"] == "patched" else State.PATCHED
    bench.assert_is(last)


@pytest.mark.parametrize(
    "verb", [[], ["--revert"], ["--status"]], ids=["apply", "revert", "status"]
)
def test_run_refuses_while_the_tree_is_held(verb: list[str], bench: Bench) -> None:
    bench.bring(State.PRISTINE)
    with locked(bench.site, fcntl.LOCK_EX):
        ended = bench.now.run("--target", bench.site, *verb, "--wait", "0", "--json")
    assert ended.code == 1
    assert [error["code"] for error in json.loads(ended.stdout)["errors"]] == ["locked"]
    bench.assert_is(State.PRISTINE)


def test_run_waits_until_the_tree_is_free(bench: Bench) -> None:
    bench.bring(State.PRISTINE)
    with locked(bench.site, fcntl.LOCK_EX):
        waiting = start(bench.site, "--wait", "60")
        with pytest.raises(subprocess.TimeoutExpired):
            waiting.wait(timeout=2)
        bench.assert_is(State.PRISTINE)
    assert waiting.wait(timeout=60) == 0, waiting.communicate()
    waiting.communicate()
    bench.assert_is(State.PATCHED)


def test_readers_do_not_shut_each_other_out(bench: Bench) -> None:
    with locked(bench.site, fcntl.LOCK_SH):
        assert bench.now.run("--target", bench.site, "--status", "--wait", "0").code == 0
        assert bench.now.run("--target", bench.site, "--check", "--wait", "0").code == 0


@pytest.mark.parametrize(
    "sent", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda s: s.name
)
@pytest.mark.parametrize("task", [APPLY, REVERT], ids=lambda task: task.name)
def test_signal_in_the_middle_of_a_change(task: Task, sent: signal.Signals, bench: Bench) -> None:
    """The change is carried to its end, nothing is left to recover; then the signal counts."""
    calls = writing_calls(bench, task)
    naming = [call for call in calls if call.name in NAMING]
    for call in (calls[3], naming[len(naming) // 2], naming[-3]):
        bench.bring(task.start)
        fault = call.fault(f"signal={sent.name.removeprefix('SIG')}")
        ended = bench.run(task, faults=[fault])
        said = f"{task.name} with {fault}: {ended.told}"
        assert ended.code == (130 if sent is signal.SIGINT else -sent), said
        if sent is signal.SIGINT:
            told = f"interrupted: too late to stop: {task.name} {source.locate().version} was"
            assert told in ended.stderr, said
        assert used_sites.leftovers(bench.site) == [], said
        bench.assert_is(task.goal, said)


def test_interrupt_while_waiting_for_the_lock(bench: Bench) -> None:
    bench.bring(State.PRISTINE)
    with locked(bench.site, fcntl.LOCK_EX):
        waiting = start(bench.site, "--wait", "60")
        time.sleep(2)
        waiting.send_signal(signal.SIGINT)
        _, told = waiting.communicate(timeout=60)
    assert waiting.returncode == 130, told
    assert "Traceback" not in told
    bench.assert_is(State.PRISTINE)
