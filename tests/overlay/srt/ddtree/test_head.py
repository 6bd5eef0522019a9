"""SGLang's LM head shards as the drafter reads them."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from sglang_overlay.srt.ddtree.head import vocab_parallel
from sglang_overlay.tree.marginals import Segment

# Rank 1 of 2: 5 of 10 base tokens padded to 8 rows, then 2 of 4 added ones.
HEAD = SimpleNamespace(
    weight=torch.zeros(16, 3),
    shard_indices=SimpleNamespace(
        num_org_elements=5,
        org_vocab_start_index=5,
        num_org_elements_padded=8,
        num_added_elements=2,
        added_vocab_start_index=12,
    ),
)


class Group:
    """Two ranks; the other one sends the same numbers, plus 100."""

    world_size = 2

    def all_gather_into_tensor(self, flat: torch.Tensor, local: torch.Tensor) -> None:
        assert local.is_contiguous()
        flat.copy_(torch.cat([local, local + 100]))


def test_padding_rows_stand_for_no_token() -> None:
    head = vocab_parallel(HEAD, SimpleNamespace(world_size=1))
    assert head.segments == (
        Segment(row=0, rows=5, token=5),
        Segment(row=8, rows=2, token=12),
    )
    assert head.weight is HEAD.weight
    assert head.gather is None


def test_ranks_are_gathered_in_order() -> None:
    gather = vocab_parallel(HEAD, Group()).gather
    assert gather is not None
    local = torch.arange(8).view(4, 2).T  # not contiguous
    both = gather(local)
    assert both.shape == (2, 2, 4)
    assert torch.equal(both[0], local)
    assert torch.equal(both[1], local + 100)
