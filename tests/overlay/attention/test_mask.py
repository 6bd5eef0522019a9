"""Packed masks against the oracle's, bit by bit."""

from __future__ import annotations

import pytest
import torch
from sglang_overlay.attention.mask import pack_full_mask, pack_parents, words_for
from sglang_overlay.attention.oracle import ancestor_mask, packed_mask

from tests.support.verify_case import TOPOLOGIES, full_mask, tree_parents


def expected(trees: list[list[int]]) -> torch.Tensor:
    return torch.stack([packed_mask(ancestor_mask(tree)) for tree in trees])


@pytest.mark.parametrize("nodes", [1, 2, 63, 64, 65, 129, 256])
def test_parents_of_every_topology(nodes: int) -> None:
    trees = [tree_parents(topology, nodes, seed=nodes) for topology in TOPOLOGIES]
    packed = torch.full((4, nodes, words_for(nodes)), -1)
    pack_parents(torch.tensor(trees), packed)
    assert torch.equal(packed, expected(trees))


def test_nodes_need_no_order() -> None:
    tree = [3, 2, 3, -1, 0]
    packed = torch.zeros(1, 5, 1, dtype=torch.int64)
    pack_parents(torch.tensor([tree], dtype=torch.int32), packed)
    assert torch.equal(packed[0], packed_mask(ancestor_mask(tree)))


def test_padding_nodes_see_only_themselves() -> None:
    packed = torch.zeros(1, 3, 1, dtype=torch.int64)
    pack_parents(torch.full((1, 3), -1), packed)
    assert packed.flatten().tolist() == [1, 2, 4]


@pytest.mark.parametrize("parents", [[1, 0, 0], [-1, 7, 900], [0, 1, 2]])
def test_damaged_parents_end_and_touch_nothing_else(parents: list[int]) -> None:
    """Cycles and parents out of range: no endless loop, no bit of a node that does not exist."""
    buffer = torch.full((3, 3, 1), 1 << 40)
    pack_parents(torch.tensor([parents]), buffer[1:2])
    assert (buffer[1] >> 3 == 0).all()
    assert (buffer[[0, 2]] == 1 << 40).all()


@pytest.mark.parametrize("nodes", [1, 16, 64, 65, 130])
def test_full_mask_of_a_ragged_batch(nodes: int) -> None:
    prefixes = [7, 0, 130, 1]
    trees = [tree_parents(topology, nodes, seed=1) for topology in TOPOLOGIES]
    packed = torch.full((4, nodes, words_for(nodes)), -1)
    pack_full_mask(full_mask(prefixes, trees), torch.tensor(prefixes), packed, max_requests=6)
    assert torch.equal(packed, expected(trees))


def test_full_mask_is_taken_as_it_is() -> None:
    """Also where it is no tree: a node that does not see itself stays blind."""
    mask = torch.rand(5, 5, generator=torch.Generator().manual_seed(0)) < 0.5
    packed = torch.zeros(1, 5, 1, dtype=torch.int64)
    pack_full_mask(mask.flatten(), torch.tensor([0]), packed, max_requests=1)
    assert torch.equal(packed[0], packed_mask(mask))


def test_padding_requests_behind_the_masks_end_read_nothing() -> None:
    trees = [tree_parents("binary", 4)]
    storage = torch.ones(400, dtype=torch.bool)
    mask = full_mask([3], trees)
    storage[: mask.numel()] = mask
    packed = torch.full((2, 4, 1), -1)
    pack_full_mask(storage[: mask.numel()], torch.tensor([3, 1]), packed, max_requests=2)
    assert torch.equal(packed[:1], expected(trees))
    assert (packed[1] == 0).all()


def test_refusals_say_what_was_got_and_needed() -> None:
    with pytest.raises(ValueError, match=r"nodes: got 257, needed 1 to 256"):
        pack_parents(torch.zeros(1, 257, dtype=torch.int64), torch.zeros(1, 257, 5).long())
    with pytest.raises(ValueError, match=r"packed: got \(1, 65, 1\)"):
        pack_parents(torch.zeros(1, 65, dtype=torch.int64), torch.zeros(1, 65, 1).long())
    with pytest.raises(ValueError, match="stride 2 between nodes"):
        pack_parents(torch.zeros(1, 8).long()[:, ::2], torch.zeros(1, 4, 1).long())
    with pytest.raises(ValueError, match="contiguous bool"):
        pack_full_mask(
            torch.ones(16), torch.tensor([0]), torch.zeros(1, 4, 1).long(), max_requests=1
        )
    with pytest.raises(ValueError, match="got 2 requests, needed at most 1"):
        pack_full_mask(
            torch.ones(32).bool(), torch.tensor([0, 0]), torch.zeros(2, 4, 1).long(), max_requests=1
        )
