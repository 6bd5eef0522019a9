"""Launcher of the tree block and merge: check, choose tiles, launch.

The tree's rows are read from the cache, through their slots, not from the fresh projection: these
are the very bits that later decode steps will read, rounded to the cache's dtype, so that verifying
a node and decoding it see the same keys. It also works when the caller has stored the rows already
and holds no key tensor any more. The query keeps its dtype here, also where an engine quantises it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton

from sglang_overlay.attention.kernels.tree_merge import tree_merge_kernel
from sglang_overlay.attention.mask import words_for
from sglang_overlay.attention.prefix import (
    KEY_DIM,
    LATENT_DIM,
    ROPE_DIM,
    PrefixParts,
    PrefixResult,
)

_LOG2_E = 1.4426950408889634


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """Launch shape of the kernel.

    ``rows`` (node, head) pairs and ``values`` output columns per program. Scores walk the latent
    columns ``key_chunk`` at a time, outputs ``value_chunk`` at a time, ``stages`` chunks in flight;
    ``warps`` per program.
    """

    rows: int
    values: int
    key_chunk: int
    value_chunk: int
    warps: int
    stages: int = 1

    def __post_init__(self) -> None:
        if (
            LATENT_DIM % self.key_chunk
            or self.values % self.value_chunk
            or LATENT_DIM % self.values
        ):
            raise ValueError(
                f"tiles: got {self}; needed key_chunk and values to divide {LATENT_DIM}, and "
                "value_chunk to divide values"
            )


def choose_tiles(
    requests: int, nodes: int, heads: int, *, parts: bool = False, roomy: bool = True
) -> Tiles:
    """Return the tiles for a batch; a function of sizes that are fixed when a graph is captured.

    Small launches are bound by latency and want many programs with everything in flight at once,
    large ones by traffic and want tall tiles that reuse the tree's rows. Where the prefix is in
    ``parts``, a small launch has them to combine as well, and wants more programs still. Thresholds
    measured on an H200. ``roomy`` is False where a block has less than 128 KiB of shared memory, as
    on sm_86, sm_89 and sm_120: the tallest tiles would not fit there.
    """
    rows = requests * nodes * heads
    if parts and nodes <= 16 and rows <= 512:
        return _tiles(16, 32, 512, 32, warps=4)
    if nodes <= 16:
        if rows >= 8192:
            return _tiles(16, 512, 128, 128, warps=2, stages=3)
        width = 128 if rows <= 512 else 256 if rows <= 2048 else 512
        return _tiles(16, width, 512, width, warps=4)
    if nodes <= 64 and rows <= 512:
        return _tiles(16, 128, 256, 128, warps=4, stages=2)
    if nodes <= 64 and rows <= 1024:
        return _tiles(16, 256, 256, 256, warps=4, stages=2)
    if nodes <= 32:
        return _tiles(16, 512, 128, 128, warps=2, stages=3)
    if nodes <= 64 and rows <= 8192:
        return _tiles(16, 512, 128, 128, warps=4, stages=3)
    if rows <= 4096:
        return _tiles(16, 512, 64, 64, warps=4, stages=3)
    if nodes <= 128:
        return _tiles(64, 512, 64, 64, warps=4, stages=3)
    if not roomy:
        return _tiles(64, 512, 64, 64, warps=8, stages=2)
    return _tiles(128, 512, 64, 64, warps=8, stages=3)


@functools.cache
def is_roomy(device: torch.device) -> bool:
    """Return whether a block on ``device`` has 128 KiB of shared memory; no GPU sets no limit."""
    if device.type != "cuda":
        return True
    properties = torch.cuda.get_device_properties(device)
    return bool(properties.shared_memory_per_block_optin >= 128 << 10)


def _tiles(
    rows: int, values: int, key_chunk: int, value_chunk: int, *, warps: int, stages: int = 1
) -> Tiles:
    return Tiles(
        rows=rows,
        values=values,
        key_chunk=key_chunk,
        value_chunk=value_chunk,
        warps=warps,
        stages=stages,
    )


def merge_tree(
    query: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    ancestors: torch.Tensor,
    lengths: torch.Tensor,
    prefix: PrefixResult | PrefixParts,
    out: torch.Tensor,
    *,
    softmax_scale: float,
    cache_scale: float = 1.0,
    tiles: Tiles | None = None,
) -> None:
    """Write attention over prefix ∪ ancestors into ``out`` [tokens, heads, 512], each row once.

    ``query`` [tokens, heads, 576]; ``cache`` [slots, 1, 576] or [slots, 576] in the query's dtype
    or fp8; ``slots`` [tokens] int32/int64, the cache rows of the tree's nodes; ``ancestors``
    [requests, nodes, words] as in `mask`; ``lengths`` [requests] int32 of the prefixes; tokens =
    requests × nodes. ``out`` may be ``prefix.out`` itself: every element is read and written by the
    same program. Last dimensions must be contiguous.

    The launch is an ordinary one, not a programmatic dependent launch: FlashMLA's combine kernel
    leaves early, without waiting, where no request was split, so waiting for it would not wait for
    the prefix.

    Method: the partial softmax merge of Dao et al., arXiv 2205.14135, appendix B.

    Raises:
        ValueError: shapes, strides or dtypes do not fit.

    """
    requests, nodes, words = ancestors.shape
    heads = query.shape[1]
    _check(query, cache, slots, ancestors, lengths, prefix, out)
    in_parts = isinstance(prefix, PrefixParts)
    tiles = tiles or choose_tiles(
        requests, nodes, heads, parts=in_parts, roomy=is_roomy(query.device)
    )
    grid = (-(-nodes * heads // tiles.rows), requests, LATENT_DIM // tiles.values)
    tree_merge_kernel[grid](
        query,
        cache,
        slots,
        ancestors.view(torch.int32),
        lengths,
        prefix.out,
        prefix.lse,
        prefix.first if isinstance(prefix, PrefixParts) else lengths,
        out,
        softmax_scale * cache_scale * _LOG2_E,
        cache_scale,
        query.stride(0),
        query.stride(1),
        cache.stride(0),
        2 * ancestors.stride(0),
        *_strides(prefix),
        out.stride(0),
        out.stride(1),
        NODES=nodes,
        HEADS=heads,
        HALF_WORDS=2 * words,
        LATENT=LATENT_DIM,
        ROPE=ROPE_DIM,
        ROWS=tiles.rows,
        COLUMNS=max(16, triton.next_power_of_2(nodes)),
        VALUES=tiles.values,
        KEY_CHUNK=tiles.key_chunk,
        VALUE_CHUNK=tiles.value_chunk,
        PARTS=in_parts,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )


def _strides(prefix: PrefixResult | PrefixParts) -> tuple[int, int, int, int, int, int]:
    """Return (token, head, part) strides of the outputs and of the lse."""
    out, lse = prefix.out.stride(), prefix.lse.stride()
    if isinstance(prefix, PrefixParts):
        return out[1], out[2], out[0], lse[1], lse[2], lse[0]
    return out[0], out[1], 0, lse[0], lse[1], 0


def _check(
    query: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    ancestors: torch.Tensor,
    lengths: torch.Tensor,
    prefix: PrefixResult | PrefixParts,
    out: torch.Tensor,
) -> None:
    requests, nodes, words = ancestors.shape
    tokens, heads, _ = query.shape
    if isinstance(prefix, PrefixParts):
        leading: tuple[int, ...] = (prefix.lse.shape[0], nodes, heads)
    else:
        leading = (tokens, heads)
    needed = {
        "query": (tuple(query.shape), (requests * nodes, heads, KEY_DIM)),
        "cache": (cache.shape[-1], KEY_DIM),
        "slots": (tuple(slots.shape), (tokens,)),
        "lengths": (tuple(lengths.shape), (requests,)),
        "ancestors": (words, words_for(nodes)),
        "prefix.out": (tuple(prefix.out.shape), (*leading, LATENT_DIM)),
        "prefix.lse": (tuple(prefix.lse.shape), leading),
        "out": (tuple(out.shape), (tokens, heads, LATENT_DIM)),
    }
    for name, (got, want) in needed.items():
        if got != want:
            raise ValueError(f"{name}: got {got}, needed {want}; see merge_tree's shapes")
    last = {"query": query, "cache": cache, "prefix.out": prefix.out, "out": out, "slots": slots}
    for name, tensor in last.items():
        if tensor.stride(-1) != 1:
            raise ValueError(
                f"{name}: got stride {tensor.stride(-1)} in the last dimension, needed 1; "
                "pass a tensor whose rows are contiguous"
            )
