"""The split kernel for GPUs without wgmma, in Gluon: mma.sync, within 101,376 B of shared memory.

Compiled for sm_80 to sm_120, and checked on a CPU, source and PTX. Of GPUs it has run on an H200
alone; `benchmarks/verify_portable.py` times it there.

What a tile of 16 keys takes for 64 rows: shared memory serves 128 B per clock, in 978 accesses,
none in conflict: 144 for the copies, 288 for keys (read by two halves of the rows), 128 for values
(read once), 256 for shares of the scores, written and read, 144 for weights, written once and read
by eight warps, 18 for factors of the scaling. The products, 64 × 16 × 1,088, take 1,088 clocks at
the 1,024 per clock that mma.sync does on sm_80 (about as many on sm_90), and 2,176 at the 512 of
sm_89 and sm_120. So tensor cores bound it, with shared memory close behind on sm_80 and sm_90; on
sm_120, where a multiprocessor gets about 4 B per clock from memory, that binds up to 128 rows.

Hence the shape: each warp keeps its part of the queries in registers (72 a thread, beside 128 of
outputs); read from shared memory for each tile, they alone would take 576 clocks more. For that the
576 columns are split among four groups of warps, whose shares are added in shared memory. For the
outputs, the columns of the values are split among the eight warps, so each value is read once.

An fp8 cache is copied and kept as it is, and converted by the warps that read it. Its values, byte
by byte, take more loads than those of bf16, which ldmatrix transposes.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

LN_2 = gl.constexpr(0.6931471805599453)
# Each of the groups of warps takes a chunk of the latent columns and one of the rope columns.
GROUPS = gl.constexpr(4)
CHUNK = gl.constexpr(128)
HALF = gl.constexpr(64)
ROPE_CHUNK = gl.constexpr(16)
ROWS = gl.constexpr(64)
TILE = gl.constexpr(16)
STAGES = gl.constexpr(4)
# Weights are relative to an old maximum until a score is higher by this, in powers of two.
SLACK = gl.constexpr(8.0)
# The bits of 1.0.
ONE = gl.constexpr(0x3F800000)

# Layouts of registers: shares of the scores by group, of keys and rows, for fp8 of rows and keys;
# a tile's scores, outputs, copies.
SHARES = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1, 2], [1, 16, 8]))
SHARES_8 = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 2, 1], [1, 16, 8]))
SCORES = gl.constexpr(gl.BlockedLayout([1, 4], [8, 4], [8, 1], [1, 0]))
SCORE_ROWS = gl.constexpr(gl.SliceLayout(1, SCORES))
# A thread's four scores of a row by themselves; and a row's factor in all threads of a warp.
FOURS = gl.constexpr(gl.BlockedLayout([1, 1, 4], [8, 4, 1], [8, 1, 1], [2, 1, 0]))
SUMS_OF_THREADS = gl.constexpr(gl.SliceLayout(2, FOURS))
ROWS_OF_THREADS = gl.constexpr(gl.SliceLayout(1, SUMS_OF_THREADS))
ROWS_OF_WARP = gl.constexpr(gl.BlockedLayout([2], [32], [8], [0]))
OUTPUTS = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [1, 8], [16, 8]))
OUTPUT_ROWS = gl.constexpr(gl.SliceLayout(1, OUTPUTS))
LATENT_COPY = gl.constexpr(gl.BlockedLayout([1, 1, 8], [1, 2, 16], [1, 8, 1], [2, 1, 0]))
# A thread copies columns of the same row as above, so that it knows the row's place.
ROPE_COPY = gl.constexpr(gl.BlockedLayout([1, 1, 8], [8, 2, 2], [1, 8, 1], [2, 0, 1]))
# The same for a cache of 8 bits.
LATENT_COPY_8 = gl.constexpr(gl.BlockedLayout([1, 1, 16], [2, 2, 8], [1, 8, 1], [2, 0, 1]))
ROPE_COPY_8 = gl.constexpr(gl.BlockedLayout([1, 1, 16], [16, 2, 1], [1, 8, 1], [2, 0, 1]))
COPY_ROWS = gl.constexpr(gl.SliceLayout(0, gl.SliceLayout(2, LATENT_COPY)))
# Layouts of shared memory, without bank conflicts; those of one group are views of the others.
WIDE = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0]))
WIDE_OF_GROUP = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
# The rope columns of a row lie together, and the place of eight of them depends on the row.
_NARROW = [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 0, 8], [1, 0, 0], [2, 0, 0]]
_NARROW += [[0, 1, 8], [1, 2, 0], [2, 4, 0], [0, 8, 0]]
WIDE_8 = gl.constexpr(gl.SwizzledSharedLayout(16, 1, 8, [2, 1, 0]))
WIDE_8_OF_GROUP = gl.constexpr(gl.SwizzledSharedLayout(16, 1, 8, [1, 0]))
_NARROW_8 = [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 0, 8], [1, 0, 0], [2, 0, 0]]
_NARROW_8 += [[0, 1, 0], [1, 2, 0], [2, 4, 0], [0, 8, 0]]
NARROW_8 = gl.constexpr(gl.SharedLinearLayout(_NARROW_8))
NARROW = gl.constexpr(gl.SharedLinearLayout(_NARROW))
QUERY_NARROW = gl.constexpr(gl.SharedLinearLayout(_NARROW + [[0, 16, 0], [0, 32, 0]]))
WEIGHTS = gl.constexpr(gl.SwizzledSharedLayout(8, 4, 2, [1, 0]))
# A row's 16 scores lie in two halves, whose places depend on the row, among those of two rows.
_SUMS = [[0, 1], [0, 2], [0, 4], [0, 8], [1, 0], [2, 8], [5, 0], [8, 0], [16, 0], [32, 0]]
SUMS_OF_GROUP = gl.constexpr(gl.SharedLinearLayout(_SUMS))
SUMS = gl.constexpr(
    gl.SharedLinearLayout([[0, *basis] for basis in _SUMS] + [[1, 0, 0], [2, 0, 0]])
)
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def find_pages(table, position, length, PAGE: gl.constexpr):
    """Return the pages [TILE] int32 of a tile; behind the prefix, the last slot's."""
    seen = gl.minimum(position + gl.arange(0, TILE, COPY_ROWS), length - 1)
    return gl.load(table + seen // PAGE)


@gluon.jit
def copy_columns(
    target, base, rows, wanted, first: gl.constexpr, count: gl.constexpr, layout: gl.constexpr
):
    """Copy GROUPS chunks of ``count`` columns from the ``first`` on of the rows at ``rows``.

    Nothing is copied where ``wanted`` is given and false: a branch would keep the compiler from
    moving what comes before past what comes behind.
    """
    of_rows: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, layout))
    rows = gl.convert_layout(rows, of_rows, assert_trivial=True)
    group = gl.arange(0, GROUPS, gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    column = gl.arange(0, count, gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    source = base + rows[None, :, None] + first
    async_copy.async_copy_global_to_shared(
        target, source + group[:, None, None] * count + column[None, None, :], mask=wanted
    )


@gluon.jit
def locate(page, position, length, stride, PAGE: gl.constexpr):
    """Return where in memory the rows of the tile at ``position`` are; its pages are ``page``."""
    seen = gl.minimum(position + gl.arange(0, TILE, COPY_ROWS), length - 1)
    return (page.to(gl.int64) * PAGE + seen % PAGE) * stride


@gluon.jit
def fetch(latents, ropes, cache, rows, wanted, BYTES: gl.constexpr):
    """Copy the tile whose rows are at ``rows``, unless ``wanted`` is false."""
    latent_copy: gl.constexpr = LATENT_COPY_8 if BYTES == 1 else LATENT_COPY
    rope_copy: gl.constexpr = ROPE_COPY_8 if BYTES == 1 else ROPE_COPY
    copy_columns(latents, cache, rows, wanted, 0, CHUNK, latent_copy)
    copy_columns(ropes, cache, rows, wanted, GROUPS * CHUNK, ROPE_CHUNK, rope_copy)


@gluon.jit
def load_query(staged, BYTES: gl.constexpr):
    """Return columns of the queries [GROUPS, ROWS, columns] for `add_scores`."""
    if BYTES == 1:
        query = staged.load(gl.DotOperandLayout(0, SHARES_8, 4))
    else:
        query = staged.permute((0, 2, 1)).load(gl.DotOperandLayout(1, SHARES, 2))
    return query


@gluon.jit
def add_scores(score, q, rows, BYTES: gl.constexpr):
    """Add each group's share of the scores of the cache ``rows``, [GROUPS, TILE, ROWS].

    A load of keys then serves four products that do not wait for each other. With an fp8 cache it
    is [GROUPS, ROWS, TILE], of two such products: the others' converted keys would be spilled.
    """
    if BYTES == 1:
        keys = rows.permute((0, 2, 1)).load(gl.DotOperandLayout(1, SHARES_8, 4))
        added = mma_v2(q, keys.to(q.dtype), score)
    else:
        added = mma_v2(rows.load(gl.DotOperandLayout(0, SHARES, 2)), q, score)
    return added


@gluon.jit
def score_tile(shares, q_low, q_high, q_rope, latents, ropes, BYTES: gl.constexpr):
    """Write each group's share of a tile's scores to ``shares`` [GROUPS, ROWS, TILE]."""
    if BYTES == 1:
        score = gl.zeros([GROUPS, ROWS, TILE], gl.float32, SHARES_8)
    else:
        score = gl.zeros([GROUPS, TILE, ROWS], gl.float32, SHARES)
    score = add_scores(score, q_rope, ropes, BYTES)
    score = add_scores(score, q_low, latents.slice(0, HALF, 2), BYTES)
    score = add_scores(score, q_high, latents.slice(HALF, HALF, 2), BYTES)
    if BYTES == 1:
        shares.store(score)
    else:
        shares.permute((0, 2, 1)).store(score)


@gluon.jit
def add_shares(shares):
    """Return a tile's scores [ROWS, TILE], the groups' ``shares`` added up."""
    share = shares._reinterpret(gl.float32, [GROUPS, ROWS, TILE], SUMS_OF_GROUP)
    score = share.index(0).load(SCORES) + share.index(1).load(SCORES)
    score += share.index(2).load(SCORES) + share.index(3).load(SCORES)
    return score


@gluon.jit
def weigh(score, top, total, position, end, score_scale):
    """Return the weights of a tile's columns before ``end``, and what rows fade by; and the sums.

    ``top`` are the rows' maxima, and ``total`` their sums, a part for each thread that has columns
    of the row.
    """
    columns = position + gl.arange(0, TILE, gl.SliceLayout(0, SCORES))
    score = gl.where((columns < end)[None, :], score * score_scale, float("-inf"))
    highest = gl.max(score, axis=1)
    higher = gl.where(highest > top + SLACK, highest, top)
    fade = gl.exp2(top - higher)
    part = gl.exp2(score - higher[:, None])
    by = gl.convert_layout(fade, ROWS_OF_THREADS, assert_trivial=True)
    fours = gl.convert_layout(part.reshape([ROWS, TILE // 4, 4]), FOURS, assert_trivial=True)
    total = total * by[:, None] + gl.sum(fours, axis=2)
    return part, fade, higher, total


@gluon.jit
def add_outputs(out, weight, rows):
    """Add the cache ``rows`` [TILE, CHUNK] by weight to the outputs [ROWS, CHUNK]."""
    values = rows.load(gl.DotOperandLayout(1, OUTPUTS, 2)).to(weight.dtype)
    return mma_v2(weight, values, out)


@gluon.jit
def store_chunk(target, out, at, live, column):
    """Write one chunk of the outputs of the rows that are ``live``, at offsets ``at``."""
    columns = column + gl.arange(0, CHUNK, gl.SliceLayout(0, OUTPUTS))
    gl.store(
        target + at[:, None] + columns[None, :],
        out.to(target.dtype.element_ty),
        mask=live[:, None],
    )


@gluon.jit(do_not_specialize=["table_request"])
def split_prefix_mma_kernel(
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
):
    """Do what `split_prefix.split_prefix_kernel` does, for 64 rows and tiles of 16.

    Two barriers a tile, and its outputs come an interval after its scores: behind the first barrier
    the softmax of the next tile runs beside products of this one's outputs, which do not wait for
    it, and behind the second the scores of the tile after the next. No product waits for a softmax.
    The outputs are scaled only when a row's scores have risen by more than SLACK, which float32 and
    the 16-bit weights bear, and which is rare. Four tiles are held, up to two of them on their way.

    For an fp8 cache the queries are rounded to float16, as the kernel of sm_90 does, which leaves
    one conversion of a key where there are two else, the second at 16 numbers a clock.
    """
    worker = gl.program_id(1).to(gl.int64)
    start = gl.load(work + worker * 4 + 1)
    end = gl.load(work + worker * 4 + 2)
    if start < end:
        dtype: gl.constexpr = query.dtype.element_ty
        stored: gl.constexpr = cache.dtype.element_ty
        BYTES: gl.constexpr = stored.primitive_bitwidth // 8
        # float16 holds every fp8 number, and costs fewer instructions to come to.
        mixed: gl.constexpr = gl.float16 if BYTES == 1 else dtype
        wide: gl.constexpr = WIDE_8 if BYTES == 1 else WIDE
        wide_of_group: gl.constexpr = WIDE_8_OF_GROUP if BYTES == 1 else WIDE_OF_GROUP
        narrow: gl.constexpr = NARROW_8 if BYTES == 1 else NARROW
        request = gl.load(work + worker * 4).to(gl.int64)
        length = gl.load(lengths + request)
        table = page_table + request * table_request

        # Rows behind the last read the last one's query; they are not stored.
        row = gl.program_id(0) * ROWS + gl.arange(0, ROWS, COPY_ROWS)
        row = gl.minimum(row, NODES * HEADS - 1)
        q_row = (request * NODES + row // HEADS) * query_token
        q_row += (row % HEADS).to(gl.int64) * query_head
        # Dead before the tiles come, which then take their place; for fp8 the rope columns stay.
        staged = gl.allocate_shared_memory(dtype, [GROUPS, ROWS, CHUNK], WIDE)
        staged_rope = gl.allocate_shared_memory(dtype, [GROUPS, ROWS, ROPE_CHUNK], QUERY_NARROW)
        copy_columns(staged, query, q_row, None, 0, CHUNK, LATENT_COPY)
        copy_columns(staged_rope, query, q_row, None, GROUPS * CHUNK, ROPE_CHUNK, ROPE_COPY)
        async_copy.commit_group()
        page0 = find_pages(table, start, length, PAGE)
        page1 = find_pages(table, start + TILE, length, PAGE)
        page2 = find_pages(table, start + 2 * TILE, length, PAGE)
        page = find_pages(table, start + 3 * TILE, length, PAGE)
        async_copy.wait_group(0)
        q_low = load_query(staged.slice(0, HALF, 2), BYTES).to(mixed)
        q_high = load_query(staged.slice(HALF, HALF, 2), BYTES).to(mixed)
        q_rope = load_query(staged_rope, BYTES).to(mixed)

        k0 = gl.allocate_shared_memory(stored, [GROUPS, TILE, CHUNK], wide)
        k1 = gl.allocate_shared_memory(stored, [GROUPS, TILE, CHUNK], wide)
        k2 = gl.allocate_shared_memory(stored, [GROUPS, TILE, CHUNK], wide)
        k3 = gl.allocate_shared_memory(stored, [GROUPS, TILE, CHUNK], wide)
        r0 = gl.allocate_shared_memory(stored, [GROUPS, TILE, ROPE_CHUNK], narrow)
        r1 = gl.allocate_shared_memory(stored, [GROUPS, TILE, ROPE_CHUNK], narrow)
        r2 = gl.allocate_shared_memory(stored, [GROUPS, TILE, ROPE_CHUNK], narrow)
        r3 = gl.allocate_shared_memory(stored, [GROUPS, TILE, ROPE_CHUNK], narrow)
        latents = (k0, k1, k2, k3)
        ropes = (r0, r1, r2, r3)
        shares = gl.allocate_shared_memory(gl.float32, [GROUPS, ROWS, TILE], SUMS)
        weight0 = gl.allocate_shared_memory(mixed, [ROWS, TILE], WEIGHTS)
        weight1 = gl.allocate_shared_memory(mixed, [ROWS, TILE], WEIGHTS)
        weights = (weight0, weight1)
        fades = gl.allocate_shared_memory(gl.float32, [ROWS], PLAIN)
        fetch(k0, r0, cache, locate(page0, start, length, cache_slot, PAGE), None, BYTES)
        async_copy.commit_group()
        rows = locate(page1, start + TILE, length, cache_slot, PAGE)
        fetch(k1, r1, cache, rows, None, BYTES)
        async_copy.commit_group()
        rows = locate(page2, start + 2 * TILE, length, cache_slot, PAGE)
        fetch(k2, r2, cache, rows, None, BYTES)
        async_copy.commit_group()

        top = gl.full([ROWS], float("-inf"), gl.float32, SCORE_ROWS)
        total = gl.zeros([ROWS, TILE // 4], gl.float32, SUMS_OF_THREADS)
        out0 = gl.zeros([ROWS, CHUNK], gl.float32, OUTPUTS)
        out1 = gl.zeros([ROWS, CHUNK], gl.float32, OUTPUTS)
        out2 = gl.zeros([ROWS, CHUNK], gl.float32, OUTPUTS)
        out3 = gl.zeros([ROWS, CHUNK], gl.float32, OUTPUTS)
        async_copy.wait_group(2)
        score_tile(shares, q_low, q_high, q_rope, k0, r0, BYTES)
        # A tile behind the last is weighed too, as nothing.
        limit = gl.minimum(length, end)
        ahead, _, top, total = weigh(add_shares(shares), top, total, start, limit, score_scale)
        weight0.store(ahead.to(mixed))
        async_copy.wait_group(1)
        score_tile(shares, q_low, q_high, q_rope, k1, r1, BYTES)
        rows = locate(page, start + 3 * TILE, length, cache_slot, PAGE)
        for first in range(start, end, STAGES * TILE):
            for slot in gl.static_range(STAGES):
                position = first + slot * TILE
                if position < end:
                    gl.thread_barrier()
                    after = position + (STAGES - 1) * TILE
                    last: gl.constexpr = (slot + STAGES - 1) % STAGES
                    v = latents[slot]._reinterpret(stored, [GROUPS, TILE, CHUNK], wide_of_group)
                    score = add_shares(shares)
                    p = weights[slot % 2].load(gl.DotOperandLayout(0, OUTPUTS, 2))
                    part, fade, top, total = weigh(
                        score, top, total, position + TILE, limit, score_scale
                    )
                    out0 = add_outputs(out0, p, v.index(0))
                    out1 = add_outputs(out1, p, v.index(1))
                    fades.store(fade)
                    weights[(slot + 1) % 2].store(part.to(mixed))
                    out2 = add_outputs(out2, p, v.index(2))
                    out3 = add_outputs(out3, p, v.index(3))
                    # The place of the tile before is free since the barrier, but there all warps
                    # have to read at once; here they wait for their products.
                    fetch(latents[last], ropes[last], cache, rows, after < end, BYTES)
                    async_copy.commit_group()
                    page = find_pages(table, after + TILE, length, PAGE)
                    # The tile after the next is there.
                    async_copy.wait_group(1)
                    # The bits of factors, which are not negative, are in the factors' order.
                    bits = fades.load(ROWS_OF_WARP).to(gl.int32, bitcast=True)
                    rising = gl.min(bits, axis=0) < ONE
                    two: gl.constexpr = (slot + 2) % STAGES
                    score_tile(shares, q_low, q_high, q_rope, latents[two], ropes[two], BYTES)
                    rows = locate(page, after + TILE, length, cache_slot, PAGE)
                    if rising:
                        by = fades.load(OUTPUT_ROWS)[:, None]
                        out0 = out0 * by
                        out1 = out1 * by
                        out2 = out2 * by
                        out3 = out3 * by
        async_copy.wait_group(0)

        total = gl.convert_layout(gl.sum(total, axis=1), SCORE_ROWS, assert_trivial=True)
        fades.store(value_scale / total)
        norm = fades.load(OUTPUT_ROWS)[:, None]
        row = gl.program_id(0) * ROWS + gl.arange(0, ROWS, OUTPUT_ROWS)
        live = row < NODES * HEADS
        at = (worker * (NODES * HEADS) + row) * (GROUPS * CHUNK)
        store_chunk(part_out, out0 * norm, at, live, 0)
        store_chunk(part_out, out1 * norm, at, live, CHUNK)
        store_chunk(part_out, out2 * norm, at, live, 2 * CHUNK)
        store_chunk(part_out, out3 * norm, at, live, 3 * CHUNK)
        row = gl.program_id(0) * ROWS + gl.arange(0, ROWS, SCORE_ROWS)
        lse = (top + gl.log2(total)) * LN_2
        gl.store(part_lse + worker * (NODES * HEADS) + row, lse, mask=row < NODES * HEADS)
