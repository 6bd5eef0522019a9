"""STAND-IN for the attention kernels of a verify, in torch float32: the interpreter is too slow.

A step in Triton's interpreter takes seconds, and what a test of DDTREE is about lies around the
attention. The kernels themselves run in `tests/engine/test_adapter.py` and in the runs of
`tests/engine/test_ddtree.py` that do not call `quicken`. One difference: the reference takes a mask
whose rows are in any order, the Triton kernel stops at the causal block's end.
"""

from __future__ import annotations

from typing import Any

import torch

from tests.support.engine.reference import attend


def quicken(bed: Any) -> None:
    """Let target and drafter of the scheduler in ``bed`` attend by torch from now on."""
    scheduler = bed.scheduler
    drafter = getattr(scheduler.draft_worker, "draft_model_runner", None)
    for runner in filter(None, (scheduler.tp_worker.model_runner, drafter)):
        if hasattr(runner.attn_backend, "extend_attention_fwd"):
            runner.attn_backend.extend_attention_fwd = extend
    from sglang_overlay.attention import adapter

    names: Any = adapter
    names.merge_tree = merge_tree


def extend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    custom_mask: torch.Tensor | None,
    is_causal: bool,
    mask_indptr: torch.Tensor | None,
    max_len_extend: int,
    k_scale: float,
    v_scale: float,
    sm_scale: float | None = None,
    **unused: Any,
) -> None:
    """Do what SGLang's ``extend_attention_fwd`` does: prefix from the buffers, the rest fresh."""
    rows, columns = qo_indptr.tolist(), kv_indptr.tolist()
    for index in range(len(rows) - 1):
        own = slice(rows[index], rows[index + 1])
        slots = kv_indices[columns[index] : columns[index + 1]].long()
        # Without a prefix an MLA model brings whole heads, which the latent buffers do not have.
        keys = torch.cat([k_buffer[slots], k[own]]) if slots.numel() else k[own]
        values = torch.cat([v_buffer[slots], v[own]]) if slots.numel() else v[own]
        nodes, width = own.stop - own.start, keys.shape[0]
        allowed = None
        if custom_mask is not None:
            assert mask_indptr is not None
            start = int(mask_indptr[index])
            flat = custom_mask[start : start + nodes * width].bool()
            allowed = flat.view(nodes, width).clone()
            allowed[:, : slots.numel()] = True
        group = q.shape[1] // k.shape[1]
        out[own] = attend(
            q[own],
            keys.repeat_interleave(group, dim=1),
            values.repeat_interleave(group, dim=1),
            scale=sm_scale or q.shape[-1] ** -0.5,
            causal=is_causal and allowed is None,
            allowed=allowed,
        )[0]


def merge_tree(
    query: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    ancestors: torch.Tensor,
    lengths: torch.Tensor,
    prefix: Any,
    out: torch.Tensor,
    *,
    softmax_scale: float,
    cache_scale: float = 1.0,
) -> None:
    """Do what the overlay's ``merge_tree`` does; shapes as there."""
    requests, nodes, _ = ancestors.shape
    bit = torch.arange(nodes)
    seen = (ancestors[:, :, bit // 64] >> (bit % 64)) & 1
    for index in range(requests):
        own = slice(index * nodes, (index + 1) * nodes)
        keys = cache[slots[own].long()].view(nodes, 1, -1).float()
        tree, lse = attend(
            query[own],
            keys,
            keys[..., :512],
            scale=softmax_scale,
            causal=False,
            allowed=seen[index].bool(),
        )
        if not lengths[index]:
            out[own] = tree
            continue
        # FlashMLA attends to a prefix at once, the portable engine in parts.
        if hasattr(prefix, "first"):
            held = slice(*prefix.first[index : index + 2].tolist())
            outs, parts = prefix.out[held], prefix.lse[held]
        else:
            outs, parts = prefix.out[own][None], prefix.lse[own][None]
        both = torch.cat([parts, lse.t()[None]])
        share = (both - both.logsumexp(0)).exp()[..., None]
        out[own] = (share * torch.cat([outs.float(), tree[None]])).sum(0)
