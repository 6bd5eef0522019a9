"""Kernel that takes free units for the requests of a batch.

One program does it all: what one request takes, another must not, and the order is that of the
requests, so that every rank takes the same.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

import triton
import triton.language as tl


@triton.jit
def _go_on(free, last, counts, out, notes, requests, units, ROWS, COLUMNS):
    """Give each request the units behind its last one; note where it is at and what it lacks."""
    row = tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    begun = tl.full([], 0, tl.int64)
    for first in range(0, requests, ROWS):
        request = first + row
        exists = request < requests
        end = tl.load(last + request, mask=exists, other=-1)
        count = tl.load(counts + request, mask=exists, other=0)
        start = begun + tl.cumsum(count, axis=0) - count
        begun += tl.sum(count, axis=0)
        # Two requests may end at the same unit, that of a prefix they share: the first goes on.
        rivals = tl.zeros([ROWS], tl.int32)
        for other in range(0, first + ROWS, ROWS):
            rival = other + row
            rival_end = tl.load(last + rival, mask=rival < requests, other=-1)
            rival_count = tl.load(counts + rival, mask=rival < requests, other=0)
            same = (rival_end[None, :] == end[:, None]) & (rival_count > 0)[None, :]
            rivals += tl.sum((same & (rival[None, :] < request[:, None])).to(tl.int32), axis=1)
        goes = exists & (end >= 0) & (rivals == 0) & (count > 0)
        got = tl.zeros([ROWS], tl.int64)
        at = tl.full([], 0, tl.int64)
        while tl.sum(goes.to(tl.int32), axis=0) > 0:
            offset = at + column
            unit = end[:, None] + 1 + offset[None, :]
            asked = goes[:, None] & (offset[None, :] < count[:, None]) & (unit <= units)
            is_free = tl.load(free + unit, mask=asked, other=0) != 0
            whole = tl.min(tl.where(asked & is_free, COLUMNS, column[None, :]), axis=1)
            mine = goes[:, None] & (column[None, :] < whole[:, None])
            tl.store(out + start[:, None] + offset[None, :], unit, mask=mine)
            tl.store(free + unit, 0, mask=mine)
            got += tl.where(goes, whole, 0)
            goes = goes & (whole == COLUMNS)
            at += COLUMNS
        tl.store(notes + 2 * request, start + got, mask=exists)
        tl.store(notes + 2 * request + 1, count - got, mask=exists)
    tl.debug_barrier()


@triton.jit
def _take_run(free, out, first, stop, needed, LANES):
    """Take units from ``first`` on as far as they are free and needed; return how many."""
    lane = tl.arange(0, LANES)
    taken = tl.full([], 0, tl.int64)
    goes = needed > 0
    while goes:
        unit = first + taken + lane
        asked = (taken + lane < needed) & (unit < stop)
        is_free = tl.load(free + unit, mask=asked, other=0) != 0
        whole = tl.min(tl.where(asked & is_free, LANES, lane), axis=0)
        tl.store(out + taken + lane, unit, mask=lane < whole)
        tl.store(free + unit, 0, mask=lane < whole)
        taken += whole
        goes = whole == LANES
    tl.debug_barrier()
    return taken


@triton.jit
def _take_free(free, out, first, stop, needed, LANES):
    """Take the free units from ``first`` on below ``stop``, as many as needed; return how many.

    Also returns where the search ended: nothing before it is free.
    """
    lane = tl.arange(0, LANES)
    taken = tl.full([], 0, tl.int64)
    at = first
    while (taken < needed) & (at < stop):
        unit = at + lane
        is_free = (tl.load(free + unit, mask=unit < stop, other=0) != 0).to(tl.int64)
        rank = tl.cumsum(is_free, axis=0)
        mine = (is_free != 0) & (rank <= needed - taken)
        tl.store(out + taken + rank - 1, unit, mask=mine)
        tl.store(free + unit, 0, mask=mine)
        taken += tl.sum(mine.to(tl.int64), axis=0)
        at += tl.where(taken < needed, LANES, 0)
        tl.debug_barrier()
        # Nothing is needed any more: the rest of these units may be free, and is left for others.
    return taken, at


@triton.jit(do_not_specialize=["requests", "units", "homes", "headroom"])
def place_units_kernel(
    free,
    last,
    counts,
    starts,
    lengths,
    out,
    notes,
    requests,
    units,
    homes,
    headroom,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Take units for all requests: where they ended, then in the ``homes``, then anywhere.

    ``notes`` [2 * requests] int64 is scratch: for each request where in ``out`` it goes on, and
    how many units it lacks.
    """
    _go_on(free, last, counts, out, notes, requests, units, ROWS, COLUMNS)
    used = tl.full([], 0, tl.int32)
    for request in range(requests):
        at = tl.load(notes + 2 * request)
        needed = tl.load(notes + 2 * request + 1)
        taken = tl.full([], 0, tl.int64)
        while (needed > 0) & (taken == 0) & (used < homes):
            start = tl.load(starts + used)
            length = tl.load(lengths + used)
            gap = tl.minimum(tl.maximum((length - needed) // 2, 0), headroom)
            taken = _take_run(free, out + at, start + gap, start + length, needed, LANES)
            used += 1
        tl.store(notes + 2 * request, at + taken)
        tl.store(notes + 2 * request + 1, needed - taken)
    tl.debug_barrier()
    low = tl.full([], 1, tl.int64)
    stop = units.to(tl.int64) + 1
    for request in range(requests):
        at = tl.load(notes + 2 * request)
        needed = tl.load(notes + 2 * request + 1)
        while (needed > 0) & (used < homes):
            start = tl.load(starts + used)
            length = tl.load(lengths + used)
            taken, _ = _take_free(free, out + at, start, start + length, needed, LANES)
            at += taken
            needed -= taken
            used += (needed > 0).to(tl.int32)
        if needed > 0:
            taken, low = _take_free(free, out + at, low, stop, needed, LANES)
