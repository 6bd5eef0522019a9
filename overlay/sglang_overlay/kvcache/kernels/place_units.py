"""Kernel that takes free units for the requests of a batch.

One program does it all: what one request takes, another must not, and the order is that of the
requests, so that every rank takes the same.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

import triton
import triton.language as tl


@triton.jit
def _ends(last, rows, lengths, stride, request, exists, PAGE):
    """Return the unit that each request ends in, -1 for none."""
    if rows is not None:
        row = tl.load(rows + request, mask=exists, other=0).to(tl.int64)
        length = tl.load(lengths + request, mask=exists, other=1).to(tl.int64)
        slot = tl.load(last + row * stride + length - 1, mask=exists, other=-1).to(tl.int64)
    else:
        slot = tl.load(last + request, mask=exists, other=-1).to(tl.int64)
    return tl.where(slot < 0, -1, slot // PAGE)


@triton.jit
def _go_on(
    free,
    last,
    rows,
    lengths,
    counts,
    each,
    out,
    notes,
    stride,
    requests,
    units,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Give each request the units behind its last one; return how many lack some, and those.

    Of those requests, in their order, note where in ``out`` each goes on and what it lacks.
    """
    row = tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    begun = tl.full([], 0, tl.int64)
    lacking = tl.full([], 0, tl.int32)
    left = tl.full([], 0, tl.int64)
    for first in range(0, requests, ROWS):
        request = first + row
        exists = request < requests
        end = _ends(last, rows, lengths, stride, request, exists, PAGE)
        if counts is None:
            count = tl.where(exists, each, 0).to(tl.int64)
        else:
            count = tl.load(counts + request, mask=exists, other=0)
        start = begun + tl.cumsum(count, axis=0) - count
        begun += tl.sum(count, axis=0)
        # Two requests may end at the same unit, that of a prefix they share, or of a prompt that
        # both had: the first goes on. One of an earlier tile has taken what lies behind by now.
        same = (end[None, :] == end[:, None]) & (count > 0)[None, :]
        rivals = tl.sum((same & (row[None, :] < row[:, None])).to(tl.int32), axis=1)
        goes = exists & (end >= 0) & (rivals == 0) & (count > 0)
        # None goes past another's end, if those are taken: nobody ends in what is free.
        goes = goes & (tl.load(free + end, mask=goes, other=1) == 0)
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
            at += COLUMNS
            goes = goes & (whole == COLUMNS) & (at < count)
        lacks = count > got
        place = lacking + tl.cumsum(lacks.to(tl.int32), axis=0) - 1
        tl.store(notes + 2 * place, start + got, mask=lacks)
        tl.store(notes + 2 * place + 1, count - got, mask=lacks)
        lacking += tl.sum(lacks.to(tl.int32), axis=0)
        left += tl.sum(count - got, axis=0)
        tl.debug_barrier()
    return lacking, left


@triton.jit
def _longest(starts, lengths, home, HOMES: tl.constexpr):
    """Return number, start and length of the longest run, the first of equal ones."""
    length = tl.max(lengths, axis=0)
    number = tl.min(tl.where(lengths == length, home, HOMES), axis=0)
    return number, tl.sum(tl.where(home == number, starts, 0), axis=0), length


@triton.jit
def _cut(starts, lengths, home, number, behind, end):
    """Return the runs with what lies behind, and before ``end``, left of one of them."""
    starts = tl.where(home == number, behind, starts)
    return starts, tl.where(home == number, tl.maximum(end - behind, 0), lengths)


@triton.jit
def _fill(out, row, total, LANES: tl.constexpr):
    """Put the units of ``row``, one after another, where ``out`` has none yet."""
    lane = tl.arange(0, LANES)
    filled = tl.full([], 0, tl.int32)
    for begin in range(0, total, LANES):
        place = begin + lane
        unit = tl.load(out + place, mask=place < total, other=0)
        empty = (unit < 0).to(tl.int32)
        rank = filled + tl.cumsum(empty, axis=0) - 1
        unit = tl.load(row + rank, mask=empty > 0, other=0)
        tl.store(out + place, unit, mask=empty > 0)
        filled += tl.sum(empty, axis=0)
    tl.debug_barrier()


@triton.jit
def _first_free(free, first, stop, LANES):
    """Return how many units there are before the first free one; LANES if those are taken."""
    lane = tl.arange(0, LANES)
    is_free = tl.load(free + first + lane, mask=lane < stop - first, other=0) != 0
    return tl.min(tl.where(is_free, lane, LANES), axis=0)


@triton.jit
def _take_run(free, out, first, stop, needed, LANES):
    """Take units from ``first`` on as far as they are free and needed; return how many."""
    lane = tl.arange(0, LANES)
    taken = tl.full([], 0, tl.int64)
    goes = needed > 0
    while goes:
        asked = lane < tl.minimum(needed, stop - first) - taken
        is_free = tl.load(free + first + taken + lane, mask=asked, other=0) != 0
        whole = tl.min(tl.where(asked & is_free, LANES, lane), axis=0)
        tl.store(out + taken + lane, first + taken + lane, mask=lane < whole)
        tl.store(free + first + taken + lane, 0, mask=lane < whole)
        taken += whole
        goes = whole == LANES
    tl.debug_barrier()
    return taken


@triton.jit
def _gap(size, known, needed, left, requests, headroom):
    """Return how many units of a run of ``size`` stay free before a request that ``needed`` some.

    The run is a part of the ``known`` units, and takes that part of the ``requests``, which still
    lack ``left``. In sixty-fourths: a division of numbers with 64 bits takes a call, and its stack.
    """
    part = size.to(tl.int32) // ((known >> 6) + 1).to(tl.int32)
    spare = tl.maximum(size - tl.maximum(needed, left * part >> 6), 0)
    sharing = 1 + tl.maximum(requests * part + 63 >> 6, 1)
    return tl.minimum(spare.to(tl.int32) // sharing, headroom)


@triton.jit
def _take_any(free, out, needed, starts, lengths, home, stop, HOMES, LANES, WIDE):
    """Take units out of the longest runs, then the lowest; return what is left of the runs.

    Where too few are free, the rest is unit 0, which is nobody's.
    """
    taken = tl.full([], 0, tl.int64)
    while (taken < needed) & (tl.max(lengths, axis=0) > 0):
        number, first, length = _longest(starts, lengths, home, HOMES)
        end = first + length
        taken += _take_free(free, out + taken, first, end, needed - taken, LANES, LANES)
        tl.debug_barrier()
        behind = end
        if taken == needed:
            behind = tl.load(out + taken - 1) + 1
        starts, lengths = _cut(starts, lengths, home, number, behind, end)
    if taken < needed:
        low = tl.full([], 1, tl.int64)
        taken += _take_free(free, out + taken, low, stop, needed - taken, LANES, WIDE)
        lane = tl.arange(0, LANES)
        nobodys = tl.zeros([LANES], tl.int64)
        while taken < needed:
            tl.store(out + taken + lane, nobodys, mask=lane < needed - taken)
            taken += LANES
    tl.debug_barrier()
    return starts, lengths


@triton.jit
def _take_free(free, out, first, stop, needed, LANES: tl.constexpr, WIDE: tl.constexpr):
    """Take the free units from ``first`` on below ``stop``, as many as needed; return how many."""
    lane = tl.arange(0, LANES)
    wide = tl.arange(0, WIDE)
    taken = tl.full([], 0, tl.int64)
    at = first
    while (taken < needed) & (at < stop):
        # Most of the time all of them are taken.
        flags = tl.load(free + at + wide, mask=wide < stop - at, other=0)
        if tl.max(flags, axis=0) > 0:
            end = tl.minimum(at + WIDE, stop)
            while (taken < needed) & (at < end):
                is_free = tl.load(free + at + lane, mask=lane < end - at, other=0).to(tl.int32)
                rank = tl.cumsum(is_free, axis=0)
                mine = (is_free != 0) & (rank <= needed - taken)
                tl.store(out + taken + rank - 1, at + lane, mask=mine)
                tl.store(free + at + lane, 0, mask=mine)
                taken += tl.sum(mine.to(tl.int32), axis=0)
                tl.debug_barrier()
                at += LANES
        else:
            at += WIDE
    return taken


# Nothing depends on a value or an address, so that a compiled kernel fits all calls with arguments
# of the same types.
@triton.jit(
    do_not_specialize=[
        *("backs", "stride", "requests", "each", "units", "homes", "headroom", "total"),
    ],
    do_not_specialize_on_alignment=[
        *("free", "back", "last", "rows", "lengths_of_rows", "counts", "starts", "lengths"),
        *("out", "scratch"),
    ],
)
def place_units_kernel(
    free,
    back,
    last,
    rows,
    lengths_of_rows,
    counts,
    starts,
    lengths,
    out,
    scratch,
    backs,
    stride,
    requests,
    each,
    units,
    homes,
    headroom,
    total,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HOMES: tl.constexpr,
    LANES: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Take units for all requests: where they ended, then in the ``homes``, then anywhere.

    Before, the units ``back`` [backs] become free.

    A request ends in the slot ``last[request]``, or, if there are ``rows``, in the last one of its
    row in the table ``last``. It needs ``counts[request]`` units, or ``each`` without ``counts``.
    What is taken of the homes, ``starts`` and ``lengths`` [homes ≤ HOMES], is cut off there.

    ``out`` gets the ``total`` of them. What is in ``scratch`` are two of each request, where in
    ``out`` it goes on and how many it lacks, and the ``total`` units, at most, that are found for
    whoever lacks some.
    """
    lane = tl.arange(0, LANES)
    for first in range(0, backs, LANES):
        unit = tl.load(back + first + lane, mask=first + lane < backs, other=0)
        tl.store(free + unit, 1, mask=first + lane < backs)
    for first in range(0, total, LANES):
        tl.store(out + first + lane, -1, mask=first + lane < total)
    tl.debug_barrier()
    notes = scratch
    lacking, left = _go_on(
        free,
        last,
        rows,
        lengths_of_rows,
        counts,
        each,
        out,
        notes,
        stride,
        requests,
        units,
        PAGE,
        ROWS,
        COLUMNS,
    )
    if left > 0:
        home = tl.arange(0, HOMES)
        begins = tl.load(starts + home, mask=home < homes, other=0)
        sizes = tl.load(lengths + home, mask=home < homes, other=0)
        request = tl.full([], 0, tl.int32)
        # More of them would wait for one another longer than a home is worth.
        served = tl.minimum(lacking, HOMES)
        while (request < served) & (tl.max(sizes, axis=0) > 0):
            at = tl.load(notes + 2 * request)
            needed = tl.load(notes + 2 * request + 1)
            taken = tl.full([], 0, tl.int64)
            while (taken == 0) & (tl.max(sizes, axis=0) > 0):
                known = tl.sum(sizes, axis=0)
                number, start, size = _longest(begins, sizes, home, HOMES)
                end = start + size
                # Whoever ended before the run may just have gone on into it.
                start += _first_free(free, start, end, LANES)
                size = tl.maximum(end - start, 0)
                start += _gap(size, known, needed, left, requests - request, headroom)
                taken = _take_run(free, out + at, start, end, needed, LANES)
                behind = start + taken
                if taken == 0:
                    behind = tl.where(size > LANES, end - size // 2, end)
                begins, sizes = _cut(begins, sizes, home, number, behind, end)
            left -= taken
            request += 1
        # The rest is found for all of them at once, and in their order.
        if left > 0:
            row = notes + 2 * requests
            stop = units + 1
            begins, sizes = _take_any(
                free, row, left, begins, sizes, home, stop, HOMES, LANES, WIDE
            )
            _fill(out, row, total, LANES)
        tl.store(starts + home, begins, mask=home < homes)
        tl.store(lengths + home, sizes, mask=home < homes)
