"""Faults planted on purpose, to show that the comparisons of the bed are able to fail."""

from __future__ import annotations

import hashlib
import os
from typing import Any
from unittest import mock

import torch

# After one that moved something comes another, until one finds nothing to do.
PASSES = ("scattered", "gathered", "gathered", "open window", "failed", "gathered")


def install(fault: str) -> None:
    """Plant ``fault``; the ones that concern drafts or start-up are planted where those live."""
    if fault == "short-verify":
        _shorten_verify()
    elif fault == "lost-slot":
        _lose_a_slot()
    elif fault == "restless-slots":
        _move_without_need()


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


def _move_without_need() -> None:
    """Let the passes of KV compaction that find something cached go by `PASSES`, the last for ever.

    Each tells on stderr what it left: `pass of <process>: <which> <tokens moved> <digest>`.
    """
    from sglang_overlay.kvcache import planner
    from sglang_overlay.srt import kv_compaction, kv_report
    from sglang_overlay.srt.kv_compaction import Compactor
    from sglang_overlay.srt.kv_layout import cached

    kv_compaction.IDLE_PAUSE, kv_report.INTERVAL = 0, 0.0
    stock = Compactor._pass
    left = list(PASSES)

    def scatter(pieces: Any, parents: Any, free: Any, **_: Any) -> list[planner.Move]:
        spread, moves = free[::-1], []
        for index, piece in enumerate(pieces):
            size = len(piece.units)
            if size <= len(spread):
                moves.append(planner.Move(piece=index, destination=spread[:size].copy()))
                spread = spread[size:]
        return moves

    def fail(*_: Any) -> None:
        raise RuntimeError("planted: a copy fails")

    def one_pass(self: Any) -> int:
        nodes = cached(self._tree_cache).nodes
        if not nodes:
            return stock(self)
        which = left.pop(0) if len(left) > 1 else left[0]
        if which == "open window":
            state = self._allocator.backup_state()
            moved = stock(self)
            self._allocator.restore_state(state)
        elif which == "gathered":
            moved = stock(self)
        else:
            movers = [fail] if which == "failed" else self._movers
            with (
                mock.patch.object(planner, "plan", scatter),
                mock.patch.object(self, "_movers", movers),
            ):
                moved = stock(self)
        slots = torch.cat([node.value for node in cached(self._tree_cache).nodes])
        digest = hashlib.sha256(slots.numpy().tobytes()).hexdigest()[:16]
        # In one piece: other ranks write to the same file.
        os.write(2, f"\npass of {os.getpid()}: {which} {moved} {digest}\n".encode())
        return moved

    Compactor._pass = one_pass  # type: ignore[method-assign]
