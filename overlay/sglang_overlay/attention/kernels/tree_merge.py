"""Kernel of the tree block: masked attention over a tree's own rows, merged with the prefix's result."""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def tree_merge_kernel(
    query,
    cache,
    slots,
    ancestors,
    lengths,
    prefix_out,
    prefix_lse,
    out,
    score_scale,
    value_scale,
    query_token,
    query_head,
    cache_slot,
    ancestors_request,
    prefix_token,
    prefix_head,
    lse_token,
    lse_head,
    out_token,
    out_head,
    NODES: tl.constexpr,
    HEADS: tl.constexpr,
    WORDS: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    VALUES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Attend BLOCK_M (node, head) rows of one request over its tree; merge; write VALUES columns.

    ``score_scale`` is softmax scale × stored-unit scale × log2 e, ``value_scale`` the stored-unit
    scale. Names ending in _token, _head, _slot, _request are strides in elements.
    """
    block = tl.program_id(0)
    request = tl.program_id(1).to(tl.int64)
    value_start = tl.program_id(2) * VALUES

    row = block * BLOCK_M + tl.arange(0, BLOCK_M)
    live = row < NODES * HEADS
    node = row // HEADS
    head = (row % HEADS).to(tl.int64)
    token = request * NODES + node
    latent = tl.arange(0, LATENT)
    rope = LATENT + tl.arange(0, ROPE)
    value = value_start + tl.arange(0, VALUES)

    # All loads that need no result of another come first, the slots before all: the cache rows wait for
    # them. The prefix's rows travel while the tree is computed.
    column = tl.arange(0, BLOCK_N)
    slot = tl.load(slots + request * NODES + column, mask=column < NODES, other=0)
    length = tl.load(lengths + request)
    query_row = query + token * query_token + head * query_head
    q_latent = tl.load(query_row[:, None] + latent[None, :], mask=live[:, None], other=0.0)
    q_rope = tl.load(query_row[:, None] + rope[None, :], mask=live[:, None], other=0.0)
    lse = tl.load(prefix_lse + token * lse_token + head * lse_head, mask=live, other=0.0)
    prefix_row = prefix_out + token * prefix_token + head * prefix_head
    prefix = tl.load(prefix_row[:, None] + value[None, :], mask=live[:, None], other=0.0)

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, VALUES], tl.float32)
    for start in range(0, NODES, BLOCK_N):
        exists = column < NODES
        kv_row = cache + slot.to(tl.int64) * cache_slot
        k_latent = tl.load(kv_row[:, None] + latent[None, :], mask=exists[:, None], other=0.0)
        k_rope = tl.load(kv_row[:, None] + rope[None, :], mask=exists[:, None], other=0.0)
        k_latent = k_latent.to(q_latent.dtype)
        k_rope = k_rope.to(q_latent.dtype)

        score = tl.dot(q_latent, tl.trans(k_latent), input_precision="ieee")
        score = tl.dot(q_rope, tl.trans(k_rope), acc=score, input_precision="ieee")
        score *= score_scale
        bits = tl.load(
            ancestors + request * ancestors_request + node * WORDS + start // 64,
            mask=live,
            other=0,
        )
        shift = (start % 64 + tl.arange(0, BLOCK_N)).to(tl.int64)
        sees = ((bits[:, None] >> shift[None, :]) & 1) != 0
        score = tl.where(sees & exists[None, :], score, float("-inf"))

        new_top = tl.maximum(top, tl.max(score, axis=1))
        # A row that has seen nothing yet keeps −inf; subtracting it from itself would be NaN.
        pivot = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.exp2(score - pivot[:, None])
        shrink = tl.exp2(top - pivot)
        total = total * shrink + tl.sum(weight, axis=1)
        if VALUES == LATENT:
            v = k_latent
        else:
            v = tl.load(kv_row[:, None] + value[None, :], mask=exists[:, None], other=0.0)
            v = v.to(q_latent.dtype)
        acc = acc * shrink[:, None]
        acc = tl.dot(weight.to(v.dtype), v, acc=acc, input_precision="ieee")
        top = new_top
        column += BLOCK_N
        slot = tl.load(slots + request * NODES + column, mask=column < NODES, other=0)

    # The length alone says whether there is a prefix; without one, its rows hold another slot's values.
    lse = tl.where(length > 0, lse * LOG2_E, float("-inf"))
    both = tl.maximum(top, lse)
    both = tl.where(both == float("-inf"), 0.0, both)
    tree_weight = tl.exp2(top - both)
    prefix_weight = tl.exp2(lse - both)
    norm = total * tree_weight + prefix_weight
    norm = tl.where(norm == 0.0, 1.0, norm)

    tree_weight = tree_weight * value_scale / norm
    prefix_weight = prefix_weight / norm
    prefix = tl.where(length > 0, prefix.to(tl.float32), 0.0)
    merged = acc * tree_weight[:, None] + prefix * prefix_weight[:, None]
    out_row = out + token * out_token + head * out_head
    tl.store(out_row[:, None] + value[None, :], merged.to(out.dtype.element_ty), mask=live[:, None])
