"""The target's choices: after processors and bias, for every node of a request alike."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch


def sampling(forbidden: list[int] | None = None, bias: torch.Tensor | None = None) -> Any:
    return SimpleNamespace(
        has_custom_logit_processor=forbidden is not None, forbidden=forbidden, logit_bias=bias
    )


LOGITS = torch.tensor([[0.0, 3, 2, 1], [1, 3, 2, 0], [9, 8, 7, 6], [0, 1, 2, 3]])


def choose(ddtree: Any, sampling_info: Any) -> list[list[int]]:
    batch = SimpleNamespace(sampling_info=sampling_info)
    chosen = ddtree.choice.choose(batch, LOGITS.clone(), 2)
    assert chosen.dtype is torch.int64
    return list(chosen.tolist())


def test_without_sampling_info_it_is_the_argmax(ddtree: Any) -> None:
    assert choose(ddtree, None) == choose(ddtree, sampling()) == [[1, 1], [0, 3]]


def test_a_processor_changes_its_own_requests_nodes(ddtree: Any) -> None:
    assert choose(ddtree, sampling(forbidden=[1, 3])) == [[2, 2], [0, 2]]


def test_a_bias_changes_its_own_requests_nodes(ddtree: Any) -> None:
    bias = torch.tensor([[0.0, 0, 0, 2.5], [0, 0, 0, -9]])
    assert choose(ddtree, sampling(bias=bias)) == [[3, 1], [0, 2]]


def test_a_bias_comes_on_top_of_a_processor(ddtree: Any) -> None:
    bias = torch.tensor([[0.0, 0, 0, 5.0], [0, 4, 0, 0]])
    assert choose(ddtree, sampling(forbidden=[1, 0], bias=bias)) == [[3, 3], [1, 1]]
