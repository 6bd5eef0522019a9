"""The decorators on the methods of SGLang's attention backends: each asks `tree_verify` first.

``FlashMLABackend`` and ``TritonAttnBackend`` give these methods the same arguments.

Apart from `hooks`, because this module imports torch and the kernels; the file that imports it has
torch already. With ``SGLANG_OVERLAY_DISABLE=1`` every decorator returns SGLang's own method.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch

from sglang_overlay.srt import graph_mask, graph_table, tree_verify
from sglang_overlay.srt.hooks import Function, unless_disabled


def eager_metadata(stock: Function) -> Function:
    """Decorate ``init_forward_metadata``: prepare a verify step that runs without a graph."""

    @functools.wraps(stock)
    def init(backend: Any, forward_batch: Any) -> Any:
        verify = tree_verify.of(backend, forward_batch.forward_mode)
        if verify is None:
            return stock(backend, forward_batch)
        return verify.prepare(
            forward_batch.req_pool_indices, forward_batch.seq_lens, forward_batch.spec_info
        )

    return unless_disabled(stock, init)


def graph_buffers(stock: Function) -> Function:
    """Decorate ``init_cuda_graph_state``: a page table that holds the drafts of a full context."""

    @functools.wraps(stock)
    def init(backend: Any, max_bs: int, max_num_tokens: int, block_kv_indices: Any = None) -> Any:
        if block_kv_indices is None:
            block_kv_indices = graph_table.wide_enough(backend, max_bs)
        return stock(backend, max_bs, max_num_tokens, block_kv_indices)

    return unless_disabled(stock, init)


def graph_state(stock: Function) -> Function:
    """Decorate ``init_cuda_graph_state`` of ``TritonAttnBackend``: buffers of the right size.

    None that nobody reads, and a mask that holds the drafts of a full context.
    """

    @functools.wraps(stock)
    def init(backend: Any, max_bs: int, max_num_tokens: int, *args: Any, **named: Any) -> Any:
        tokens = tree_verify.graph_tokens(backend, max_bs, max_num_tokens)
        state = stock(backend, max_bs, tokens, *args, **named)
        if tokens == max_num_tokens:
            graph_mask.lengthen(backend, tokens)
        return state

    return unless_disabled(stock, init)


def capture_metadata(stock: Function) -> Function:
    """Decorate ``init_forward_metadata_capture_cuda_graph``: replays bring the topology."""

    @functools.wraps(stock)
    def init(
        backend: Any,
        bs: int,
        num_tokens: int,
        req_pool_indices: Any,
        seq_lens: Any,
        encoder_lens: Any,
        forward_mode: Any,
        spec_info: Any,
    ) -> Any:
        verify = tree_verify.of(backend, forward_mode)
        if verify is None:
            return stock(
                backend,
                bs,
                num_tokens,
                req_pool_indices,
                seq_lens,
                encoder_lens,
                forward_mode,
                spec_info,
            )
        return verify.prepare(req_pool_indices[:bs], seq_lens[:bs])

    return unless_disabled(stock, init)


def replay_metadata(stock: Function) -> Function:
    """Decorate ``init_forward_metadata_replay_cuda_graph``: prepare a step for a captured graph."""

    @functools.wraps(stock)
    def init(
        backend: Any,
        bs: int,
        req_pool_indices: Any,
        seq_lens: Any,
        seq_lens_sum: int,
        encoder_lens: Any,
        forward_mode: Any,
        spec_info: Any,
        seq_lens_cpu: Any,
    ) -> Any:
        verify = tree_verify.of(backend, forward_mode)
        if verify is None:
            return stock(
                backend,
                bs,
                req_pool_indices,
                seq_lens,
                seq_lens_sum,
                encoder_lens,
                forward_mode,
                spec_info,
                seq_lens_cpu,
            )
        return verify.prepare(req_pool_indices[:bs], seq_lens[:bs], spec_info)

    return unless_disabled(stock, init)


def forward_extend(stock: Function) -> Function:
    """Decorate ``forward_extend``: attend in a verify step.

    SGLang's MLA models hand the rope parts of queries and keys over apart, or not, by the name of
    the target's backend. EAGLE's drafter may have another one: on Triton beside FlashInfer it ended
    in a TypeError at the first prompt with a cached prefix. Parts that ``stock`` does not take
    apart are joined.
    """
    takes_rope = "q_rope" in inspect.signature(stock).parameters

    @functools.wraps(stock)
    def forward(
        backend: Any,
        q: Any,
        k: Any,
        v: Any,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **others: Any,
    ) -> Any:
        verify = tree_verify.of(backend, forward_batch.forward_mode)
        if not takes_rope and others.get("q_rope") is not None:
            q = _join(q, others.pop("q_rope"), layer.tp_q_head_num)
            k = _join(k, others.pop("k_rope"), layer.tp_k_head_num)
        if verify is None:
            return stock(backend, q, k, v, layer, forward_batch, save_kv_cache, **others)
        return verify.attend(q, k, v, layer, forward_batch, save_kv_cache, **others)

    return unless_disabled(stock, forward)


def _join(latent: torch.Tensor, rope: torch.Tensor, heads: int) -> torch.Tensor:
    """Return [tokens, heads, latent + rope] from both parts, each [tokens, heads × width] or so."""
    rows = latent.shape[0]
    return torch.cat([latent.view(rows, heads, -1), rope.view(rows, heads, -1)], dim=-1)
