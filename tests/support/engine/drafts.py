"""Known-good drafts: random models accept next to nothing, so most of a verify would go untested.

For a prompt with a known continuation the drafter's tokens are replaced where they leave its head,
so the rest of the engine sees them as its own. The number of good tokens runs through
0 .. block - 1, so commits of every length happen; the tokens after them are wrong on purpose.
"""

from __future__ import annotations

from typing import Any

import torch

from tests.support.engine.models import VOCABULARY
from tests.support.engine.orders import Known


def install(known: Known, *, shifted: bool = False) -> None:
    """Make DFLASH propose ``known``; ``shifted`` plants a fault: each token comes one too early."""
    import sglang.srt.speculative.dflash_worker as dflash_worker

    if not known:
        return
    worker = dflash_worker.DFlashWorker
    stock_prepare = worker._prepare_for_speculative_decoding
    stock_sample = worker._greedy_sample_from_vocab_parallel_head
    continuations = dict(known)
    drafted = 0
    requests: list[Any] = []

    def prepare(self: Any, batch: Any, draft_input: Any) -> Any:
        requests[:] = batch.reqs
        return stock_prepare(self, batch, draft_input)

    def sample(self: Any, **kwargs: Any) -> torch.Tensor:
        nonlocal drafted
        tokens: torch.Tensor = stock_sample(self, **kwargs)
        rows = tokens.view(len(requests), -1)
        for offset, (row, request) in enumerate(zip(rows, requests, strict=True)):
            tail = continuations.get(tuple(request.origin_input_ids), ())
            good = (drafted + offset) % (rows.shape[1] + 1)
            _overwrite(row, tail[len(request.output_ids) + shifted :], good)
        drafted += 1
        return tokens

    worker._prepare_for_speculative_decoding = prepare
    worker._greedy_sample_from_vocab_parallel_head = sample


def _overwrite(row: torch.Tensor, tail: tuple[int, ...], good: int) -> None:
    """Put ``good`` tokens of ``tail`` into ``row`` (int64 [block - 1]) and then a wrong one."""
    for index, token in enumerate(tail[: row.numel()]):
        row[index] = token if index < good else (token + 1) % VOCABULARY
