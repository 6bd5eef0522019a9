"""The tree of `build`, grown depth by depth with torch alone, for devices without Triton.

A depth keeps its first B nodes in the order of `build`, as places 0 … B − 1. A node under place i
with rank r has (i + 1)(r + 1) − 1 nodes of its depth before it, those under no later place with no
larger rank; so only pairs of product at most B can stay, B·ln B of them instead of B².
"""

from __future__ import annotations

import functools

import torch

from sglang_overlay.tree.layout import DraftTree


def grow(
    log_probs: torch.Tensor, candidates: torch.Tensor, root: torch.Tensor, out: DraftTree
) -> None:
    """Fill ``out``; shapes as in ``build.build_tree``."""
    requests, n = out.tokens.shape
    beam = n - 1
    out.tokens[:, 0] = root
    out.parents[:, 0] = -1
    out.depths[:, 0] = 0
    if beam == 0:
        return
    scores, places, ranks = _levels(_descending(log_probs), beam)

    # Flat by depth, then by place: a stable sort leaves ties in the order of `build`.
    depth = log_probs.shape[1]
    order = scores.view(requests, -1).sort(dim=1, descending=True, stable=True)
    taken, score = order.indices[:, :beam], order.values[:, :beam]
    at = taken // beam
    node = torch.arange(1, n, device=root.device).expand(requests, -1)
    node_of = torch.zeros(requests, depth * beam, dtype=torch.int64, device=root.device)
    node_of.scatter_(1, taken, node)
    parent_place = places.view(requests, -1).gather(1, taken)
    parent_flat = ((at - 1) * beam + parent_place).clamp_(min=0)
    parent = torch.where(at > 0, node_of.gather(1, parent_flat), 0)
    rank = ranks.view(requests, -1).gather(1, taken)
    width = log_probs.shape[2]
    token = candidates.reshape(requests, -1).gather(1, at * width + rank)

    drafted = score > float("-inf")
    out.tokens[:, 1:] = torch.where(drafted, token, root[:, None])
    out.parents[:, 1:] = torch.where(drafted, parent, -1)
    out.depths[:, 1:] = torch.where(drafted, at + 1, 0)


def _descending(log_probs: torch.Tensor) -> torch.Tensor:
    """Return the values that `build` takes odd ones for."""
    known = torch.where(log_probs.isnan(), float("-inf"), log_probs)
    return known.clamp(max=0.0).cummin(dim=2).values


def _levels(log_probs: torch.Tensor, beam: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return scores, parents' places and ranks of every depth, each [requests, depth, beam]."""
    requests, depth, width = log_probs.shape
    parent_place, rank = _pairs(beam, width)
    parent_place, rank = parent_place.to(log_probs.device), rank.to(log_probs.device)
    score = torch.full((requests, beam), float("-inf"), device=log_probs.device)
    score[:, 0] = 0.0  # the root stands where a depth's parents do
    levels = []
    for at in range(depth):
        reached = score[:, parent_place] + log_probs[:, at, rank]
        best = reached.sort(dim=1, descending=True, stable=True)
        score, taken = best.values[:, :beam], best.indices[:, :beam]
        levels.append((score, parent_place[taken], rank[taken]))
    scores, places, ranks = (torch.stack(part, dim=1) for part in zip(*levels, strict=True))
    return scores, places, ranks


@functools.lru_cache(maxsize=64)
def _pairs(beam: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the (place, rank) pairs that can stay, in the order of ties; at least ``beam``."""
    pairs = [
        (place, rank) for place in range(beam) for rank in range(min(width, beam // (place + 1)))
    ]
    places, ranks = zip(*pairs, strict=True)
    return torch.tensor(places), torch.tensor(ranks)
