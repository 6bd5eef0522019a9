"""The accepted path of a draft tree: from the root along the target's own choices.

Greedy verification of Miao et al., arXiv 2305.09781: at each node the target has chosen the token
that follows it; the walk goes on to the child of that token, and ends where there is none.
"""

from __future__ import annotations

import torch
import triton

from sglang_overlay.tree.kernels.walk import walk_kernel
from sglang_overlay.tree.layout import DraftTree


def walk(tree: DraftTree, predicted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (path [requests, max_depth + 1] int64, lengths [requests] int32); no synchronisation.

    ``predicted`` [requests, n] int64 is the target's choice after each node, its argmax. ``path``
    holds the nodes from the root on, −1 behind its end; ``lengths`` counts them, the root included.
    That is also the number of tokens that the step commits, ``predicted`` along the path: its
    drafts, which the root's choice begins, and the bonus token, the last node's choice.

    Raises:
        ValueError: shapes, dtypes or strides do not fit.

    """
    requests, n = tree.tokens.shape
    if tuple(predicted.shape) != (requests, n) or predicted.dtype is not torch.int64:
        raise ValueError(
            f"predicted: got {tuple(predicted.shape)} {predicted.dtype}, needed {(requests, n)} "
            "torch.int64; pass the argmax of each node's logits, viewed per request"
        )
    if n > 1 and predicted.stride(1) != 1:
        raise ValueError(
            f"predicted: got stride {predicted.stride(1)} between nodes, needed 1; pass "
            ".contiguous()"
        )
    return (launch_walk if predicted.is_cuda else _walk_by_doubling)(tree, predicted)


def launch_walk(tree: DraftTree, predicted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Walk by the kernel: one program per request, one launch."""
    requests, n = tree.tokens.shape
    steps = tree.max_depth + 1
    path = torch.empty(requests, steps, dtype=torch.int64, device=predicted.device)
    lengths = torch.empty(requests, dtype=torch.int32, device=predicted.device)
    walk_kernel[(requests,)](
        tree.tokens,
        tree.parents,
        predicted,
        path,
        lengths,
        tree.tokens.stride(0),
        tree.parents.stride(0),
        predicted.stride(0),
        path.stride(0),
        NODES=n,
        STEPS=steps,
        LANES=max(32, triton.next_power_of_2(n)),
        STEP_LANES=triton.next_power_of_2(steps),
        num_warps=1,
    )
    return path, lengths


def _walk_by_doubling(
    tree: DraftTree, predicted: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Walk all nodes at once: one is on the path when it and all above it were chosen."""
    requests, n = tree.tokens.shape
    steps = tree.max_depth + 1
    above = tree.parents.long()
    child = above >= 0
    child[:, 0] = False
    above = torch.where(child, above, 0)
    accepted = child & (predicted.gather(1, above) == tree.tokens)
    accepted[:, 0] = True
    for _ in range(tree.max_depth.bit_length()):  # each round doubles the height looked at
        accepted = accepted & accepted.gather(1, above)
        above = above.gather(1, above)
    # The path has one node a depth; the others write into a column that is cut off.
    column = torch.where(accepted, tree.depths.long(), steps)
    node = torch.arange(n, device=predicted.device).expand(requests, -1)
    path = torch.full((requests, steps + 1), -1, dtype=torch.int64, device=predicted.device)
    path.scatter_(1, column, node)
    return path[:, :steps], accepted.sum(dim=1, dtype=torch.int32)
