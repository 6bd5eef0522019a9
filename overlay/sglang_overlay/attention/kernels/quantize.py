"""Kernel that casts a query to fp8 with saturation."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

import triton
import triton.language as tl


@triton.jit
def saturate_kernel(
    query,
    out,
    query_token,
    query_head,
    heads,
    LIMIT: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write one (token, head) row of ``WIDTH`` values; out is contiguous [tokens, heads, WIDTH]."""
    row = tl.program_id(0).to(tl.int64)
    source = query + (row // heads) * query_token + (row % heads) * query_head
    column = tl.arange(0, BLOCK)
    value = tl.load(source + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    value = tl.minimum(tl.maximum(value, -LIMIT), LIMIT)
    tl.store(out + row * WIDTH + column, value.to(out.dtype.element_ty), mask=column < WIDTH)
