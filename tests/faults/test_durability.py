"""What has to be on disk before what, so that a power failure is no worse than a kill.

Power cannot be cut here, but the order of the calls can be read: a name or a content counts as
durable from the return of the fsync of its file or folder on, whichever thread called it.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from patcher import files
from patcher.receipt import STAGING
from tests.support.bench import TASKS, Bench, Task

_RENAME = re.compile(r'rename\("([^"]+)", "([^"]+)"\)')
_NAMED = re.compile(r'(?:unlink|mkdir|rmdir)\("([^"]+)"')
_SYNC = re.compile(r"fsync\(\d+<([^>]+)>\)")
_CREATE = re.compile(r'openat\([^"]*"([^"]+)", [A-Z_|]*O_CREAT')


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_order_of_the_syncs(task: Task, bench: Bench) -> None:
    bench.bring(task.start)
    lines = bench.run(task, trace=True, at_once=files.AT_ONCE).trace.splitlines()
    staging = bench.site / STAGING
    journal = str(staging / "journal.json")
    commit = _first(lines, f'"{journal}") = 0')
    tree_from = _first(lines, "rename(", "mkdir(", "unlink(", start=commit + 1)
    end = _first(lines, f'unlink("{journal}")', start=commit)

    created = [m[1] for line in lines[:commit] for m in _CREATE.finditer(line)]
    staged = [path for path in created if path.startswith(str(staging))]
    assert staged
    assert [path for path in staged if path not in _synced(lines[:commit])] == []
    assert str(staging) in _synced(lines[:commit]), "the journal may be there, the files not"
    assert {str(staging), str(bench.site)} <= _synced(lines[commit:tree_from])

    touched = {
        str(Path(path).parent)
        for line in lines[commit + 1 : end]
        for path in _paths(line)
        if STAGING not in path
    }
    gone = {m[1] for line in lines[commit:end] for m in re.finditer(r'rmdir\("([^"]+)"', line)}
    late = _last(lines[:end], _RENAME, _NAMED)
    assert touched - gone - _synced(lines[late:end]) == set(), "the journal goes before the change"


def _first(lines: list[str], *texts: str, start: int = 0) -> int:
    return next(
        n for n, line in enumerate(lines) if n >= start and any(text in line for text in texts)
    )


def _last(lines: list[str], *patterns: re.Pattern[str]) -> int:
    return max(n for n, line in enumerate(lines) if any(p.search(line) for p in patterns))


def _synced(lines: list[str]) -> set[str]:
    return {match[1] for line in lines for match in _SYNC.finditer(line)}


def _paths(line: str) -> list[str]:
    rename = _RENAME.search(line)
    named = _NAMED.search(line)
    return [rename[2]] if rename else [named[1]] if named else []
