"""A drafter's marginals: the exact top-k log-probabilities of every draft position.

The LM head is split over ranks by vocabulary rows. Each rank takes the top-k and the log-sum-exp of
its own rows, one all-gather brings both together, and every rank merges the same numbers in the
same way. The normaliser covers the whole vocabulary, because `build` compares scores of different
depths. The head's padding rows take no part.

Equal logits, frequent in bf16, are ordered by token id, on each device and for any split: a logit
and its token are packed into one int64 whose order is that, so no top-k that decides sees a tie.
Over the vocabulary that would be slow (64-bit keys of every logit), so a rank first finds the k-th
largest logit by value, which no order of ties changes, then the k tokens that are above it or are
the first of those equal to it, by one int32 key each. Only those k are packed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

# [rows, width] int64 of this rank → [ranks, rows, width], the same on every rank.
Gather = Callable[[torch.Tensor], torch.Tensor]

_TOKEN_MASK = (1 << 32) - 1
_NOTHING = -(1 << 63)


@dataclass(frozen=True, kw_only=True)
class Segment:
    """``rows`` rows of this rank's head from ``row`` on: the tokens from ``token`` on, in order."""

    row: int
    rows: int
    token: int


@dataclass(frozen=True, kw_only=True)
class VocabParallelHead:
    """One rank's part of an LM head.

    ``weight`` [rows, hidden]; ``segments`` say which rows stand for tokens. A row in none of them
    is padding. ``gather`` is None where the head is whole.
    """

    weight: torch.Tensor
    segments: tuple[Segment, ...]
    gather: Gather | None = None


def top_log_probs(
    hidden: torch.Tensor, head: VocabParallelHead, k: int, *, max_logits: int = 1 << 25
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (log_probs [tokens, k] float32, descending, candidates [tokens, k] int64).

    ``hidden`` [tokens, hidden size] is cast to the head's dtype, as the greedy head does. At most
    ``max_logits`` logits (or one token's, if those are more) exist at a time, and about 16 bytes
    are in use for each. ``k`` beyond the vocabulary gives candidates of −inf, token 0; so does
    everything of a token whose logits are NaN or whose largest is infinite.

    Raises:
        ValueError: ``k`` or a shape does not fit.

    """
    if k < 1 or hidden.dim() != 2 or hidden.shape[1] != head.weight.shape[1]:
        raise ValueError(
            f"hidden, k: got {tuple(hidden.shape)} and {k}, needed [tokens, "
            f"{head.weight.shape[1]}] as the head's rows are wide, and k of at least 1"
        )
    tokens = hidden.shape[0]
    local_rows = sum(segment.rows for segment in head.segments)
    step = max(1, max_logits // max(1, local_rows))
    parts = [_local_top(hidden[start : start + step], head, k) for start in range(0, tokens, step)]
    if not parts:
        return (
            torch.empty(0, k, dtype=torch.float32, device=hidden.device),
            torch.empty(0, k, dtype=torch.int64, device=hidden.device),
        )
    local = torch.cat(parts)
    gathered = local[None] if head.gather is None else head.gather(local)
    return _merge(gathered, k)


def _local_top(hidden: torch.Tensor, head: VocabParallelHead, k: int) -> torch.Tensor:
    """Return [tokens, k + 1] int64: the packed top-k of this rank's rows, and their log-sum-exp."""
    hidden = hidden.to(head.weight.dtype)
    packed = [torch.full((hidden.shape[0], k), _NOTHING, device=hidden.device)]
    sums = []
    for segment in head.segments:
        if segment.rows == 0:
            continue
        weight = head.weight[segment.row : segment.row + segment.rows]
        logits = torch.matmul(hidden, weight.T)
        sums.append(torch.logsumexp(logits.float(), dim=1))
        first = _first_rows(logits, min(k, segment.rows))
        packed.append(_pack(logits.gather(1, first).float(), first + segment.token))
    top = torch.cat(packed, dim=1).topk(k, dim=1).values
    normaliser = torch.full((hidden.shape[0],), float("-inf"), device=hidden.device)
    for one in sums:
        normaliser = torch.logaddexp(normaliser, one)
    bits = normaliser.float().view(torch.int32).long()
    return torch.cat([top, bits[:, None]], dim=1)


def _merge(gathered: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the result from every rank's [ranks, tokens, k + 1]."""
    ranks, tokens, _ = gathered.shape
    keys = gathered[:, :, :k].transpose(0, 1).reshape(tokens, ranks * k)
    logits, candidates = _unpack(keys.topk(k, dim=1).values)
    sums = gathered[:, :, k].to(torch.int32).view(torch.float32)
    normaliser = torch.logsumexp(sums, dim=0)[:, None]
    log_probs = logits - normaliser
    known = normaliser.isfinite() & logits.isfinite()
    return torch.where(known, log_probs, float("-inf")), torch.where(known, candidates, 0)


def _first_rows(logits: torch.Tensor, k: int) -> torch.Tensor:
    """Return [tokens, k] int64, in no order: the rows of the k largest ``logits`` [tokens, rows].

    Of equal ones the smaller rows are taken. Where a logit is NaN the rows are any.
    """
    rows = logits.shape[1]
    # Which of equal logits this one finds is arbitrary; the smallest value is not.
    least = logits.topk(k, dim=1, sorted=False).values.amin(dim=1, keepdim=True)
    earlier = torch.arange(rows, 0, -1, dtype=torch.int32, device=logits.device)
    # Fewer than k are above, and with those that are equal there are k at least: keys of 0 lose.
    keys = torch.where(logits >= least, earlier, 0)
    keys = torch.where(logits > least, earlier + rows, keys)
    best = keys.topk(k, dim=1, sorted=False).values
    # The keys of a row with NaN may be 0.
    return (-best).remainder_(rows).long()


def _pack(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return int64 keys that are ordered as (logit, then the smaller token) is.

    ``logits`` float32 and ``tokens`` int64 have one shape.
    """
    # −0 and +0 are equal; adding +0 makes their bits so.
    bits = (logits + 0.0).view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    return (ordered << 32) | (_TOKEN_MASK - tokens)


def _unpack(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return float32 logits and int64 tokens; what stands for nothing is NaN."""
    ordered = (keys >> 32).to(torch.int32)
    bits = torch.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered)
    return bits.view(torch.float32), _TOKEN_MASK - (keys & _TOKEN_MASK)
