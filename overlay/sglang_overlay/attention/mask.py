"""Packed ancestor masks, built on the device without a synchronisation.

``packed`` is [requests, nodes, ceil(nodes / 64)] int64; bit j % 64 of word j // 64 of row i says
that node i attends to node j. It is nodes × nodes bits, whatever the context.
"""

from __future__ import annotations

import torch
import triton

from sglang_overlay.attention.kernels.ancestors import pack_full_mask_kernel, pack_parents_kernel

MAX_NODES = 256
_MASK_ROWS = 16


def words_for(nodes: int) -> int:
    """Return how many 64-bit words one row of a mask over ``nodes`` nodes has."""
    return -(-nodes // 64)


def pack_parents(parents: torch.Tensor, packed: torch.Tensor) -> None:
    """Write every node's ancestors into ``packed``, from [requests, nodes] int32/int64 parents.

    A negative parent makes a root. The order of nodes is free. A parent ≥ nodes counts as a root's
    and a cycle ends after ``nodes`` steps: the values are on the device and cannot be refused here.

    Raises:
        ValueError: the shapes do not fit each other or the limit of 256 nodes.

    """
    requests, nodes = parents.shape
    _check_packed(packed, requests, nodes)
    if parents.stride(1) != 1:
        raise ValueError(
            f"parents: got stride {parents.stride(1)} between nodes, needed 1; pass .contiguous()"
        )
    words = words_for(nodes)
    rows = max(16, triton.next_power_of_2(nodes))
    pack_parents_kernel[(requests,)](
        parents,
        packed,
        nodes,
        parents.stride(0),
        packed.stride(0),
        ROWS=rows,
        WORDS=words,
        WORDS_PADDED=triton.next_power_of_2(words),
        num_warps=1 if rows <= 64 else 4,
    )


def pack_full_mask(
    full_mask: torch.Tensor, prefix_lens: torch.Tensor, packed: torch.Tensor, *, max_requests: int
) -> None:
    """Write the tree's corner of SGLang's FULL_MASK into ``packed``.

    ``full_mask`` is flat bool: per request nodes × (prefix + nodes), requests one behind the other
    (the layout that ``TritonAttnBackend`` indexes by its ``mask_indptr``). ``prefix_lens``
    [requests] int. Prefix columns are taken as True, as the stock kernel takes them.
    ``max_requests`` bounds the batch for the life of the caller, so that one compiled kernel serves
    every batch size.

    Raises:
        ValueError: the shapes do not fit each other, or the batch is larger than ``max_requests``.

    """
    requests = prefix_lens.shape[0]
    nodes = packed.shape[1]
    _check_packed(packed, requests, nodes)
    if full_mask.dtype is not torch.bool or not full_mask.is_contiguous():
        raise ValueError(
            f"full_mask: got {full_mask.dtype}, contiguous={full_mask.is_contiguous()}; needed a "
            "contiguous bool tensor; flatten it first"
        )
    if requests > max_requests:
        raise ValueError(
            f"prefix_lens: got {requests} requests, needed at most {max_requests}; "
            "raise max_requests"
        )
    words = words_for(nodes)
    pack_full_mask_kernel[(requests, words, -(-nodes // _MASK_ROWS))](
        full_mask.view(torch.uint8),
        full_mask.numel(),
        prefix_lens,
        packed,
        nodes,
        packed.stride(0),
        ROWS=_MASK_ROWS,
        WORDS=words,
        REQUESTS=triton.next_power_of_2(max_requests),
        num_warps=2,
    )


def _check_packed(packed: torch.Tensor, requests: int, nodes: int) -> None:
    if not 1 <= nodes <= MAX_NODES:
        raise ValueError(
            f"nodes: got {nodes}, needed 1 to {MAX_NODES}; choose a smaller draft tree"
        )
    needed = (requests, nodes, words_for(nodes))
    if tuple(packed.shape) != needed or packed.dtype is not torch.int64:
        raise ValueError(
            f"packed: got {tuple(packed.shape)} {packed.dtype}, needed {needed} torch.int64; "
            "take a view of the plan's buffer"
        )
    if packed.stride(2) != 1 or packed.stride(1) != packed.shape[2]:
        raise ValueError(
            f"packed: got strides {packed.stride()}, needed contiguous rows; slice requests only"
        )
