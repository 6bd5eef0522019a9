"""The decorators for KV slots, apart from `hooks`: the files that import this one have torch.

With ``SGLANG_OVERLAY_DISABLE=1`` every decorator returns SGLang's own function.
"""

from __future__ import annotations

import functools
from typing import Any

from sglang_overlay.srt import kv_slots
from sglang_overlay.srt.hooks import Function, unless_disabled


def memory_pool(stock: Function) -> Function:
    """Decorate ``ModelRunner.init_memory_pool``: give the target a placing allocator."""

    @functools.wraps(stock)
    def init(model_runner: Any, pre_model_load_memory: Any) -> None:
        stock(model_runner, pre_model_load_memory)
        if not model_runner.is_draft_worker:
            kv_slots.start_placement(model_runner)

    return unless_disabled(stock, init)


def cache(stock: Function) -> Function:
    """Decorate ``Scheduler.init_cache_with_memory_pool``: start compaction, and the report."""

    @functools.wraps(stock)
    def init(scheduler: Any) -> None:
        stock(scheduler)
        kv_slots.start(scheduler)

    return unless_disabled(stock, init)


def extend_slots(stock: Function) -> Function:
    """Decorate ``alloc_for_extend``: say which request each of the slots is for."""

    @functools.wraps(stock)
    def alloc(batch: Any) -> Any:
        with kv_slots.extending(batch):
            return stock(batch)

    return unless_disabled(stock, alloc)


def decode_slots(stock: Function) -> Function:
    """Decorate ``alloc_for_decode``: the same."""

    @functools.wraps(stock)
    def alloc(batch: Any, token_per_req: int) -> Any:
        with kv_slots.growing(batch, token_per_req):
            return stock(batch, token_per_req)

    return unless_disabled(stock, alloc)


def verify_slots(stock: Function) -> Function:
    """Decorate ``DFlashVerifyInput.prepare_for_verify``: the same."""

    @functools.wraps(stock)
    def prepare(verify_input: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        with kv_slots.growing(batch, verify_input.draft_token_num):
            return stock(verify_input, batch, *args, **kwargs)

    return unless_disabled(stock, prepare)


def window_slots(stock: Function) -> Function:
    """Decorate ``DFlashWorker._prepare_for_speculative_decoding``: say whose step a window is for.

    Its slots are those of the verify behind it then, if that is for as many tokens. On pages they
    also depend on the lengths, which a compact draft cache has of its own.
    """

    @functools.wraps(stock)
    def prepare(worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if worker.use_compact_draft_cache and worker.page_size > 1:
            return stock(worker, batch, *args, **kwargs)
        with kv_slots.growing(batch, worker.server_args.speculative_num_draft_tokens):
            return stock(worker, batch, *args, **kwargs)

    return unless_disabled(stock, prepare)


def idle(stock: Function) -> Function:
    """Decorate ``Scheduler.on_idle``: compact, and let SGLang's own checks look at the outcome."""

    @functools.wraps(stock)
    def on_idle(scheduler: Any) -> None:
        kv_slots.compact_idle(scheduler)
        stock(scheduler)

    return unless_disabled(stock, on_idle)


def next_batch(stock: Function) -> Function:
    """Decorate ``Scheduler.get_next_batch_to_run``: compact what no running request uses."""

    @functools.wraps(stock)
    def get(scheduler: Any) -> Any:
        kv_slots.compact_live(scheduler)
        return stock(scheduler)

    return unless_disabled(stock, get)
