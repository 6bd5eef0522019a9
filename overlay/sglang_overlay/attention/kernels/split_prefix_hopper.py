"""The split kernel for sm_90, in Gluon: Triton leaves the tensor cores idle during the softmax."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

LN_2 = gl.constexpr(0.6931471805599453)
# Columns of a chunk: a tile's buffer is freed and filled again chunk by chunk.
CHUNK = gl.constexpr(128)
CHUNKS = gl.constexpr(4)
ROWS = gl.constexpr(64)
TILE = gl.constexpr(64)


@gluon.jit
def locate(table, position, length, stride, PAGE: gl.constexpr, layout: gl.constexpr):
    """Return the element offsets [TILE] int64 of a tile's cache rows."""
    seen = gl.minimum(position + gl.arange(0, TILE, layout), length - 1)
    page = gl.load(table + seen // PAGE).to(gl.int64)
    return (page * PAGE + seen % PAGE) * stride


@gluon.jit
def fetch(target, base, rows, column, WIDTH: gl.constexpr, layout: gl.constexpr):
    """Copy WIDTH columns of the cache rows at offsets ``rows`` into ``target``."""
    columns = column + gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    async_copy.async_copy_global_to_shared(target, base + rows[:, None] + columns[None, :])


@gluon.jit
def score_tile(q, q_rope, k, k_rope, slot, score_layout: gl.constexpr):
    """Issue the products of the queries and the tile in ``slot``; wait for its loads on the way."""
    score = warpgroup_mma_init(gl.zeros([ROWS, TILE], gl.float32, score_layout))
    async_copy.wait_group(CHUNKS - 1)
    fence_async_shared()
    score = warpgroup_mma(
        q_rope, k_rope.index(slot).permute((1, 0)), score, use_acc=False, is_async=True
    )
    for chunk in gl.static_range(CHUNKS):
        if chunk > 0:
            async_copy.wait_group(CHUNKS - 1 - chunk)
            fence_async_shared()
        tile = k.index(slot * CHUNKS + chunk).permute((1, 0))
        score = warpgroup_mma(q.index(chunk), tile, score, is_async=True)
    return score


@gluon.jit
def soften(
    score,
    top,
    total,
    position,
    length,
    score_scale,
    score_layout: gl.constexpr,
    weight_layout: gl.constexpr,
    row_layout: gl.constexpr,
    dtype: gl.constexpr,
):
    """Return (weights, new maximum, new total, factor of what was summed before)."""
    columns = position + gl.arange(0, TILE, gl.SliceLayout(0, score_layout))
    score = gl.where((columns < length)[None, :], score * score_scale, float("-inf"))
    higher = gl.maximum(top, gl.max(score, axis=1))
    fade = gl.exp2(top - higher)
    weight = gl.exp2(score - higher[:, None])
    total = total * fade + gl.sum(weight, axis=1)
    weight = gl.convert_layout(weight.to(dtype), weight_layout)
    return weight, higher, total, gl.convert_layout(fade, row_layout)


@gluon.jit
def store_chunk(target, out, at, live, column, out_layout: gl.constexpr):
    columns = column + gl.arange(0, CHUNK, gl.SliceLayout(0, out_layout))
    gl.store(
        target + at[:, None] + columns[None, :],
        out.to(target.dtype.element_ty),
        mask=live[:, None],
    )


@gluon.jit(do_not_specialize=["table_request"])
def split_prefix_hopper_kernel(
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
    NODES: gl.constexpr,
    HEADS: gl.constexpr,
    PAGE: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Do what `split_prefix.split_prefix_kernel` does, for 64 rows, tiles of 64 and 16-bit caches.

    Scores of tile i + 1 are issued before the outputs of tile i, so that the tensor cores work on
    the latter while the softmax runs on the former. Two tiles are held. A tile's chunk of 128
    columns is loaded over as soon as its outputs are done.
    """
    worker = gl.program_id(1).to(gl.int64)
    start = gl.load(work + worker * 4 + 1)
    end = gl.load(work + worker * 4 + 2)
    if start < end:
        dtype: gl.constexpr = query.dtype.element_ty
        score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16])
        out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 64, 16])
        weight_layout: gl.constexpr = gl.DotOperandLayout(0, out_layout, 2)
        row_layout: gl.constexpr = gl.SliceLayout(1, out_layout)
        copy_layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [8, 1], [1, 0])
        rope_layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
        shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)

        request = gl.load(work + worker * 4).to(gl.int64)
        length = gl.load(lengths + request)
        table = page_table + request * table_request
        rope: gl.constexpr = CHUNKS * CHUNK
        q = gl.allocate_shared_memory(dtype, [CHUNKS, ROWS, CHUNK], shared)
        q_rope = gl.allocate_shared_memory(dtype, [1, ROWS, 64], shared)
        k = gl.allocate_shared_memory(dtype, [2 * CHUNKS, TILE, CHUNK], shared)
        k_rope = gl.allocate_shared_memory(dtype, [2, TILE, 64], shared)

        # Rows behind the last read the last one's query; they are not stored.
        row = gl.program_id(0) * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, copy_layout))
        row = gl.minimum(row, NODES * HEADS - 1)
        q_row = (request * NODES + row // HEADS) * query_token
        q_row += (row % HEADS).to(gl.int64) * query_head
        row = gl.program_id(0) * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, rope_layout))
        row = gl.minimum(row, NODES * HEADS - 1)
        r_row = (request * NODES + row // HEADS) * query_token
        r_row += (row % HEADS).to(gl.int64) * query_head
        fetch(q_rope.index(0), query, r_row, rope, 64, rope_layout)
        for chunk in gl.static_range(CHUNKS):
            fetch(q.index(chunk), query, q_row, chunk * CHUNK, CHUNK, copy_layout)
        for slot in gl.static_range(2):
            # A run of one tile loads a second one all the same: its rows are valid, only unused.
            position = start + slot * TILE
            rows = locate(table, position, length, cache_slot, PAGE, gl.SliceLayout(1, copy_layout))
            ropes = locate(
                table, position, length, cache_slot, PAGE, gl.SliceLayout(1, rope_layout)
            )
            fetch(k_rope.index(slot), cache, ropes, rope, 64, rope_layout)
            for chunk in gl.static_range(CHUNKS):
                target = k.index(slot * CHUNKS + chunk)
                fetch(target, cache, rows, chunk * CHUNK, CHUNK, copy_layout)
                async_copy.commit_group()

        top = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, score_layout))
        total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, score_layout))
        out0 = gl.zeros([ROWS, CHUNK], gl.float32, out_layout)
        out1 = gl.zeros([ROWS, CHUNK], gl.float32, out_layout)
        out2 = gl.zeros([ROWS, CHUNK], gl.float32, out_layout)
        out3 = gl.zeros([ROWS, CHUNK], gl.float32, out_layout)
        async_copy.wait_group(CHUNKS)
        fence_async_shared()
        first = warpgroup_mma_init(gl.zeros([ROWS, TILE], gl.float32, score_layout))
        first = warpgroup_mma(
            q_rope.index(0), k_rope.index(0).permute((1, 0)), first, use_acc=False, is_async=True
        )
        for chunk in gl.static_range(CHUNKS):
            first = warpgroup_mma(
                q.index(chunk), k.index(chunk).permute((1, 0)), first, is_async=True
            )
        score = warpgroup_mma_wait(0, deps=[first])
        weight, top, total, fade = soften(
            score,
            top,
            total,
            start,
            length,
            score_scale,
            score_layout,
            weight_layout,
            row_layout,
            dtype,
        )

        slot = 0
        for position in range(start + TILE, end, TILE):
            # The tile after the next goes where this one's outputs are done.
            after = position + TILE
            rows = locate(table, after, length, cache_slot, PAGE, gl.SliceLayout(1, copy_layout))
            ropes = locate(table, after, length, cache_slot, PAGE, gl.SliceLayout(1, rope_layout))
            out0 = out0 * fade[:, None]
            out1 = out1 * fade[:, None]
            out2 = out2 * fade[:, None]
            out3 = out3 * fade[:, None]
            issued = score_tile(q, q_rope.index(0), k, k_rope, 1 - slot, score_layout)
            here = slot * CHUNKS
            sum0 = warpgroup_mma(weight, k.index(here), out0, is_async=True)
            sum1 = warpgroup_mma(weight, k.index(here + 1), out1, is_async=True)
            sum2 = warpgroup_mma(weight, k.index(here + 2), out2, is_async=True)
            sum3 = warpgroup_mma(weight, k.index(here + 3), out3, is_async=True)
            score = warpgroup_mma_wait(4, deps=[issued])
            next_weight, top, total, fade = soften(
                score,
                top,
                total,
                position,
                length,
                score_scale,
                score_layout,
                weight_layout,
                row_layout,
                dtype,
            )
            more = after < end
            out0 = warpgroup_mma_wait(3, deps=[sum0])
            gl.thread_barrier()
            if more:
                fetch(k_rope.index(slot), cache, ropes, rope, 64, rope_layout)
                fetch(k.index(here), cache, rows, 0, CHUNK, copy_layout)
            async_copy.commit_group()
            out1 = warpgroup_mma_wait(2, deps=[sum1])
            gl.thread_barrier()
            if more:
                fetch(k.index(here + 1), cache, rows, CHUNK, CHUNK, copy_layout)
            async_copy.commit_group()
            out2 = warpgroup_mma_wait(1, deps=[sum2])
            gl.thread_barrier()
            if more:
                fetch(k.index(here + 2), cache, rows, 2 * CHUNK, CHUNK, copy_layout)
            async_copy.commit_group()
            out3 = warpgroup_mma_wait(0, deps=[sum3])
            gl.thread_barrier()
            if more:
                fetch(k.index(here + 3), cache, rows, 3 * CHUNK, CHUNK, copy_layout)
            async_copy.commit_group()
            weight = next_weight
            slot = 1 - slot

        here = slot * CHUNKS
        sum0 = warpgroup_mma(weight, k.index(here), out0 * fade[:, None], is_async=True)
        sum1 = warpgroup_mma(weight, k.index(here + 1), out1 * fade[:, None], is_async=True)
        sum2 = warpgroup_mma(weight, k.index(here + 2), out2 * fade[:, None], is_async=True)
        sum3 = warpgroup_mma(weight, k.index(here + 3), out3 * fade[:, None], is_async=True)
        out0, out1, out2, out3 = warpgroup_mma_wait(0, deps=[sum0, sum1, sum2, sum3])
        async_copy.wait_group(0)

        norm = gl.convert_layout(value_scale / total, row_layout)[:, None]
        row = gl.program_id(0) * ROWS + gl.arange(0, ROWS, row_layout)
        live = row < NODES * HEADS
        at = (worker * (NODES * HEADS) + row) * (CHUNKS * CHUNK)
        store_chunk(part_out, out0 * norm, at, live, 0, out_layout)
        store_chunk(part_out, out1 * norm, at, live, CHUNK, out_layout)
        store_chunk(part_out, out2 * norm, at, live, 2 * CHUNK, out_layout)
        store_chunk(part_out, out3 * norm, at, live, 3 * CHUNK, out_layout)
        row = gl.program_id(0) * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, score_layout))
        lse = (top + gl.log2(total)) * LN_2
        gl.store(part_lse + worker * (NODES * HEADS) + row, lse, mask=row < NODES * HEADS)
