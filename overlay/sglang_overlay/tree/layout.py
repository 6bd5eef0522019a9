"""The tensors of a draft tree, and the forms of it that attention backends and kernels read.

Everything here is torch on the tree's device, of fixed shapes and without a synchronisation.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class DraftTree:
    """One draft tree of n nodes per request; node 0 is the root, the last committed token.

    ``tokens`` [requests, n] int64; ``parents`` [requests, n] int32, indices of nodes; ``depths``
    [requests, n] int32, at most ``max_depth``. Parents come before their children and siblings have
    distinct tokens. A node with parent −1 is no child: the root, or a node that there was no
    candidate for. The latter has depth 0 and the root's token, and no walk reaches it.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    depths: torch.Tensor
    max_depth: int

    @classmethod
    def empty(cls, requests: int, n: int, max_depth: int, device: torch.device | str) -> DraftTree:
        """Return the buffers of a tree, not filled."""
        return cls(
            tokens=torch.empty(requests, n, dtype=torch.int64, device=device),
            parents=torch.empty(requests, n, dtype=torch.int32, device=device),
            depths=torch.empty(requests, n, dtype=torch.int32, device=device),
            max_depth=max_depth,
        )

    def first(self, requests: int) -> DraftTree:
        """Return a view of the first ``requests`` trees, as for a batch in a larger buffer."""
        return DraftTree(
            tokens=self.tokens[:requests],
            parents=self.parents[:requests],
            depths=self.depths[:requests],
            max_depth=self.max_depth,
        )


@dataclass(frozen=True, kw_only=True)
class ChildLinks:
    """A tree as SGLang's tree kernels read it, each [requests, n] int64.

    ``index`` is a node's row in the flat batch, ``next_token`` its first child and ``next_sibling``
    the next child of its parent, both as nodes of the request and −1 where there is none.
    """

    index: torch.Tensor
    next_token: torch.Tensor
    next_sibling: torch.Tensor


def positions(tree: DraftTree, starts: torch.Tensor) -> torch.Tensor:
    """Return [requests, n] int64: ``starts`` [requests] int, the root's position, plus depth."""
    return starts.to(torch.int64)[:, None] + tree.depths


def ancestors(parents: torch.Tensor) -> torch.Tensor:
    """Return [requests, n, n] bool from [requests, n] parents: row i is True at i and above it.

    The same mask as ``attention.mask.pack_parents`` packs into bits; for small batches and
    cross-checks, its cost is n³.
    """
    n = parents.shape[1]
    node = torch.arange(n, device=parents.device)
    reach = ((parents[:, :, None] == node) | (node[:, None] == node)).float()
    for _ in range((n - 1).bit_length()):  # each product doubles the height that is reached
        reach = (reach @ reach).clamp_(max=1.0)
    return reach > 0.5


def write_full_mask(parents: torch.Tensor, prefix_lens: torch.Tensor, out: torch.Tensor) -> None:
    """Write SGLang's FULL_MASK into the flat bool ``out``.

    Per request n rows of prefix + n entries, requests one behind the other, as
    ``TritonAttnBackend`` indexes it; nodes see the whole prefix. ``parents`` [requests, n] int,
    ``prefix_lens`` [requests] int, both on the device: ``out`` may be longer than the masks, whose
    size the host need not know, and is True behind them.

    Raises:
        ValueError: ``out`` is not a flat bool tensor.

    """
    if out.dtype is not torch.bool or out.dim() != 1:
        raise ValueError(
            f"out: got {out.dtype} of shape {tuple(out.shape)}, needed a flat torch.bool buffer; "
            "pass one of at least sum((prefix + nodes) × nodes) entries"
        )
    n = parents.shape[1]
    node = torch.arange(n, device=parents.device)
    row = prefix_lens.to(torch.int64) + n  # entries of a mask row, per request
    start = (row * n).cumsum(0) - row * n
    at = (start[:, None] + node * row[:, None])[:, :, None] + (row - n)[:, None, None] + node
    out.fill_(True)
    out[at] = ancestors(parents)


def child_links(parents: torch.Tensor) -> ChildLinks:
    """Return the links of [requests, n] ``parents``; siblings are linked in the order of nodes."""
    requests, n = parents.shape
    node = torch.arange(n, device=parents.device)
    # child_of[b, i, j]: node j is a child of node i. A node that is no child is nobody's.
    child_of = parents[:, None, :] == node[:, None]
    next_token = torch.where(child_of, node, n).amin(dim=2)
    later_sibling = (parents[:, :, None] == parents[:, None, :]) & (node > node[:, None])
    later_sibling &= (parents >= 0)[:, :, None]
    next_sibling = torch.where(later_sibling, node, n).amin(dim=2)
    index = torch.arange(requests * n, device=parents.device).view(requests, n)
    return ChildLinks(
        index=index,
        next_token=torch.where(next_token == n, -1, next_token),
        next_sibling=torch.where(next_sibling == n, -1, next_sibling),
    )
