"""Known-good drafts: random models accept next to nothing, so most of a verify would go untested.

For a prompt with a known continuation the drafter's tokens are replaced where they leave its head,
so the rest of the engine sees them as its own. The number of good tokens runs through
0 .. block - 1, so commits of every length happen; the tokens after them are wrong on purpose.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
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
    if importlib.util.find_spec("sglang_overlay") is not None:
        _install_marginals(continuations, requests)


def _overwrite(row: torch.Tensor, tail: tuple[int, ...], good: int) -> None:
    """Put ``good`` tokens of ``tail`` into ``row`` (int64 [block - 1]) and then a wrong one."""
    for index, token in enumerate(tail[: row.numel()]):
        row[index] = token if index < good else (token + 1) % VOCABULARY


# Probabilities by rank, the same at every position: a tree of these branches at every depth.
_PROBABILITIES = (0.6, 0.2, 0.1, 0.05)
# The rank of the known-good token by depth, beginning with the first; 0 behind the end. All but the
# first leave the chain that DFLASH would draft.
_RANKS = ((), (1,), (0, 1), (2,), (0, 0, 1), (1, 1), (0, 2))


def marginals(k: int) -> torch.Tensor:
    """Return the log-probabilities of the ranks of every position, [k] float32."""
    rest = 1.0 - sum(_PROBABILITIES)
    by_rank = [*_PROBABILITIES, *(rest / 2.0 ** (1 + at) for at in range(k))][:k]
    return torch.tensor([math.log(each) for each in by_rank])


def place(candidates: torch.Tensor, tail: Sequence[int], turn: int) -> None:
    """Put tokens of ``tail`` among one request's ``candidates`` [depth, k] int64, by ``turn``.

    The turns run through how many tokens are good, 0 .. depth, and through the ranks of `_RANKS`.
    """
    good = turn % (candidates.shape[0] + 1)
    ranks = _RANKS[turn // 2 % len(_RANKS)]
    for depth, token in enumerate(tail[:good]):
        _put(candidates[depth], token, ranks[depth] if depth < len(ranks) else 0)


def _put(candidates: torch.Tensor, token: int, rank: int) -> None:
    """Put ``token`` at ``rank`` of the distinct ``candidates`` [k]; the two change places."""
    there = (candidates == token).nonzero().flatten().tolist()
    if there:
        candidates[there[0]] = candidates[rank]
    candidates[rank] = token


def _install_marginals(continuations: dict[Any, Any], requests: list[Any]) -> None:
    """Make DDTREE find the known-good tokens among its marginals, on the chain and off it."""
    from sglang_overlay.srt.ddtree import worker

    names: Any = worker
    stock = names.top_log_probs
    drafted = 0

    def top_log_probs(hidden: Any, head: Any, k: int, **kwargs: Any) -> Any:
        nonlocal drafted
        _, candidates = stock(hidden, head, k, **kwargs)
        rows = candidates.view(len(requests), -1, k)
        for offset, (row, request) in enumerate(zip(rows, requests, strict=True)):
            tail = continuations.get(tuple(request.origin_input_ids), ())
            place(row, tail[len(request.output_ids) :], drafted + offset)
        drafted += 1
        return marginals(k).to(hidden.device).expand(candidates.shape).contiguous(), candidates

    names.top_log_probs = top_log_probs
