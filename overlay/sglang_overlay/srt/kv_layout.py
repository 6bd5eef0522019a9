"""Where SGLang's tokens lie: the radix cache and the running requests as `metrics` wants them.

Reading the layout copies indices to the host, which waits for the device: for idle moments, and for
an operator who asks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sglang_overlay import upstream
from sglang_overlay.kvcache.metrics import NOTHING, Piece, Units, free_space, layout

# The block of the aligned share: the page of the kernels that need one.
BLOCK = 64


@dataclass(frozen=True, kw_only=True)
class Cached:
    """The cached nodes, parents first, in the order in which they were inserted.

    ``parents`` are positions in ``nodes``; `NOTHING` for one whose parent is not among them.
    """

    nodes: Sequence[Any]
    parents: Sequence[int]

    def pieces(self, page_size: int) -> list[Piece]:
        """Return a piece per node."""
        if not self.nodes:
            return []
        values = torch.cat([node.value for node in self.nodes]).cpu().numpy()
        ends = np.cumsum([len(node.value) for node in self.nodes])[:-1]
        units = [to_units(part, page_size) for part in np.split(values, ends)]
        return [
            Piece(units=mine, after=NOTHING if parent == NOTHING else int(units[parent][-1]))
            for mine, parent in zip(units, self.parents, strict=True)
        ]

    def part(self, first: int, stop: int) -> Cached:
        """Return the nodes from number ``first`` on, before ``stop``."""
        return Cached(
            nodes=self.nodes[first:stop],
            parents=[max(parent - first, NOTHING) for parent in self.parents[first:stop]],
        )


def to_units(slots: Units, page_size: int) -> Units:
    """Return the units of ``slots`` [n] int64, whose pages are whole but for the last."""
    return slots[::page_size] // page_size


def cached(tree_cache: Any, *, unlocked: bool = False) -> Cached:
    """Return the nodes of a ``RadixCache``; with ``unlocked`` those that no request holds.

    Nodes that are on the host only, as HiCache has them, are none of these.
    """
    nodes: list[Any] = []
    parents: list[int] = []
    stack = [(child, NOTHING) for child in tree_cache.root_node.children.values()]
    while stack:
        node, parent = stack.pop()
        mine = NOTHING
        if node.value is not None and not (unlocked and node.lock_ref):
            mine = len(nodes)
            nodes.append(node)
            parents.append(parent)
        stack += [(child, mine) for child in node.children.values()]
    return Cached(nodes=nodes, parents=parents)


def free_units(allocator: Any) -> Units:
    """Return the free units [f] int64, ascending."""
    listed = torch.cat((allocator.free_pages, allocator.release_pages))
    units: Units = listed.sort().values.cpu().numpy()
    return units


def running(requests: Sequence[Any], req_to_token: torch.Tensor, page_size: int) -> list[Piece]:
    """Return a piece per running request: all of its committed tokens, cached ones included."""
    held = [(one.req_pool_idx, one.kv_committed_len) for one in requests]
    rows = [req_to_token[row, :length] for row, length in held if row is not None]
    return [Piece(units=to_units(row.cpu().numpy().astype(np.int64), page_size)) for row in rows]


def describe(scheduler: Any, *, requests: bool = True) -> dict[str, float]:
    """Return the layout of ``scheduler`` in numbers, named as in server info and the metrics.

    ``…_tokens_per_run`` and ``largest_free_run``, ``high_water`` in tokens; shares in 0 … 1. Those
    of cached tokens are left out for a cache whose nodes are not known, those of running
    ``requests`` where nobody wants them.
    """
    allocator, cache = scheduler.token_to_kv_pool_allocator, scheduler.tree_cache
    page = allocator.page_size
    found: dict[str, float] = {}
    kinds: dict[str, list[Piece]] = {}
    if upstream.has_known_nodes(cache):
        kinds["cached"] = cached(cache).pieces(page)
    if requests:
        table = scheduler.req_to_token_pool.req_to_token
        kinds["running"] = running(scheduler.running_batch.reqs, table, page)
    for kind, pieces in kinds.items():
        lies = layout(pieces, block=max(BLOCK // page, 1))
        found[f"{kind}_tokens_per_run"] = lies.units_per_run * page
        found[f"{kind}_aligned_share"] = lies.aligned_share
    free = free_space(free_units(allocator), units=allocator.size // page)
    return found | {
        "free_tokens": free.units * page,
        "largest_free_run": free.largest_run * page,
        "high_water": free.high_water * page,
    }
