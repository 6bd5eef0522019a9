"""SIGKILL at every system call that writes: the next run ends exactly patched or exactly pristine.

The process is killed as it enters the call, so that each state of the tree between two calls is
met once. In between, whatever is hooked must find what it imports.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support import used_sites
from tests.support.bench import APPLY, RELEASE, REVERT, TASKS, Bench, Task
from tests.support.runs import KILLED, NAMING, Call, Fault
from tests.support.snapshots import assert_identical, snapshot

KILL = "signal=KILL"
ERROR = "error=EIO"


def test_kill_at_a_sample_of_calls(bench: Bench, injected: Counter[str]) -> None:
    """A sample of each task, the next run alternating between the same and the opposite."""
    for task in TASKS:
        calls = writing_calls(bench, task)
        for number, call in enumerate(sample(calls, every=30)):
            kill_and_go_on(bench, task, [call.fault(KILL)], opposite=bool(number % 2))
            injected[f"kills of {task.name}"] += 1


@pytest.mark.full
@pytest.mark.parametrize("opposite", [False, True], ids=["same", "opposite"])
@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_kill_at_every_call(
    task: Task, opposite: bool, small_bench: Bench, injected: Counter[str]
) -> None:
    bench = small_bench
    calls = writing_calls(bench, task)
    for call in calls:
        kill_and_go_on(bench, task, [call.fault(KILL)], opposite=opposite)
        injected[f"kills of {task.name}"] += 1
    # One more than there were: the run is unharmed, so none was missed.
    bench.bring(task.start)
    name = calls[-1].name
    beyond = Call(name=name, nth=sum(call.name == name for call in calls) + 1)
    assert bench.run(task, faults=[beyond.fault(KILL)]).code == 0
    bench.assert_is(task.goal)


def test_kill_the_recovery_at_a_sample_of_calls(bench: Bench, injected: Counter[str]) -> None:
    for task in (APPLY, REVERT):
        _kill_recoveries(bench, task, injected, firsts=1, every=60)


@pytest.mark.full
@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_kill_the_recovery_at_every_call(
    task: Task, small_bench: Bench, injected: Counter[str]
) -> None:
    _kill_recoveries(small_bench, task, injected, firsts=6, every=1)


def test_kill_the_undoing_at_a_sample_of_calls(bench: Bench, injected: Counter[str]) -> None:
    for task in (APPLY, REVERT):
        _kill_undoings(bench, task, injected, every=60)


@pytest.mark.full
@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_kill_the_undoing_at_every_call(
    task: Task, small_bench: Bench, injected: Counter[str]
) -> None:
    _kill_undoings(small_bench, task, injected, every=1)


def test_kill_at_random_times(bench: Bench, injected: Counter[str]) -> None:
    _kill_at_random(bench, injected, count=10, seed=1)


@pytest.mark.full
def test_kill_at_random_times_500(bench: Bench, injected: Counter[str]) -> None:
    _kill_at_random(bench, injected, count=500, seed=2)


@pytest.mark.parametrize(
    "every", [100, pytest.param(1, marks=pytest.mark.full)], ids=["sample", "all"]
)
def test_kill_on_an_editable_install(
    every: int, tmp_path: Path, small_bench: Bench, injected: Counter[str]
) -> None:
    """The package lies in another folder, which has a staging folder of its own."""
    bench = small_bench
    site = editable_site(tmp_path)
    pristine = snapshot(tmp_path)
    for number, verb in enumerate(([], ["--revert"])):
        if verb:
            assert bench.now.run("--target", site).code == 0
        calls = bench.now.run("--target", site, *verb, trace=True).calls
        for at, call in enumerate(sample(calls, every=every)):
            bench.now.run("--target", site, *([] if verb else ["--revert"]))
            ended = bench.now.run("--target", site, *verb, faults=[call.fault(KILL)])
            assert ended.code == KILLED, f"{call}: {ended.told}"
            for then in ([], ["--revert"]) if (number + at) % 2 else (["--revert"],):
                ended = bench.now.run("--target", site, *then)
                assert ended.code == 0, f"{call}: {ended.told}"
            assert_identical(pristine, snapshot(tmp_path), f"the install after a kill at {call}")
            injected["kills on an editable install"] += 1


def editable_site(folder: Path) -> Path:
    """Return a site-packages folder in ``folder`` with an editable install of ``folder``/source."""
    site = used_sites.lived_in_site(RELEASE, folder / "site-packages")
    (folder / "source").mkdir()
    (site / "sglang").rename(folder / "source" / "sglang")
    (site / "__editable__.sglang.pth").write_text(f"{folder / 'source'}\n")
    return site


def writing_calls(bench: Bench, task: Task, *faults: Fault) -> tuple[Call, ...]:
    """Return the calls by which ``task`` writes, in order (with ``faults`` on the way)."""
    bench.bring(task.start)
    ended = bench.run(task, trace=True, faults=faults)
    assert ended.code == (1 if faults else 0), ended.told
    assert len(ended.calls) > 50, "the trace has missed most of the calls"
    return ended.calls


def sample(calls: Sequence[Call], *, every: int) -> list[Call]:
    """Return one in ``every`` calls, twice as many of those that name files, some of each kind.

    What is chosen depends on the calls alone, so that a failure comes back.
    """
    naming = [call for call in calls if call.name in NAMING]
    other = [call for call in calls if call.name not in NAMING]
    chosen = {*naming[:: max(1, every // 2)], *other[::every], calls[-1]}
    for name in {call.name for call in calls}:
        alike = [call for call in calls if call.name == name]
        chosen.add(alike[len(alike) // 2])
    return [call for call in calls if call in chosen]


def kill_and_go_on(
    bench: Bench, task: Task, faults: Sequence[Fault], *, opposite: bool, runs: int = 1
) -> None:
    bench.bring(task.start)
    said = f"after {task.name} with {' and '.join(map(str, faults))}"
    ended = bench.run(task, faults=faults)
    assert ended.code == KILLED, f"{said}: {ended.told}"
    bench.assert_importable(said)
    finish(bench, task, opposite=opposite, said=said)


def finish(bench: Bench, task: Task, *, opposite: bool, said: str) -> None:
    """Run the same again or the opposite; it must end exactly where it would from a whole tree."""
    said = f"{said}, then {'the opposite' if opposite else 'the same'}"
    ended = bench.run(task, opposite=opposite)
    assert ended.code == 0, f"{said}: {ended.told}"
    bench.assert_is(task.opposite_goal if opposite else task.goal, said)


def _kill_recoveries(
    bench: Bench, task: Task, injected: Counter[str], *, firsts: int, every: int
) -> None:
    """Kill ``task`` at a few points from its commit on, then the run that recovers at each call."""
    calls = writing_calls(bench, task)
    start = next(n for n, call in enumerate(calls) if call.name == "rename")  # of the journal
    later = calls[start + 1 :: max(1, (len(calls) - start) // firsts)]
    for number, first in enumerate(later):
        kill = first.fault(KILL)
        bench.bring(task.start)
        assert bench.run(task, faults=[kill]).code == KILLED
        recovering = bench.run(task, trace=True)
        assert recovering.code == 0, recovering.told
        for at, call in enumerate(sample(recovering.calls, every=every)):
            said = f"after {task.name} with {kill}, recovered with a kill at {call}"
            bench.bring(task.start)
            assert bench.run(task, faults=[kill]).code == KILLED, said
            assert bench.run(task, faults=[call.fault(KILL)]).code == KILLED, said
            bench.assert_importable(said)
            finish(bench, task, opposite=bool((number + at) % 2), said=said)
            injected["kills of a recovery"] += 1


def _kill_undoings(bench: Bench, task: Task, injected: Counter[str], *, every: int) -> None:
    """Let the change fail as it is synced to disk, when all is done, and kill what undoes it."""
    calls = writing_calls(bench, task)
    last_rename = max(n for n, call in enumerate(calls) if call.name == "rename")
    failing = next(call for call in calls[last_rename:] if call.name == "fsync").fault(ERROR)
    tried = writing_calls(bench, task, failing)
    undoing = tried[tried.index(failing.call) + 1 :]
    possible = [call for call in undoing if call.name != "fsync" and not call.path]
    for number, call in enumerate(sample(possible, every=every)):
        faults = [failing, call.fault(KILL)]
        kill_and_go_on(bench, task, faults, opposite=bool(number % 2))
        injected["kills of an undoing"] += 1


def _kill_at_random(bench: Bench, injected: Counter[str], *, count: int, seed: int) -> None:
    """Kill runs at random times until so many kills have met a run that had not ended yet."""
    chance = random.Random(seed)
    longest = {task: _seconds(bench, task) for task in TASKS}
    killed, number = 0, 0
    while killed < count:
        number += 1
        task = chance.choice(TASKS)
        bench.bring(task.start)
        after = chance.uniform(0, 1.1 * longest[task])
        said = f"after {task.name} killed after {after:.4f} s"
        ended = bench.run(task, kill_after=after)
        assert ended.code in (0, KILLED), f"{said}: {ended.told}"
        bench.assert_importable(said)
        killed += ended.code == KILLED
        injected["kills at random times"] += ended.code == KILLED
        injected["of them in a change under way"] += bool(used_sites.leftovers(bench.site))
        finish(bench, task, opposite=bool(number % 2), said=said)


def _seconds(bench: Bench, task: Task) -> float:
    """Return how long an undisturbed run takes on this machine just now."""
    bench.bring(task.start)
    started = time.perf_counter()
    assert bench.run(task).code == 0
    return time.perf_counter() - started
