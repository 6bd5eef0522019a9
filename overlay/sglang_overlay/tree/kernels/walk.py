"""Kernel that follows the target's choices from the root of a request's draft tree."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

import triton
import triton.language as tl


@triton.jit
def walk_kernel(
    tokens,
    parents,
    predicted,
    path,
    lengths,
    tokens_request,
    parents_request,
    predicted_request,
    path_request,
    NODES: tl.constexpr,
    STEPS: tl.constexpr,
    LANES: tl.constexpr,
    STEP_LANES: tl.constexpr,
):
    """Write one request's path; STEPS, its longest length, bounds the walk whatever the parents."""
    request = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    step_lane = tl.arange(0, STEP_LANES)
    # Node 0 is the root and nobody's child, whatever stands in its row.
    child = (lane > 0) & (lane < NODES)
    token_of = tl.load(tokens + request * tokens_request + lane, mask=child, other=0)
    parent_of = tl.load(parents + request * parents_request + lane, mask=child, other=-1)
    walked = tl.full([STEP_LANES], -1, tl.int64)
    node = tl.full([], 0, tl.int32)
    step = tl.full([], 0, tl.int32)
    while (step < STEPS) & (node < NODES):
        walked = tl.where(step_lane == step, node.to(tl.int64), walked)
        choice = tl.load(predicted + request * predicted_request + node)
        chosen = child & (parent_of == node) & (token_of == choice)
        node = tl.min(tl.where(chosen, lane, NODES), axis=0)
        step += 1
    tl.store(path + request * path_request + step_lane, walked, mask=step_lane < STEPS)
    tl.store(lengths + request, step)
