"""The draft tree of one drafter pass: its B = n − 1 most probable prefixes, and the root.

Method: Ringel and Romano, arXiv 2604.12989, algorithm 1. A draft position i has candidates of ranks
0, 1, …, in descending log-probability. A node at depth d is a tuple of ranks (r₁ … r_d); its score
is the sum of its log-probabilities, added in float32 from the root on.

**Order.** Nodes are taken by: higher score first; then smaller depth; then the parent that comes
earlier in this very order; then smaller rank. That is total (two children of a parent differ in
rank), so the tree is a function of the inputs' bits: the same on every device and every rank.

**Prefix-closed, parents first.** Log-probabilities are at most 0 and rounding is monotone, so no
score exceeds its parent's, and a parent at equal score has the smaller depth.

**Exact.** Write (s) ≤ (r) for nodes of one depth with every sᵢ ≤ rᵢ. By the same monotony (s) comes
no later than (r), by induction over the depth also where they tie. So before (r₁ … r_d) come all
∏(rᵢ + 1) − 1 nodes below it, and likewise those below each of its prefixes: all in all
Σ_{j ≤ d} ∏_{i ≤ j} (rᵢ + 1) nodes, itself counted. A node of the tree has this sum at most B. At
depth d all other ranks 0 leaves r_d ≤ B − d, and no smaller bound holds: a position that is flat
behind certain ones uses every rank up to it. So B candidates are needed at the first position and
B − d + 1 at the d-th, or the whole vocabulary where that is smaller; see `candidates_needed`.

**Odd values.** NaN counts as −inf and a positive value as 0. A rank whose value exceeds an earlier
rank's counts as equal to it. A candidate of −inf never becomes a node; where the candidates run
out, the rest of the nodes are no children (see `DraftTree`).
"""

from __future__ import annotations

import torch
import triton

from sglang_overlay.tree import levels
from sglang_overlay.tree.kernels.best_first import best_first_kernel
from sglang_overlay.tree.layout import DraftTree

MAX_NODES = 256
MAX_DEPTH = 1 << 14


def candidates_needed(n: int, vocabulary: int) -> int:
    """Return how many candidates per position an exact tree of ``n`` nodes needs: min(B, V)."""
    return max(1, min(n - 1, vocabulary))


def build_tree(
    log_probs: torch.Tensor,
    candidates: torch.Tensor,
    root: torch.Tensor,
    n: int,
    *,
    out: DraftTree | None = None,
) -> DraftTree:
    """Build one tree of ``n`` nodes per request, without a synchronisation.

    ``log_probs`` [requests, depth, k] float32, descending along k; ``candidates`` of the same shape
    int64, distinct along k; ``root`` [requests] int64, the last committed tokens. The tree is exact
    over the vocabulary where k ≥ `candidates_needed`, and over the candidates in any case. ``out``
    is written and returned, where given.

    Raises:
        ValueError: shapes, dtypes or strides do not fit, or ``n`` is out of range.

    """
    requests, depth, _ = log_probs.shape
    _check(log_probs, candidates, root, n, out)
    if out is None:
        out = DraftTree.empty(requests, n, depth, log_probs.device)
    grow = grow_best_first if log_probs.is_cuda else levels.grow
    grow(log_probs, candidates, root, out)
    return out


def grow_best_first(
    log_probs: torch.Tensor, candidates: torch.Tensor, root: torch.Tensor, out: DraftTree
) -> None:
    """Fill ``out`` by the kernel: one program per request, one launch."""
    requests, depth, width = log_probs.shape
    n = out.tokens.shape[1]
    best_first_kernel[(requests,)](
        log_probs,
        candidates,
        root,
        out.tokens,
        out.parents,
        out.depths,
        log_probs.stride(0),
        log_probs.stride(1),
        candidates.stride(0),
        candidates.stride(1),
        root.stride(0),
        out.tokens.stride(0),
        out.parents.stride(0),
        out.depths.stride(0),
        DEPTH=depth,
        WIDTH=min(width, max(n - 1, 1)),
        NODES=n,
        LANES=max(32, triton.next_power_of_2(n)),
        num_warps=1,
    )


def _check(
    log_probs: torch.Tensor,
    candidates: torch.Tensor,
    root: torch.Tensor,
    n: int,
    out: DraftTree | None,
) -> None:
    requests, depth, width = log_probs.shape
    if not 1 <= n <= MAX_NODES:
        raise ValueError(f"n: got {n}, needed 1 to {MAX_NODES} nodes; choose another tree size")
    if not 1 <= depth <= MAX_DEPTH or width < 1:
        raise ValueError(
            f"log_probs: got {tuple(log_probs.shape)}, needed a depth of 1 to {MAX_DEPTH} and at "
            "least one candidate per position"
        )
    needed = {
        "log_probs": (log_probs, tuple(log_probs.shape), torch.float32),
        "candidates": (candidates, tuple(log_probs.shape), torch.int64),
        "root": (root, (requests,), torch.int64),
    }
    if out is not None:
        needed["out.tokens"] = (out.tokens, (requests, n), torch.int64)
        needed["out.parents"] = (out.parents, (requests, n), torch.int32)
        needed["out.depths"] = (out.depths, (requests, n), torch.int32)
        if out.max_depth != depth:
            raise ValueError(
                f"out.max_depth: got {out.max_depth}, needed {depth}, the depth of log_probs; make "
                "the buffer for this depth"
            )
    for name, (tensor, shape, dtype) in needed.items():
        if tuple(tensor.shape) != shape or tensor.dtype is not dtype:
            raise ValueError(
                f"{name}: got {tuple(tensor.shape)} {tensor.dtype}, needed {shape} {dtype}; see "
                "build_tree's shapes"
            )
        if name != "root" and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(
                f"{name}: got stride {tensor.stride(-1)} in the last dimension, needed 1; pass "
                ".contiguous()"
            )
