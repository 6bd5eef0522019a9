"""Kernels of the portable prefix engine: share the prefixes out, then attend part by part."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

import triton
import triton.language as tl

LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit(do_not_specialize=["requests", "workers"])
def share_work_kernel(
    lengths,
    work,
    first_part,
    requests,
    workers,
    TILE: tl.constexpr,
    LEAST_TILES: tl.constexpr,
    REQUESTS: tl.constexpr,
    WORKERS: tl.constexpr,
):
    """Give every worker one run of tiles of one request, so that the longest run is shortest.

    ``work`` [workers, 4] int32 gets (request, first position, end position, 0), a worker without
    work an empty range; ``first_part`` [requests + 1] int32 the first worker of each request. The
    longest run is found by bisection; each request's tiles are then spread evenly over as many
    workers as that run asks for. Every program repeats the bisection and fills WORKERS rows.
    """
    request = tl.arange(0, REQUESTS)
    exists = request < requests
    tiles = (tl.load(lengths + request, mask=exists, other=0) + TILE - 1) // TILE
    low = tl.full([], LEAST_TILES, tl.int32)
    high = tl.maximum(tl.max(tiles, axis=0), LEAST_TILES)
    while low < high:
        middle = (low + high) // 2
        fits = tl.sum((tiles + middle - 1) // middle, axis=0) <= workers
        low = tl.where(fits, low, middle + 1)
        high = tl.where(fits, middle, high)
    parts = (tiles + low - 1) // low
    end = tl.cumsum(parts, axis=0)
    if tl.program_id(0) == 0:
        tl.store(first_part + request + 1, end, mask=exists)
        tl.store(first_part, 0)

    worker = tl.program_id(0) * WORKERS + tl.arange(0, WORKERS)
    own = tl.sum((end[None, :] <= worker[:, None]).to(tl.int32), axis=1)
    here = (own[:, None] == request[None, :]).to(tl.int32)
    own_tiles = tl.sum(here * tiles[None, :], axis=1)
    own_parts = tl.maximum(tl.sum(here * parts[None, :], axis=1), 1)
    part = worker - tl.sum(here * (end - parts)[None, :], axis=1)
    start = part * (own_tiles // own_parts) + tl.minimum(part, own_tiles % own_parts)
    run = own_tiles // own_parts + (part < own_tiles % own_parts).to(tl.int32)
    idle = own >= requests
    row = work + worker * 4
    inside = worker < workers
    tl.store(row, tl.where(idle, 0, own), mask=inside)
    tl.store(row + 1, tl.where(idle, 0, start * TILE), mask=inside)
    tl.store(row + 2, tl.where(idle, 0, (start + run) * TILE), mask=inside)


@triton.jit(do_not_specialize=["table_request"])
def split_prefix_kernel(
    query,
    cache,
    page_table,
    lengths,
    work,
    part_out,
    part_lse,
    score_scale,
    value_scale,
    query_token,
    query_head,
    cache_slot,
    table_request,
    NODES: tl.constexpr,
    HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Attend ROWS (node, head) rows of one request to one worker's run of its prefix.

    The softmax is online, in base 2; ``score_scale`` is softmax scale × stored-unit scale × log2 e.
    ``part_out`` [workers, nodes × heads, 512] gets the run's own attention and ``part_lse``
    [workers, nodes × heads] the natural logarithm of its weight. A position behind the prefix reads
    the last slot again instead of its own, so no load is masked and unused rows may hold anything.
    """
    worker = tl.program_id(1).to(tl.int64)
    start = tl.load(work + worker * 4 + 1)
    end = tl.load(work + worker * 4 + 2)
    if start >= end:
        return
    request = tl.load(work + worker * 4).to(tl.int64)
    length = tl.load(lengths + request)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = row < NODES * HEADS
    token = request * NODES + row // HEADS
    query_row = query + token * query_token + (row % HEADS).to(tl.int64) * query_head
    latent = tl.arange(0, LATENT)
    rope = LATENT + tl.arange(0, ROPE)
    q = tl.load(query_row[:, None] + latent[None, :], mask=live[:, None], other=0.0)
    q_rope = tl.load(query_row[:, None] + rope[None, :], mask=live[:, None], other=0.0)

    table = page_table + request * table_request
    step = tl.arange(0, TILE)
    seen = tl.minimum(start + step, length - 1)
    page = tl.load(table + seen // PAGE).to(tl.int64)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, LATENT], tl.float32)
    for position in range(start, end, TILE):
        cache_row = cache + (page * PAGE + seen % PAGE) * cache_slot
        # The next tile's pages are loaded a tile ahead: its rows' addresses depend on them.
        seen = tl.minimum(position + TILE + step, length - 1)
        page = tl.load(table + seen // PAGE).to(tl.int64)
        k = tl.load(cache_row[:, None] + latent[None, :]).to(q.dtype)
        k_rope = tl.load(cache_row[:, None] + rope[None, :]).to(q.dtype)
        score = tl.dot(q, tl.trans(k), input_precision="ieee")
        score = tl.dot(q_rope, tl.trans(k_rope), acc=score, input_precision="ieee")
        if position + TILE > length:
            score = tl.where((position + step < length)[None, :], score, float("-inf"))
        score *= score_scale
        higher = tl.maximum(top, tl.max(score, axis=1))
        # What an empty prefix is planned to read may be NaN, and NaN is no maximum.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        fade = tl.exp2(top - base)
        weight = tl.exp2(score - base[:, None])
        total = total * fade + tl.sum(weight, axis=1)
        out = tl.dot(weight.to(q.dtype), k, acc=out * fade[:, None], input_precision="ieee")
        top = higher

    at = worker * (NODES * HEADS) + row
    out *= (value_scale / total)[:, None]
    target = part_out + at[:, None] * LATENT + latent[None, :]
    tl.store(target, out.to(part_out.dtype.element_ty), mask=live[:, None])
    tl.store(part_lse + at, (top + tl.log2(total)) * LN_2, mask=live)
