"""The walk against the oracle, by both ways."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from sglang_overlay.tree import oracle
from sglang_overlay.tree.accept import launch_walk, walk
from sglang_overlay.tree.layout import DraftTree

Walk = Callable[[DraftTree, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
WALKS = [walk, launch_walk]


def tree_of(parents: list[list[int]], tokens: list[list[int]], max_depth: int) -> DraftTree:
    depths = []
    for one in parents:
        depth: list[int] = []
        for parent in one:
            depth.append(depth[parent] + 1 if parent >= 0 else 0)
        depths.append(depth)
    return DraftTree(
        tokens=torch.tensor(tokens),
        parents=torch.tensor(parents, dtype=torch.int32),
        depths=torch.tensor(depths, dtype=torch.int32),
        max_depth=max_depth,
    )


@st.composite
def walks(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    """A tree whose siblings differ, some nodes no children, and choices that often hit."""
    n = draw(st.integers(1, 12))
    parents, tokens = [-1], [draw(st.integers(0, 3))]
    for node in range(1, n):
        parent = draw(st.integers(-1, node - 1))
        taken = {tokens[other] for other in range(node) if parents[other] == parent}
        parents.append(parent)
        tokens.append(draw(st.sampled_from([token for token in range(16) if token not in taken])))
    predicted = []
    for node in range(n):
        children = [tokens[other] for other in range(n) if parents[other] == node]
        predicted.append(draw(st.sampled_from([*children, *children, 99])))
    return parents, tokens, predicted


@settings(max_examples=200, deadline=None)
@given(case=walks())
def test_any_tree_against_the_oracle(case: tuple[list[int], list[int], list[int]]) -> None:
    check_walk(walk, *case)


@settings(max_examples=40, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(case=walks())
def test_any_tree_in_the_kernel(case: tuple[list[int], list[int], list[int]]) -> None:
    check_walk(launch_walk, *case)


def check_walk(way: Walk, parents: list[int], tokens: list[int], predicted: list[int]) -> None:
    tree = tree_of([parents, parents], [tokens, tokens], max_depth=11)
    path, lengths = way(tree, torch.tensor([predicted, [-1] * len(parents)]))
    want = oracle.walk(tokens, parents, predicted)
    assert path.shape == (2, 12)
    assert path[0].tolist() == want + [-1] * (12 - len(want))
    assert path[1].tolist() == [0] + [-1] * 11
    assert lengths.tolist() == [len(want), 1]
    assert path.dtype is torch.int64
    assert lengths.dtype is torch.int32


@pytest.mark.parametrize("way", WALKS)
def test_every_node_can_be_the_end(way: Walk) -> None:
    parents = [-1, 0, 0, 1, 1, 2, 5, 6, 6]
    tokens = [5, 10, 11, 10, 11, 10, 11, 10, 12]
    for end in range(9):
        predicted = [99] * 9
        node, want = end, [end]
        while node > 0:
            predicted[parents[node]] = tokens[node]
            node = parents[node]
            want.insert(0, node)
        path, lengths = way(tree_of([parents], [tokens], 4), torch.tensor([predicted]))
        assert path[0, : lengths[0]].tolist() == want
        committed = torch.tensor(predicted)[path[0, : lengths[0]]].tolist()
        assert committed == [*(tokens[node] for node in want[1:]), 99]


@pytest.mark.parametrize("way", WALKS)
def test_the_deepest_path_of_a_large_tree(way: Walk) -> None:
    chain = list(range(-1, 31))
    parents = chain + [7] * 224
    tokens = chain + list(range(1000, 1224))
    path, lengths = way(tree_of([parents], [tokens], 31), torch.tensor([list(range(256))]))
    assert lengths.tolist() == [32]
    assert path[0].tolist() == list(range(32))


@pytest.mark.parametrize("way", WALKS)
def test_a_node_that_is_no_child_is_not_accepted(way: Walk) -> None:
    tree = tree_of([[-1, 0, -1]], [[4, 6, 4]], 3)
    path, lengths = way(tree, torch.tensor([[4, 4, 4]]))
    assert (path[0].tolist(), lengths.tolist()) == ([0, -1, -1, -1], [1])


def test_damaged_parents_end_inside_the_path() -> None:
    """A cycle that the target follows for ever fills the path and no more."""
    tree = DraftTree(
        tokens=torch.tensor([[1, 1, 1]]),
        parents=torch.tensor([[-1, 0, 0]], dtype=torch.int32),
        depths=torch.zeros(1, 3, dtype=torch.int32),
        max_depth=2,
    )
    tree.parents[0] = torch.tensor([1, 0, 1])
    path, lengths = launch_walk(tree, torch.tensor([[1, 1, 1]]))
    assert lengths.tolist() == [3]
    assert path[0].tolist() == [0, 1, 2]


def test_refusals_name_the_argument() -> None:
    tree = tree_of([[-1, 0]], [[1, 2]], 1)
    with pytest.raises(ValueError, match=r"predicted: got \(2,\) torch.int64, needed \(1, 2\)"):
        walk(tree, torch.zeros(2).long())
    with pytest.raises(ValueError, match=r"predicted: got \(1, 2\) torch.int32"):
        walk(tree, torch.zeros(1, 2).int())
    with pytest.raises(ValueError, match="stride 2 between nodes"):
        walk(tree, torch.zeros(1, 4).long()[:, ::2])
