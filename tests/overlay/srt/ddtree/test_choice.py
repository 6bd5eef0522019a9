"""The target's choices: after bias and processors, in plain decoding's order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from sglang_overlay.srt.ddtree import choice
from sglang_overlay.tree.layout import DraftTree

from tests.overlay.srt.ddtree.test_processed import Request, sampling

LOGITS = torch.tensor([[0.0, 3, 2, 1], [1, 3, 2, 0], [9, 8, 7, 6], [0, 1, 2, 3]])
# Two trees of a root and a child: the first child is what the target chooses, the second is not.
TREE = DraftTree(
    tokens=torch.tensor([[7, 1], [7, 3]]),
    parents=torch.tensor([[-1, 0], [-1, 0]], dtype=torch.int32),
    depths=torch.tensor([[0, 1], [0, 1]], dtype=torch.int32),
    max_depth=1,
)


def choose(sampling_info: Any) -> list[list[int]]:
    batch = SimpleNamespace(sampling_info=sampling_info, reqs=[Request(), Request()])
    chosen = choice.choose(batch, LOGITS.clone(), TREE)
    assert chosen.dtype is torch.int64
    return list(chosen.tolist())


def test_without_sampling_info_it_is_the_argmax() -> None:
    assert choose(None) == choose(sampling()) == [[1, 1], [0, 3]]


def test_a_bias_changes_its_own_requests_nodes() -> None:
    bias = torch.tensor([[0.0, 0, 0, 2.5], [0, 0, 0, -9]])
    assert choose(sampling(bias=bias)) == [[3, 1], [0, 2]]


def test_a_processor_changes_its_own_requests_path() -> None:
    def forbid(logits: torch.Tensor, params: list[Any]) -> torch.Tensor:
        logits[:, 1] = float("-inf")
        return logits

    # The root now chooses what is no child of it: nobody asks what comes behind the child.
    assert choose(sampling((forbid, [True, False]))) == [[2, 1], [0, 3]]


def test_a_processor_has_the_last_word() -> None:
    """Plain decoding adds the bias first; a processor that forces a token overrules it."""

    def force(logits: torch.Tensor, params: list[Any]) -> torch.Tensor:
        logits[:, 1] = 1000.0
        return logits

    bias = torch.tensor([[0.0, -2000, 0, 0], [0, -2000, 0, 0]])
    assert choose(sampling((force, [True, False]), bias=bias)) == [[1, 1], [0, 3]]
