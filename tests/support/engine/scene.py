"""Scenes: functions of a test file that play in a fresh process with a real engine in hand."""

from __future__ import annotations

import atexit
import inspect
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tests.support.engine.launch import READ_AGAIN, REPOSITORY, Launch
from tests.support.engine.orders import Known, Orders
from tests.support.engine.processes import EngineFailure, WarmEngine, running
from tests.support.engine.record import Record, Step

Driver = Literal["stepper", "engine"]
_RUNS = REPOSITORY / ".run"
_SECONDS = 600
_warm_engines: dict[Path, WarmEngine] = {}


@dataclass(frozen=True, kw_only=True)
class Report:
    """``result``: the scene's return value after a trip through JSON. ``steps``: per rank."""

    result: Any
    steps: tuple[tuple[Step, ...], ...]
    stderr: str


def play(
    scene: Callable[..., Any],
    launch: Launch,
    *,
    driver: Driver = "stepper",
    known: Known = (),
    fault: str = "",
    **arguments: Any,
) -> Report:
    """Call ``scene(driver, **arguments)`` in a process of its own.

    ``scene`` is a top-level function; it gets a `Stepper` or a ``sglang.Engine``. Arguments and
    result must survive JSON. ``known`` and ``fault``: see `Orders`. Raises `EngineFailure` when the
    scene or the engine fails, or when the harness was not active in every process with a model.
    """
    file = inspect.getsourcefile(scene)
    assert file is not None, "a scene comes from a file"
    with run_folder() as folder:
        call = folder / "call.json"
        result = folder / "result.json"
        call.write_text(
            json.dumps(
                {
                    "file": file,
                    "scene": scene.__name__,
                    "driver": driver,
                    "server_args": launch.arguments(),
                    "arguments": arguments,
                    "result": str(result),
                }
            )
        )
        environment = (
            launch.environment() | Orders(record=folder, known=known, fault=fault).environment()
        )
        # Variables may steer what SGLang does at import: most runs with any import it anew.
        if driver == "stepper" and READ_AGAIN.issuperset(dict(launch.variables)):
            code = _warm_engine(launch).run(folder, environment, _SECONDS)
        else:
            command = [sys.executable, "-m", "tests.support.engine.child", str(call)]
            with running(command, environment, folder) as child:
                code = child.wait(_SECONDS)
        stderr = (folder / "stderr.log").read_text(errors="replace")
        if code != 0:
            raise EngineFailure(f"{scene.__name__} ended with exit code {code}", stderr)
        record = Record(folder)
        if record.model_processes() != launch.ranks:
            raise EngineFailure(
                f"the harness was active in {record.model_processes()} model processes, "
                f"needed {launch.ranks}",
                stderr,
            )
        return Report(result=json.loads(result.read_text()), steps=record.steps(), stderr=stderr)


def _warm_engine(launch: Launch) -> WarmEngine:
    """Return the process that has the SGLang of the launch's tree imported; it ends with ours."""
    if launch.tree not in _warm_engines:
        warm = WarmEngine(launch.environment())
        atexit.register(warm.close)
        _warm_engines[launch.tree] = warm
    return _warm_engines[launch.tree]


@contextmanager
def run_folder() -> Iterator[Path]:
    """Give a fresh folder for one run and remove it afterwards."""
    _RUNS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="engine-", dir=_RUNS) as name:
        yield Path(name)
