"""Kernels of grouped-query verify: the prefix in parts, then the tree block on top of them."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

import triton
import triton.language as tl

from sglang_overlay.attention.kernels.tree_merge import joint_lse, joint_values

LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def load_rows(rows, columns, live, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Load [rows, COLUMNS] of rows WIDTH wide; what is not live, or behind the width, is zero."""
    if WIDTH == COLUMNS:
        return tl.load(rows[:, None] + columns[None, :], mask=live[:, None], other=0.0)
    inside = live[:, None] & (columns < WIDTH)[None, :]
    return tl.load(rows[:, None] + columns[None, :], mask=inside, other=0.0)


@triton.jit
def take_tile(q, k, v, seen, score_scale, top, total, out):
    """Fold one tile of keys and values into the rows' running softmax, in base 2.

    ``top`` is the largest score so far, ``total`` the sum of weights relative to it, ``out`` the
    weighted sum of values; ``seen`` says which of the tile a row attends to.
    """
    score = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee") * score_scale
    score = tl.where(seen, score, float("-inf"))
    higher = tl.maximum(top, tl.max(score, axis=1))
    # A row that has seen nothing keeps −inf, whose difference to itself would be NaN.
    base = tl.where(higher == float("-inf"), 0.0, higher)
    fade = tl.exp2(top - base)
    weight = tl.exp2(score - base[:, None])
    total = total * fade + tl.sum(weight, axis=1)
    out = tl.dot(weight.to(q.dtype), v.to(q.dtype), acc=out * fade[:, None], input_precision="ieee")
    return higher, total, out


@triton.jit
def grouped_prefix_kernel(
    query,
    keys,
    values,
    page_table,
    lengths,
    work,
    part_out,
    part_lse,
    score_scale,
    query_token,
    query_head,
    key_slot,
    key_head,
    value_slot,
    value_head,
    table_request,
    NODES: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_COLUMNS: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Attend ROWS (node, head) rows of one KV head to one worker's run of its request's prefix.

    GROUP query heads share a KV head, and so a tile of keys and values. ``part_out`` [workers,
    nodes, heads, VALUE_COLUMNS] gets the run's own attention, ``part_lse`` [workers, nodes, heads]
    its natural lse. A position behind the prefix reads the last slot again: no address is masked.
    """
    worker = tl.program_id(1).to(tl.int64)
    start = tl.load(work + worker * 4 + 1)
    end = tl.load(work + worker * 4 + 2)
    if start >= end:
        return
    request = tl.load(work + worker * 4).to(tl.int64)
    length = tl.load(lengths + request)
    kv_head = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = row < NODES * GROUP
    node = row // GROUP
    head = kv_head * GROUP + row % GROUP
    key_column = tl.arange(0, KEY_COLUMNS)
    value_column = tl.arange(0, VALUE_COLUMNS)
    query_row = query + (request * NODES + node) * query_token + head * query_head
    q = load_rows(query_row, key_column, live, KEY_DIM, KEY_COLUMNS)

    table = page_table + request * table_request
    step = tl.arange(0, TILE)
    every = step >= 0
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, VALUE_COLUMNS], tl.float32)
    for position in range(start, end, TILE):
        seen = tl.minimum(position + step, length - 1)
        slot = tl.load(table + seen // PAGE).to(tl.int64) * PAGE + seen % PAGE
        key_row = keys + slot * key_slot + kv_head * key_head
        value_row = values + slot * value_slot + kv_head * value_head
        k = load_rows(key_row, key_column, every, KEY_DIM, KEY_COLUMNS)
        v = load_rows(value_row, value_column, every, VALUE_DIM, VALUE_COLUMNS)
        within = (position + step < length)[None, :]
        top, total, out = take_tile(q, k, v, within, score_scale, top, total, out)

    at = (worker * NODES + node) * HEADS + head
    out /= total[:, None]
    tl.store(
        part_out + at[:, None] * VALUE_COLUMNS + value_column[None, :], out, mask=live[:, None]
    )
    tl.store(part_lse + at, (top + tl.log2(total)) * LN_2, mask=live)


@triton.jit
def grouped_tree_kernel(
    query,
    keys,
    values,
    slots,
    ancestors,
    lengths,
    part_out,
    part_lse,
    first_part,
    out,
    score_scale,
    query_token,
    query_head,
    key_slot,
    key_head,
    value_slot,
    value_head,
    ancestors_request,
    out_token,
    out_head,
    NODES: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HALF_WORDS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_COLUMNS: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Combine a request's parts for ROWS rows of one KV head, and add the tree's rows they see.

    The parts are where the running softmax starts, the tree's rows are its further tiles; TILE is
    at most 32, so that a tile's mask is one 32-bit half of a row's ancestor words.
    """
    request = tl.program_id(1).to(tl.int64)
    kv_head = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = row < NODES * GROUP
    node = row // GROUP
    head = kv_head * GROUP + row % GROUP
    token = request * NODES + node
    key_column = tl.arange(0, KEY_COLUMNS)
    value_column = tl.arange(0, VALUE_COLUMNS)
    query_row = query + token * query_token + head * query_head
    q = load_rows(query_row, key_column, live, KEY_DIM, KEY_COLUMNS)

    first = tl.load(first_part + request)
    last = tl.load(first_part + request + 1)
    has_prefix = tl.load(lengths + request) > 0
    place = node.to(tl.int64) * HEADS + head
    lse_part = NODES * HEADS
    lse = joint_lse(part_lse + place, first, last, lse_part, live, ROWS)
    prefix = joint_values(
        part_out + place[:, None] * VALUE_COLUMNS + value_column[None, :],
        part_lse + place,
        first,
        last,
        lse_part * VALUE_COLUMNS,
        lse_part,
        lse,
        live,
        ROWS,
        VALUE_COLUMNS,
    )
    # Without a prefix its parts hold another slot's values.
    top = tl.where(has_prefix, lse, float("-inf"))
    total = tl.where(has_prefix & live, 1.0, 0.0)
    state = tl.where(has_prefix, prefix, 0.0)

    ancestors_row = ancestors + request * ancestors_request + node * HALF_WORDS
    step = tl.arange(0, TILE)
    for start in tl.static_range(0, NODES, TILE):
        column = start + step
        exists = column < NODES
        bits = tl.load(ancestors_row + start // 32, mask=live, other=0)
        sees = ((bits[:, None] >> (column % 32)[None, :]) & 1) != 0
        slot = tl.load(slots + request * NODES + column, mask=exists, other=0).to(tl.int64)
        key_row = keys + slot * key_slot + kv_head * key_head
        value_row = values + slot * value_slot + kv_head * value_head
        k = load_rows(key_row, key_column, exists, KEY_DIM, KEY_COLUMNS)
        v = load_rows(value_row, value_column, exists, VALUE_DIM, VALUE_COLUMNS)
        sees &= exists[None, :]
        top, total, state = take_tile(q, k, v, sees, score_scale, top, total, state)

    state /= tl.where(total == 0.0, 1.0, total)[:, None]
    target = out + token[:, None] * out_token + head[:, None] * out_head + value_column[None, :]
    inside = live[:, None] & (value_column < VALUE_DIM)[None, :]
    tl.store(target, state.to(out.dtype.element_ty), mask=inside)
