"""Kernels that write the packed ancestor mask: bit j of row i says that node i sees node j."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

import triton
import triton.language as tl


@triton.jit
def pack_parents_kernel(
    parents,
    packed,
    nodes,
    parents_stride,
    packed_stride,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
    WORDS_PADDED: tl.constexpr,
):
    """Write one request's ancestor bits; every node climbs to the root in its own lane.

    A step of the climb is one cached load, so 256 nodes need 256 dependent loads at most. The bound
    also ends the climb when damaged parents form a cycle.
    """
    request = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, ROWS)
    word = tl.arange(0, WORDS_PADDED)
    current = tl.where(node < nodes, node, -1)
    bits = tl.zeros([ROWS, WORDS_PADDED], dtype=tl.int64)
    one = tl.full([ROWS, WORDS_PADDED], 1, dtype=tl.int64)
    step = 0
    while (step < nodes) & (tl.max(current, axis=0) >= 0):
        here = (current >= 0)[:, None] & ((current >> 6)[:, None] == word[None, :])
        bits |= tl.where(here, one << (current & 63)[:, None].to(tl.int64), 0)
        current = tl.load(
            parents + request * parents_stride + current,
            mask=(current >= 0) & (current < nodes),
            other=-1,
        ).to(tl.int32)
        current = tl.where(current < nodes, current, -1)
        step += 1
    at = packed + request * packed_stride + node[:, None] * WORDS + word[None, :]
    tl.store(at, bits, mask=(node < nodes)[:, None] & (word < WORDS)[None, :])


@triton.jit(do_not_specialize=["full_mask_size"])
def pack_full_mask_kernel(
    full_mask,
    full_mask_size: tl.int64,  # it changes with every step: of one type, whatever the value
    prefix_lens,
    packed,
    nodes,
    packed_stride,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
    REQUESTS: tl.constexpr,
):
    """Copy the nodes × nodes corner of a request's FULL_MASK into bits; the prefix is not read.

    The requests' masks lie one behind the other, each nodes × (prefix + nodes), so a request's
    start is a sum over those before it. Summing here spares the caller an indptr and a kernel.
    """
    request = tl.program_id(0)
    word = tl.program_id(1)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    column = word * 64 + tl.arange(0, 64)

    others = tl.arange(0, REQUESTS)
    lens = tl.load(prefix_lens + others, mask=others < request, other=0).to(tl.int64)
    start = tl.sum(tl.where(others < request, (lens + nodes) * nodes, 0), axis=0)
    prefix = tl.load(prefix_lens + request).to(tl.int64)

    at = start + row[:, None].to(tl.int64) * (prefix + nodes) + prefix + column[None, :]
    inside = (row < nodes)[:, None] & (column < nodes)[None, :]
    # Padding rows of a graph may point behind the mask that this step wrote.
    inside &= at < full_mask_size
    seen = tl.load(full_mask + at, mask=inside, other=0).to(tl.int64)
    bits = tl.sum((seen != 0).to(tl.int64) << tl.arange(0, 64)[None, :].to(tl.int64), axis=1)
    out = packed + request.to(tl.int64) * packed_stride + row * WORDS + word
    tl.store(out, bits, mask=row < nodes)
