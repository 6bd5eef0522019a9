"""Trees against brute force and a heap: node for node, in order, with ties and odd values."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from sglang_overlay.tree import levels
from sglang_overlay.tree.build import build_tree, candidates_needed, grow_best_first
from sglang_overlay.tree.layout import DraftTree
from sglang_overlay.tree.oracle import Node, Position, best_first, brute_force

Marginals = list[Position]  # of one request
Builder = Callable[[list[Marginals], int], DraftTree]

ROOT = 7


def inputs(batch: list[Marginals]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    log_probs = torch.tensor([[list(values) for values, _ in one] for one in batch])
    candidates = torch.tensor([[list(tokens) for _, tokens in one] for one in batch])
    return log_probs, candidates, torch.arange(len(batch)) + ROOT


def by_torch(batch: list[Marginals], n: int) -> DraftTree:
    return build_tree(*inputs(batch), n)


def by_kernel(batch: list[Marginals], n: int) -> DraftTree:
    log_probs, candidates, root = inputs(batch)
    tree = DraftTree.empty(len(batch), n, log_probs.shape[1], "cpu")
    grow_best_first(log_probs, candidates, root, tree)
    return tree


BUILDERS = [by_torch, by_kernel]


def rows(tree: DraftTree, request: int) -> list[tuple[int, int, int]]:
    columns = (tree.tokens[request], tree.parents[request], tree.depths[request])
    return list(zip(*(column.tolist() for column in columns), strict=True))


def expected(nodes: list[Node], n: int) -> list[tuple[int, int, int]]:
    padding = (nodes[0].token, -1, 0)
    found = [(node.token, node.parent, node.depth) for node in nodes]
    return found + [padding] * (n - len(found))


def marginals(chance: random.Random, depth: int, width: int, values: str) -> Marginals:
    draw: Callable[[], float] = {
        "smooth": lambda: -chance.expovariate(1.0),
        "tied": lambda: -float(chance.randint(0, 2)),
        "flat": lambda: -1.25,
    }[values]
    return [
        (
            sorted((draw() for _ in range(width)), reverse=True),
            chance.sample(range(1000), width),
        )
        for _ in range(depth)
    ]


# Few distinct values make ties across ranks, depths and branches; the others are odd on purpose.
VALUES = st.one_of(
    st.sampled_from([0.0, -0.0, -0.5, -1.0, -1.0, -1.5, -2.0]),
    st.sampled_from([-math.inf, math.inf, math.nan, 1.0, -1e-45, -5e37]),
    st.floats(-20.0, 0.0, width=32),
)


@st.composite
def odd_batches(draw: st.DrawFn, most_nodes: int) -> tuple[list[Marginals], int]:
    depth, width = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    row = st.lists(VALUES, min_size=width, max_size=width)
    ordered = draw(st.booleans())
    batch: list[Marginals] = []
    for _ in range(draw(st.integers(1, 2))):
        one: Marginals = []
        for _ in range(depth):
            values = draw(row)
            if ordered:
                values = sorted(values, key=lambda v: -math.inf if math.isnan(v) else v)[::-1]
            one.append((values, draw(st.permutations(range(100, 100 + width)))))
        batch.append(one)
    return batch, draw(st.integers(1, most_nodes))


@settings(max_examples=200, deadline=None)
@given(case=odd_batches(40))
def test_odd_marginals_against_brute_force(case: tuple[list[Marginals], int]) -> None:
    batch, n = case
    tree = by_torch(batch, n)
    for request, one in enumerate(batch):
        root = ROOT + request
        want = brute_force(one, root, n)
        assert best_first(one, root, n) == want
        assert rows(tree, request) == expected(want, n)


# The interpreter takes a while for each example, so there are few, and they are not shrunk.
@settings(max_examples=20, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(case=odd_batches(14))
def test_odd_marginals_in_the_kernel(case: tuple[list[Marginals], int]) -> None:
    batch, n = case
    tree = by_kernel(batch, n)
    for request, one in enumerate(batch):
        assert rows(tree, request) == expected(brute_force(one, ROOT + request, n), n)


@pytest.mark.parametrize("values", ["smooth", "tied", "flat"])
@pytest.mark.parametrize(
    ("build", "n", "depth", "width"),
    [
        (by_torch, 16, 7, 15),
        (by_torch, 64, 15, 63),
        (by_torch, 33, 31, 5),
        (by_kernel, 16, 7, 15),
        pytest.param(by_kernel, 64, 15, 63, marks=pytest.mark.full),
        pytest.param(by_kernel, 33, 31, 5, marks=pytest.mark.full),
    ],
)
def test_sizes_in_use_against_the_heap(
    build: Builder, values: str, n: int, depth: int, width: int
) -> None:
    chance = random.Random(n)
    batch = [marginals(chance, depth, width, values) for _ in range(2)]
    tree = build(batch, n)
    for request, one in enumerate(batch):
        assert rows(tree, request) == expected(best_first(one, ROOT + request, n), n)


@pytest.mark.parametrize("shape", ["wide", "chain then wide", "mixed"])
@pytest.mark.parametrize("build", [by_torch, pytest.param(by_kernel, marks=pytest.mark.full)])
def test_the_largest_tree(build: Builder, shape: str) -> None:
    """Parents and ranks use all of their 8 bits, and every rank of the first position is taken."""
    tokens = list(range(255))
    flat, far, sure = [-0.5] * 255, [-1.0] * 255, [0.0] + [-90.0] * 254
    shapes: dict[str, Marginals] = {
        "wide": [(flat, tokens), *[(far, tokens)] * 30],
        "chain then wide": [*[(sure, tokens)] * 30, (flat, tokens)],
        "mixed": marginals(random.Random(5), 31, 255, "smooth"),
    }
    one = shapes[shape]
    tree = build([one], 256)
    assert rows(tree, 0) == expected(best_first(one, ROOT, 256), 256)


def test_the_last_candidate_that_is_needed_is_used() -> None:
    """The bound on candidates is tight: one fewer at the first position loses a node."""
    n = 16
    flat: Marginals = [(([-1.0] * 15), list(range(15))), ([-5.0] * 15, list(range(15)))]
    assert candidates_needed(n, 1000) == 15
    whole, short = by_torch([flat], n), by_torch([[(v[:14], t[:14]) for v, t in flat]], n)
    assert whole.tokens[0, 1:].tolist() == list(range(15))
    assert short.depths[0].tolist() == [0] + [1] * 14 + [2]
    assert candidates_needed(n, 9) == 9
    assert candidates_needed(1, 9) == 1


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    depth=st.integers(1, 4),
    width=st.integers(2, 5),
    n=st.integers(2, 9),
)
def test_the_proven_number_of_candidates_per_depth_loses_nothing(
    data: st.DataObject, depth: int, width: int, n: int
) -> None:
    """Ranks from B − d + 1 on, at depth d, can be cut off without a change."""
    row = st.lists(st.sampled_from([0.0, -0.5, -1.0, -2.0, -2.5]), min_size=width, max_size=width)
    one = [(sorted(data.draw(row), reverse=True), range(width)) for _ in range(depth)]
    cut = [(v[: max(1, n - 1 - at)], t[: max(1, n - 1 - at)]) for at, (v, t) in enumerate(one)]
    assert brute_force(cut, ROOT, n) == brute_force(one, ROOT, n)


@pytest.mark.parametrize("build", BUILDERS)
def test_ties_follow_the_documented_order(build: Builder) -> None:
    """At equal scores: the smaller depth, then the earlier parent, then the smaller rank."""
    one: Marginals = [([0.0, -1.0, -1.0], [10, 11, 12]), ([-1.0, -1.0, -9.0], [20, 21, 22])]
    tree = build([one], 9)
    assert rows(tree, 0) == [
        (ROOT, -1, 0),
        (10, 0, 1),
        (11, 0, 1),
        (12, 0, 1),
        (20, 1, 2),
        (21, 1, 2),
        (20, 2, 2),
        (21, 2, 2),
        (20, 3, 2),
    ]


@pytest.mark.parametrize("build", BUILDERS)
def test_a_rank_above_an_earlier_one_counts_as_equal(build: Builder) -> None:
    """Token 11, at −1 behind −2, may not overtake; all behind a NaN is out of the question."""
    one: Marginals = [
        ([-2.0, -1.0, math.nan, 0.0], [10, 11, 12, 13]),
        ([-0.5, -3.0, -3.0, -3.0], [20, 21, 22, 23]),
    ]
    tree = build([one], 6)
    assert rows(tree, 0)[:5] == [
        (ROOT, -1, 0),
        (10, 0, 1),
        (11, 0, 1),
        (20, 1, 2),
        (20, 2, 2),
    ]
    assert rows(tree, 0) == expected(brute_force(one, ROOT, 6), 6)


@pytest.mark.parametrize("build", BUILDERS)
def test_strided_inputs_and_nothing_written_beside_the_tree(build: Builder) -> None:
    chance = random.Random(3)
    batch = [marginals(chance, 5, 6, "smooth") for _ in range(3)]
    log_probs, candidates, root = inputs(batch)
    wide_values = torch.full((3, 7, 11), math.nan)
    wide_tokens = torch.full((3, 7, 11), -1)
    wide_values[:, 1:6, 2:8], wide_tokens[:, 1:6, 2:8] = log_probs, candidates
    canvas = DraftTree.empty(5, 20, 5, "cpu")
    for column in (canvas.tokens, canvas.parents, canvas.depths):
        column.fill_(-77)
    view = DraftTree(
        tokens=canvas.tokens[1:4, 2:14],
        parents=canvas.parents[1:4, 2:14],
        depths=canvas.depths[1:4, 2:14],
        max_depth=5,
    )
    grow = grow_best_first if build is by_kernel else levels.grow
    roots = torch.stack([root, root], dim=1)[:, 0]
    grow(wide_values[:, 1:6, 2:8], wide_tokens[:, 1:6, 2:8], roots, view)
    for request, one in enumerate(batch):
        assert rows(view, request) == expected(best_first(one, ROOT + request, 12), 12)
    for column in (canvas.tokens, canvas.parents, canvas.depths):
        assert (column[[0, 4]] == -77).all()
        assert (column[:, :2] == -77).all()
        assert (column[:, 14:] == -77).all()


def test_a_buffer_is_filled_and_returned() -> None:
    batch = [marginals(random.Random(1), 4, 4, "smooth") for _ in range(2)]
    buffer = DraftTree.empty(8, 6, 4, "cpu")
    out = buffer.first(2)
    assert build_tree(*inputs(batch), 6, out=out) is out
    assert torch.equal(buffer.tokens[:2], by_torch(batch, 6).tokens)


def test_refusals_name_the_argument() -> None:
    log_probs, candidates, root = (
        torch.zeros(2, 3, 4),
        torch.zeros(2, 3, 4).long(),
        torch.ones(2).long(),
    )
    with pytest.raises(ValueError, match=r"n: got 257, needed 1 to 256"):
        build_tree(log_probs, candidates, root, 257)
    with pytest.raises(ValueError, match=r"log_probs: got \(2, 3, 4\) torch.float64"):
        build_tree(log_probs.double(), candidates, root, 4)
    with pytest.raises(ValueError, match=r"candidates: got \(2, 3, 3\)"):
        build_tree(log_probs, candidates[:, :, :3], root, 4)
    with pytest.raises(ValueError, match=r"root: got \(3,\)"):
        build_tree(log_probs, candidates, torch.ones(3).long(), 4)
    with pytest.raises(ValueError, match=r"at least one candidate"):
        build_tree(log_probs[:, :, :0], candidates[:, :, :0], root, 4)
    with pytest.raises(ValueError, match=r"log_probs: got stride 2"):
        build_tree(torch.zeros(2, 3, 8)[:, :, ::2], candidates, root, 4)
    with pytest.raises(ValueError, match=r"out.max_depth: got 2, needed 3"):
        build_tree(log_probs, candidates, root, 4, out=DraftTree.empty(2, 4, 2, "cpu"))
    with pytest.raises(ValueError, match=r"out.tokens: got \(2, 5\)"):
        build_tree(log_probs, candidates, root, 4, out=DraftTree.empty(2, 5, 3, "cpu"))
