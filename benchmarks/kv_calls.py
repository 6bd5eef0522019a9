"""What one call of placement's allocator takes on a GPU, beside SGLang's own.

    python benchmarks/kv_calls.py OUT.json OUT.md
    python benchmarks/kv_calls.py OUT.json OUT.md --dry     on a CPU, small, to see that it runs

with SGLang importable (``gpu_host.sh``, step ``kv-calls``). R requests get 16 units each (slots, or
pages of 64) in a pool of which half is taken, in stretches, and give them back:

- ``grow``     behind what they have, as a verify step asks
- ``prompt``   as newcomers; placement looks for the longest free runs first
- ``release``  the free of what ``grow`` took

``device`` is the time between two CUDA events around a call that the host has queued meanwhile,
``host`` what the call takes the host on an idle device; µs, medians. SGLang's release on pages
waits for the device, so that its ``device`` time has the host's in it. A pool of which the requests
would take more than a quarter is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "overlay")]

from benchmarks.installed import versions  # noqa: E402

UNITS, CONTEXT, STRETCH = 16, 4096, 64
POOLS, PAGES, REQUESTS = (65_536, 1_048_576), (1, 64), (8, 64, 256, 1024)
DRY_POOLS, DRY_REQUESTS = (8192,), (2, 8)
ROUNDS = 20
# Longer than the host takes to queue a call.
SLEEP_CYCLES = 1_000_000

Call = Callable[[], Any]


class Case:
    """Requests on one allocator, which have a page or a slot each to begin with."""

    def __init__(self, *, slots: int, page: int, requests: int, placed: bool, device: str) -> None:
        from sglang.srt.mem_cache import allocator as allocators
        from sglang_overlay.srt import kv_allocators

        self.page, self.requests, self.placed, self.device = page, requests, placed, device
        common: dict[str, Any] = {"dtype": torch.bfloat16, "device": device, "kvcache": None}
        if page == 1:
            stock = allocators.TokenToKVPoolAllocator(slots, need_sort=False, **common)
        else:
            stock = allocators.PagedTokenToKVPoolAllocator(slots, page, need_sort=False, **common)
        self.allocator: Any = kv_allocators.placed(stock, patient=False) if placed else stock
        self._take_half(slots // page)
        self.lengths = {
            place: torch.full((requests,), page, dtype=torch.int64, device=place)
            for place in {device, "cpu"}
        }
        self.last = torch.full((requests,), -1, dtype=torch.int64, device=device)
        first = (self._newcomers if page == 1 else self._extend_newcomers)(1).view(requests, page)
        self.rows = torch.arange(requests, device=device)
        self.table = torch.zeros(requests, CONTEXT, dtype=torch.int32, device=device)
        self.table[:, :page] = first
        self.last = first[:, -1].contiguous()

    def _take_half(self, units: int) -> None:
        stretches = units // STRETCH
        taken = self.allocator.alloc(stretches * STRETCH * self.page).view(stretches, -1)
        generator = torch.Generator().manual_seed(0)
        keeps = torch.rand(stretches, generator=generator) < 0.5
        self.allocator.free(taken[~keeps.to(taken.device)].flatten())

    def calls(self) -> dict[str, Call]:
        """Return what allocates, by kind."""
        if self.page > 1:
            return {"grow": lambda: self._extend(self.last), "prompt": self._extend_newcomers}
        return {"grow": self._grow, "prompt": self._newcomers}

    def _grow(self) -> torch.Tensor:
        from sglang_overlay.kvcache.placement import RowEnds

        lengths = self.lengths[self.device]
        return self._slots(RowEnds(table=self.table, rows=self.rows, lengths=lengths), False)

    def _newcomers(self, units: int = UNITS) -> torch.Tensor:
        return self._slots(torch.full_like(self.last, -1), True, units)

    def _slots(self, last: Any, prompt: bool, units: int = UNITS) -> torch.Tensor:
        found: torch.Tensor
        if self.placed:
            with self.allocator.following(last, [units] * self.requests, prompt=prompt):
                found = self.allocator.alloc(units * self.requests)
        else:
            found = self.allocator.alloc(units * self.requests)
        return found

    def _extend_newcomers(self, units: int = UNITS) -> torch.Tensor:
        return self._extend(torch.full_like(self.last, -1), 0, units)

    def _extend(self, last: torch.Tensor, before: int = 1, units: int = UNITS) -> torch.Tensor:
        """Ask for ``units`` pages for each request behind ``before`` of them."""
        on_gpu, on_host = self.lengths[self.device], self.lengths["cpu"]
        after = before + units
        found: torch.Tensor = self.allocator.alloc_extend(
            *(before * on_gpu, before * on_host, after * on_gpu, after * on_host),
            last,
            units * self.page * self.requests,
        )
        return found


def device_time(call: Call) -> tuple[float, Any]:
    """Return µs between two events around ``call``, queued behind a pause, and its result."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(SLEEP_CYCLES)
    start.record()
    result = call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3, result


def host_time(call: Call) -> tuple[float, Any]:
    """Return µs that ``call`` takes the host, and its result."""
    began = time.perf_counter()
    result = call()
    spent = 1e6 * (time.perf_counter() - began)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return spent, result


def measure(case: Case, rounds: int) -> Iterator[tuple[str, dict[str, float]]]:
    """Return median times in µs of each kind of call."""
    ways = {"host": host_time}
    if case.device == "cuda":
        ways["device"] = device_time
    for kind, call in case.calls().items():
        taken: dict[str, list[float]] = {way: [] for way in ways}
        released: dict[str, list[float]] = {way: [] for way in ways}
        for turn in range(rounds + 2):
            for way, timed in ways.items():
                spent, slots = timed(call)
                back, _ = timed(partial(case.allocator.free, slots))
                # The first ones compile.
                if turn >= 2:
                    taken[way].append(spent)
                    released[way].append(back)
        yield kind, {way: round(statistics.median(times), 1) for way, times in taken.items()}
        if kind == "grow":
            found = {way: round(statistics.median(times), 1) for way, times in released.items()}
            yield "release", found


def rows(*, dry: bool) -> list[dict[str, Any]]:
    """Return a row per pool, page size, number of requests, allocator and kind of call."""
    found = []
    device = "cpu" if dry else "cuda"
    for slots in DRY_POOLS if dry else POOLS:
        for page in PAGES:
            for requests in DRY_REQUESTS if dry else REQUESTS:
                if requests * UNITS * 4 > slots // page:
                    continue
                for placed in (False, True):
                    case = Case(
                        slots=slots, page=page, requests=requests, placed=placed, device=device
                    )
                    about = {
                        "slots": slots,
                        "page": page,
                        "requests": requests,
                        "allocator": "placement" if placed else "SGLang",
                    }
                    for kind, times in measure(case, 2 if dry else ROUNDS):
                        found.append({**about, "call": kind, **times})
    return found


def page_of(found: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    names = [*found["rows"][0]]
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    lines += ["| " + " | ".join(str(row[name]) for name in names) + " |" for row in found["rows"]]
    about = ", ".join(f"{name} {value}" for name, value in found["about"].items())
    return (
        "# What a call of the allocators takes, in µs\n\n"
        f"{about}. Script: `benchmarks/kv_calls.py`, which says what is compared.\n\n"
        + "\n".join(lines)
        + "\n"
    )


def main() -> None:
    """Measure, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("json", type=Path)
    parser.add_argument("page", type=Path)
    parser.add_argument("--dry", action="store_true")
    options = parser.parse_args()
    if options.dry and os.environ.get("TRITON_INTERPRET") != "1":
        # The kernels' decorators ask for it when they are imported.
        environment = os.environ | {"TRITON_INTERPRET": "1"}
        os.execve(sys.executable, [sys.executable, *sys.argv], environment)
    if options.dry:
        from tests.support.kv_bed import KvBed

        # SGLang's paged kernels have stand-ins on a CPU; a bed puts them in their place.
        KvBed(page=64, slots=64, placed=False)
    began = time.monotonic()
    found = {
        "about": {
            "machine": "CPU, dry run" if options.dry else torch.cuda.get_device_name(),
            "date": time.strftime("%Y-%m-%d"),
            **versions(),
        },
        "rows": rows(dry=options.dry),
    }
    options.json.write_text(json.dumps(found, indent=1) + "\n")
    options.page.write_text(page_of(found))
    print(page_of(found))
    print(f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
