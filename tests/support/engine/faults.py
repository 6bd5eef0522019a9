"""Faults planted on purpose, to show that the comparisons of the bed are able to fail."""

from __future__ import annotations

from typing import Any

import torch


def install(fault: str) -> None:
    """Plant ``fault``; the ones that concern drafts or start-up are planted where those live."""
    if fault == "short-verify":
        _shorten_verify()
    elif fault == "lost-slot":
        _lose_a_slot()


def _shorten_verify() -> None:
    """Let each FlashMLA verify see one token less than it wrote: an off-by-one in its length."""
    import sglang.srt.layers.attention.flashmla_backend as backend

    stock = backend.flash_mla_with_kvcache

    def short(*, q: torch.Tensor, cache_seqlens: torch.Tensor, **kwargs: Any) -> Any:
        verifies = q.shape[1] > 1
        return stock(q=q, cache_seqlens=cache_seqlens - int(verifies), **kwargs)

    backend.flash_mla_with_kvcache = short


def _lose_a_slot() -> None:
    """Take one free page away from the allocator at the first verify, for good."""
    import sglang.srt.speculative.dflash_info as dflash_info

    verify_input = dflash_info.DFlashVerifyInput
    stock = verify_input.verify
    lost = False

    def verify(self: Any, *, batch: Any, **kwargs: Any) -> Any:
        nonlocal lost
        if not lost:
            allocator = batch.token_to_kv_pool_allocator
            allocator.free_pages = allocator.free_pages[1:]
            lost = True
        return stock(self, batch=batch, **kwargs)

    verify_input.verify = verify
