"""Time the portable verify engine beside stock Triton and FlashMLA on one GPU, in one run.

Per shape, one layer's attention of a verify step with a random tree:

- ``chain``     FlashMLA, causal over prefix + tree rows, the tree ignored
- ``adapter``   FlashMLA over the prefix, then the tree kernel
- ``portable``  the portable engine as this GPU gets it, pages of 64, then the tree kernel
- ``slots``     the same with pages of 1, every row at a random place
- ``mma``       the portable engine with the kernel that sm_120 gets, compiled for this GPU, and
  ``mma_slots`` with pages of 1
- ``triton``    the portable engine with the Triton kernel that ``mma`` replaced
- ``stock``     SGLang's Triton verify kernel under the same tree's FULL_MASK, and ``stock_slots``
  with pages of 1
- ``floor``     max(bytes / measured copy bandwidth, flops / 790 TFLOP/s)

Graphs, KV rotation and rounds are those of ``verify_adapter.py``. ``error`` is the relative
distance of a way's output to the float64 oracle's, in the norm over all elements. Tiles of the
portable engine that are off by more than LIMIT are named and not timed.

usage: python benchmarks/verify_portable.py OUT.json OUT.md [--seconds N] [--ways NAME...]
Needs an sm_90 GPU, sgl_kernel and sglang on PYTHONPATH, beside the overlay and this repository.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from sglang_overlay.attention.adapter import VerifyAdapter
from sglang_overlay.attention.oracle import tree_attention
from sglang_overlay.attention.plan import PlanSizes, VerifyPlan
from sglang_overlay.attention.portable import PortableEngine
from sglang_overlay.attention.split_config import (
    MMA,
    SAFE,
    SAFE_FP8,
    SplitConfig,
    choose_config,
)
from sglang_overlay.self_test.timing import captured, replay_time
from sglang_overlay.srt.stock_verify import stock_verify

from benchmarks.verify_adapter import (
    SCALE,
    Case,
    copy_bandwidth,
    kernel_times,
    unpacked,
    version,
)

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
SHAPES = [
    (1, 8192, 8, 16),
    (1, 32768, 8, 16),
    (1, 131072, 8, 16),
    (1, 131072, 8, 64),
    (8, 32768, 8, 16),
    (8, 32768, 8, 64),
    (32, 8192, 8, 16),
    (32, 8192, 8, 64),
    (8, 32768, 64, 16),
    (1, 32768, 8, 8),
    (1, 32768, 16, 32),
    (1, 32768, 128, 16),
    (4, 131072, 8, 16),
    (16, 16384, 16, 32),
    (48, 4096, 8, 16),
    (128, 1024, 8, 8),
]
# Limits on stock ÷ portable that the project has set itself.
WANTED = {
    (1, 32768, 8, 16): 70,
    (1, 131072, 8, 16): 110,
    (8, 32768, 8, 16): 18,
    (32, 8192, 8, 16): 8,
}
WAYS = ("chain", "adapter", "portable", "slots", "mma", "mma_slots", "triton", "stock")
ROUNDS = 8
# bf16 results of bf16 rows are off by 0.003; a wrong row moves them by much more.
LIMIT = 0.01


class Ways:
    """Everything that is timed on the tensors of one shape."""

    def __init__(self, shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
        self.case = case = Case(shape, dtype)
        self.dtype = dtype
        case.prepare()
        slots = case.caches[0].shape[0]
        width = case.context + case.nodes
        order = torch.randperm(slots - 1, device="cuda")[: case.requests * width] + 1
        self.scattered = order.view(case.requests, width)

    def portable(
        self, config: SplitConfig | None = None, *, scattered: bool = False
    ) -> list[Callable[[], torch.Tensor]]:
        """Return one call per layer of the portable engine and the tree kernel."""
        case = self.case
        step, page, slots = case.step, 64, case.tree_slots
        if scattered:
            step, page = replace(step, req_to_token=self.scattered.int().contiguous()), 1
            slots = self.scattered[:, case.context :].reshape(-1)
        adapter = self._adapter(page, config)
        adapter.prepare(step, case.heads)
        return [
            partial(adapter.attend, case.query, cache, slots, softmax_scale=SCALE)
            for cache in case.caches
        ]

    def _adapter(self, page: int, config: SplitConfig | None) -> VerifyAdapter:
        case = self.case
        engine = PortableEngine(
            page_size=page,
            max_requests=case.requests,
            rows=case.nodes * case.heads,
            max_context=case.context,
            cache_dtype=self.dtype,
            device="cuda",
            config=config,
        )
        sizes = PlanSizes(
            max_requests=case.requests,
            max_context=case.context,
            nodes=case.nodes,
            page_size=page,
        )
        return VerifyAdapter(engine, VerifyPlan(sizes, "cuda"))

    def stock_slots(self) -> Callable[[], torch.Tensor]:
        """Return a call of stock's kernel on scattered rows."""
        case = self.case
        return stock_verify(
            case.query,
            case.caches[0],
            list(self.scattered[:, : case.context]),
            self.scattered[:, case.context :],
            list(unpacked(case.adapter.plan.ancestors, case.nodes)),
            softmax_scale=SCALE,
        )

    def errors(self, calls: dict[str, list[Callable[[], Any]]]) -> dict[str, float]:
        """Return each way's distance to the oracle; ``chain`` computes something else."""
        case = self.case
        paged = self._exact(list(case.prefix_slots), case.tree_slots)
        slots = self._exact(
            list(self.scattered[:, : case.context]), self.scattered[:, case.context :]
        )
        return {
            name: distance(each[0](), slots if name.endswith("slots") else paged)
            for name, each in calls.items()
            if name != "chain"
        }

    def _exact(self, prefix: list[torch.Tensor], tree: torch.Tensor) -> torch.Tensor:
        """Return the float64 oracle's output for the first layer."""
        case = self.case
        out, _ = tree_attention(
            case.query,
            case.caches[0][:, 0].bfloat16(),
            prefix,
            tree.reshape(case.requests, -1),
            list(unpacked(case.adapter.plan.ancestors, case.nodes)),
            SCALE,
        )
        return out


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    """Return ‖got − want‖ / ‖want‖."""
    return float((got.double() - want).norm() / want.norm())


def measure(
    shape: tuple[int, int, int, int], dtype: torch.dtype, tb_per_s: float, wanted: Sequence[str]
) -> dict[str, Any]:
    """Return one row of results for the ways that are ``wanted``; times in ms."""
    ways = Ways(shape, dtype)
    case = ways.case
    made: dict[str, Callable[[], list[Callable[[], Any]]]] = {
        "chain": case.chain_calls,
        "adapter": case.adapter_calls,
        "portable": ways.portable,
        "slots": partial(ways.portable, scattered=True),
        "mma": partial(ways.portable, MMA),
        "mma_slots": partial(ways.portable, MMA, scattered=True),
        "triton": partial(ways.portable, SAFE_FP8 if case.fp8 else SAFE),
    }
    calls = {name: make() for name, make in made.items() if name in wanted}
    row: dict[str, Any] = dict(zip(("requests", "context", "heads", "nodes"), shape, strict=True))
    row |= {"cache": "fp8" if case.fp8 else "bf16", "layers": case.layers}
    row["floor"] = case.floor(tb_per_s)
    row["error"] = ways.errors(calls)
    for name, error in row["error"].items():
        # FlashMLA rounds the queries to fp8 too. Without the engine's own tiles there is no ratio.
        if name not in ("adapter", "portable", "slots") and not error <= LIMIT:
            print(f"{name} is wrong at {shape}: off by {error:.2e}, not timed", flush=True)
            del calls[name]
    graphs = {name: captured(each) for name, each in calls.items()}
    repeats = max(1, round(6 / replay_time(next(iter(graphs.values())), 2)))
    rounds: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(ROUNDS):
        for name, graph in graphs.items():
            rounds[name].append(replay_time(graph, repeats) / case.layers)
    row |= {name: statistics.median(times) for name, times in rounds.items()}
    for above, below in (("portable", "chain"), ("mma", "portable"), ("triton", "portable")):
        if above in rounds and below in rounds:
            row[f"{above}_over_{below}"] = ratio(rounds[above], rounds[below])
    for name, key in (("portable", "kernels_us"), ("mma", "mma_kernels_us")):
        if name in calls:
            row[key] = kernel_times(calls[name][0])
    if "stock" in wanted and not case.fp8:
        for name, call in (("stock", case.stock_call()), ("stock_slots", ways.stock_slots())):
            graph = captured([call])
            row[name] = statistics.median(replay_time(graph, 1) for _ in range(5))
        for above, below in (("stock", "portable"), ("stock_slots", "slots")):
            if below in rounds:
                row[f"{above}_over_{below}"] = row[above] / row[below]
    return row


def ratio(above: list[float], below: list[float]) -> float:
    """Return the median of each round's ratio."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def markdown(info: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """Return the results as a table, with the machine and the versions above it."""
    lines = [
        "# The portable verify engine, one layer, one GPU",
        "",
        ", ".join(f"{name} {value}" for name, value in info.items() if name != "configs") + ".",
        "",
        "Times in ms, medians. `slots` and `stock slots` read pages of 1 at random places, the "
        "others pages of 64.",
        "",
        "| bs | context | heads | tree | KV | floor | chain | adapter | portable | ÷ chain | slots "
        "| sm_120's (mma) | ÷ portable | triton | ÷ portable | stock | ÷ portable | wanted "
        "| stock slots | ÷ slots |",
        "|" + "---|" * 20,
    ]
    return "\n".join([*lines, *map(markdown_row, rows)]) + "\n"


def markdown_row(row: dict[str, Any]) -> str:
    """Return one result as a line of the table."""
    shape = tuple(row[key] for key in ("requests", "context", "heads", "nodes"))
    cells = [*map(str, shape), row["cache"]]

    def add(form: str, *keys: str) -> None:
        cells.extend(f"{row[key]:{form}}" if key in row else "" for key in keys)

    add(".4f", "floor", "chain", "adapter", "portable")
    add(".2f", "portable_over_chain")
    add(".4f", "slots")
    for name in ("mma", "triton"):
        add(".4f", name)
        add(".2f", f"{name}_over_portable")
    add(".3f", "stock")
    add(".0f", "stock_over_portable")
    cells.append(f"≥ {WANTED[shape]}" if "stock" in row and shape in WANTED else "")
    add(".3f", "stock_slots")
    add(".0f", "stock_slots_over_slots")
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Measure every shape that fits the time, and write both files after each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("json", type=Path)
    parser.add_argument("markdown", type=Path)
    parser.add_argument("--seconds", type=float, default=600, help="start no shape after these")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, help="time these only")
    options = parser.parse_args()
    began = time.monotonic()
    tb_per_s = copy_bandwidth()
    capability = torch.cuda.get_device_capability()
    number = capability[0] * 10 + capability[1]
    info = {
        "GPU": torch.cuda.get_device_name(),
        "date": datetime.datetime.now(tz=datetime.timezone.utc).date().isoformat(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "sglang-kernel": version("sglang-kernel"),
        "sglang": version("sglang"),
        "copy TB/s": round(tb_per_s, 3),
        "configs": {
            "portable": asdict(choose_config(number, fp8=False)),
            "portable fp8": asdict(choose_config(number, fp8=True)),
            "mma": asdict(MMA),
            "triton": asdict(SAFE),
            "triton fp8": asdict(SAFE_FP8),
        },
    }
    rows: list[dict[str, Any]] = []
    plan = [(shape, BF16) for shape in SHAPES[:9]] + [(shape, FP8) for shape in SHAPES[1:8]]
    plan += [(shape, BF16) for shape in SHAPES[9:]]
    for shape, dtype in plan:
        if time.monotonic() - began > options.seconds:
            print(f"out of time before {shape}", flush=True)
            break
        rows.append(measure(shape, dtype, tb_per_s, options.ways))
        print(markdown_row(rows[-1]), flush=True)
        torch.cuda.empty_cache()
        options.json.write_text(json.dumps({"info": info, "rows": rows}, indent=1) + "\n")
        options.markdown.write_text(markdown(info, rows))


if __name__ == "__main__":
    main()
