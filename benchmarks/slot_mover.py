"""Time the slot mover and the draft tree's kernels on one GPU.

Mover: a pool of 61 layers of 576 bf16, slots scattered at random, moved

- ``mover``          by one launch, as one disjoint list
- ``overlap``        by one launch, as accepted paths that move to the front of their draft slots
- ``loop``           layer by layer, ``buffer[targets] = buffer[sources]``, as later SGLang
  releases do it for MLA, launched one by one; ``loop_graph``: the same inside a CUDA graph

against ``copy``, the device's own copy of 2 GiB, bytes read plus bytes written. mover, overlap and
loop_graph are graphs of several calls, each on slots of its own, so that no call finds its rows in
the L2; replayed in turns, medians over the rounds.

Tree: ``kernel`` (best-first, one launch) and ``torch`` (depth by depth), both as a graph and
launched from Python, and the walk.

usage: python benchmarks/slot_mover.py OUT.json OUT.md [--sweep]
Needs a CUDA GPU, torch and triton, with the overlay on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from sglang_overlay.kvcache.mover import Tiles, move_rows
from sglang_overlay.kvcache.rows import RowBuffers
from sglang_overlay.tree import levels
from sglang_overlay.tree.accept import walk
from sglang_overlay.tree.build import grow_best_first
from sglang_overlay.tree.layout import DraftTree, child_links
from sglang_overlay.tree.marginals import Segment, VocabParallelHead, top_log_probs

LAYERS, ROW, SLOTS = 61, 576, 1 << 16
ROW_BYTES = 2 * ROW
PAIRS = [64, 320, 1024, 4096, 16384]
# (requests, draft tokens, accepted path)
PATHS = [(64, 16, 5), (8, 64, 8), (32, 64, 16), (128, 64, 32)]
TREES = [
    (n, depth, requests) for n, depth in ((16, 7), (64, 15), (256, 15)) for requests in (1, 8, 32)
]
SWEEP = [(7, 4), (14, 4), (14, 8), (28, 4), (28, 8), (56, 8)]
ROUNDS = 15
_HELD: list[object] = []

Call = Callable[[], object]


def captured(calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
    """Return a graph of all ``calls``; each has run before, so that everything is compiled."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    _HELD.append(calls)  # a graph holds addresses, not tensors
    return graph


def elapsed(run: Call) -> float:
    """Return µs of GPU time."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3


def in_turns(graphs: dict[str, tuple[torch.cuda.CUDAGraph, int]]) -> dict[str, float]:
    """Return each graph's median µs per call; all share every round's clock and temperature."""
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for turn in range(ROUNDS + 2):
        for name, (graph, calls) in graphs.items():
            spent = elapsed(graph.replay) / calls
            if turn >= 2:
                times[name].append(spent)
    return {name: statistics.median(spent) for name, spent in times.items()}


def eager(call: Call) -> float:
    """Return the median µs of a call launched from Python, until the GPU is done."""
    times = []
    for _ in range(12):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times[2:])


def copy_bandwidth() -> float:
    """Return the device's copy rate in TB/s, read + write."""
    source = torch.empty(2 << 30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    # Launched by itself: inside a graph the same copy is another, slower operation (2.76 for 4.3).
    spent = [elapsed(partial(target.copy_, source)) for _ in range(ROUNDS)]
    return float(2 * source.numel() / statistics.median(spent[2:]) / 1e6)


def pool() -> list[torch.Tensor]:
    """Return the layers of a pool, filled with random rows."""
    return [torch.randn(SLOTS, 1, ROW, device="cuda", dtype=torch.bfloat16) for _ in range(LAYERS)]


def loop(buffers: RowBuffers, targets: torch.Tensor, sources: torch.Tensor) -> None:
    """Move layer by layer, through a copy aside."""
    for buffer in buffers.tensors:
        buffer[targets] = buffer[sources]


def lists(pairs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return distinct slots, none of them in both lists."""
    slots = torch.randperm(SLOTS, device="cuda")
    return slots[:pairs].clone(), slots[-pairs:].clone()


def paths(requests: int, nodes: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return targets and sources [requests, length] of paths through scattered draft slots."""
    slots = torch.randperm(SLOTS)[: requests * nodes].view(requests, nodes)
    chosen = [[0, *sorted(random.sample(range(1, nodes), length - 1))] for _ in range(requests)]
    sources = slots.gather(1, torch.tensor(chosen))
    return slots[:, :length].contiguous().cuda(), sources.cuda()


def report(moved: int, microseconds: float, copy: float) -> dict[str, float]:
    """Return µs, TB/s and the share of the copy's rate for ``moved`` rows of every layer."""
    rate = 2 * moved * LAYERS * ROW_BYTES / microseconds / 1e6
    return {"us": round(microseconds, 2), "TB/s": round(rate, 3), "of_copy": round(rate / copy, 3)}


def time_mover(buffers: RowBuffers, copy: float) -> list[dict[str, Any]]:
    """Time the mover and the loop over layers."""
    rows: list[dict[str, Any]] = []
    for pairs in PAIRS:
        calls = max(2, min(16, 8192 // pairs))
        own = [lists(pairs) for _ in range(calls)]
        times = in_turns(
            {
                "mover": (captured([partial(move_rows, buffers, *one) for one in own]), calls),
                "loop_graph": (captured([partial(loop, buffers, *one) for one in own]), calls),
            }
        )
        times["loop"] = eager(partial(loop, buffers, *own[0]))
        times["mover_eager"] = eager(partial(move_rows, buffers, *own[0]))
        rows.append(
            {
                "mode": "disjoint",
                "tokens": pairs,
                **{name: report(pairs, spent, copy) for name, spent in times.items()},
                "graph_ratio": round(times["loop_graph"] / times["mover"], 2),
                "eager_ratio": round(times["loop"] / times["mover_eager"], 2),
            }
        )
    for requests, nodes, length in PATHS:
        tokens = requests * length
        calls = max(2, min(16, 8192 // tokens))
        groups = [paths(requests, nodes, length) for _ in range(calls)]
        graph = captured([partial(move_rows, buffers, *one, overlap=True) for one in groups])
        flat = [(t.flatten(), s.flatten()) for t, s in groups]
        flat_graph = captured([partial(move_rows, buffers, *one, overlap=True) for one in flat])
        times = in_turns({"overlap": (graph, calls), "overlap_flat": (flat_graph, calls)})
        rows.append(
            {
                "mode": f"{requests} paths of {length} in {nodes} slots",
                "tokens": tokens,
                **{name: report(tokens, spent, copy) for name, spent in times.items()},
            }
        )
    return rows


def sweep(buffers: RowBuffers, copy: float) -> list[dict[str, Any]]:
    """Time other launch shapes of the disjoint kernel."""
    rows = []
    for pairs in (320, 4096):
        own = [lists(pairs) for _ in range(4)]
        graphs = {}
        for count, warps in SWEEP:
            tiles = Tiles(rows=count, vectors=ROW_BYTES // 16, warps=warps)
            calls = [partial(move_rows, buffers, *one, tiles=tiles) for one in own]
            graphs[f"{count} rows, {warps} warps"] = (captured(calls), len(calls))
        for name, spent in in_turns(graphs).items():
            rows.append({"tokens": pairs, "shape": name, **report(pairs, spent, copy)})
    return rows


def child_tokens(tree: DraftTree) -> torch.Tensor:
    """Return for each node its first child's token, or −1."""
    links = child_links(tree.parents)
    return torch.where(links.next_token < 0, -1, tree.tokens.gather(1, links.next_token.clamp(0)))


def time_trees() -> list[dict[str, Any]]:
    """Time both ways to build a tree, and the walk."""
    rows = []
    for n, depth, requests in TREES:
        log_probs = -torch.rand(requests, depth, n - 1, device="cuda").mul(9).sort(dim=2).values
        candidates = torch.randint(0, 150_000, log_probs.shape, device="cuda")
        root = torch.zeros(requests, dtype=torch.int64, device="cuda")
        out = DraftTree.empty(requests, n, depth, "cuda")
        # The first child of each node is chosen: the walk goes to the end.
        levels.grow(log_probs, candidates, root, out)
        predicted = child_tokens(out)
        calls: dict[str, Call] = {
            "kernel": partial(grow_best_first, log_probs, candidates, root, out),
            "torch": partial(levels.grow, log_probs, candidates, root, out),
            "walk": partial(walk, out, predicted),
        }
        graphs = {
            name: (captured([call] * 4), 4) for name, call in calls.items() if name != "torch"
        }
        times = in_turns(graphs)
        rows.append(
            {
                "n": n,
                "depth": depth,
                "requests": requests,
                **{f"{name}_us": round(spent, 1) for name, spent in times.items()},
                **{f"{name}_eager_us": round(eager(call), 1) for name, call in calls.items()},
            }
        )
    return rows


def time_marginals() -> list[dict[str, Any]]:
    """Time the marginals of a drafter of hidden size 4096 over a head of 19k or 152k rows."""
    rows = []
    for vocabulary in (19_000, 152_000):
        weight = torch.randn(vocabulary, 4096, device="cuda", dtype=torch.bfloat16)
        head = VocabParallelHead(
            weight=weight, segments=(Segment(row=0, rows=vocabulary, token=0),)
        )
        for requests in (1, 8, 32):
            hidden = torch.randn(15 * requests, 4096, device="cuda", dtype=torch.bfloat16)
            calls: dict[str, Call] = {
                "marginals": partial(top_log_probs, hidden, head, 63),
                "product": partial(torch.matmul, hidden, weight.T),
            }
            times = in_turns({name: (captured([call]), 1) for name, call in calls.items()})
            times["marginals_eager"] = eager(calls["marginals"])
            rows.append(
                {
                    "vocabulary": vocabulary,
                    "tokens": 15 * requests,
                    **{f"{name}_us": round(spent, 1) for name, spent in times.items()},
                }
            )
    return rows


def main() -> None:
    """Measure, and keep what is there after each part."""
    parser = argparse.ArgumentParser(description="Time the slot mover.")
    parser.add_argument("json", type=Path)
    parser.add_argument("markdown", type=Path)
    parser.add_argument("--sweep", action="store_true", help="time other launch shapes too")
    arguments = parser.parse_args()
    random.seed(0)
    torch.manual_seed(0)
    result: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "layers": LAYERS,
        "row_bytes": ROW_BYTES,
    }

    def keep(name: str, value: object) -> None:
        result[name] = value
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")

    keep("copy_TB/s", round(copy_bandwidth(), 3))
    buffers = RowBuffers.of(pool())
    keep("mover", time_mover(buffers, result["copy_TB/s"]))
    if arguments.sweep:
        keep("sweep", sweep(buffers, result["copy_TB/s"]))
    keep("trees", time_trees())
    keep("marginals", time_marginals())
    arguments.markdown.write_text(page(result))
    print(page(result))


def page(result: dict[str, Any]) -> str:
    """Return the result as a page of tables."""
    lines = [
        f"# Slot mover and draft tree on one {result['gpu']}",
        "",
        f"{result['date']}, torch {result['torch']}, triton {result['triton']}, by",
        f"`benchmarks/slot_mover.py`. Copy: {result['copy_TB/s']} TB/s (read + write). Rows of",
        f"{result['row_bytes']} bytes in {result['layers']} layers; µs are medians.",
    ]
    for title in ("mover", "sweep", "trees", "marginals"):
        lines += [f"\n## {title}", *table(result.get(title, []))] if result.get(title) else []
    return "\n".join(lines) + "\n"


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Return markdown tables, one per set of columns."""
    lines: list[str] = []
    header: list[str] = []
    for row in rows:
        flat: dict[str, object] = {}
        for name, value in row.items():
            if isinstance(value, dict):
                flat |= {f"{name} {unit}": number for unit, number in value.items()}
            else:
                flat[name] = value
        if list(flat) != header:
            header = list(flat)
            lines += ["", f"| {' | '.join(header)} |", "|" + "---|" * len(header)]
        lines.append(f"| {' | '.join(str(value) for value in flat.values())} |")
    return lines


if __name__ == "__main__":
    main()
