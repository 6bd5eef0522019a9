"""A writing call fails: the run ends whole (exit 0) or with nothing changed (1), never between.

Once for a single failure and once for a disk that refuses from then on; the latter may leave the
putting back to the next run, which then has to do it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from patcher import files
from tests.faults.test_kills import finish, sample, writing_calls
from tests.support import used_sites
from tests.support.bench import APPLY, RELEASE, REVERT, TASKS, Bench, Task
from tests.support.runs import ROOT, Call, Fault
from tests.support.snapshots import assert_identical, snapshot

ERRORS = ("ENOSPC", "EIO", "EACCES")


def test_error_at_a_sample_of_calls(bench: Bench, injected: Counter[str]) -> None:
    for number, task in enumerate(TASKS):
        chosen = sample(writing_calls(bench, task), every=60)
        _fail_each(bench, task, chosen, injected, first_error=number)


@pytest.mark.full
@pytest.mark.parametrize("first_error", range(len(ERRORS)), ids=ERRORS)
@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_error_at_every_call(
    task: Task, first_error: int, small_bench: Bench, injected: Counter[str]
) -> None:
    calls = writing_calls(small_bench, task)
    _fail_each(small_bench, task, calls, injected, first_error=first_error)


def test_lasting_error_from_a_sample_of_calls(bench: Bench, injected: Counter[str]) -> None:
    for number, task in enumerate((APPLY, REVERT)):
        chosen = sample(writing_calls(bench, task), every=100)
        _fail_each(bench, task, chosen, injected, first_error=number, lasting=True)


@pytest.mark.full
@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_lasting_error_from_every_call(
    task: Task, small_bench: Bench, injected: Counter[str]
) -> None:
    calls = writing_calls(small_bench, task)
    _fail_each(small_bench, task, calls, injected, first_error=0, lasting=True)


@pytest.mark.parametrize(
    "every", [20, pytest.param(1, marks=pytest.mark.full)], ids=["sample", "all"]
)
@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_error_at_a_sync_in_any_thread(
    task: Task, every: int, bench: Bench, injected: Counter[str]
) -> None:
    """As shipped, with several syncs at a time; each is told by its path, which occurs once."""
    bench.bring(task.start)
    trace = bench.run(task, trace=True, at_once=files.AT_ONCE).trace
    synced = re.findall(r"^(\d+) +fsync\(\d+<([^>]+)>\)", trace, re.MULTILINE)
    assert len({thread for thread, _ in synced}) >= files.AT_ONCE
    times = Counter(path for _, path in synced)
    once = [path for path in times if times[path] == 1]
    assert len(once) > 10
    for number, path in enumerate(once[::every]):
        bench.bring(task.start)
        fault = Call(name="fsync", nth=1, path=path).fault("error=EIO")
        _fail(bench, task, fault, opposite=bool(number % 2), at_once=files.AT_ONCE)
        injected[f"sync errors in threads of {task.name}"] += 1


@pytest.mark.parametrize("task", [APPLY, REVERT], ids=lambda task: task.name)
def test_output_that_cannot_be_written(task: Task, bench: Bench) -> None:
    """The tree is as it should be, but nobody was told: that is a failure, and no bug."""
    bench.bring(task.start)
    verb = ["--revert"] if task.revert else []
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [sys.executable, ROOT / "apply.py", "--target", bench.site, *verb],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert ended.returncode == 1, ended.stderr
    assert "Traceback" not in ended.stderr
    bench.assert_is(task.goal)


@pytest.mark.root
@pytest.mark.parametrize("kilobytes", [0, 64, 500, 1000, 1500, 2500])
def test_full_disk(kilobytes: int, tmp_path: Path, bench: Bench) -> None:
    """A real small filesystem with so much room left: whole or nothing, never in between."""
    with mounted(tmp_path / "disk", megabytes=16) as disk:
        site = used_sites.lived_in_site(RELEASE, disk / "site-packages")
        pristine = snapshot(site)
        room = os.statvfs(disk)
        ballast = room.f_bavail * room.f_frsize - kilobytes * 1024
        (disk / "ballast").write_bytes(bytes(ballast))
        ended = bench.now.run("--target", site)
        assert ended.code in (0, 1), ended.told
        if ended.code == 1:
            assert_identical(pristine, snapshot(site), f"the site after {ended.told}")
            assert "space" in ended.told
        assert used_sites.leftovers(site) == []
        (disk / "ballast").unlink()
        assert bench.now.run("--target", site).code == 0
        assert bench.now.run("--target", site, "--revert").code == 0
        assert_identical(pristine, snapshot(site))


@contextmanager
def mounted(folder: Path, *, megabytes: int) -> Iterator[Path]:
    folder.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", folder], check=True
    )
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def _fail_each(
    bench: Bench,
    task: Task,
    calls: Sequence[Call],
    injected: Counter[str],
    *,
    first_error: int,
    lasting: bool = False,
) -> None:
    for number, call in enumerate(calls):
        error = ERRORS[(first_error + number) % len(ERRORS)]
        bench.bring(task.start)
        fault = call.fault(f"error={error}", onwards=lasting)
        _fail(bench, task, fault, opposite=bool(number % 2))
        injected[f"write errors{' that last' if lasting else ''} in {task.name}"] += 1


def _fail(
    bench: Bench, task: Task, fault: Fault, *, opposite: bool, at_once: int | None = None
) -> None:
    said = f"after {task.name} with {fault}"
    ended = bench.run(task, faults=[fault], at_once=at_once)
    assert ended.code in (0, 1), f"{said}: {ended.told}"
    bench.assert_importable(said)
    warned = "next run" in ended.told
    if fault.onwards or warned:
        finish(bench, task, opposite=opposite, said=f"{said} ({ended.told})")
    else:
        # Where only the report could not be written, the tree is as it should be.
        done = ended.code == 0 or "report could not be written" in ended.told
        bench.assert_is(task.goal if done else task.start, f"{said} ({ended.told})")
