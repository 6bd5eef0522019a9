"""Kernels that copy cache rows between slots, in every buffer of a pool at once.

A lane copies 16 bytes, as two int64. Lanes run over the vectors of a row, then over rows.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

import triton
import triton.language as tl


@triton.jit
def _places(pointers, row_bytes, targets, sources, pairs, start, tile, ROWS, TILE, LANES):
    """Return where LANES vectors go and come from, and which of them exist."""
    buffer = tl.program_id(1)
    stride = tl.load(row_bytes + buffer).to(tl.int64)
    base = tl.load(pointers + buffer).to(tl.pointer_type(tl.int64))
    # The launcher has checked both: without the hints no 16-byte access is made.
    base = tl.multiple_of(base, 16)
    words = tl.multiple_of(stride // 8, 2)

    lane = tl.arange(0, LANES)
    pair = start + lane // TILE
    vector = tile * TILE + lane % TILE
    exists = (lane < ROWS * TILE) & (pair < pairs) & (vector * 16 < stride)
    target = tl.load(targets + pair, mask=exists, other=-1).to(tl.int64)
    source = tl.load(sources + pair, mask=exists, other=-1).to(tl.int64)
    exists = exists & (target >= 0) & (source >= 0)
    word = (vector * 2)[:, None] + tl.arange(0, 2)[None, :]
    to = base + (target * words)[:, None] + word
    origin = base + (source * words)[:, None] + word
    return to, origin, exists[:, None]


@triton.jit(do_not_specialize=["pairs"])
def move_disjoint_kernel(
    pointers,
    row_bytes,
    targets,
    sources,
    pairs,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    LANES: tl.constexpr,
):
    """Copy ROWS rows of one buffer, whole; nobody else writes what is read here."""
    start = tl.program_id(0) * ROWS
    to, origin, exists = _places(
        pointers, row_bytes, targets, sources, pairs, start, 0, ROWS, TILE, LANES
    )
    tl.store(to, tl.load(origin, mask=exists), mask=exists)


@triton.jit(do_not_specialize=["pairs"])
def move_overlapping_kernel(
    pointers,
    row_bytes,
    targets,
    sources,
    pairs,
    targets_group,
    sources_group,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    LANES: tl.constexpr,
):
    """Copy TILE vectors of all rows of one group in one buffer, ROWS rows at a time.

    A group's rows overlap among themselves only, and only in equal columns. So a program that has
    some columns of the whole group to itself need but load all before it stores.
    """
    group = tl.program_id(0).to(tl.int64)
    targets += group * targets_group
    sources += group * sources_group
    start = 0
    while start < pairs:
        to, origin, exists = _places(
            pointers,
            row_bytes,
            targets,
            sources,
            pairs,
            start,
            tl.program_id(2),
            ROWS,
            TILE,
            LANES,
        )
        rows = tl.load(origin, mask=exists)
        # Another thread of this program may store what this one loads.
        tl.debug_barrier()
        tl.store(to, rows, mask=exists)
        start += ROWS
