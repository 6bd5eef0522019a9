"""One layer's grouped-query verify on a GPU: the overlay's kernels beside SGLang's Triton kernel.

Both run from a CUDA graph on the same tensors: shuffled slots (page size 1) or shuffled pages (64),
a random tree behind each prefix. Errors are against a float64 reference in torch, at a context that
this can take; times are medians over replays, the prefix's plan (one launch a step) left out.

``python benchmarks/grouped_verify.py OUT.json`` on a host with SGLang, the overlay and a GPU.
"""

from __future__ import annotations

import importlib.metadata
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "overlay")]

from sglang_overlay.attention.grouped import GroupedVerifier, Heads  # noqa: E402
from sglang_overlay.attention.plan import PlanSizes, VerifyPlan, VerifyStep  # noqa: E402

REPLAYS = 20


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One measured size; ``group`` query heads share each of ``kv`` KV heads."""

    requests: int
    context: int
    nodes: int
    kv: int
    group: int
    dim: int
    page_size: int


TIMED = [
    Shape(requests=r, context=c, nodes=16, kv=kv, group=group, dim=128, page_size=page)
    for r, c, page in [(1, 32768, 1), (1, 32768, 64), (8, 32768, 1), (32, 8192, 1), (1, 131072, 1)]
    for kv, group in [(8, 4), (2, 8)]
] + [
    Shape(requests=1, context=32768, nodes=16, kv=8, group=2, dim=256, page_size=1),
    Shape(requests=1, context=32768, nodes=16, kv=8, group=8, dim=64, page_size=1),
    Shape(requests=1, context=32768, nodes=64, kv=8, group=4, dim=128, page_size=1),
]
CHECKED = [
    Shape(requests=2, context=4000, nodes=nodes, kv=2, group=4, dim=dim, page_size=page)
    for nodes, dim, page in [(16, 128, 1), (16, 64, 64), (33, 256, 1), (64, 128, 64), (16, 96, 1)]
]


class Case:
    """The tensors of one shape, and both ways to attend."""

    def __init__(self, shape: Shape) -> None:
        from sglang.srt.layers.attention.triton_ops.extend_attention import extend_attention_fwd

        self.shape = shape
        self._stock = extend_attention_fwd
        heads = shape.kv * shape.group
        generator = torch.Generator(device="cuda").manual_seed(shape.context + shape.nodes)

        def normal(*size: int) -> torch.Tensor:
            made = torch.randn(*size, generator=generator, device="cuda")
            return made.to(torch.bfloat16)

        length = shape.context + shape.nodes
        pages = -(-length // shape.page_size)
        order = torch.randperm(shape.requests * pages, generator=generator, device="cuda") + 1
        slots = (order[:, None] * shape.page_size) + torch.arange(shape.page_size, device="cuda")
        self.table = slots.view(shape.requests, -1)[:, :length].int().contiguous()
        rows = (shape.requests * pages + 1) * shape.page_size
        self.keys, self.values = (normal(rows, shape.kv, shape.dim) for _ in "kv")
        self.query = normal(shape.requests * shape.nodes, heads, shape.dim)
        self.scale = shape.dim**-0.5
        self.slots = self.table[:, shape.context :].reshape(-1).long()
        draw = torch.rand(shape.requests, shape.nodes, generator=generator, device="cuda")
        self.parents = (draw * torch.arange(shape.nodes, device="cuda")).int()
        self.parents[:, 0] = -1
        self.sees = self._ancestors()

        sizes = PlanSizes(
            max_requests=shape.requests,
            max_context=shape.context,
            nodes=shape.nodes,
            page_size=shape.page_size,
        )
        made = Heads(query=heads, kv=shape.kv, key_dim=shape.dim, value_dim=shape.dim)
        self.verifier = GroupedVerifier(VerifyPlan(sizes, "cuda"), made)
        lengths = torch.full((shape.requests,), shape.context, device="cuda")
        self.verifier.prepare(
            VerifyStep(
                prefix_lens=lengths,
                request_rows=torch.arange(shape.requests, device="cuda"),
                req_to_token=self.table,
                parents=self.parents,
            ),
            heads,
        )
        step = torch.arange(shape.requests + 1, device="cuda")
        self._starts = (step * shape.nodes).int()
        self._kv_starts = (step * shape.context).int()
        self._kv_slots = self.table[:, : shape.context].reshape(-1).long()
        self._mask_starts = step * (shape.nodes * length)
        ones = torch.ones(
            shape.requests, shape.nodes, shape.context, dtype=torch.bool, device="cuda"
        )
        self._mask = torch.cat([ones, self.sees], dim=2).flatten()

    def overlay(self) -> torch.Tensor:
        """Attend with the overlay's kernels."""
        cache = (self.keys, self.values)
        return self.verifier.attend(self.query, cache, self.slots, softmax_scale=self.scale)

    def stock(self) -> torch.Tensor:
        """Attend with SGLang's Triton kernel, as its backend calls it for a tree."""
        out = torch.empty_like(self.query)
        self._stock(
            self.query,
            self.keys[self.slots],
            self.values[self.slots],
            out,
            self.keys,
            self.values,
            self._starts,
            self._kv_starts,
            self._kv_slots,
            self._mask,
            True,
            self._mask_starts,
            self.shape.nodes,
            1.0,
            1.0,
            self.scale,
        )
        return out

    def expected(self) -> torch.Tensor:
        """Return the float64 reference."""
        shape, found = self.shape, []
        for request in range(shape.requests):
            rows = self.table[request].long()
            own = slice(request * shape.nodes, (request + 1) * shape.nodes)
            keys = self.keys[rows].double().repeat_interleave(shape.group, dim=1)
            values = self.values[rows].double().repeat_interleave(shape.group, dim=1)
            scores = torch.einsum("nhd,shd->hns", self.query[own].double(), keys) * self.scale
            hidden = ~self.sees[request]
            scores[:, :, shape.context :].masked_fill_(hidden, float("-inf"))
            found.append(torch.einsum("hns,shd->nhd", scores.softmax(-1), values))
        return torch.cat(found)

    def _ancestors(self) -> torch.Tensor:
        requests, nodes = self.parents.shape
        sees = torch.eye(nodes, dtype=torch.bool).repeat(requests, 1, 1)
        for request, parents in enumerate(self.parents.tolist()):
            for node in range(1, nodes):
                sees[request, node] |= sees[request, parents[node]]
        return sees.cuda()


def milliseconds(call: Callable[[], Any]) -> float:
    """Return the median time of one replay of ``call``."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    times: list[float] = []
    for _ in range(REPLAYS):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        times.append(began.elapsed_time(ended))
    return statistics.median(times)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Return ‖got − want‖ / ‖want‖."""
    return float((got.double() - want).norm() / want.norm())


def main(target: Path) -> None:
    """Check, time, write; the file is kept up to date, in case the time runs out."""
    found: dict[str, Any] = {
        "machine": torch.cuda.get_device_name(),
        "versions": {n: importlib.metadata.version(n) for n in ("torch", "triton", "sglang")},
        "date": time.strftime("%Y-%m-%d"),
        "checked": [],
        "timed": [],
    }
    for shape in CHECKED:
        case = Case(shape)
        want = case.expected()
        errors = {name: relative_error(getattr(case, name)(), want) for name in WAYS}
        found["checked"].append(asdict(shape) | {"relative_error": errors})
        print(shape, errors, flush=True)
    for shape in TIMED:
        case = Case(shape)
        times = {name: milliseconds(getattr(case, name)) for name in WAYS}
        found["timed"].append(asdict(shape) | {"ms": times})
        print(shape, times, f"{times['stock'] / times['overlay']:.1f} ×", flush=True)
        target.write_text(json.dumps(found, indent=1) + "\n")


WAYS = ("overlay", "stock")

if __name__ == "__main__":
    main(Path(sys.argv[1]))
