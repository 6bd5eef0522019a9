"""Which free units new tokens get: after their request's last one if that is free, else far off.

Only an order of preference: as many units are free as without it, and any of them can be had.
Everything is computed on the device, without a synchronisation: what a request needs is known to
the host, where it goes is not. One launch serves a batch, since a step of a small model takes no
longer than a few hundred of them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from sglang_overlay.kvcache.free_map import FreeMap
from sglang_overlay.kvcache.free_runs import Runs
from sglang_overlay.kvcache.kernels.place_units import place_units_kernel
from sglang_overlay.kvcache.ready_kernels import launch

NOTHING = -1
# What the kernel looks at at once: requests and their next units, then units of a run.
ROWS, COLUMNS = 32, 16
LANES = 1024
# Units that the kernel looks at at once where most are taken.
WIDE = 4096
WARPS = 4

Array = npt.NDArray[np.int64]


# Not frozen: a step makes one of each, and that would take three times as long.
@dataclass(kw_only=True, slots=True)
class RowEnds:
    """The last slots of requests, as they stand in SGLang's table: read when they are needed.

    ``table`` [rows, context] int32, ``rows`` and ``lengths`` [requests] int.
    """

    table: torch.Tensor
    rows: torch.Tensor
    lengths: torch.Tensor

    def slots(self) -> torch.Tensor:
        """Return the slots [requests] int32."""
        return self.table[self.rows, self.lengths - 1]


@dataclass(kw_only=True, slots=True)
class Demand:
    """What the requests of a batch need: ``counts`` units each, to follow slot ``last``.

    ``last``: [requests] int64 on the device, in units that are taken, `NOTHING` for a request that
    has none yet; or where to read them. ``total``: the units of the whole batch.
    """

    last: torch.Tensor | RowEnds
    counts: Sequence[int]
    page_size: int = 1
    total: int = field(init=False)

    def __post_init__(self) -> None:
        """Count once what every call asks for."""
        self.total = sum(self.counts)

    def units(self) -> torch.Tensor:
        """Return the unit [requests] int64 that each request ends in, `NOTHING` for none."""
        slots = self.last.slots() if isinstance(self.last, RowEnds) else self.last
        # Slot −1, which is none, is in unit −1.
        return slots.long() // self.page_size


def place(free: FreeMap, demand: Demand, runs: Runs, *, headroom: int) -> torch.Tensor:
    """Take units from ``free`` for ``demand``.

    Each request goes on where it ended, as far as that is free. What is left of its demand goes to
    one of the longest ``runs``, another for each request, up to ``headroom`` units behind its
    start so that whoever ends there can go on too. The rest takes what there is, in the next
    longest runs first. ``runs`` may be out of date: a unit is looked at before it is taken.

    Returns:
        The units [demand.total] int64, request after request.

    Raises:
        ValueError: more is demanded than is free.
    """
    total = demand.total
    if total > free.count:
        raise ValueError(
            f"demand: got {total} units, needed at most the {free.count} free ones; evict first"
        )
    by = _place_on_host if free.flags.is_cpu else launch_place
    found = by(free, demand, runs, headroom)
    free.count -= total
    return found


def launch_place(free: FreeMap, demand: Demand, runs: Runs, headroom: int) -> torch.Tensor:
    """Launch the kernel; return the units [demand.total] int64. `place` keeps count."""
    flags, wanted, ends, total = free.flags, demand.counts, demand.last, demand.total
    requests, each, counts = len(wanted), wanted[0], None
    if wanted.count(each) != requests:
        counts = _counts(tuple(wanted), flags.device)
    # Two tensors, and made so: parts of one, or keywords, take the host longer.
    found, scratch = runs.starts.new_empty(total), runs.starts.new_empty(total + 2 * requests)
    last: torch.Tensor
    types: tuple[torch.dtype, ...]
    if isinstance(ends, RowEnds):
        last, rows, lengths = ends.table, ends.rows, ends.lengths
        stride, types = last.stride(0), (last.dtype, rows.dtype, lengths.dtype)
    else:
        last, rows, lengths, stride, types = ends, None, None, 0, (ends.dtype,)
    launch(
        place_units_kernel,
        ("place_units", flags.device, counts is None, demand.page_size, *types),
        (1, 1),
        WARPS,
        *(flags, last, rows, lengths, counts, runs.starts, runs.lengths, found, scratch),
        *(stride, requests, each, free.units, runs.starts.shape[0], headroom, total),
        *(demand.page_size, ROWS, COLUMNS, LANES, WIDE),
    )
    return found


def tiles() -> dict[str, int]:
    """Return how much the kernel looks at at once: of the requests, and of the units."""
    return {"ROWS": ROWS, "COLUMNS": COLUMNS, "LANES": LANES, "WIDE": WIDE}


@functools.lru_cache(maxsize=64)
def _counts(counts: tuple[int, ...], device: torch.device) -> torch.Tensor:
    # Kept, because many steps ask for as much as one before. From pinned memory nobody waits.
    on_host = torch.tensor(counts, dtype=torch.int64, pin_memory=device.type == "cuda")
    return on_host.to(device, non_blocking=True)


def _place_on_host(free: FreeMap, demand: Demand, runs: Runs, headroom: int) -> torch.Tensor:
    """Do what the kernel does, and in its order."""
    flags = free.flags.numpy()
    shares = [_Share(flags, count) for count in demand.counts]
    ends: set[int] = set()
    for share, last in zip(shares, demand.units().tolist(), strict=True):
        # Two requests may end at the same unit, that of a prefix they share: the first goes on.
        if share.needed and last != NOTHING and last not in ends:
            ends.add(last)
            share.take_run(last + 1, free.units + 1)
    homes = list(zip(runs.starts.tolist(), runs.lengths.tolist(), strict=True))
    used = 0
    for share in shares:
        found = False
        while share.needed and not found and used < len(homes):
            start, length = homes[used]
            end = start + length
            # Whoever ended before the run may just have gone on into it.
            start += share.first_free(start, end)
            gap = min(max((end - start - share.needed) // 2, 0), headroom)
            found = share.take_run(start + gap, end)
            used += 1
    for share in shares:
        while share.needed and used < len(homes):
            start, length = homes[used]
            share.take_free(start, start + length)
            used += bool(share.needed)
        share.take_free(1, free.units + 1)
    parts = [part for share in shares for part in share.all_parts()]
    return torch.from_numpy(np.concatenate(parts))


class _Share:
    """What one request gets."""

    def __init__(self, flags: npt.NDArray[np.uint8], needed: int) -> None:
        self._flags = flags
        self.needed = needed
        self.parts: list[Array] = [np.empty(0, dtype=np.int64)]

    def all_parts(self) -> list[Array]:
        """Return what it got, and the padding unit for each that could not be had."""
        return [*self.parts, np.zeros(self.needed, dtype=np.int64)]

    def first_free(self, first: int, stop: int) -> int:
        """Return how many units there are before the first free one; LANES if those are taken."""
        near = self._flags[first : min(first + LANES, stop)]
        return int(near.argmax()) if near.any() else LANES

    def take_run(self, first: int, stop: int) -> bool:
        """Take units from ``first`` on as far as they are free; say whether there were any."""
        wanted = self._flags[first : min(first + self.needed, stop)]
        length = len(wanted) if wanted.all() else int(wanted.argmin())
        self._take(np.arange(first, first + length))
        return length > 0

    def take_free(self, first: int, stop: int) -> None:
        """Take the free units below ``stop`` from ``first`` on."""
        while self.needed and first < stop:
            end = min(first + max(WIDE, 4 * self.needed), stop)
            self._take(np.flatnonzero(self._flags[first:end])[: self.needed] + first)
            first = end

    def _take(self, units: Array) -> None:
        self._flags[units] = 0
        self.needed -= len(units)
        self.parts.append(units)
