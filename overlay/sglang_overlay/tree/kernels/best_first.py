"""Kernel that grows one request's draft tree best-first, its whole frontier in registers."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

import triton
import triton.language as tl

# A frontier entry is one int64, so that one maximum both finds the next node and says which it is:
# the score's bits, ordered, above 31 bits that count down over (depth, parent, rank).
_NOTHING = tl.constexpr(-(1 << 63))
_TIES = tl.constexpr((1 << 31) - 1)


@triton.jit
def _entry(score, depth, parent, rank):
    bits = score.to(tl.int32, bitcast=True)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
    ties = _TIES - ((depth << 16) | (parent << 8) | rank)
    return tl.where(score > float("-inf"), (ordered << 32) | ties.to(tl.int64), _NOTHING)


@triton.jit
def _log_prob(at, inside):
    loaded = tl.load(at, mask=inside, other=float("-inf"))
    return tl.where(loaded == loaded, tl.minimum(loaded, 0.0), float("-inf"))


@triton.jit
def best_first_kernel(
    log_probs,
    candidates,
    root,
    tokens,
    parents,
    depths,
    log_probs_request,
    log_probs_depth,
    candidates_request,
    candidates_depth,
    root_request,
    tokens_request,
    parents_request,
    depths_request,
    DEPTH: tl.constexpr,
    WIDTH: tl.constexpr,
    NODES: tl.constexpr,
    LANES: tl.constexpr,
):
    """Take the NODES − 1 first prefixes of the order in `build`, one after the other.

    Each node that is taken offers its first child and its next sibling: the only two that can be
    next because of it. Names ending in _request and _depth are strides in elements.
    """
    request = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    row = log_probs + request * log_probs_request
    score_of = tl.zeros([LANES], tl.float32)
    depth_of = tl.zeros([LANES], tl.int32)
    parent_of = tl.full([LANES], -1, tl.int32)
    rank_of = tl.zeros([LANES], tl.int32)

    first = _log_prob(row, True) + 0.0
    frontier = tl.where(lane == 0, _entry(first, 1, 0, 0), _NOTHING)
    for node in range(1, NODES):
        best = tl.max(frontier, axis=0)
        live = best != _NOTHING
        ties = _TIES - (best & 0xFFFFFFFF).to(tl.int32)
        depth = tl.where(live, ties >> 16, 0)
        parent = tl.where(live, (ties >> 8) & 0xFF, -1)
        rank = ties & 0xFF
        ordered = (best >> 32).to(tl.int32)
        score = (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)

        sibling_at = row + (depth - 1) * log_probs_depth + rank + 1
        sibling = _log_prob(sibling_at, live & (rank + 1 < WIDTH))
        child = _log_prob(row + depth * log_probs_depth, live & (depth < DEPTH))
        # Held down to the node's own score: ranks that do not descend cannot break the order.
        parent_score = tl.sum(tl.where(lane == parent, score_of, 0.0), axis=0)
        sibling = tl.minimum(parent_score + sibling, score)
        next_sibling = _entry(sibling, depth, parent, rank + 1)
        first_child = _entry(score + child, depth + 1, node, 0)
        frontier = tl.where(live & (frontier == best), next_sibling, frontier)
        frontier = tl.where(live & (lane == node), first_child, frontier)

        here = lane == node
        score_of = tl.where(here, score, score_of)
        depth_of = tl.where(here, depth, depth_of)
        parent_of = tl.where(here, parent, parent_of)
        rank_of = tl.where(here, rank, rank_of)

    # The root and the nodes that there were no candidates for have the root's token.
    drafted = depth_of > 0
    candidate_at = candidates + request * candidates_request
    candidate_at += (depth_of - 1) * candidates_depth + rank_of
    root_token = tl.load(root + request * root_request)
    token_of = tl.load(candidate_at, mask=drafted, other=0)
    token_of = tl.where(drafted, token_of, root_token)
    exists = lane < NODES
    tl.store(tokens + request * tokens_request + lane, token_of, mask=exists)
    tl.store(parents + request * parents_request + lane, parent_of, mask=exists)
    tl.store(depths + request * depths_request + lane, depth_of, mask=exists)
