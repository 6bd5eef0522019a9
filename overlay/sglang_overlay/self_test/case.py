"""The tensors of one verify step: shuffled pages, a random tree behind each prefix, NaN elsewhere.

Everything is drawn on the CPU from a fixed seed, so a host gives the same case every time.
"""

from __future__ import annotations

import torch

from sglang_overlay.attention.oracle import ancestor_mask, tree_attention
from sglang_overlay.attention.plan import VerifyStep
from sglang_overlay.attention.prefix import KEY_DIM
from sglang_overlay.self_test.shapes import Shape

SOFTMAX_SCALE = KEY_DIM**-0.5


class Case:
    """One step of ``shape``; all tensors on ``device``.

    ``query`` [tokens, heads, 576], ``cache`` [slots, 1, 576], ``prefix_slots`` one [prefix] per
    request, ``tree_slots`` [requests, nodes], ``masks`` one [nodes, nodes] bool per request.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        page_size: int,
        query_dtype: torch.dtype,
        cache_dtype: torch.dtype,
        device: str,
    ) -> None:
        draw = torch.Generator().manual_seed(0)
        requests, nodes = len(shape.prefixes), shape.nodes
        spans = [-(-(prefix + nodes) // page_size) for prefix in shape.prefixes]
        # Page 0 is the pool's padding, and nobody's.
        pages = torch.randperm(sum(spans), generator=draw) + 1
        own = [
            (each[:, None] * page_size + torch.arange(page_size)).flatten()[: prefix + nodes]
            for each, prefix in zip(pages.split(spans), shape.prefixes, strict=True)
        ]
        cache = torch.full(((sum(spans) + 1) * page_size, 1, KEY_DIM), float("nan"))
        table = torch.zeros(requests, max(spans) * page_size, dtype=torch.int32)
        for request, slots in enumerate(own):
            cache[slots, 0] = torch.randn(slots.numel(), KEY_DIM, generator=draw)
            table[request, : slots.numel()] = slots.int()
        parents = (torch.rand(requests, nodes, generator=draw) * torch.arange(nodes)).int()
        parents[:, 0] = -1
        query = torch.randn(requests * nodes, shape.heads, KEY_DIM, generator=draw) * 2.0

        self.shape = shape
        self.query = query.to(device, query_dtype)
        self.cache = cache.to(device, cache_dtype)
        self.prefix_slots = [slots[:-nodes].to(device) for slots in own]
        self.tree_slots = torch.stack([slots[-nodes:] for slots in own]).to(device)
        self.masks = [ancestor_mask(tree).to(device) for tree in parents.tolist()]
        self.step = VerifyStep(
            prefix_lens=torch.tensor(shape.prefixes, device=device),
            request_rows=torch.arange(requests, device=device),
            req_to_token=table.to(device),
            parents=parents.to(device),
        )

    def expected(self) -> torch.Tensor:
        """Return the oracle's result, [tokens, heads, 512] float64."""
        rows = self.cache[:, 0]
        # Plain loops over heads and nodes: on a GPU they cost a second, on a CPU minutes.
        out, _ = tree_attention(
            self.query, rows, self.prefix_slots, self.tree_slots, self.masks, SOFTMAX_SCALE
        )
        return out
