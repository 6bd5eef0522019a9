"""Torch versions, in float32, of the CUDA kernels that the FlashMLA and FlashInfer backends call.

They stand in for missing hardware: the same arguments and results, no speed, and no numerics of the
real kernels. Plans (tile schedules, splits) are accepted and ignored, so only a GPU can show that a
plan was made for the wrong lengths.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    causal: bool,
    allowed: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one request; ``causal`` is aligned to the last row and the last column.

    ``allowed`` [rows, columns] bool says which pairs may be, where it is given.

    q [rows, heads, d], k [columns, heads or 1, d], v [columns, heads or 1, d_v]; returns the output
    [rows, heads, d_v] in q's dtype and the natural-log lse [heads, rows] in float32.
    """
    rows, heads, _ = q.shape
    columns = k.shape[0]
    keys = k.expand(columns, heads, k.shape[-1]).float()
    values = v.expand(columns, heads, v.shape[-1]).float()
    scores = torch.einsum("rhd,chd->hrc", q.float(), keys) * scale
    if causal:
        last = torch.arange(rows).unsqueeze(1) + (columns - rows)
        scores = scores.masked_fill(torch.arange(columns).unsqueeze(0) > last, float("-inf"))
    if allowed is not None:
        scores = scores.masked_fill(~allowed, float("-inf"))
    out = torch.einsum("hrc,chd->rhd", scores.softmax(-1), values)
    return out.to(q.dtype), scores.logsumexp(-1)


def get_mla_metadata(
    cache_seqlens: torch.Tensor, *args: object, **kwargs: object
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return an empty tile schedule and split table of the real shapes (int32)."""
    return (
        torch.zeros(1, 8, dtype=torch.int32),
        torch.arange(cache_seqlens.numel() + 1, dtype=torch.int32),
    )


def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    head_dim_v: int,
    tile_scheduler_metadata: torch.Tensor,
    num_splits: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dense MLA attention over a paged cache, one latent head for keys and values.

    q [b, s_q, h_q, d], k_cache [blocks, page, 1, d], block_table [b, max_blocks] int32 and
    cache_seqlens [b] int32; returns out [b, s_q, h_q, head_dim_v] and lse [b, h_q, s_q] (natural
    log; an empty row is all zero with lse +inf, as the CUDA kernel answers). The fp8 arguments are
    absent on purpose: this reference has no fp8.
    """
    batch, rows, heads, dim = q.shape
    blocks, page = k_cache.shape[:2]
    scale = dim**-0.5 if softmax_scale is None else softmax_scale
    out = q.new_zeros(batch, rows, heads, head_dim_v)
    lse = torch.full((batch, heads, rows), float("inf"))
    for index, length in enumerate(cache_seqlens.tolist()):
        if length == 0:
            continue
        used = block_table[index, : -(-length // page)].long()
        # The CUDA kernel would read foreign memory here; the reference must not hide that.
        if used.numel() * page < length or bool(((used < 0) | (used >= blocks)).any()):
            raise IndexError(f"block table row {index} does not cover {length} tokens: {used}")
        kv = k_cache[used].reshape(-1, 1, dim)[:length]
        out[index], lse[index] = attend(
            q[index], kv, kv[..., :head_dim_v], scale=scale, causal=causal
        )
    return out, lse


class RaggedPrefill:
    """Stands in for flashinfer's ``BatchPrefillWithRaggedKVCacheWrapper``."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        self._rows: list[int] = []
        self._columns: list[int] = []

    def begin_forward(
        self, *, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, **kwargs: object
    ) -> None:
        """Take the row and column offsets (int32 [b + 1]) of the coming calls."""
        self._rows, self._columns = qo_indptr.tolist(), kv_indptr.tolist()

    def forward_return_lse(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        causal: bool,
        sm_scale: float,
        **kwargs: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output [rows, heads, d_v] and the lse [rows, heads]."""
        parts = [
            attend(q[a:b], k[c:d], v[c:d], scale=sm_scale, causal=causal)
            for (a, b), (c, d) in zip(pairwise(self._rows), pairwise(self._columns), strict=True)
        ]
        return torch.cat([out for out, _ in parts]), torch.cat([lse.t() for _, lse in parts])

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the output alone."""
        return self.forward_return_lse(*args, **kwargs)[0]


class PagedMLA:
    """Stands in for flashinfer's ``BatchMLAPagedAttentionWrapper`` (page size 1)."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        self._plan: tuple[list[int], list[int], torch.Tensor, bool, float] | None = None

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        *dtypes: object,
    ) -> None:
        """Take offsets (int32 [b + 1]) and slots (int32 [columns]) of the coming calls."""
        if page_size != 1:
            raise ValueError(f"the reference knows page size 1 only, got {page_size}")
        self._plan = (
            qo_indptr.tolist(),
            kv_indptr.tolist(),
            kv_indices.long(),
            causal,
            sm_scale,
        )

    def run(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        ckv_cache: torch.Tensor,
        kpe_cache: torch.Tensor,
        *,
        out: torch.Tensor,
        **kwargs: object,
    ) -> torch.Tensor:
        """Fill ``out`` [rows, heads, d_ckv] with attention over the planned slots."""
        assert self._plan is not None, "run before plan"
        rows, columns, slots, causal, scale = self._plan
        q = torch.cat([q_nope, q_pe], dim=-1)
        for (a, b), (c, d) in zip(pairwise(rows), pairwise(columns), strict=True):
            latent = ckv_cache[slots[c:d]]
            keys = torch.cat([latent, kpe_cache[slots[c:d]]], dim=-1)
            out[a:b] = attend(q[a:b], keys, latent, scale=scale, causal=causal)[0]
        return out
