"""The target's LM head as the drafter reads it: SGLang's shards, told to ``tree.marginals``."""

from __future__ import annotations

from typing import Any

import torch

from sglang_overlay.tree.marginals import Segment, VocabParallelHead


def vocab_parallel(lm_head: Any, group: Any) -> VocabParallelHead:
    """Return this rank's part of ``lm_head`` (SGLang's ParallelLMHead) over the TP ``group``."""
    shard = lm_head.shard_indices
    base = Segment(row=0, rows=int(shard.num_org_elements), token=int(shard.org_vocab_start_index))
    added = Segment(
        row=int(shard.num_org_elements_padded),
        rows=int(shard.num_added_elements),
        token=int(shard.added_vocab_start_index),
    )

    def gather(local: torch.Tensor) -> torch.Tensor:
        flat = local.new_empty(group.world_size * local.shape[0], local.shape[1])
        group.all_gather_into_tensor(flat, local.contiguous())
        return flat.view(group.world_size, *local.shape)

    return VocabParallelHead(
        weight=lm_head.weight,
        segments=(base, added),
        gather=gather if group.world_size > 1 else None,
    )
