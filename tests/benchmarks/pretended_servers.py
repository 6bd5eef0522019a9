"""STAND-IN: `kv_throughput.py` with a pretended SGLang, to see what its driver makes of servers.

A step is work for the host, and nothing else; how long it took is said by its loops, not by a
clock. ``PRETENDED`` in the environment has by level what a server does apart from that: ``more``
loops of its steps, ``diverges`` in what is accepted.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import kv_throughput

LOOPS = 40_000


class Clock:
    """Goes on with the loops of steps, and with nothing else."""

    seconds = 0.0
    monotonic, strftime = time.monotonic, time.strftime

    def perf_counter(self) -> float:
        return self.seconds


CLOCK = Clock()


class Request:
    """As much of a request as is asked for."""

    def __init__(self, rid: str, tokens: int, seed: str) -> None:
        self.rid, self.cached_tokens, self.output_ids = rid, 0, [1]
        self._tokens, self.lengths = tokens, random.Random(seed)

    def finished(self) -> bool:
        return len(self.output_ids) >= self._tokens


class Bed:
    """As much of a `Stepper` as is asked for."""

    def __init__(self, level: str) -> None:
        apart = json.loads(os.environ.get("PRETENDED", "{}")).get(level, {})
        self._loops = LOOPS + apart.get("more", 0)
        self._salt = "apart" * apart.get("diverges", False)
        self._running: list[Request] = []
        self._submitted = 0
        self.scheduler: Any = SimpleNamespace(waiting_queue=[], chunked_req=None, last_batch=None)
        if level == "idle":
            tally = SimpleNamespace(moved_tokens=0)
            self.scheduler.overlay_compactor = SimpleNamespace(tally=tally, _pass=lambda: 0)

    def submit(self, prompt: list[int], *, tokens: int) -> Request:
        self._submitted += 1
        rid = f"request-{self._submitted}"
        request = Request(rid, tokens, rid + self._salt)
        self.scheduler.waiting_queue.append(request)
        return request

    def step(self) -> str:
        waiting = self.scheduler.waiting_queue
        if not waiting and not self._running:
            compactor = getattr(self.scheduler, "overlay_compactor", None)
            if compactor:
                compactor._pass()
                compactor.tally.moved_tokens += 3
            return ""
        sum(range(self._loops))
        CLOCK.seconds += 1e-8 * self._loops
        self.scheduler.last_batch = SimpleNamespace(reqs=[*waiting] or self._running)
        if waiting:
            self._running += waiting
            waiting.clear()
            return "EXTEND"
        for request in self._running:
            request.output_ids += [1] * request.lengths.randint(1, 16)
        self._running = [each for each in self._running if not each.finished()]
        return "DECODE"


@contextmanager
def teaching(_teacher: Any, _runner: Any) -> Iterator[None]:
    yield


@contextmanager
def looks() -> Iterator[dict[str, int]]:
    yield {"looks": 0}


def start(_way: str, folder: Path, _layers: int, _load: Any) -> Any:
    bed = Bed(folder.name.partition("-")[2])
    bed.scheduler.tp_worker = SimpleNamespace(model_runner=None)
    return bed


def pretend() -> None:
    """Put the stand-ins in place."""
    names: Any = kv_throughput
    names.__file__ = __file__
    names.time = CLOCK
    names.start, names.looks = start, looks
    names.Drafting.teaching = teaching
    names.WRITTEN = 1.0
    names.watch = lambda *_: {"waits": {}, "calls": {"cudaLaunchKernel": 2.0}, "placing_us": 1.5}
    names.torch.cuda.get_device_name = lambda: "host without a GPU"


if __name__ == "__main__":
    pretend()
    chosen = kv_throughput.read_options()
    if chosen.server is None:
        kv_throughput.main(chosen)
    else:
        kv_throughput.serve(chosen, kv_throughput.Load(dry=False))
