"""Kernels that find the longest runs of free units, in two launches whatever the map.

The first has a program for each piece of the map. Most runs lie within one, and of those it lists
the longest. How long the run is that reaches into a piece is known once all were looked at: the
second one, a single program, adds these, and picks the longest of all.

Nothing is sorted before it is picked: it is counted how often each digit of a length occurs.

``notes`` [2 * PIECES * KEPT + 2 * PIECES] int32 goes from one to the other: for each of the
``pieces`` the starts of KEPT runs, ascending, then the lengths of all, then each piece's first and
last unit that is taken. Each piece's first run is the one that reaches into it.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

import triton
import triton.language as tl

# Stands for no unit: behind every other.
_NONE = tl.constexpr((1 << 31) - 1)
_DIGITS = tl.constexpr(256)
# What three digits tell. Longer ones count as such: as many as are wanted cannot be.
_LONG = tl.constexpr((1 << 24) - 1)


@triton.jit
def _later(a, b):
    return tl.maximum(a, b)


@triton.jit
def _pick(counts, wanted):
    """Return the lowest digit that is wanted, and how many with this one."""
    digit = tl.arange(0, _DIGITS)
    higher = tl.sum(counts, axis=0) - tl.cumsum(counts, axis=0)
    lowest = tl.min(tl.where(higher < wanted, digit, _DIGITS), axis=0)
    return lowest, wanted - tl.sum(tl.where(digit > lowest, counts, 0), axis=0)


@triton.jit
def _are_picked(lengths, shortest, wanted, before):
    """Say which are longer than ``shortest``, or among the first ``wanted`` of that length.

    ``before``: how many of that length there were already; returned with those added.
    """
    are_equal = ((lengths == shortest) & (lengths > 0)).to(tl.int32)
    rank = before + tl.cumsum(are_equal, axis=0)
    picked = (lengths > shortest) | ((are_equal > 0) & (rank <= wanted))
    return picked, before + tl.sum(are_equal, axis=0)


@triton.jit(do_not_specialize=["size", "pieces"], do_not_specialize_on_alignment=["free", "notes"])
def list_runs_kernel(free, notes, size, pieces, PIECE: tl.constexpr, KEPT: tl.constexpr):
    """List the longest KEPT - 1 runs within a piece of PIECE units; the grid is (pieces,)."""
    piece = tl.program_id(0)
    at = tl.arange(0, PIECE)
    unit = piece * PIECE + at
    taken = (unit < size) & (tl.load(free + unit, mask=unit < size, other=1) == 0)
    behind_taken = (at > 0) & (unit <= size)
    behind_taken &= tl.load(free + unit - 1, mask=behind_taken, other=1) == 0
    # The last unit taken before each; a run ends where one is taken again.
    last = tl.associative_scan(tl.where(behind_taken, at - 1, -1), 0, _later)
    lengths = tl.where(taken & (last >= 0), at - last - 1, 0)
    # No longer than two digits.
    upper, wanted = _pick(tl.histogram(lengths >> 8, _DIGITS), KEPT - 1)
    lower = tl.where(lengths >> 8 == upper, lengths & 255, 0)
    lower, wanted = _pick(tl.histogram(lower, _DIGITS), wanted)
    picked, _ = _are_picked(lengths, upper * 256 + lower, wanted, 0)
    slot = piece * KEPT + tl.cumsum(picked.to(tl.int32), axis=0)
    tl.store(notes + slot, piece * PIECE + last + 1, mask=picked)
    notes += pieces * KEPT
    tl.store(notes + slot, lengths, mask=picked)
    column = tl.arange(0, KEPT)
    unused = column > tl.sum(picked.to(tl.int32), axis=0)
    tl.store(notes + piece * KEPT + column, tl.zeros([KEPT], tl.int32), mask=unused)
    notes += pieces * KEPT
    tl.store(notes + piece, tl.min(tl.where(taken, unit, _NONE), axis=0))
    tl.store(notes + pieces + piece, tl.max(tl.where(taken, unit, 0), axis=0))


@triton.jit
def _add_reaching_in(notes, pieces, KEPT, BLOCK: tl.constexpr):
    """Note for each piece the run that ends where its first unit is taken."""
    firsts = notes + 2 * pieces * KEPT
    lasts = firsts + pieces
    last = tl.full([], 0, tl.int32)
    for begin in range(0, pieces, BLOCK):
        piece = begin + tl.arange(0, BLOCK)
        exists = piece < pieces
        first = tl.load(firsts + piece, mask=exists, other=_NONE)
        before = tl.load(lasts + piece - 1, mask=exists & (piece > 0), other=0)
        before = tl.maximum(tl.associative_scan(before, 0, _later), last)
        length = tl.where(first < _NONE, tl.maximum(first - before - 1, 0), 0)
        tl.store(notes + piece * KEPT, before + 1, mask=exists)
        tl.store(notes + (pieces + piece) * KEPT, length, mask=exists)
        last = tl.max(before, axis=0)
    tl.debug_barrier()


@triton.jit
def _count(lengths, listed, higher, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """Count the digits at bit SHIFT of those ``lengths`` that are ``higher`` above."""
    counts = tl.zeros([_DIGITS], tl.int32)
    for begin in range(0, listed, BLOCK):
        place = begin + tl.arange(0, BLOCK)
        length = tl.minimum(tl.load(lengths + place, mask=place < listed, other=0), _LONG)
        digit = tl.where(length >> (SHIFT + 8) == higher, (length >> SHIFT) & 255, 0)
        counts += tl.histogram(digit, _DIGITS)
    return counts


@triton.jit(
    do_not_specialize=["pieces"],
    do_not_specialize_on_alignment=["notes", "starts", "lengths"],
)
def pick_runs_kernel(notes, starts, lengths, pieces, KEPT: tl.constexpr, BLOCK: tl.constexpr):
    """Write ``starts`` and ``lengths`` [KEPT - 1] int64 of the longest runs; the grid is (1,).

    Longest first, of equal ones the lowest. A length of 0 is no run. BLOCK are looked at at once.
    """
    _add_reaching_in(notes, pieces, KEPT, 256)
    listed = pieces * KEPT
    noted = notes + listed
    upper, wanted = _pick(_count(noted, listed, 0, 16, BLOCK), KEPT - 1)
    middle, wanted = _pick(_count(noted, listed, upper, 8, BLOCK), wanted)
    upper = upper * 256 + middle
    lower, wanted = _pick(_count(noted, listed, upper, 0, BLOCK), wanted)
    shortest = upper * 256 + lower
    equal = tl.full([], 0, tl.int32)
    found = tl.full([], 0, tl.int32)
    for begin in range(0, listed, BLOCK):
        place = begin + tl.arange(0, BLOCK)
        length = tl.load(noted + place, mask=place < listed, other=0)
        picked, equal = _are_picked(length, shortest, wanted, equal)
        slot = found + tl.cumsum(picked.to(tl.int32), axis=0) - 1
        start = tl.load(notes + place, mask=picked, other=0)
        tl.store(starts + slot, start.to(tl.int64), mask=picked)
        tl.store(lengths + slot, length.to(tl.int64), mask=picked)
        found += tl.sum(picked.to(tl.int32), axis=0)
    tl.debug_barrier()
    slot = tl.arange(0, KEPT)
    start = tl.load(starts + slot, mask=slot < found, other=0)
    length = tl.load(lengths + slot, mask=slot < found, other=0)
    # No two keys are equal, so that no order of a sort shows. Below all is what is no run.
    keys = tl.where(slot < found, (length << 32) | (_NONE - start), _NONE)
    keys = tl.sort(keys, descending=True)
    tl.debug_barrier()
    tl.store(starts + slot, _NONE - (keys & _NONE), mask=slot < KEPT - 1)
    tl.store(lengths + slot, keys >> 32, mask=slot < KEPT - 1)
