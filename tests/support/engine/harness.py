"""The SGLang plugin that makes the engine testable on a CPU (entry point ``sglang.srt.plugins``).

SGLang logs a plugin that raises and carries on without it. So this one ends its process instead,
and leaves a file for each process whose model it gave weights; drivers refuse a run without one per
rank.
"""

from __future__ import annotations

import os
import sys
import traceback
from functools import partial
from typing import Any

import torch

from tests.support.engine import adapter, drafts, faults, ngram, reference, steps, weights
from tests.support.engine.orders import Orders
from tests.support.engine.record import Record

EXIT_CODE = 70
_installed = False


def register() -> None:
    """Install everything in this process, once; end the process when that fails."""
    global _installed
    if _installed:
        return
    try:
        orders = Orders.read()
        if orders.fault == "broken-harness":
            raise RuntimeError("planted fault: the harness does not start")
        _install(orders)
    except BaseException:  # noqa: BLE001  SGLang would swallow it
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(EXIT_CODE)
    _installed = True


def is_active() -> bool:
    """Say whether `register` has run to its end in this process."""
    return _installed


def _install(orders: Orders) -> None:
    import sglang.srt.distributed.parallel_state as parallel
    import sglang.srt.layers.attention.flashinfer_mla_backend as flashinfer_mla
    import sglang.srt.model_executor.model_runner_kv_cache_mixin as pools
    import sglang.srt.model_loader.loader as loader
    import sglang.srt.models.dflash as dflash

    record = Record(orders.record)
    flashinfer_mla.BatchPrefillWithRaggedKVCacheWrapper = reference.RaggedPrefill
    flashinfer_mla.BatchMLAPagedAttentionWrapper = reference.PagedMLA
    loader.initialize_dummy_weights = partial(_fill_and_mark, record=record)
    # The registered operator behind the public method exists for CUDA only.
    group = parallel.GroupCoordinator
    group.all_gather_into_tensor = group._all_gather_into_tensor
    # The engine sizes its pools by free memory, which changes with whatever else the machine does.
    mixin = pools.ModelRunnerKVCacheMixin
    mixin._profile_available_bytes = lambda self, before: 1 << 30
    _keep_draft_embeddings_whole(dflash.DFlashDraftModel)
    # EAGLE's drafter waits for a GPU when it takes over the target's embeddings.
    torch.cuda.synchronize = _wait_for_nothing
    drafts.install(orders.known, shifted=orders.fault == "wrong-drafts")
    ngram.install(orders.known)
    steps.install(record)
    adapter.install()
    faults.install(orders.fault)


def _keep_draft_embeddings_whole(model: Any) -> None:
    """Undo the model runner's cast of draft embeddings to bfloat16: the CPU runs are float32."""
    stock = model.forward

    def forward(
        self: Any, input_ids: Any, positions: Any, forward_batch: Any, input_embeds: Any = None
    ) -> Any:
        if forward_batch.input_embeds is not None:
            input_embeds = forward_batch.input_embeds
        return stock(
            self, input_ids, positions, forward_batch, input_embeds.to(self.fc.weight.dtype)
        )

    model.forward = forward


def _wait_for_nothing(device: Any = None) -> None:
    """Stand in for ``torch.cuda.synchronize``."""


def _fill_and_mark(model: torch.nn.Module, *, record: Record) -> None:
    weights.fill(model)
    record.add_model()
