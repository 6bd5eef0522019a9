"""What placement's allocator costs the host per call, beside SGLang's, while a trace is replayed.

    python benchmarks/kv_allocation.py [--requests N] [--release R]

The trace of ``kv_trace.py``, on a CPU. Per call of the allocator, µs, over the trace's second
half: the drafter's window, verify's allocation, prefill's, and the releases. On a CPU the host
computes what a GPU would, so a call's time has both in it; on a GPU the host only launches. So the
launches of a call are counted too: operations that are kernels on a GPU, the placement kernel and
the one that gives slots on pages, SGLang's or placement's, as one each. The time of the latter's
stand-in is taken off. Views and empty tensors are none. Pool sizes: that of the trace, which is
full, and one eight times as large, which is not.
Writes ``benchmarks/results/kv-allocation-cpu-DATE``.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import inspect
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "overlay")]

from sglang_overlay.switches import OFF, PLACEMENT  # noqa: E402

from benchmarks import kv_trace  # noqa: E402
from tests.support import trees  # noqa: E402
from tests.support.engine.launch import Launch  # noqa: E402

COUNTED_EVERY = 25
# Operations without a kernel of their own: views, and memory that is only reserved.
FREE = {
    *("view", "_unsafe_view", "slice", "select", "expand", "unsqueeze", "squeeze", "split"),
    *("split_with_sizes", "alias", "detach", "empty", "new_empty", "reshape", "unbind"),
}
SLOTS = (kv_trace.SLOTS, 8 * kv_trace.SLOTS)


class Watch:
    """Times and launches of the calls of one bed's allocator, by what they are for."""

    def __init__(self, replay: kv_trace.Replay) -> None:
        self._replay = replay
        self.times: dict[str, list[float]] = defaultdict(list)
        self.launches: dict[str, list[int]] = defaultdict(list)
        self._windows = self._calls = 0
        self._stand_in = 0.0
        self._leave_out_the_stand_ins()
        allocator = replay.bed.allocator
        for name in ("alloc", "alloc_extend", "free"):
            setattr(allocator, name, self._timed(name, getattr(allocator, name)))
        for name in ("backup_state", "restore_state"):
            setattr(allocator, name, self._window(name, getattr(allocator, name)))

    def _window(self, name: str, stock: Callable[..., Any]) -> Callable[..., Any]:
        timed = self._timed("window", stock)

        def call(*args: Any) -> Any:
            self._windows += 1 if name == "backup_state" else -1
            return timed(*args)

        return call

    def _timed(self, name: str, stock: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._replay.done < self._replay.requests // 2:
                return stock(*args, **kwargs)
            kind = self._kind(name, args)
            self._calls += 1
            if self._calls % COUNTED_EVERY == 0:
                with counting() as launches:
                    result = stock(*args, **kwargs)
                self.launches[kind].append(launches[0])
                return result
            self._stand_in = 0.0
            started = time.perf_counter()
            result = stock(*args, **kwargs)
            spent = time.perf_counter() - started - self._stand_in
            self.times[kind].append(1e6 * spent)
            return result

        return call

    def _leave_out_the_stand_ins(self) -> None:
        import sglang.srt.mem_cache.allocator as allocators
        from sglang_overlay.kvcache import token_slots

        kernel = mock.MagicMock()
        kernel.__getitem__.return_value = self._left_out(allocators.alloc_extend_kernel[(1,)])
        allocators.alloc_extend_kernel = kernel
        # The watch before has replaced it too.
        token_slots._on_host = self._left_out(inspect.unwrap(token_slots._on_host))

    def _left_out(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(stock)
        def launch(*args: Any) -> Any:
            started = time.perf_counter()
            with launched_once():
                found = stock(*args)
            self._stand_in += time.perf_counter() - started
            return found

        return launch

    def _kind(self, name: str, args: tuple[Any, ...]) -> str:
        if name == "free":
            return "release"
        if self._windows or name == "window":
            return "window"
        tokens = args[0] if name == "alloc" else args[5]
        return "verify" if tokens == kv_trace.DRAFT * len(self._replay.bed.running) else "prefill"


_count = [0]


@contextmanager
def launched_once() -> Iterator[None]:
    """Count what is within as one launch."""
    from torch.utils._python_dispatch import _disable_current_modes

    _count[0] += 1
    with _disable_current_modes():
        yield


@contextmanager
def counting() -> Iterator[list[int]]:
    """Count the launches within."""
    from sglang_overlay.kvcache import placement
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(
            self, op: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            _count[0] += op.__name__.partition(".")[0] not in FREE
            return op(*args, **(kwargs or {}))

    host = placement._place_on_host

    def place(*args: Any) -> Any:
        with launched_once():
            return host(*args)

    _count[0] = 0
    with mock.patch.object(placement, "_place_on_host", place), Count():
        yield _count


def measure(requests: int) -> list[dict[str, Any]]:
    """Return a row per pool, page size, level and kind of call."""
    rows = []
    for slots in SLOTS:
        for page in (1, 64):
            for level in (OFF, PLACEMENT):
                with mock.patch.object(kv_trace, "SLOTS", slots):
                    replay = kv_trace.Replay(page, level, "first", requests)
                replay.seconds["placement"] = 0.0
                watch = Watch(replay)
                replay.run()
                rows += summary(watch, slots, page, level)
                print(json.dumps(rows[-4:]), file=sys.stderr, flush=True)
    return rows


def summary(watch: Watch, slots: int, page: int, level: str) -> list[dict[str, Any]]:
    """Return a row per kind of call."""
    return [
        {
            "slots": slots,
            "page": page,
            "level": level,
            "call": kind,
            "calls": len(times),
            **{
                name: round(statistics.quantiles(times, n=100)[at - 1], 1)
                for name, at in (("p10", 10), ("p50", 50), ("p90", 90), ("p99", 99))
            },
            "launches": round(statistics.mean(watch.launches[kind] or [-1]), 1),
        }
        for kind, times in sorted(watch.times.items())
        if len(times) > 1
    ]


def table(rows: list[dict[str, Any]]) -> str:
    """Return the results as a Markdown table."""
    names = [*rows[0]]
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    lines += ["| " + " | ".join(str(row[name]) for name in names) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure in a process that has SGLang; write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--release", default="0.5.12.post1")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        options.inside.write_text(json.dumps(measure(options.requests)))
        return
    date = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    stem = ROOT / "benchmarks" / "results" / f"kv-allocation-cpu-{date}"
    inside = stem.with_suffix(".rows")
    environment = Launch(tree=trees.patched(options.release)).environment()
    command = [sys.executable, __file__, "--requests", str(options.requests)]
    subprocess.run([*command, "--inside", str(inside)], env=environment, check=True)
    rows = json.loads(inside.read_text())
    inside.unlink()
    import torch

    about = {
        "date": date,
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, no GPU, "
        f"load {os.getloadavg()[0]:.1f}",
        "sglang": options.release,
        "torch": torch.__version__,
        "requests": options.requests,
        "concurrency": kv_trace.CONCURRENCY,
        "draft": kv_trace.DRAFT,
    }
    text = json.dumps({"about": about, "rows": rows}, indent=1)
    stem.with_suffix(".json").write_text(text + "\n")
    listed = ", ".join(f"{name} {value}" for name, value in about.items())
    stem.with_suffix(".md").write_text(
        "# What the allocators cost the host, per call\n\n"
        f"{listed}. Script: `benchmarks/kv_allocation.py`. Times in µs, of a CPU that does the "
        "device's work too; a verify step makes one `verify`, one `release` per request and three "
        "`window` calls (open, allocate, close).\n\n" + table(rows)
    )


if __name__ == "__main__":
    main()
