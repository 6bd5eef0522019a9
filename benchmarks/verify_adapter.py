"""Time tree verification side by side on one GPU: the adapter, FlashMLA's chain, stock Triton.

Per shape, one layer's attention of a verify step:

- ``chain``    FlashMLA, causal over prefix + tree rows: what SGLang's FlashMLA backend runs, tree
  ignored
- ``adapter``  FlashMLA over the prefix, then the tree kernel with a random tree
- ``stock``    SGLang's Triton verify kernel with the same tree as a FULL_MASK
- ``prefix``   the adapter without its tree kernel
- ``metadata`` everything done once per step: page table, packed mask, schedule
- ``schedule``, ``schedule_op`` the schedule alone, by the overlay's kernel and by FlashMLA's op
- ``prefix_op`` the prefix under the op's schedule, for what a difference of the two would cost
- ``floor``    max(bytes / measured copy bandwidth, flops / 790 TFLOP/s)

One CUDA graph holds one call per layer, every layer with its own KV cache, together more than four
times the L2, as in a model. chain, adapter and prefix are replayed in turns, round after round, so
that clock and temperature are shared; times are medians over the rounds, ratios medians of each
round's ratio. ``*_eager`` are single launches between L2 flushes (triton's do_bench), as a
cross-check.

usage: python benchmarks/verify_adapter.py OUT.json OUT.md [--no-stock] [--limit SHAPES]
Needs an sm_90 GPU, sgl_kernel and sglang on PYTHONPATH, beside the overlay.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from sgl_kernel.flash_mla import flash_mla_with_kvcache, get_mla_metadata
from sglang_overlay.attention.adapter import VerifyAdapter
from sglang_overlay.attention.flashmla import FlashMlaEngine, _saturated
from sglang_overlay.attention.plan import PlanSizes, VerifyPlan, VerifyStep
from sglang_overlay.self_test.timing import captured, replay_time
from sglang_overlay.srt.stock_verify import stock_verify
from torch.profiler import ProfilerActivity, profile

KEY, VALUE, PAGE, SCALE = 576, 512, 64, 576**-0.5
# (requests, context, heads, nodes): first the shapes of the project's reference table.
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
    (1, 512, 8, 16),
    (1, 32768, 8, 64),
    (1, 32768, 16, 32),
    (1, 32768, 64, 16),
    (1, 32768, 128, 16),
    (1, 32768, 8, 256),
    (2, 65536, 16, 32),
    (4, 32768, 8, 32),
    (4, 131072, 8, 16),
    (8, 8192, 8, 16),
    (8, 8192, 16, 128),
    (8, 8192, 8, 256),
    (16, 16384, 16, 32),
    (16, 4096, 8, 100),
    (48, 4096, 8, 16),
    (64, 2048, 8, 16),
    (128, 1024, 8, 8),
]
FP8_SHAPES = SHAPES[:9]
ROUNDS = 12
FLOOR_NOTE = [
    "What is missing to the floor is FlashMLA's own gap first (chain against floor): short",
    "contexts are the latency of its two kernels (about 25 µs at 8k), long or wide ones run",
    "at 75 to 83 %, at the clock that sustained load leaves. The tree kernel adds the rest:",
    "it reads queries and prefix outputs once more and rewrites them. fp8 floors take",
    "arithmetic at twice the rate of bf16. Single eager calls are bound by Python at short",
    "contexts (`*_eager` in the JSON).",
]


def copy_bandwidth() -> float:
    """Return the device's copy rate in TB/s, read + write."""
    source = torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    milliseconds = do_bench(lambda: target.copy_(source))
    return float(2 * source.numel() / milliseconds / 1e9)


def do_bench(call: Callable[[], object]) -> float:
    """Return the median time of single launches in ms, the L2 flushed before each."""
    return float(triton.testing.do_bench(call, warmup=5, rep=20, return_mode="median"))


def kernel_times(call: Callable[[], object]) -> dict[str, float]:
    """Return µs of GPU time per kernel of one ``call``."""
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        for _ in range(10):
            call()
        torch.cuda.synchronize()
    return {
        event.key[:60]: round(event.self_device_time_total / 10, 2)
        for event in profiler.key_averages()
        if event.self_device_time_total > 0
    }


class Case:
    """The tensors of one shape: a cache per layer, one page table, one random tree per request."""

    def __init__(self, shape: tuple[int, int, int, int], cache_dtype: torch.dtype) -> None:
        self.requests, self.context, self.heads, self.nodes = shape
        self.fp8 = cache_dtype is not torch.bfloat16
        span = -(-(self.context + self.nodes) // PAGE)
        pages = self.requests * span + 1
        size = pages * PAGE * KEY * (1 if self.fp8 else 2)
        self.layers = max(4, min(512, -(-256_000_000 // size)))
        self.caches = [
            torch.randn(pages * PAGE, 1, KEY, device="cuda", dtype=torch.bfloat16).to(cache_dtype)
            for _ in range(self.layers)
        ]
        order = (torch.randperm(pages - 1, device="cuda") + 1).view(self.requests, span)
        slots = order[:, :, None] * PAGE + torch.arange(PAGE, device="cuda")
        slots = slots.reshape(self.requests, -1)
        tokens = self.requests * self.nodes
        self.query = torch.randn(tokens, self.heads, KEY, device="cuda", dtype=torch.bfloat16)
        self.table = order.int().contiguous()
        self.prefix_slots = slots[:, : self.context]
        self.tree_slots = slots[:, self.context : self.context + self.nodes].reshape(-1)
        generator = torch.Generator().manual_seed(0)
        parents = torch.full((self.requests, self.nodes), -1, dtype=torch.int32)
        for node in range(1, self.nodes):
            drawn = torch.randint(0, node, (self.requests,), generator=generator)
            parents[:, node] = drawn.int()
        self.step = VerifyStep(
            prefix_lens=torch.full((self.requests,), self.context, device="cuda"),
            request_rows=torch.arange(self.requests, device="cuda"),
            req_to_token=slots.int().contiguous(),
            parents=parents.cuda(),
        )
        engine = FlashMlaEngine(max_requests=self.requests, cache_dtype=cache_dtype, device="cuda")
        sizes = PlanSizes(max_requests=self.requests, max_context=self.context, nodes=self.nodes)
        self.adapter = VerifyAdapter(engine, VerifyPlan(sizes, "cuda"))

    def prepare(self) -> None:
        """Do what is done once per step."""
        self.adapter.prepare(self.step, self.heads)

    def adapter_calls(self) -> list[Callable[[], object]]:
        """Return one call per layer of the whole adapter."""
        return [
            partial(self.adapter.attend, self.query, cache, self.tree_slots, softmax_scale=SCALE)
            for cache in self.caches
        ]

    def prefix_calls(self) -> list[Callable[[], object]]:
        """Return one call per layer of the prefix engine alone."""
        run = self.adapter.engine.run
        return [partial(run, self.query, cache, SCALE, 1.0) for cache in self.caches]

    def schedule_call(self) -> Callable[[], object]:
        """Return a call that plans the prefixes as the adapter does."""
        engine, plan = self.adapter.engine, self.adapter.plan
        lengths = plan.planned_lengths[: self.requests]
        rows = self.nodes * self.heads
        return partial(engine.plan, lengths, plan.page_table[: self.requests], rows)

    def plan_by_op(self) -> None:
        """Let FlashMLA's op plan the prefixes, into the adapter's buffers."""
        engine = self.adapter.engine
        assert isinstance(engine, FlashMlaEngine)
        engine.plan_by_op(
            self.adapter.plan.planned_lengths[: self.requests], self.nodes * self.heads
        )

    def schedule_op_call(self) -> Callable[[], object]:
        """Return a call that plans the prefixes with FlashMLA's op."""
        lengths = self.adapter.plan.planned_lengths[: self.requests]
        rows = self.nodes * self.heads
        return partial(get_mla_metadata, lengths, rows, 1, is_fp8_kvcache=self.fp8)

    def chain_calls(self) -> list[Callable[[], object]]:
        """Return one call per layer of FlashMLA's causal kernel over prefix and tree."""
        lengths = (self.step.prefix_lens + self.nodes).int()
        plan = get_mla_metadata(lengths, self.nodes * self.heads, 1, is_fp8_kvcache=self.fp8)
        one = torch.ones(1, device="cuda")
        scales = {"descale_q": one, "descale_k": one} if self.fp8 else {}

        def call(cache: torch.Tensor) -> object:
            query = _saturated(self.query) if self.fp8 else self.query
            return flash_mla_with_kvcache(
                query.view(self.requests, self.nodes, self.heads, KEY),
                cache.view(-1, PAGE, 1, KEY),
                self.table,
                lengths,
                VALUE,
                *plan,
                SCALE,
                True,
                **scales,
            )

        return [partial(call, cache) for cache in self.caches]

    def stock_call(self) -> Callable[[], object]:
        """Return a call of stock's kernel; its time hardly depends on the cache's state."""
        return stock_verify(
            self.query,
            self.caches[0],
            list(self.prefix_slots),
            self.tree_slots.view(self.requests, -1),
            list(unpacked(self.adapter.plan.ancestors, self.nodes)),
            softmax_scale=SCALE,
        )

    def floor(self, tb_per_s: float) -> float:
        """Return the least possible ms: KV rows and queries read once, outputs written once."""
        width = self.context + self.nodes
        rows = self.requests * self.nodes * self.heads
        moved = self.requests * width * KEY * (1 if self.fp8 else 2) + rows * (KEY + VALUE) * 2
        flops = 2 * rows * width * (KEY + VALUE)
        rate = 790e9 * (2 if self.fp8 else 1)
        return max(moved / tb_per_s / 1e9, flops / rate)


def unpacked(words: torch.Tensor, nodes: int) -> torch.Tensor:
    """Return [requests, nodes, nodes] bool from packed int64 words."""
    bits = (words[..., None] >> torch.arange(64, device=words.device)) & 1
    return bits.flatten(2)[..., :nodes].bool()


def measure(
    shape: tuple[int, int, int, int], cache_dtype: torch.dtype, tb_per_s: float, *, stock: bool
) -> dict[str, Any]:
    """Return one row of results; times in ms."""
    case = Case(shape, cache_dtype)
    case.prepare()
    graphs = {
        "chain": captured(case.chain_calls()),
        "adapter": captured(case.adapter_calls()),
        "prefix": captured(case.prefix_calls()),
    }
    once = {name: replay_time(graph, 3) for name, graph in graphs.items()}
    repeats = max(1, round(8 / once["chain"]))
    rounds: dict[str, list[float]] = {name: [] for name in (*graphs, "prefix_op")}
    for _ in range(ROUNDS):
        for name, graph in graphs.items():
            rounds[name].append(replay_time(graph, repeats) / case.layers)
        # The same graph, as it reads the schedule from the adapter's buffers.
        case.plan_by_op()
        rounds["prefix_op"].append(replay_time(graphs["prefix"], repeats) / case.layers)
        case.schedule_call()()
    row: dict[str, Any] = {
        "requests": shape[0],
        "context": shape[1],
        "heads": shape[2],
        "nodes": shape[3],
        "cache": "fp8" if case.fp8 else "bf16",
        "layers": case.layers,
        "floor": case.floor(tb_per_s),
    }
    for name, times in rounds.items():
        row[name] = statistics.median(times)
    pairs = list(zip(rounds["adapter"], rounds["chain"], strict=True))
    row["ratio"] = statistics.median(a / c for a, c in pairs)
    row["ratio_worst_round"] = max(a / c for a, c in pairs)
    row["ratio_best_round"] = min(a / c for a, c in pairs)
    row["extra_us"] = 1000 * statistics.median(a - c for a, c in pairs)
    row["passes"] = row["ratio"] <= 1.10 or row["extra_us"] <= 6.0
    row["floor_fraction"] = row["floor"] / row["adapter"]
    row["metadata"] = replay_time(captured([case.prepare]), 200)
    row["schedule"] = replay_time(captured([case.schedule_call()]), 200)
    row["schedule_op"] = replay_time(captured([case.schedule_op_call()]), 200)
    row["metadata_kernels_us"] = kernel_times(case.prepare)
    row["attend_kernels_us"] = kernel_times(case.adapter_calls()[0])
    row["chain_kernels_us"] = kernel_times(case.chain_calls()[0])
    row["chain_eager"] = do_bench(case.chain_calls()[0])
    row["adapter_eager"] = do_bench(case.adapter_calls()[0])
    if stock and not case.fp8:
        graph = captured([case.stock_call()])
        row["stock"] = statistics.median(replay_time(graph, 1) for _ in range(5))
        row["stock_over_adapter"] = row["stock"] / row["adapter"]
    return row


def markdown(info: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """Return the results as a table, with the machine and the versions above it."""
    lines = [
        "# Tree verification, one layer, one GPU",
        "",
        ", ".join(f"{name} {value}" for name, value in info.items()) + ".",
        "",
        "Times in ms, medians. adapter / chain must be ≤ 1.10, or the difference ≤ 6 µs.",
        "",
        *FLOOR_NOTE,
        "",
        "| bs | context | heads | tree | KV | floor | chain | adapter | adapter / chain | extra µs "
        "| holds | floor / adapter | stock | stock / adapter | metadata µs "
        "| schedule µs | by FlashMLA's op | prefix | prefix under the op's schedule |",
        "|" + "---|" * 19,
    ]
    lines += [markdown_row(row) for row in rows]
    for row in rows:
        if not row["passes"]:
            lines += ["", profile_text(row)]
    return "\n".join(lines) + "\n"


def profile_text(row: dict[str, Any]) -> str:
    """Return where the time of a shape goes, kernel by kernel, both sides."""
    name = ", ".join(str(row[key]) for key in ("requests", "context", "heads", "nodes"))
    sides = [
        f"{side}: " + ", ".join(f"{kernel} {time}" for kernel, time in row[key].items())
        for side, key in (("adapter", "attend_kernels_us"), ("chain", "chain_kernels_us"))
    ]
    return f"({name}) misses. µs of single launches, L2 warm. " + "; ".join(sides) + "."


def markdown_row(row: dict[str, Any]) -> str:
    """Return one result as a line of the table."""
    stock = f"{row['stock']:.3f} | {row['stock_over_adapter']:.0f}" if "stock" in row else " | "
    return (
        f"| {row['requests']} | {row['context']} | {row['heads']} | {row['nodes']} "
        f"| {row['cache']} | {row['floor']:.4f} | {row['chain']:.4f} | {row['adapter']:.4f} "
        f"| {row['ratio']:.3f} | {row['extra_us']:.1f} | {'yes' if row['passes'] else 'NO'} "
        f"| {row['floor_fraction']:.2f} | {stock} | {1000 * row['metadata']:.1f} "
        f"| {1000 * row['schedule']:.1f} | {1000 * row['schedule_op']:.1f} "
        f"| {row['prefix']:.4f} | {row['prefix_op']:.4f} |"
    )


def version(name: str) -> str:
    """Return an installed distribution's version, or a plain statement that it has none."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def main() -> None:
    """Measure every shape and write both files after each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("json", type=Path)
    parser.add_argument("markdown", type=Path)
    parser.add_argument("--no-stock", action="store_true")
    parser.add_argument("--limit", type=int, default=len(SHAPES))
    options = parser.parse_args()
    tb_per_s = copy_bandwidth()
    info = {
        "GPU": torch.cuda.get_device_name(),
        "date": datetime.datetime.now(tz=datetime.timezone.utc).date().isoformat(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "sglang-kernel": version("sglang-kernel"),
        "sglang": version("sglang"),
        "copy TB/s": round(tb_per_s, 3),
    }
    plan = [(shape, torch.bfloat16) for shape in SHAPES[: options.limit]]
    plan += [(shape, torch.float8_e4m3fn) for shape in FP8_SHAPES[: options.limit]]
    rows = []
    for shape, dtype in plan:
        rows.append(measure(shape, dtype, tb_per_s, stock=not options.no_stock))
        print(
            {k: round(v, 4) if isinstance(v, float) else v for k, v in rows[-1].items()}, flush=True
        )
        torch.cuda.empty_cache()
        options.json.write_text(json.dumps({"info": info, "rows": rows}, indent=1) + "\n")
        options.markdown.write_text(markdown(info, rows))
    print(options.markdown.read_text())


if __name__ == "__main__":
    main()
