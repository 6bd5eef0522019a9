"""Kernel that turns the token table of a batch into FlashMLA's page table and int32 lengths."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

import triton
import triton.language as tl


@triton.jit
def page_table_kernel(
    req_to_token,
    request_rows,
    prefix_lens,
    page_table,
    lengths,
    planned_lengths,
    width,
    req_to_token_stride,
    page_table_stride,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the page ids that cover a request's prefix, its length, and its length but at least 1.

    Entries behind the prefix keep what they held: always a page id that once was valid, which is
    all that a prefetch behind the end needs.
    """
    request = tl.program_id(0)
    block = tl.program_id(1)
    length = tl.load(prefix_lens + request).to(tl.int32)
    if block == 0:
        tl.store(lengths + request, length)
        tl.store(planned_lengths + request, tl.maximum(length, 1))
    page = block * BLOCK + tl.arange(0, BLOCK)
    used = (page * PAGE < length) & (page < width)
    row = tl.load(request_rows + request).to(tl.int64)
    first = req_to_token + row * req_to_token_stride + page.to(tl.int64) * PAGE
    slot = tl.load(first, mask=used, other=0)
    out = page_table + request.to(tl.int64) * page_table_stride + page
    tl.store(out, (slot // PAGE).to(tl.int32), mask=used)
