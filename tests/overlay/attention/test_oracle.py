"""The oracle itself, against results that can be written down by hand."""

from __future__ import annotations

import math

import torch
from sglang_overlay.attention.oracle import ancestor_mask, packed_mask, tree_attention


def test_ancestors_of_a_small_tree() -> None:
    want = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]
    assert ancestor_mask([-1, 0, 0, 2]).int().tolist() == want


def test_bit_63_and_the_second_word() -> None:
    mask = torch.zeros(66, 66, dtype=torch.bool)
    mask[0, 63] = mask[1, 65] = True
    words = packed_mask(mask)
    assert words[0].tolist() == [-(1 << 63), 0]
    assert words[1].tolist() == [0, 2]


def test_equal_scores_average_the_values_of_prefix_and_ancestors() -> None:
    cache = torch.zeros(5, 576)
    cache[:, 0] = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0])
    out, lse = tree_attention(
        torch.zeros(3, 1, 576),
        cache,
        [torch.tensor([4])],
        torch.tensor([[0, 1, 2]]),
        [ancestor_mask([-1, 0, 0])],
        1.0,
    )
    assert torch.allclose(out[:, 0, 0], torch.tensor([8.5, 19 / 3, 7.0]).double())
    assert torch.allclose(lse[:, 0], torch.tensor([math.log(2), *[math.log(3)] * 2]).double())


def test_a_blind_node_gives_zeros_and_minus_infinity() -> None:
    out, lse = tree_attention(
        torch.ones(1, 1, 576),
        torch.ones(1, 576),
        [torch.tensor([], dtype=torch.int64)],
        torch.tensor([[0]]),
        [torch.zeros(1, 1, dtype=torch.bool)],
        1.0,
    )
    assert (out == 0).all()
    assert lse.item() == float("-inf")


def test_a_single_row_gives_its_score_as_lse_and_scales_once() -> None:
    row = torch.randn(1, 576, generator=torch.Generator().manual_seed(2))
    out, lse = tree_attention(
        row[:, None],
        row,
        [torch.tensor([0])],
        torch.tensor([[0]]),
        [torch.zeros(1, 1).bool()],
        0.1,
        3.0,
    )
    assert torch.allclose(out[0, 0], row[0, :512].double() * 3.0)
    assert math.isclose(lse.item(), 0.3 * (row.double() @ row.double().T).item(), rel_tol=1e-12)
