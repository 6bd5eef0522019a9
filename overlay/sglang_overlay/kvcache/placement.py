"""Which free units new tokens get: after their request's last one if that is free, else far off.

Only an order of preference: as many units are free as without it, and any of them can be had.
Everything is computed on the device of the free list, without a synchronisation: what a request
needs is known to the host, where it goes is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

NOTHING = -1


@dataclass(frozen=True, kw_only=True)
class Demand:
    """What the requests of a batch need: ``counts`` units each, to follow unit ``last``.

    ``last`` [requests] int64 on the free list's device, `NOTHING` for a request that has none yet.
    ``prompt``: the units will be filled at once and may be many; what does not fit into one run
    goes to the next longest. Otherwise a few at a time, and the lowest will do.
    """

    last: torch.Tensor
    counts: Sequence[int]
    prompt: bool

    @property
    def total(self) -> int:
        """Return the units of the whole batch."""
        return sum(self.counts)


def place(
    free: torch.Tensor, demand: Demand, *, headroom: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose units from ``free`` [f] int64, ascending.

    Each request goes on where it ended, as far as that is free. What is left of its demand goes to
    one of the longest free runs, another for each request, up to ``headroom`` units behind its
    start so that whoever ends there can go on too. The rest takes what there is.

    Returns:
        The chosen units [demand.total], request after request, and the free ones that remain
        [f − demand.total], ascending. Both are new tensors: ``free`` may be held elsewhere.

    Raises:
        ValueError: more is demanded than is free.
    """
    total, available = demand.total, free.shape[0]
    if total > available:
        raise ValueError(
            f"demand: got {total} units, needed at most the {available} free ones; evict first"
        )
    if total == 0:
        return free[:0].clone(), free.clone()
    tokens = _Tokens.of(demand, free.device)
    goes_on, at_next = _following(free, demand.last, tokens)
    taken = _mark(available, goes_on, at_next)
    in_home, at_home = _homes(free, taken, ~goes_on, tokens, headroom)
    taken |= _mark(available, in_home, at_home)
    at_any = _any(free, taken, ~(goes_on | in_home), long_runs_first=demand.prompt)
    at = torch.where(goes_on, at_next, torch.where(in_home, at_home, at_any))
    taken = torch.zeros_like(taken)
    taken[at] = True
    return free[at], _without(free, taken, total)


@dataclass(frozen=True)
class _Tokens:
    """The new tokens of a batch, flat: ``owner``, and ``offset`` within what the owner gets."""

    owner: torch.Tensor
    offset: torch.Tensor
    starts: torch.Tensor
    counts: torch.Tensor

    @staticmethod
    def of(demand: Demand, device: torch.device) -> _Tokens:
        counts = torch.tensor(demand.counts, dtype=torch.int64)
        starts = counts.cumsum(0) - counts
        owner = torch.repeat_interleave(counts)
        offset = torch.arange(owner.shape[0]) - starts[owner]
        # One copy, and no wait for it: three would cost more than the whole computation.
        parts = (owner, offset, starts, counts)
        packed = torch.cat(parts).to(device, non_blocking=True)
        return _Tokens(*packed.split([len(part) for part in parts]))

    def rank(self, mine: torch.Tensor) -> torch.Tensor:
        """Return for each token how many of ``mine`` [tokens] bool its owner has before it."""
        before = mine.cumsum(0) - mine.long()
        # A request without tokens has no start of its own; clamped, nobody reads it.
        start = before[self.starts.clamp(max=len(before) - 1)]
        return before - start[self.owner]

    def count(self, mine: torch.Tensor) -> torch.Tensor:
        """Return for each request how many of ``mine`` [tokens] bool it has."""
        zeros = torch.zeros_like(self.starts)
        return zeros.index_add(0, self.owner, mine.long())


def _following(
    free: torch.Tensor, last: torch.Tensor, tokens: _Tokens
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which tokens can have the unit that follows, and its position in ``free``."""
    # Two requests may end at the same unit, that of a prefix they share: the first one goes on.
    rival = (last[:, None] == last[None, :]) & (tokens.counts > 0)
    earlier = torch.tril(rival, diagonal=-1).any(1)
    leads = (last != NOTHING) & ~earlier
    wanted = last[tokens.owner] + 1 + tokens.offset
    at = torch.searchsorted(free, wanted).clamp_(max=free.shape[0] - 1)
    missing = (free[at] != wanted) | ~leads[tokens.owner]
    return ~missing & (tokens.rank(missing) == 0), at


def _homes(
    free: torch.Tensor,
    taken: torch.Tensor,
    wanting: torch.Tensor,
    tokens: _Tokens,
    headroom: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which of the ``wanting`` tokens fit into their request's home, and the positions."""
    starts, lengths = _longest_runs(free, taken, len(tokens.starts))
    need = tokens.count(wanting)
    wants = need > 0
    run = (wants.cumsum(0) - 1).clamp_(min=0, max=len(starts) - 1)
    # With more requests than free units the last run would be shared.
    own = wants & (wants.cumsum(0) <= len(starts))
    length = torch.where(own, lengths[run], 0)
    gap = ((length - need) // 2).clamp_(min=0, max=headroom)
    rank = tokens.rank(wanting)
    fits = wanting & (rank < (length - gap)[tokens.owner])
    return fits, (starts[run] + gap)[tokens.owner] + rank


def _longest_runs(
    free: torch.Tensor, taken: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return where in ``free`` the ``count`` longest runs of untaken units start, their lengths."""
    run = _runs(free, taken)
    lengths = torch.zeros_like(free).index_add_(0, run, (~taken).long())
    longest, which = lengths.topk(min(count, free.shape[0]))
    return torch.searchsorted(run, which), longest


def _runs(free: torch.Tensor, taken: torch.Tensor) -> torch.Tensor:
    """Return the number of the run that each position of ``free`` lies in; taken ones part runs."""
    parts = (free[1:] != free[:-1] + 1) | taken[1:] | taken[:-1]
    return torch.cat((parts.new_zeros(1), parts)).cumsum(0)


def _any(
    free: torch.Tensor, taken: torch.Tensor, wanting: torch.Tensor, *, long_runs_first: bool
) -> torch.Tensor:
    """Return positions in ``free``: for the ``wanting`` tokens those of untaken units, in order."""
    order = None
    if long_runs_first:
        run = _runs(free, taken)
        lengths = torch.zeros_like(free).index_add_(0, run, (~taken).long())
        order = lengths[run].argsort(descending=True, stable=True)
        taken = taken[order]
    nth = (~taken).cumsum(0)
    at = torch.searchsorted(nth, wanting.cumsum(0)).clamp_(max=free.shape[0] - 1)
    return at if order is None else order[at]


def _mark(size: int, chosen: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Return a mask [size] of the positions ``at`` of the ``chosen`` tokens."""
    # Selecting by a mask would make the host wait for its size: the others go past the end.
    mask = chosen.new_zeros(size + 1)
    mask[torch.where(chosen, at, size)] = True
    return mask[:size]


def _without(free: torch.Tensor, taken: torch.Tensor, total: int) -> torch.Tensor:
    """Return ``free`` without its ``total`` taken units."""
    size = free.shape[0] - total
    kept = (~taken).cumsum(0) - 1
    result = free.new_empty(size + 1)
    result[torch.where(taken, size, kept)] = free
    return result[:size]
