"""What the trees of a server came to."""

from __future__ import annotations

from typing import Any

import torch


def test_only_tokens_that_no_chain_had_drafted_make_a_path_branched(ddtree: Any) -> None:
    spine = torch.tensor([[1, 2, 3], [1, 2, 3], [1, 2, 3]])
    tokens = torch.tensor([[1, 2, 3], [1, 2, -1], [1, 9, -1]])
    held = tokens >= 0
    path = ddtree.commit.Path(nodes=held, tokens=tokens, choices=tokens, held=held, tree_size=3)
    tally = ddtree.tally.Tally("cpu")
    for _ in range(2):
        tally.count(path, spine)
    assert tally.as_dict() == {
        "steps": 2,
        "requests": 6,
        "committed_tokens": 14,
        "branched_paths": 2,
    }
