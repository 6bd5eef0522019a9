"""Float64 reference of tree attention: plain loops, one node at a time. Slow on purpose.

Absorbed MLA: one key row of 576 per slot, whose first 512 columns are the value row (DeepSeek-V2,
arXiv 2405.04434, section 2.1). The tree follows Miao et al., arXiv 2305.09781: a node attends to
the prefix, its ancestors and itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang_overlay.attention.prefix import LATENT_DIM


def ancestor_mask(parents: Sequence[int]) -> torch.Tensor:
    """Return [nodes, nodes] bool: row i is True at i and at every ancestor of i.

    ``parents[i]`` is the index of node i's parent, negative for a root.
    """
    nodes = len(parents)
    mask = torch.zeros(nodes, nodes, dtype=torch.bool)
    for node in range(nodes):
        current = node
        while current >= 0:
            mask[node, current] = True
            current = parents[current]
    return mask


def packed_mask(mask: torch.Tensor) -> torch.Tensor:
    """Return the 64-bit words of a [nodes, nodes] bool mask, [nodes, ceil(nodes / 64)] int64."""
    rows = []
    for row in mask.tolist():
        words = [0] * -(-len(row) // 64)
        for column, seen in enumerate(row):
            words[column // 64] |= int(seen) << (column % 64)
        # Bit 63 is the sign of an int64.
        rows.append([word - (1 << 64) if word >> 63 else word for word in words])
    return torch.tensor(rows, dtype=torch.int64)


def tree_attention(
    query: torch.Tensor,
    cache: torch.Tensor,
    prefix_slots: Sequence[torch.Tensor],
    tree_slots: torch.Tensor,
    masks: Sequence[torch.Tensor],
    softmax_scale: float,
    cache_scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out [tokens, heads, 512], natural-log lse [tokens, heads]), both float64.

    ``query`` [requests × nodes, heads, 576], ``cache`` [slots, 576], ``prefix_slots`` one index
    tensor [prefix] per request, ``tree_slots`` [requests, nodes], ``masks`` one [nodes, nodes] bool
    per request, all on one device. A node that sees no row at all gives zeros and −inf.
    """
    requests, nodes = tree_slots.shape
    heads = query.shape[1]
    device = query.device
    out = torch.zeros(requests * nodes, heads, LATENT_DIM, dtype=torch.float64, device=device)
    lse = torch.full((requests * nodes, heads), float("-inf"), dtype=torch.float64, device=device)
    for request in range(requests):
        for node in range(nodes):
            own = tree_slots[request][masks[request][node]]  # [ancestors]
            slots = torch.cat([prefix_slots[request].long(), own.long()])  # [rows]
            if slots.numel() == 0:
                continue
            keys = cache[slots].double() * cache_scale  # [rows, 576]
            token = request * nodes + node
            for head in range(heads):
                scores = keys @ query[token, head].double() * softmax_scale  # [rows]
                lse[token, head] = torch.logsumexp(scores, dim=0)
                weights = torch.exp(scores - lse[token, head])  # [rows]
                out[token, head] = weights @ keys[:, :LATENT_DIM]  # [512]
    return out, lse
