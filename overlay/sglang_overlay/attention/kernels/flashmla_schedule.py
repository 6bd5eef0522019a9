"""Kernel that plans FlashMLA's dense decode on sm_90, a program per part instead of one thread."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

import triton
import triton.language as tl


@triton.jit
def _next_cut(cut, ends, total, share, OVERHEAD: tl.constexpr):
    """Return the end of the part that begins at ``cut``, and the last sequence border before it.

    A part takes ``share`` blocks more, or goes on to a border (0 or one of ``ends``) that the
    overhead it then saves reaches: no part costs more than ``share`` + OVERHEAD.
    """
    border = tl.max(tl.where(ends <= cut + share + OVERHEAD, ends, 0))
    return tl.minimum(tl.maximum(cut + share, border), total), border


# Not specialised: a batch's size must not compile anew.
@triton.jit(do_not_specialize=["requests", "parts"])
def flashmla_schedule_kernel(
    lengths,
    schedule,
    splits,
    requests,
    parts,
    PAGE: tl.constexpr,
    OVERHEAD: tl.constexpr,
    FLAGS: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write ``schedule`` [parts, 8] and ``splits`` [requests + 1]; the grid is (parts + 1,).

    All are int32 and contiguous. The sequences lie end to end on one axis of blocks, each with its
    ``lengths`` [requests] in blocks of PAGE slots and then OVERHEAD blocks, what a piece costs
    beside them. Where a part begins depends on where the one before it ended, so every program
    walks there from the first, one reduction over ``ends`` a part; the last program counts pieces.

    A row of ``schedule`` has in blocks: first request, its first block, last request, the block
    behind its last, number of the first piece in its request, 0, 0, 0. With SLOTS these are slots,
    the last the request's length where it ends there. With FLAGS in blocks: first and last request,
    first block of the one, block behind the last of the other, number of the piece, whether the
    first and the last request have other pieces, 0. A part without work has ``requests`` as its
    first. ``splits`` counts the pieces of all requests before.

    BLOCK is at least ``requests``. An empty sequence counts one block, or none with SLOTS.
    """
    part = tl.program_id(0)
    request = tl.arange(0, BLOCK)
    present = request < requests
    length = tl.load(lengths + request, mask=present, other=0)
    blocks = (length + (PAGE - 1)) // PAGE
    counted = blocks if SLOTS else tl.maximum(blocks, 1)
    # Behind the last request this repeats the total, which is a border anyway.
    ends = tl.cumsum(tl.where(present, counted + OVERHEAD, 0))
    total = tl.max(ends)
    share = tl.cdiv(total, parts)
    cut = total * 0  # 0 of total's type, for the loops
    if part == parts:
        pieces = request + 1
        for _ in range(parts):
            cut, border = _next_cut(cut, ends, total, share, OVERHEAD)
            # A cut inside a request is a piece more, for its own end and for those of later ones.
            pieces += ((cut > border) & (cut < ends)).to(tl.int32)
        tl.store(splits, 0)
        tl.store(splits + 1 + request, pieces, mask=present)
    else:
        for _ in range(part):
            cut, _border = _next_cut(cut, ends, total, share, OVERHEAD)
        stop, border = _next_cut(cut, ends, total, share, OVERHEAD)
        first = tl.sum((present & (ends <= cut)).to(tl.int32))
        block = cut - tl.max(tl.where(ends <= cut, ends, 0))
        last = tl.sum((present & (ends <= stop)).to(tl.int32))
        inside = stop > border
        last = tl.where(inside, last, last - 1)
        # A request's first piece may be shorter than a share; those between are one each.
        piece = tl.cdiv(block, share)
        size = tl.sum(tl.where(request == last, length if SLOTS else blocks, 0))
        field = tl.arange(0, 8)
        if FLAGS:
            alone = first == last
            first_split = (block > 0) | (alone & inside)
            last_split = inside | (alone & (block > 0))
            stop = tl.where(inside, stop - border, size)
            row = tl.where(field == 1, last, tl.where(field == 2, block, stop))
            row = tl.where(field == 5, first_split.to(tl.int32), row)
            row = tl.where(field == 6, last_split.to(tl.int32), row)
        else:
            UNIT: tl.constexpr = PAGE if SLOTS else 1
            stop = tl.where(inside, (stop - border) * UNIT, size)
            row = tl.where(field == 1, block * UNIT, tl.where(field == 2, last, stop))
            row = tl.where(field >= 5, 0, row)
        row = tl.where(field == 7, 0, row)
        row = tl.where(field == 0, first, tl.where(field == 4, piece, row))
        tl.store(schedule + part * 8 + field, row)
