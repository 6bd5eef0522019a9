"""Kernel of the tree block: masked attention over a tree's rows, merged with the prefix's."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
# Parts in flight at once while they are combined: their loads do not depend on each other.
AHEAD = tl.constexpr(4)


@triton.jit
def joint_lse(lse_row, first, last, lse_part, live, ROWS: tl.constexpr):
    """Return the base-2 lse [ROWS] of parts ``first`` to ``last`` of every row."""
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    lane = tl.arange(0, 4 * AHEAD).to(tl.int64)
    for part in range(first, last, 4 * AHEAD):
        at = lse_row[:, None] + ((part + lane) * lse_part)[None, :]
        inside = live[:, None] & (part + lane < last)[None, :]
        lse = tl.load(at, mask=inside, other=float("-inf")) * LOG2_E
        higher = tl.maximum(top, tl.max(lse, axis=1))
        # Rows behind the last keep −inf; a difference of two of these would be NaN.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp2(top - base) + tl.sum(tl.exp2(lse - base[:, None]), axis=1)
        top = higher
    return tl.where(live, top + tl.log2(tl.where(live, total, 1.0)), 0.0)


@triton.jit
def joint_values(
    value_row,
    lse_row,
    first,
    last,
    value_part,
    lse_part,
    lse,
    live,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Return the parts' values [ROWS, WIDTH], each weighted by its share of ``lse``."""
    values = tl.zeros([ROWS, WIDTH], tl.float32)
    value_row += first.to(tl.int64) * value_part
    lse_row += first.to(tl.int64) * lse_part
    for part in range(first, last, AHEAD):
        for ahead in tl.static_range(AHEAD):
            inside = live & (part + ahead < last)
            own = tl.load(lse_row + ahead * lse_part, mask=inside, other=float("-inf")) * LOG2_E
            value = tl.load(value_row + ahead * value_part, mask=inside[:, None], other=0.0)
            values += value.to(tl.float32) * tl.exp2(own - lse)[:, None]
        value_row += AHEAD * value_part
        lse_row += AHEAD * lse_part
    return values


@triton.jit
def tree_merge_kernel(
    query,
    cache,
    slots,
    ancestors,
    lengths,
    prefix_out,
    prefix_lse,
    first_part,
    out,
    score_scale,
    value_scale,
    query_token,
    query_head,
    cache_slot,
    ancestors_request,
    prefix_token,
    prefix_head,
    prefix_part,
    lse_token,
    lse_head,
    lse_part,
    out_token,
    out_head,
    NODES: tl.constexpr,
    HEADS: tl.constexpr,
    HALF_WORDS: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    VALUES: tl.constexpr,
    KEY_CHUNK: tl.constexpr,
    VALUE_CHUNK: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Attend ROWS (node, head) rows of one request over its tree; merge; write VALUES columns.

    A tree has at most 256 nodes, so a row's scores fit in registers and one ordinary softmax covers
    tree and prefix; the wide dimensions are walked in chunks instead. The prefix's attention comes
    per token or, with PARTS, in parts of a request's rows, ``first_part[request]`` to
    ``first_part[request + 1]``, which are combined here. ``score_scale`` is softmax scale ×
    stored-unit scale × log2 e, ``value_scale`` the stored-unit scale. ``ancestors`` are 32-bit
    halves of the packed words. Names ending in _token, _head, _slot, _request, _part are strides in
    elements.
    """
    block = tl.program_id(0)
    request = tl.program_id(1).to(tl.int64)
    value_start = tl.program_id(2) * VALUES

    row = block * ROWS + tl.arange(0, ROWS)
    live = row < NODES * HEADS
    node = row // HEADS
    head = (row % HEADS).to(tl.int64)
    token = request * NODES + node
    column = tl.arange(0, COLUMNS)
    exists = column < NODES
    slot = tl.load(slots + request * NODES + column, mask=exists, other=0).to(tl.int64)
    query_row = query + token * query_token + head * query_head
    cache_row = cache + slot * cache_slot

    # Whatever can be loaded before the first product is: its barriers would hold up the rest.
    columns = value_start + tl.arange(0, VALUE_CHUNK)
    # A part holds one request's rows, so a row's place in it does not depend on the request.
    place = node.to(tl.int64) if PARTS else token
    prefix_row = prefix_out + place * prefix_token + head * prefix_head
    lse_row = prefix_lse + place * lse_token + head * lse_head
    rope = LATENT + tl.arange(0, ROPE)
    q_rope = tl.load(query_row[:, None] + rope[None, :], mask=live[:, None], other=0.0)
    if PARTS:
        first = tl.load(first_part + request)
        last = tl.load(first_part + request + 1)
        lse = joint_lse(lse_row, first, last, lse_part, live, ROWS)
    else:
        prefix = tl.load(prefix_row[:, None] + columns[None, :], mask=live[:, None], other=0.0)
        lse = tl.load(lse_row, mask=live, other=0.0) * LOG2_E
    has_prefix = tl.load(lengths + request) > 0
    ancestors_row = ancestors + request * ancestors_request + node * HALF_WORDS
    bits = tl.load(ancestors_row, mask=live, other=0)
    k_rope = tl.load(cache_row[:, None] + rope[None, :], mask=exists[:, None], other=0.0)

    if KEY_CHUNK == LATENT:
        latent = tl.arange(0, LATENT)
        q = tl.load(query_row[:, None] + latent[None, :], mask=live[:, None], other=0.0)
        k = tl.load(cache_row[:, None] + latent[None, :], mask=exists[:, None], other=0.0)
        k = k.to(q.dtype)
        score = tl.dot(q, tl.trans(k), input_precision="ieee")
    else:
        score = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in range(0, LATENT, KEY_CHUNK):
            latent = start + tl.arange(0, KEY_CHUNK)
            q = tl.load(query_row[:, None] + latent[None, :], mask=live[:, None], other=0.0)
            k = tl.load(cache_row[:, None] + latent[None, :], mask=exists[:, None], other=0.0)
            score = tl.dot(q, tl.trans(k.to(q.dtype)), acc=score, input_precision="ieee")
    score = tl.dot(q_rope, tl.trans(k_rope.to(q_rope.dtype)), acc=score, input_precision="ieee")

    sees = tl.zeros([ROWS, COLUMNS], tl.int32)
    for word in tl.static_range(0, (NODES + 31) // 32):
        own = (column // 32 == word)[None, :]
        sees |= tl.where(own, (bits[:, None] >> (column % 32)[None, :]) & 1, 0)
        bits = tl.load(ancestors_row + word + 1, mask=live & (word + 1 < HALF_WORDS), other=0)
    score = tl.where(sees != 0, score * score_scale, float("-inf"))

    # The length alone says whether there is a prefix; without one, its rows hold another slot's
    # values.
    joint = lse
    lse = tl.where(has_prefix, lse, float("-inf"))
    top = tl.maximum(tl.max(score, axis=1), lse)
    # A row with neither prefix nor bit has the maximum −inf and gives zeros, not NaN.
    top = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.exp2(score - top[:, None])
    prefix_weight = tl.exp2(lse - top)
    total = tl.sum(weight, axis=1) + prefix_weight
    norm = 1.0 / tl.where(total == 0.0, 1.0, total)
    prefix_weight *= norm
    weight = (weight * (norm * value_scale)[:, None]).to(query.dtype.element_ty)

    out_row = out + token * out_token + head * out_head
    for start in range(0, VALUES, VALUE_CHUNK):
        if VALUE_CHUNK == LATENT and KEY_CHUNK == LATENT:
            v = k
        else:
            v = tl.load(cache_row[:, None] + columns[None, :], mask=exists[:, None], other=0.0)
        if PARTS:
            prefix = joint_values(
                prefix_row[:, None] + columns[None, :],
                lse_row,
                first,
                last,
                prefix_part,
                lse_part,
                joint,
                live,
                ROWS,
                VALUE_CHUNK,
            )
        merged = tl.where(has_prefix, prefix.to(tl.float32), 0.0) * prefix_weight[:, None]
        merged = tl.dot(weight, v.to(weight.dtype), acc=merged, input_precision="ieee")
        merged = merged.to(out.dtype.element_ty)
        tl.store(out_row[:, None] + columns[None, :], merged, mask=live[:, None])
        columns += VALUE_CHUNK
        if not PARTS:
            more = live & (start + VALUE_CHUNK < VALUES)
            prefix = tl.load(prefix_row[:, None] + columns[None, :], mask=more[:, None], other=0.0)
