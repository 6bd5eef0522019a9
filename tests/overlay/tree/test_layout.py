"""The forms of a tree that others read, against plain loops and the packed mask."""

from __future__ import annotations

import pytest
import torch
from sglang_overlay.attention.mask import pack_full_mask, pack_parents, words_for
from sglang_overlay.attention.oracle import ancestor_mask
from sglang_overlay.tree.layout import (
    DraftTree,
    ancestors,
    child_links,
    positions,
    write_full_mask,
)

from tests.support.verify_case import TOPOLOGIES, full_mask, tree_parents


def test_positions_are_the_roots_and_the_depth() -> None:
    tree = DraftTree.empty(2, 4, 2, "cpu")
    tree.depths.copy_(torch.tensor([[0, 1, 1, 2], [0, 1, 2, 0]]))
    starts = torch.tensor([100, 7], dtype=torch.int32)
    assert positions(tree, starts).tolist() == [[100, 101, 101, 102], [7, 8, 9, 7]]
    assert positions(tree, starts).dtype is torch.int64


@pytest.mark.parametrize("nodes", [1, 2, 17, 64, 130])
def test_ancestors_of_every_topology(nodes: int) -> None:
    trees = [tree_parents(topology, nodes, seed=nodes) for topology in TOPOLOGIES]
    want = torch.stack([ancestor_mask(tree) for tree in trees])
    assert torch.equal(ancestors(torch.tensor(trees, dtype=torch.int32)), want)


def test_a_node_that_is_no_child_sees_only_itself() -> None:
    assert ancestors(torch.tensor([[-1, 0, -1]]))[0].tolist() == [
        [True, False, False],
        [True, True, False],
        [False, False, True],
    ]


@pytest.mark.parametrize("nodes", [1, 16, 65])
def test_the_full_mask_is_the_one_that_the_adapter_reads(nodes: int) -> None:
    prefixes = [7, 0, 130, 1]
    trees = [tree_parents(topology, nodes, seed=2) for topology in TOPOLOGIES]
    parents = torch.tensor(trees, dtype=torch.int32)
    want = full_mask(prefixes, trees)
    out = torch.zeros(want.numel() + 9, dtype=torch.bool)
    write_full_mask(parents, torch.tensor(prefixes, dtype=torch.int32), out)
    assert torch.equal(out[: want.numel()], want)
    assert out[want.numel() :].all()
    packed = torch.zeros(4, nodes, words_for(nodes), dtype=torch.int64)
    from_parents = torch.zeros_like(packed)
    pack_full_mask(out, torch.tensor(prefixes), packed, max_requests=4)
    pack_parents(parents, from_parents)
    assert torch.equal(packed, from_parents)


def test_links_to_first_children_and_next_siblings() -> None:
    links = child_links(torch.tensor([[-1, 0, 0, 1, 0, 1, -1], [-1, 0, 1, 2, 3, 4, 5]]))
    assert links.index.tolist() == [list(range(7)), list(range(7, 14))]
    assert links.next_token[0].tolist() == [1, 3, -1, -1, -1, -1, -1]
    assert links.next_sibling[0].tolist() == [-1, 2, 4, 5, -1, -1, -1]
    assert links.next_token[1].tolist() == [1, 2, 3, 4, 5, 6, -1]
    assert links.next_sibling[1].tolist() == [-1] * 7


def test_a_mask_buffer_of_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match=r"needed a flat torch\.bool buffer"):
        write_full_mask(torch.tensor([[-1]]), torch.tensor([0]), torch.zeros(4))
