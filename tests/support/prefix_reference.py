"""REFERENCE prefix engine in torch, for tests on a CPU: no product code, no stand-in for speed.

It honours the whole contract of `sglang_overlay.attention.prefix.PrefixEngine`, page table
included, and refuses what the contract excludes.
"""

from __future__ import annotations

import torch
from sglang_overlay.attention.prefix import KEY_DIM, LATENT_DIM, PrefixResult


class ReferencePrefixEngine:
    def __init__(self, *, page_size: int = 64) -> None:
        self.page_size = page_size
        self.planned_rows = 0

    def plan(self, lengths: torch.Tensor, page_table: torch.Tensor, rows: int) -> None:
        assert int(lengths.min()) >= 1, "an engine is never asked for an empty row"
        self.lengths, self.page_table, self.planned_rows = lengths, page_table, rows

    def run(
        self, query: torch.Tensor, cache: torch.Tensor, softmax_scale: float, cache_scale: float
    ) -> PrefixResult:
        tokens, heads, _ = query.shape
        requests = self.lengths.shape[0]
        nodes = tokens // requests
        assert nodes * heads == self.planned_rows
        rows = cache.reshape(cache.shape[0], KEY_DIM)
        out = torch.empty(tokens, heads, LATENT_DIM, dtype=query.dtype)
        lse = torch.empty(tokens, heads, dtype=torch.float32)
        for request, length in enumerate(self.lengths.tolist()):
            position = torch.arange(length)
            page = self.page_table[request][position // self.page_size].long()
            keys = rows[page * self.page_size + position % self.page_size].double() * cache_scale
            own = slice(request * nodes, (request + 1) * nodes)
            scores = query[own].double() @ keys.T * softmax_scale  # [nodes, heads, length]
            natural = torch.logsumexp(scores, dim=-1)
            out[own] = (torch.exp(scores - natural[..., None]) @ keys[:, :LATENT_DIM]).to(out.dtype)
            lse[own] = natural.float()
        return PrefixResult(out=out, lse=lse)
