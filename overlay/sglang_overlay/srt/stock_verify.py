"""SGLang's own masked verify of a tree, its Triton kernel under a FULL_MASK, as a call.

The overlay never verifies with it. It is what results and times are compared with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from sglang.srt.layers.attention.triton_ops.extend_attention import extend_attention_fwd

from sglang_overlay.attention.prefix import LATENT_DIM


def stock_verify(
    query: torch.Tensor,
    cache: torch.Tensor,
    prefix_slots: Sequence[torch.Tensor],
    tree_slots: torch.Tensor,
    masks: Sequence[torch.Tensor],
    *,
    softmax_scale: float,
) -> Callable[[], torch.Tensor]:
    """Return a call that writes and returns attention over prefix ∪ tree, [tokens, heads, 512].

    ``query`` [requests × nodes, heads, 576], ``cache`` [slots, 1, 576] in the query's dtype,
    ``prefix_slots`` one [prefix] int64 per request, ``tree_slots`` [requests, nodes], ``masks`` one
    [nodes, nodes] bool per request, parents before children. What `TritonAttnBackend` passes in a
    target verify, with the indices and the mask made beforehand: only the kernel is in the call.
    """
    nodes = tree_slots.shape[1]
    lengths = torch.tensor([0, *(slots.numel() for slots in prefix_slots)], device=query.device)
    starts = torch.arange(lengths.numel(), device=query.device) * nodes
    whole = [
        torch.cat([mask.new_ones(nodes, slots.numel()), mask], dim=1).flatten()
        for slots, mask in zip(prefix_slots, masks, strict=True)
    ]
    sizes = torch.tensor([0, *(mask.numel() for mask in whole)], device=query.device)
    own = cache[tree_slots.flatten()].contiguous()
    out = query.new_empty(query.shape[0], query.shape[1], LATENT_DIM)
    arguments = (
        query,
        own,
        own[..., :LATENT_DIM],
        out,
        cache,
        cache[..., :LATENT_DIM],
        starts.int(),
        lengths.cumsum(0).int(),
        torch.cat(list(prefix_slots)),
        torch.cat(whole),
        True,  # causal: rows are in topological order
        sizes.cumsum(0),
        nodes,
        1.0,  # scales of keys and values
        1.0,
        softmax_scale,
    )

    def call() -> torch.Tensor:
        extend_attention_fwd(*arguments)
        return out

    return call
