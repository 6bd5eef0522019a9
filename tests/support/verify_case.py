"""Random verify steps: shuffled pages, poisoned cache, ragged prefixes, trees of several shapes."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from sglang_overlay.attention.oracle import ancestor_mask, tree_attention
from sglang_overlay.attention.plan import VerifyStep
from sglang_overlay.attention.prefix import KEY_DIM

SCALE = KEY_DIM**-0.5
TOPOLOGIES = ("chain", "star", "binary", "random")


def tree_parents(topology: str, nodes: int, seed: int = 0) -> list[int]:
    """Return a parent per node, −1 for the root, parents before children."""
    chance = random.Random(seed)
    parent_of: dict[str, Callable[[int], int]] = {
        "chain": lambda i: i - 1,
        "star": lambda i: 0,
        "binary": lambda i: (i - 1) // 2,
        "random": chance.randrange,
    }
    return [-1] + [parent_of[topology](i) for i in range(1, nodes)]


@dataclass(kw_only=True)
class VerifyCase:
    """One step's tensors, and what the float64 oracle says about it."""

    query: torch.Tensor  # [tokens, heads, 576]
    cache: torch.Tensor  # [slots, 1, 576], NaN wherever no request may look
    tree_slots: torch.Tensor  # [tokens] int64
    step: VerifyStep
    parents: list[list[int]]
    prefix_slots: list[torch.Tensor]
    cache_scale: float = 1.0

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        requests = len(self.parents)
        return tree_attention(
            self.query.cpu(),
            self.cache.cpu()[:, 0].double(),
            self.prefix_slots,
            self.tree_slots.cpu().view(requests, -1),
            [ancestor_mask(parents) for parents in self.parents],
            SCALE,
            self.cache_scale,
        )


def make_case(
    prefixes: list[int],
    topologies: list[str],
    nodes: int,
    heads: int,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    cache_scale: float = 1.0,
    page_size: int = 64,
    device: str = "cpu",
    poison: bool = True,
    strided: bool = False,
) -> VerifyCase:
    """Build a step: shuffled pages, each request's tree right behind its prefix."""
    generator = torch.Generator().manual_seed(seed)
    requests = len(prefixes)
    spans = [-(-(prefix + nodes) // page_size) for prefix in prefixes]
    pages = torch.randperm(sum(spans) + 3, generator=generator) + 1
    pool = (int(pages.max()) + 1) * page_size
    cache = torch.full((pool, 1, KEY_DIM), float("nan") if poison else 0.5)
    context = max(spans) * page_size
    # One row more than requests, and rows in reverse, so that a wrong row is a wrong answer.
    req_to_token = torch.zeros(requests + 1, context, dtype=torch.int32)
    prefix_slots, tree_slots, first = [], [], 0
    for request, prefix in enumerate(prefixes):
        own = pages[first : first + spans[request]]
        first += spans[request]
        slots = (own[:, None] * page_size + torch.arange(page_size)).reshape(-1)
        req_to_token[requests - request, : slots.numel()] = slots.int()
        prefix_slots.append(slots[:prefix])
        tree_slots.append(slots[prefix : prefix + nodes])
        used = slots[: prefix + nodes]
        cache[used, 0] = torch.randn(used.numel(), KEY_DIM, generator=generator)
    parents = [tree_parents(t, nodes, seed + i) for i, t in enumerate(topologies)]
    query = torch.randn(requests * nodes, heads, KEY_DIM, generator=generator) * 2.0
    if strided:
        wide = torch.zeros(requests * nodes, heads + 1, KEY_DIM + 8)
        wide[:, :heads, :KEY_DIM] = query
        query = wide[:, :heads, :KEY_DIM]
    return VerifyCase(
        query=query.to(device, dtype) if not strided else query,
        cache=cache.to(device, cache_dtype or dtype),
        tree_slots=torch.cat(tree_slots).to(device),
        step=VerifyStep(
            prefix_lens=torch.tensor(prefixes, dtype=torch.int64, device=device),
            request_rows=torch.arange(requests, 0, -1, device=device),
            req_to_token=req_to_token.to(device),
            parents=torch.tensor(parents, dtype=torch.int32, device=device),
        ),
        parents=parents,
        prefix_slots=prefix_slots,
        cache_scale=cache_scale,
    )


def full_mask(prefixes: list[int], parents: list[list[int]]) -> torch.Tensor:
    """Return SGLang's flat FULL_MASK: per request nodes × (prefix + nodes), prefix columns True."""
    chunks = []
    for prefix, tree in zip(prefixes, parents, strict=True):
        ones = torch.ones(len(tree), prefix, dtype=torch.bool)
        chunks.append(torch.cat([ones, ancestor_mask(tree)], dim=1).flatten())
    return torch.cat(chunks)
