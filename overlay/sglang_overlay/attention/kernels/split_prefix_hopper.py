"""The split kernel for sm_90 in Gluon, warp groups with roles: load, score, add up the outputs.

16 warps are four groups, so that the tensor cores have work while one group computes the softmax
and another the addresses of its copies. (With all warps doing the same at once, they stood idle two
thirds of the time.) The groups meet at barriers in shared memory alone:

- ``asked``: the queries are there
- ``full``: a piece of a tile's columns is there; ``free``: its outputs are done
- ``faded``: how far the outputs shrink is known; ``weighed``: the weights are there; ``spent``: the
  outputs have read them

A tile's columns are five pieces, the rope columns and four chunks. Two tiles are held, and a piece
is loaded over as soon as it is free. One group adds the first two chunks, one the others, so the
first and the third are free first, and loaded and scored first.

Rows of fp8 are loaded into registers a tile ahead, and stored as float16, which holds every fp8
number; so are the queries and the weights.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

LN_2 = gl.constexpr(0.6931471805599453)
CHUNK = gl.constexpr(128)
CHUNKS = gl.constexpr(4)
PIECES = gl.constexpr(5)
LATENT = gl.constexpr(512)
ROPE = gl.constexpr(64)
ROWS = gl.constexpr(64)
TILE = gl.constexpr(64)
LOADERS = gl.constexpr(128)
# Weights are relative to an old maximum until a score is higher by this, in powers of two.
SLACK = gl.constexpr(8.0)

# Layouts of one group of four warps.
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
SCORE_ROWS = gl.constexpr(gl.SliceLayout(1, SCORES))
OUTPUTS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
OUTPUT_ROWS = gl.constexpr(gl.SliceLayout(1, OUTPUTS))
# Each warp knows all.
EVERY_ROW = gl.constexpr(gl.BlockedLayout([2], [32], [4], [0]))
COPY = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
COPY_ROWS = gl.constexpr(gl.SliceLayout(1, COPY))
# The same for words of four fp8 numbers.
WORDS = gl.constexpr(gl.BlockedLayout([1, 2], [4, 8], [4, 1], [1, 0]))
WORD_ROWS = gl.constexpr(gl.SliceLayout(1, WORDS))
SHARED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
SHARED_WORDS = gl.constexpr(gl.NVMMASharedLayout(128, 32, 2))
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def find_pages(table, position, length, PAGE: gl.constexpr, layout: gl.constexpr):
    """Return the page of the tile at ``position``, or [TILE] slots where a page is one slot."""
    if PAGE == 1:
        at = gl.minimum(position + gl.arange(0, TILE, layout), length - 1)
    else:
        at = gl.minimum(position, length - 1) // PAGE
    return gl.load(table + at)


@gluon.jit
def place_rows(page, position, length, stride, PAGE: gl.constexpr, layout: gl.constexpr):
    """Return the element offsets [TILE] int64 of a tile's rows; behind the prefix, the last's."""
    if PAGE == 1:
        rows = page.to(gl.int64) * stride
    else:
        within = gl.minimum(gl.arange(0, TILE, layout), length - 1 - position)
        rows = page.to(gl.int64) * PAGE * stride + within * stride
    return rows


@gluon.jit
def place_queries(
    request,
    block,
    query_token,
    query_head,
    NODES: gl.constexpr,
    HEADS: gl.constexpr,
):
    """Return the offsets [ROWS] int64 of the queries; those behind the last are the last's."""
    row = gl.minimum(block * ROWS + gl.arange(0, ROWS, COPY_ROWS), NODES * HEADS - 1)
    token = (request * NODES + row // HEADS) * query_token
    return token + (row % HEADS).to(gl.int64) * query_head


@gluon.jit
def point(base, rows, column: gl.constexpr, WIDTH: gl.constexpr, layout: gl.constexpr):
    """Return pointers to WIDTH columns of the rows at offsets ``rows``."""
    columns = gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    return base + rows[:, None] + columns[None, :] + column


@gluon.jit
def copy_chunk(cache, rows, k, full, free, slot, phase, chunk: gl.constexpr):
    """Load one chunk of a tile's rows once its place is free."""
    piece = slot * PIECES + 1 + chunk
    mbarrier.wait(free.index(piece), phase ^ 1)
    async_copy.async_copy_global_to_shared(
        k.index(slot * CHUNKS + chunk), point(cache, rows, chunk * CHUNK, CHUNK, COPY)
    )
    async_copy.mbarrier_arrive(full.index(piece), increment_count=False)


@gluon.jit
def copy_tiles(asking, loading, NODES: gl.constexpr, HEADS: gl.constexpr, PAGE: gl.constexpr):
    """Load the queries, then tile after tile, 16-bit rows: the group that loads."""
    query, q, q_rope, asked, request, block, query_token, query_head = asking
    cache, table, k, k_rope, full, free, start, end, length, cache_slot = loading
    rows = place_queries(request, block, query_token, query_head, NODES, HEADS)
    async_copy.async_copy_global_to_shared(q_rope.index(0), point(query, rows, LATENT, ROPE, COPY))
    for chunk in gl.static_range(CHUNKS):
        async_copy.async_copy_global_to_shared(
            q.index(chunk), point(query, rows, chunk * CHUNK, CHUNK, COPY)
        )
    async_copy.mbarrier_arrive(asked, increment_count=False)
    page = find_pages(table, start, length, PAGE, COPY_ROWS)
    slot = 0
    phase = 0
    for position in range(start, end, TILE):
        rows = place_rows(page, position, length, cache_slot, PAGE, COPY_ROWS)
        # Of the next tile, whose addresses depend on them.
        page = find_pages(table, position + TILE, length, PAGE, COPY_ROWS)
        mbarrier.wait(free.index(slot * PIECES), phase ^ 1)
        async_copy.async_copy_global_to_shared(
            k_rope.index(slot), point(cache, rows, LATENT, ROPE, COPY)
        )
        async_copy.mbarrier_arrive(full.index(slot * PIECES), increment_count=False)
        for step in gl.static_range(CHUNKS):
            copy_chunk(cache, rows, k, full, free, slot, phase, step % 2 * 2 + step // 2)
        phase = phase ^ slot
        slot = 1 - slot


@gluon.jit
def widen(words):
    """Return pairs of float16, in twice as many words, of words of four fp8 numbers."""
    low, high = gl.inline_asm_elementwise(
        "{ .reg .b16 a, b; mov.b32 {a, b}, $2; "
        "cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }",
        "=r,=r,r",
        [words],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )
    return gl.join(low, high).reshape([words.shape[0], words.shape[1] * 2])


@gluon.jit
def load_words(words, rows, chunk: gl.constexpr):
    """Load a chunk of the rows at offsets ``rows``, four fp8 numbers a word."""
    return gl.load(point(words, rows, chunk * (CHUNK // 4), CHUNK // 4, WORDS))


@gluon.jit
def load_rope(words, rows):
    """Load the rope columns of the rows at offsets ``rows``, four fp8 numbers a word."""
    return gl.load(point(words, rows, LATENT // 4, ROPE // 4, WORDS))


@gluon.jit
def store_words(target, words, barrier):
    """Store words of four fp8 numbers as float16 in ``target``, and tell ``barrier``."""
    wide = widen(words)
    target._reinterpret(gl.int32, wide.shape, SHARED_WORDS).store(wide)
    fence_async_shared()
    gl.thread_barrier()
    mbarrier.arrive(barrier, count=1)


@gluon.jit
def convert_tiles(loading, PAGE: gl.constexpr):
    """Do what `copy_tiles` does for rows of fp8; they are converted on the way."""
    cache, table, k, k_rope, full, free, start, end, length, cache_slot = loading
    words = cache.to(gl.pointer_type(gl.int32), bitcast=True)
    stride = cache_slot // 4
    page = find_pages(table, start, length, PAGE, WORD_ROWS)
    rows = place_rows(page, start, length, stride, PAGE, WORD_ROWS)
    page = find_pages(table, start + TILE, length, PAGE, WORD_ROWS)
    rope = load_rope(words, rows)
    word0 = load_words(words, rows, 0)
    word1 = load_words(words, rows, 2)
    slot = 0
    phase = 0
    for position in range(start, end, TILE):
        here = slot * PIECES
        mbarrier.wait(free.index(here), phase ^ 1)
        store_words(k_rope.index(slot), rope, full.index(here))
        mbarrier.wait(free.index(here + 1), phase ^ 1)
        store_words(k.index(slot * CHUNKS), word0, full.index(here + 1))
        word0 = load_words(words, rows, 1)
        mbarrier.wait(free.index(here + 3), phase ^ 1)
        store_words(k.index(slot * CHUNKS + 2), word1, full.index(here + 3))
        word1 = load_words(words, rows, 3)
        # Behind the last tile, its last row is loaded again, and not used.
        after = gl.minimum(position + TILE, length - 1)
        rows = place_rows(page, after, length, stride, PAGE, WORD_ROWS)
        page = find_pages(table, after + TILE, length, PAGE, WORD_ROWS)
        rope = load_rope(words, rows)
        mbarrier.wait(free.index(here + 2), phase ^ 1)
        store_words(k.index(slot * CHUNKS + 1), word0, full.index(here + 2))
        word0 = load_words(words, rows, 0)
        mbarrier.wait(free.index(here + 4), phase ^ 1)
        store_words(k.index(slot * CHUNKS + 3), word1, full.index(here + 4))
        word1 = load_words(words, rows, 2)
        phase = phase ^ slot
        slot = 1 - slot


@gluon.jit
def convert_queries(asking, HALF: gl.constexpr, NODES: gl.constexpr, HEADS: gl.constexpr):
    """Store one half of the queries' columns as float16."""
    query, q, q_rope, asked, request, block, query_token, query_head = asking
    rows = place_queries(request, block, query_token, query_head, NODES, HEADS)
    if HALF == 0:
        part = gl.load(point(query, rows, LATENT, ROPE, COPY))
        q_rope.index(0).store(part.to(gl.float16))
    for chunk in gl.static_range(2 * HALF, 2 * HALF + 2):
        part = gl.load(point(query, rows, chunk * CHUNK, CHUNK, COPY))
        q.index(chunk).store(part.to(gl.float16))
    fence_async_shared()
    gl.thread_barrier()
    mbarrier.arrive(asked, count=1)


@gluon.jit
def score_tiles(
    asking,
    scoring,
    finishing,
    NODES: gl.constexpr,
    HEADS: gl.constexpr,
):
    """Compute scores and weights tile after tile, and write the lse: the group that scores."""
    _query, q, q_rope, asked, _request, block, _query_token, _query_head = asking
    k, k_rope, weights, fades, full, free, faded, weighed, spent, start, end, length = scoring
    part_lse, score_scale, value_scale = finishing
    mbarrier.wait(asked, 0)
    top = gl.full([ROWS], float("-inf"), gl.float32, SCORE_ROWS)
    total = gl.zeros([ROWS], gl.float32, SCORE_ROWS)
    slot = 0
    phase = 0
    for position in range(start, end, TILE):
        here = slot * PIECES
        issued = gl.zeros([ROWS, TILE], gl.float32, SCORES)
        mbarrier.wait(full.index(here), phase)
        fence_async_shared()
        issued = warpgroup_mma(
            q_rope.index(0),
            k_rope.index(slot).permute((1, 0)),
            issued,
            use_acc=False,
            is_async=True,
        )
        for step in gl.static_range(CHUNKS):
            chunk = step % 2 * 2 + step // 2
            mbarrier.wait(full.index(here + 1 + chunk), phase)
            fence_async_shared()
            tile = k.index(slot * CHUNKS + chunk).permute((1, 0))
            issued = warpgroup_mma(q.index(chunk), tile, issued, is_async=True)
        score = warpgroup_mma_wait(0, deps=[issued])
        if position + TILE > length:
            columns = position + gl.arange(0, TILE, gl.SliceLayout(0, SCORES))
            score = gl.where((columns < length)[None, :], score, float("-inf"))
        highest = gl.max(score, axis=1) * score_scale
        higher = gl.where(highest > top + SLACK, highest, top)
        fade = gl.exp2(top - higher)
        top = higher
        fades.index(slot).store(fade)
        gl.thread_barrier()
        mbarrier.arrive(faded.index(slot), count=1)
        mbarrier.arrive(free.index(here), count=1)
        weight = gl.exp2(score * score_scale - higher[:, None])
        mbarrier.wait(spent, slot ^ 1)
        weights.store(weight.to(weights.dtype))
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(weighed, count=1)
        total = total * fade + gl.sum(weight, axis=1)
        phase = phase ^ slot
        slot = 1 - slot
    fades.index(slot).store(value_scale / total)
    gl.thread_barrier()
    mbarrier.arrive(faded.index(slot), count=1)
    row = block * ROWS + gl.arange(0, ROWS, SCORE_ROWS)
    gl.store(part_lse + row, (top + gl.log2(total)) * LN_2, mask=row < NODES * HEADS)


@gluon.jit
def add_outputs(
    asking,
    adding,
    CONVERT: gl.constexpr,
    HALF: gl.constexpr,
    NODES: gl.constexpr,
    HEADS: gl.constexpr,
):
    """Add up one half of the columns of the outputs, and write it: a group that adds."""
    k, weights, fades, free, faded, weighed, spent, part_out, block, start, end = adding
    if CONVERT:
        convert_queries(asking, HALF, NODES, HEADS)
    low = gl.zeros([ROWS, CHUNK], gl.float32, OUTPUTS)
    high = gl.zeros([ROWS, CHUNK], gl.float32, OUTPUTS)
    slot = 0
    phase = 0
    for _position in range(start, end, TILE):
        mbarrier.wait(faded.index(slot), phase)
        if gl.min(fades.index(slot).load(EVERY_ROW), axis=0) < 1.0:
            fade = fades.index(slot).load(OUTPUT_ROWS)
            low = low * fade[:, None]
            high = high * fade[:, None]
        mbarrier.wait(weighed, slot)
        here = slot * CHUNKS + 2 * HALF
        low_sum = warpgroup_mma(weights, k.index(here), low, is_async=True)
        high_sum = warpgroup_mma(weights, k.index(here + 1), high, is_async=True)
        low = warpgroup_mma_wait(1, deps=[low_sum])
        gl.thread_barrier()
        freed = slot * PIECES + 1 + 2 * HALF
        mbarrier.arrive(free.index(freed), count=1)
        high = warpgroup_mma_wait(0, deps=[high_sum])
        gl.thread_barrier()
        mbarrier.arrive(free.index(freed + 1), count=1)
        mbarrier.arrive(spent, count=1)
        phase = phase ^ slot
        slot = 1 - slot
    mbarrier.wait(faded.index(slot), phase)
    norm = fades.index(slot).load(OUTPUT_ROWS)
    row = block * ROWS + gl.arange(0, ROWS, OUTPUT_ROWS)
    live = (row < NODES * HEADS)[:, None]
    columns = gl.arange(0, CHUNK, gl.SliceLayout(0, OUTPUTS))
    target = part_out + row[:, None] * LATENT + columns[None, :] + 2 * HALF * CHUNK
    gl.store(target, low * norm[:, None], mask=live)
    gl.store(target + CHUNK, high * norm[:, None], mask=live)


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
):
    """Do what `split_prefix.split_prefix_kernel` does, for 64 rows and tiles of 64."""
    worker = gl.program_id(1).to(gl.int64)
    block = gl.program_id(0)
    start = gl.load(work + worker * 4 + 1)
    end = gl.load(work + worker * 4 + 2)
    if start < end:
        FP8: gl.constexpr = cache.dtype.element_ty.primitive_bitwidth == 8
        dtype: gl.constexpr = gl.float16 if FP8 else query.dtype.element_ty
        request = gl.load(work + worker * 4).to(gl.int64)
        length = gl.load(lengths + request)
        table = page_table + request * table_request
        q = gl.allocate_shared_memory(dtype, [CHUNKS, ROWS, CHUNK], SHARED)
        q_rope = gl.allocate_shared_memory(dtype, [1, ROWS, ROPE], SHARED)
        k = gl.allocate_shared_memory(dtype, [2 * CHUNKS, TILE, CHUNK], SHARED)
        k_rope = gl.allocate_shared_memory(dtype, [2, TILE, ROPE], SHARED)
        weights = gl.allocate_shared_memory(dtype, [ROWS, TILE], SHARED)
        fades = gl.allocate_shared_memory(gl.float32, [2, ROWS], PLAIN)
        full = gl.allocate_shared_memory(gl.int64, [2 * PIECES, 1], mbarrier.MBarrierLayout())
        free = gl.allocate_shared_memory(gl.int64, [2 * PIECES, 1], mbarrier.MBarrierLayout())
        faded = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        asked = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        weighed = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        spent = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        for piece in gl.static_range(2 * PIECES):
            mbarrier.init(full.index(piece), count=1 if FP8 else LOADERS)
            mbarrier.init(free.index(piece), count=1)
        for slot in gl.static_range(2):
            mbarrier.init(faded.index(slot), count=1)
        # One that no group waits for would be no barrier any more: the groups' arguments could get
        # its place in memory, and be lost when its initialisation comes to pass behind them.
        mbarrier.init(asked, count=2 if FP8 else LOADERS)
        mbarrier.init(weighed, count=1)
        mbarrier.init(spent, count=2)
        gl.thread_barrier()
        first = worker * (NODES * HEADS)
        out = part_out + first * LATENT
        lse = part_lse + first
        asking = (query, q, q_rope, asked, request, block, query_token, query_head)
        loading = (cache, table, k, k_rope, full, free, start, end, length, cache_slot)
        scoring = (k, k_rope, weights, fades, full, free, faded, weighed, spent, start, end, length)
        finishing = (lse, score_scale, value_scale)
        adding = (k, weights, fades, free, faded, weighed, spent, out, block, start, end)
        # Registers by thread; those that add have half of the outputs in 128.
        if FP8:
            gl.warp_specialize(
                [
                    (add_outputs, (asking, adding, True, 0, NODES, HEADS)),
                    (add_outputs, (asking, adding, True, 1, NODES, HEADS)),
                    (score_tiles, (asking, scoring, finishing, NODES, HEADS)),
                    (convert_tiles, (loading, PAGE)),
                ],
                [4, 4, 4],
                [160, 80, 112],
            )
        else:
            gl.warp_specialize(
                [
                    (add_outputs, (asking, adding, False, 0, NODES, HEADS)),
                    (add_outputs, (asking, adding, False, 1, NODES, HEADS)),
                    (score_tiles, (asking, scoring, finishing, NODES, HEADS)),
                    (copy_tiles, (asking, loading, NODES, HEADS, PAGE)),
                ],
                [4, 4, 4],
                [160, 104, 80],
            )
