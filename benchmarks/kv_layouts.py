"""What the layout of KV slots is worth to a verify: the same requests, laid out by every level.

    python benchmarks/kv_layouts.py OUT [--layouts FILE] [--requests N]
    python benchmarks/kv_layouts.py OUT --dry     on a CPU, to see that it runs

on a host with SGLang, the overlay applied to it, and a Hopper GPU; writes OUT/kv-layouts.json and
.md.

The trace of ``kv_trace.py`` is replayed by SGLang's own allocator and radix cache, on the CPU, for
each level (``off`` is stock) and page size; three quarters through, the running requests' rows of
``req_to_token`` and the slots of their next draft are kept. ``--layouts`` names a file for that: it
is read if it is there, else written (a minute or two; needs no GPU). Then one layer's attention of
a verify step is timed on each layout, with the project's engines:

- pages of 64: ``flashmla``, the adapter, and ``portable``
- pages of one slot: ``portable``; commits that keep the first slots, and scattered ones

One CUDA graph holds a call per layer, each with its own cache, together beyond the L2; the layouts
are replayed in turns, round after round; times are medians, ratios medians of each round's ratio to
``off``. Every token has the same row whatever its slot, so that outputs can be compared: ``error``
is the relative distance to those on ``off``.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "overlay")]

from sglang_overlay.attention.adapter import VerifyAdapter  # noqa: E402
from sglang_overlay.attention.plan import PlanSizes, VerifyPlan, VerifyStep  # noqa: E402
from sglang_overlay.attention.portable import PortableEngine  # noqa: E402
from sglang_overlay.kvcache.metrics import Piece, layout  # noqa: E402
from sglang_overlay.self_test.timing import captured, replay_time  # noqa: E402
from sglang_overlay.switches import KV_LEVELS, OFF  # noqa: E402

from benchmarks import kv_trace  # noqa: E402
from benchmarks.installed import versions  # noqa: E402

KEY, SCALE, HEADS, NODES = 576, 576**-0.5, (8, 16), kv_trace.DRAFT
CASES = ((64, "first"), (1, "first"), (1, "scattered"))
ROUNDS = 12
BEYOND_L2 = 256_000_000


# --- the layouts, without a GPU


def capture(page: int, commit: str, level: str, requests: int) -> dict[str, Any]:
    """Return the rows of the running requests three quarters through the trace.

    ``rows``: a list per request of [start, length] of the runs of its slots, those of its next
    draft at the end.
    """
    replay = kv_trace.Replay(page, level, commit, requests)
    replay.run(keep=requests // 4)
    bed = replay.bed
    drafted = bed.draft(NODES)
    assert drafted is not None, "the trace leaves room for a draft"
    rows = []
    for request, draft in zip(bed.running, drafted, strict=True):
        rows.append(runs(np.concatenate([bed.row(request).numpy(), draft.numpy()])))
    return {"page": page, "commit": commit, "level": level, "slots": kv_trace.SLOTS, "rows": rows}


def runs(slots: np.ndarray[Any, Any]) -> list[list[int]]:
    """Return [start, length] of the runs of ``slots``, in their order."""
    starts = np.concatenate([[0], np.flatnonzero(np.diff(slots) != 1) + 1])
    lengths = np.diff(np.append(starts, len(slots)))
    return [[int(slots[at]), int(length)] for at, length in zip(starts, lengths, strict=True)]


def slots_of(row: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return what `runs` was made of, int64."""
    return torch.cat([torch.arange(start, start + length) for start, length in row])


def capture_cases(requests: int, *, processes: int) -> list[dict[str, Any]]:
    """Capture every case and level, in a process that has SGLang and no use for a GPU."""
    import tests.support.kv_bed  # noqa: F401  imported once, before the others fork

    torch.set_num_threads(1)
    cases = [(*case, level, requests) for case in CASES for level in KV_LEVELS]
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        return pool.starmap(capture, cases, chunksize=1)


def capture_elsewhere(file: Path, requests: int, *, dry: bool) -> None:
    """Let another process `capture_cases` into ``file``."""
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    if dry:
        from tests.support import trees
        from tests.support.engine.launch import Launch

        environment = dict(Launch(tree=trees.patched("0.5.12.post1")).environment())
    processes = 1 if dry else min(os.cpu_count() or 1, len(CASES) * len(KV_LEVELS))
    command = [sys.executable, __file__, str(file), "--requests", str(requests)]
    subprocess.run([*command, "--capture", str(processes)], env=environment, check=True)


def last_pages(row: torch.Tensor, page: int) -> torch.Tensor:
    """Return about the last 130 slots of ``row``, from the first slot of a page on."""
    return row[max(len(row) - 130, 0) // page * page :]


# --- the timing


class Case:
    """The requests of one page size and kind of commit: caches, queries, a tree per request."""

    def __init__(self, layouts: list[dict[str, Any]], heads: int, *, dry: bool) -> None:
        self.page, self.heads = layouts[0]["page"], heads
        self.device = "cpu" if dry else "cuda"
        self.dtype = torch.float32 if dry else torch.bfloat16
        self.dry = dry
        self.rows = {each["level"]: [slots_of(row) for row in each["rows"]] for each in layouts}
        if dry:
            self.rows = {
                level: [last_pages(row, self.page) for row in rows[:2]]
                for level, rows in self.rows.items()
            }
        lengths = [[len(row) for row in rows] for rows in self.rows.values()]
        assert all(each == lengths[0] for each in lengths), "levels serve the same requests"
        self.contexts = [length - NODES for length in lengths[0]]
        self.slots = (layouts[0]["slots"] // self.page + 1) * self.page
        generator = torch.Generator().manual_seed(0)
        requests = len(self.contexts)
        self.parents = torch.full((requests, NODES), -1, dtype=torch.int32)
        for node in range(1, NODES):
            drawn = torch.randint(0, node, (requests,), generator=generator)
            self.parents[:, node] = drawn.int()
        query = torch.randn(requests * NODES, heads, KEY, generator=generator)
        self.query = query.to(self.device, self.dtype)
        # Contents by the slots of `off`: shared ones are shared by every level.
        self.contents = torch.randn(self.slots, KEY, generator=generator)

    @property
    def layers(self) -> int:
        """Return the caches that go beyond the L2."""
        return 1 if self.dry else max(4, -(-BEYOND_L2 // (sum(self.contexts) * KEY * 2)))

    def calls(self, level: str, engine: str) -> list[Callable[[], torch.Tensor]]:
        """Return a call per layer on the layout of ``level``."""
        rows, width = self.rows[level], max(self.contexts) + NODES
        table = torch.zeros(len(rows), width + self.page, dtype=torch.int32)
        for index, row in enumerate(rows):
            table[index, : len(row)] = row.int()
        step = VerifyStep(
            prefix_lens=torch.tensor(self.contexts, device=self.device),
            request_rows=torch.arange(len(rows), device=self.device),
            req_to_token=table.to(self.device),
            parents=self.parents.to(self.device),
        )
        adapter = self._adapter(engine)
        adapter.prepare(step, self.heads)
        drafts = torch.cat([row[-NODES:] for row in rows]).to(self.device)
        cache = torch.zeros(self.slots, 1, KEY)
        for mine, first in zip(rows, self.rows[OFF], strict=True):
            cache[mine, 0] = self.contents[first]
        cache = cache.to(self.device, self.dtype)
        caches = [cache, *(cache.clone() for _ in range(self.layers - 1))]
        return [
            partial(adapter.attend, self.query, each, drafts, softmax_scale=SCALE)
            for each in caches
        ]

    def _adapter(self, engine: str) -> VerifyAdapter:
        sizes = PlanSizes(
            max_requests=len(self.contexts),
            max_context=max(self.contexts),
            nodes=NODES,
            page_size=self.page,
        )
        if engine == "flashmla":
            from sglang_overlay.attention.flashmla import FlashMlaEngine

            made: Any = FlashMlaEngine(
                max_requests=len(self.contexts), cache_dtype=self.dtype, device=self.device
            )
        else:
            made = PortableEngine(
                page_size=self.page,
                max_requests=len(self.contexts),
                rows=NODES * self.heads,
                max_context=max(self.contexts),
                cache_dtype=self.dtype,
                device=self.device,
                multi_processor_count=8 if self.dry else None,
            )
        return VerifyAdapter(made, VerifyPlan(sizes, self.device))


def measure(case: Case, engine: str, commit: str) -> list[dict[str, Any]]:
    """Return a row per level; times in ms per layer."""
    calls = {level: case.calls(level, engine) for level in case.rows}
    outputs = {level: each[0]().double() for level, each in calls.items()}
    rounds: dict[str, list[float]] = {level: [] for level in calls}
    if case.dry:
        for level, each in calls.items():
            began = time.perf_counter()
            each[0]()
            rounds[level].append(1e3 * (time.perf_counter() - began))
    else:
        graphs = {level: captured(each) for level, each in calls.items()}
        repeats = max(1, round(8 / replay_time(graphs[OFF], 3)))
        for _ in range(ROUNDS):
            for level, graph in graphs.items():
                rounds[level].append(replay_time(graph, repeats) / case.layers)
    stock = outputs[OFF]
    rows = []
    for level, times in rounds.items():
        ratios = sorted(a / b for a, b in zip(times, rounds[OFF], strict=True))
        pieces = [Piece(units=row.numpy()) for row in case.rows[level]]
        rows.append(
            {
                "engine": engine,
                "page": case.page,
                "commit": commit,
                "heads": case.heads,
                "level": level,
                "requests": len(case.contexts),
                "mean_context": round(statistics.mean(case.contexts)),
                "tokens_per_run": round(layout(pieces, block=64).units_per_run, 1),
                "layers": case.layers,
                "ms": statistics.median(times),
                "ratio": statistics.median(ratios),
                "lowest_ratio": ratios[0],
                "highest_ratio": ratios[-1],
                "error": float((outputs[level] - stock).norm() / stock.norm()),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


def page_of(found: dict[str, Any]) -> str:
    """Return the result as a page for people."""
    about = ", ".join(f"{name} {value}" for name, value in found["about"].items())
    lines = [
        "# One layer's verify on the layouts of a replayed trace",
        "",
        f"`benchmarks/kv_layouts.py`; {about}. {NODES} nodes per tree; the trace of "
        "`benchmarks/kv_trace.py`. ms of one layer, median; ratios to `off` in the same round.",
        "",
        "| engine | page | commits keep | heads | level | requests × mean context | tokens per run "
        "| ms | ÷ off | lowest … highest | error |",
        "|" + "---|" * 11,
    ]
    lines += [
        f"| {row['engine']} | {row['page']} | {row['commit']} | {row['heads']} | {row['level']} "
        f"| {row['requests']} × {row['mean_context']} | {row['tokens_per_run']} "
        f"| {row['ms']:.4f} | {row['ratio']:.4f} "
        f"| {row['lowest_ratio']:.4f} … {row['highest_ratio']:.4f} | {row['error']:.1e} |"
        for row in found["rows"]
    ]
    return "\n".join(lines) + "\n"


def main(options: argparse.Namespace) -> None:
    """Capture or read the layouts, time, write after each case."""
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    file = options.layouts or out / "kv-layouts-captured.json"
    if not file.exists():
        capture_elsewhere(file, options.requests, dry=options.dry)
    layouts = json.loads(file.read_text())
    found: dict[str, Any] = {
        "about": {
            "machine": "CPU, dry run" if options.dry else torch.cuda.get_device_name(),
            "date": time.strftime("%Y-%m-%d"),
            **versions(),
        },
        "rows": [],
    }
    for at, commit in CASES:
        mine = [each for each in layouts if (each["page"], each["commit"]) == (at, commit)]
        for heads in (2,) if options.dry else HEADS:
            case = Case(mine, heads, dry=options.dry)
            engines = ["flashmla"] * (at == 64 and not options.dry) + ["portable"]
            for engine in engines:
                found["rows"] += measure(case, engine, commit)
                (out / "kv-layouts.json").write_text(json.dumps(found, indent=1) + "\n")
                (out / "kv-layouts.md").write_text(page_of(found))
                if not options.dry:
                    torch.cuda.empty_cache()
    print(page_of(found))


def read_options() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out")
    parser.add_argument("--layouts", type=Path)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--dry", action="store_true")
    # What the program starts itself with.
    parser.add_argument("--capture", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    chosen = read_options()
    if chosen.capture:
        cases = capture_cases(chosen.requests, processes=chosen.capture)
        Path(chosen.out).write_text(json.dumps(cases))
    elif chosen.dry and os.environ.get("TRITON_INTERPRET") != "1":
        # The kernels' decorators ask for it when they are imported.
        os.execve(
            sys.executable, [sys.executable, *sys.argv], os.environ | {"TRITON_INTERPRET": "1"}
        )
    else:
        main(chosen)
