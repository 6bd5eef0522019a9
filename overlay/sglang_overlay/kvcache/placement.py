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
from sglang_overlay.kvcache.free_runs import KEPT, Runs
from sglang_overlay.kvcache.kernels.place_units import place_units_kernel
from sglang_overlay.kvcache.ready_kernels import launch

NOTHING = -1
# What the kernel looks at at once: requests and their next units, then units of a run.
ROWS, COLUMNS = 32, 16
LANES = 512
# Runs that are looked at at once, at least as many as there are.
HOMES = KEPT
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

    def is_same(self, other: Demand) -> bool:
        """Say whether ``other`` is certainly of the same requests, for as much."""
        mine, others = self.last, other.last
        return (
            isinstance(mine, RowEnds)
            and isinstance(others, RowEnds)
            and mine.rows is others.rows
            and mine.lengths is others.lengths
            and self.counts == other.counts
        )

    def units(self) -> torch.Tensor:
        """Return the unit [requests] int64 that each request ends in, `NOTHING` for none."""
        slots = self.last.slots() if isinstance(self.last, RowEnds) else self.last
        # Slot −1, which is none, is in unit −1.
        return slots.long() // self.page_size


def place(free: FreeMap, demand: Demand, runs: Runs, *, headroom: int) -> torch.Tensor:
    """Take units from ``free`` for ``demand``.

    Each request goes on where it ended, as far as that is free. What is left of its demand goes to
    the longest of the ``runs``, up to ``headroom`` units behind its start so that whoever ends
    there can go on too, or less where all these requests need the room. What lies behind is a run
    again, for the next request or the next call: ``runs`` are cut by what is taken. The rest takes
    what there is, in the longest runs first. ``runs`` may be out of date: a unit is looked at
    before it is taken.

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
    by = _place_on_host if free.on_host else launch_place
    found = by(free, demand, runs, headroom)
    free.count -= total
    return found


def launch_place(free: FreeMap, demand: Demand, runs: Runs, headroom: int) -> torch.Tensor:
    """Launch the kernel; return the units [demand.total] int64. `place` keeps count."""
    wanted, ends, total = demand.counts, demand.last, demand.total
    requests, each, counts = len(wanted), wanted[0], None
    if wanted.count(each) != requests:
        counts = _counts(tuple(wanted), runs.starts.device)
    found, scratch = runs.starts.new_empty(total), free.scratch(total + 2 * requests)
    # Last, since what comes before may fail: what is handed over is written down nowhere else.
    flags, back = free.flags_to_take_from()
    last: torch.Tensor
    types: tuple[torch.dtype, ...]
    if isinstance(ends, RowEnds):
        last, rows, lengths = ends.table, ends.rows, ends.lengths
        stride, types = last.stride(0), (last.dtype, rows.dtype, lengths.dtype)
    else:
        last, rows, lengths, stride, types = ends, None, None, 0, (ends.dtype,)
    tensors = flags, found if back is None else back, last, rows, lengths, counts
    launch(
        place_units_kernel,
        ("place_units", flags.device, counts is None, demand.page_size, *types),
        (1, 1),
        WARPS,
        (*tensors, runs.starts, runs.lengths, found, scratch),
        (
            *(0 if back is None else back.numel(), stride, requests, each, free.units),
            *(runs.starts.shape[0], headroom, total),
            *(demand.page_size, ROWS, COLUMNS, HOMES, LANES, WIDE),
        ),
    )
    return found


def tiles() -> dict[str, int]:
    """Return how much the kernel looks at at once: of the requests, and of the units."""
    return {"ROWS": ROWS, "COLUMNS": COLUMNS, "HOMES": HOMES, "LANES": LANES, "WIDE": WIDE}


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
        # Nobody ends in what is free: side by side, others would go past that end.
        if share.needed and last != NOTHING and last not in ends and not flags[last]:
            ends.add(last)
            share.take_run(last + 1, free.units + 1)
    homes = _Homes(runs)
    left = sum(share.needed for share in shares)
    lacking = [share for share in shares if share.needed]
    for earlier, share in enumerate(lacking[:HOMES]):
        found = False
        while not found and homes.any():
            number, start, end = homes.longest()
            # Whoever ended before the run may just have gone on into it.
            start += share.first_free(start, end)
            size = max(end - start, 0)
            sharing = len(shares) - earlier
            start += min(_gap(size, homes.known, share.needed, left, sharing), headroom)
            taken = share.take_run(start, end)
            found, left = taken > 0, left - taken
            behind = start + taken
            if not found:
                behind = end - size // 2 if size > LANES else end
            homes.cut(number, behind, end)
    rest = _take_any(flags, left, homes, free.units + 1)
    for share in shares:
        rest = share.accept(rest)
    parts = [part for share in shares for part in share.parts]
    return torch.from_numpy(np.concatenate(parts))


def _gap(size: int, known: int, needed: int, left: int, requests: int) -> int:
    """Return how many units of a run of ``size`` stay free before a request that ``needed`` some.

    The run is a part of the ``known`` units, and takes that part of the ``requests``, which still
    lack ``left``. In sixty-fourths, as the kernel has it.
    """
    part = size // ((known >> 6) + 1)
    spare = max(size - max(needed, left * part >> 6), 0)
    return spare // (1 + max(requests * part + 63 >> 6, 1))


class _Homes:
    """Runs, of which the longest is asked for. What is cut off them is cut off the tensors."""

    def __init__(self, runs: Runs) -> None:
        self._starts, self._lengths = runs.starts.numpy(), runs.lengths.numpy()

    @property
    def known(self) -> int:
        """Return how many units are left in the runs."""
        return int(self._lengths.sum())

    def any(self) -> bool:
        """Say whether any is left."""
        return bool(self._lengths.max() > 0)

    def longest(self) -> tuple[int, int, int]:
        """Return number, start and end of the longest run, the first of equal ones."""
        number = int(self._lengths.argmax())
        start = int(self._starts[number])
        return number, start, start + int(self._lengths[number])

    def cut(self, number: int, behind: int, end: int) -> None:
        """Leave of a run what lies from ``behind`` on, and before ``end``."""
        self._starts[number], self._lengths[number] = behind, max(end - behind, 0)


def _take_any(flags: npt.NDArray[np.uint8], needed: int, homes: _Homes, stop: int) -> Array:
    """Take units out of the longest runs, then the lowest, and the padding unit for the rest."""
    parts: list[Array] = []
    while needed and homes.any():
        number, start, end = homes.longest()
        part = np.flatnonzero(flags[start:end])[:needed] + start
        flags[part] = 0
        needed -= len(part)
        homes.cut(number, end if needed else int(part[-1]) + 1, end)
        parts.append(part)
    low = np.flatnonzero(flags[1:stop])[:needed] + 1
    flags[low] = 0
    return np.concatenate([*parts, low, np.zeros(needed - len(low), dtype=np.int64)])


class _Share:
    """What one request gets."""

    def __init__(self, flags: npt.NDArray[np.uint8], needed: int) -> None:
        self._flags = flags
        self.needed = needed
        self.parts: list[Array] = [np.empty(0, dtype=np.int64)]

    def first_free(self, first: int, stop: int) -> int:
        """Return how many units there are before the first free one; LANES if those are taken."""
        near = self._flags[first : min(first + LANES, stop)]
        return int(near.argmax()) if near.any() else LANES

    def take_run(self, first: int, stop: int) -> int:
        """Take units from ``first`` on as far as they are free; return how many."""
        wanted = self._flags[first : min(first + self.needed, stop)]
        length = len(wanted) if wanted.all() else int(wanted.argmin())
        units = np.arange(first, first + length)
        self._flags[units] = 0
        self.needed -= length
        self.parts.append(units)
        return length

    def accept(self, units: Array) -> Array:
        """Take what is needed of ``units``, which are taken; return those behind."""
        self.parts.append(units[: self.needed])
        return units[self.needed :]
