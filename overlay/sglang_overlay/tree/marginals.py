"""A drafter's marginals: the exact top-k log-probabilities of every draft position.

The LM head is split over ranks by vocabulary rows. Each rank takes the top-k and the log-sum-exp of
its own rows, one all-gather brings both together, and every rank merges the same numbers in the
same way. The normaliser covers the whole vocabulary, because `build` compares scores of different
depths. The head's padding rows take no part.

Equal logits, frequent in bf16, are ordered by token id, on each device and for any split: a logit
and its token are packed into one int64 whose order is that, so no top-k sees a tie. A row of what
is exchanged has k such keys and the bits of the log-sum-exp. On a GPU kernels find them
(`kernels.top_tokens`); what is here in torch does the same on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from sglang_overlay.tree.top_tokens import find_tokens, finish_tokens

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
    ``max_logits`` logits (or one token's, if those are more) exist at a time. ``k`` beyond the
    vocabulary gives candidates of −inf, token 0; so does everything of a token whose logits are NaN
    or whose largest is infinite.

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
    find, finish = (find_tokens, finish_tokens) if hidden.is_cuda else (_find, _finish)
    steps = [hidden[at : at + step] for at in range(0, tokens, step)]
    parts = [find(_logits(each, head), each.shape[0], k) for each in steps]
    if not parts:
        return (
            torch.empty(0, k, dtype=torch.float32, device=hidden.device),
            torch.empty(0, k, dtype=torch.int64, device=hidden.device),
        )
    local = torch.cat(parts) if len(parts) > 1 else parts[0]
    gathered = local[None] if head.gather is None else head.gather(local)
    return finish(gathered, k)


def _logits(hidden: torch.Tensor, head: VocabParallelHead) -> list[tuple[torch.Tensor, int]]:
    """Return per segment of the head its logits [tokens, rows] and its first token."""
    hidden = hidden.to(head.weight.dtype)
    # A rank without a token still takes part.
    segments = [each for each in head.segments if each.rows] or head.segments[:1]
    return [
        (torch.matmul(hidden, head.weight[each.row : each.row + each.rows].T), each.token)
        for each in segments
    ]


def _find(parts: Sequence[tuple[torch.Tensor, int]], rows: int, k: int) -> torch.Tensor:
    """Return what `top_tokens.find_tokens` does."""
    device = parts[0][0].device
    keys = [torch.full((rows, k), _NOTHING, device=device)]
    sums = [torch.full((rows,), float("-inf"), device=device)]
    for logits, token in parts:
        sums.append(torch.logsumexp(logits.float(), dim=1))
        keys.append(_pack(logits.float(), torch.arange(token, token + logits.shape[1])))
    top = torch.cat(keys, dim=1).topk(k, dim=1).values
    normaliser = torch.logsumexp(torch.stack(sums), dim=0)
    return torch.cat([top, normaliser.view(torch.int32).long()[:, None]], dim=1)


def _finish(gathered: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `top_tokens.finish_tokens` does."""
    ranks, tokens, _ = gathered.shape
    keys = gathered[:, :, :k].transpose(0, 1).reshape(tokens, ranks * k)
    logits, candidates = _unpack(keys.topk(k, dim=1).values)
    sums = gathered[:, :, k].to(torch.int32).view(torch.float32)
    normaliser = torch.logsumexp(sums, dim=0)[:, None]
    log_probs = logits - normaliser
    known = normaliser.isfinite() & logits.isfinite()
    return torch.where(known, log_probs, float("-inf")), torch.where(known, candidates, 0)


def _pack(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return int64 keys that are ordered as (logit, then the smaller token) is.

    ``logits`` are float32, ``tokens`` int64; their shapes broadcast.
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
