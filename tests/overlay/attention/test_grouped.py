"""Grouped-query verify in the interpreter, against the float64 oracle."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from sglang_overlay.attention.grouped import GroupedVerifier, Heads, choose_tiles
from sglang_overlay.attention.oracle import ancestor_mask, grouped_tree_attention
from sglang_overlay.attention.plan import PlanSizes, VerifyPlan

from tests.support.closeness import assert_close
from tests.support.verify_case import TOPOLOGIES, VerifyCase, make_case

SCALE = 0.17


@dataclass(kw_only=True)
class Case:
    """A step of `make_case`, whose places are used, with keys, values and queries of its own."""

    base: VerifyCase
    heads: Heads
    nodes: int
    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor

    def verifier(self, page_size: int) -> GroupedVerifier:
        sizes = PlanSizes(max_requests=6, max_context=1024, nodes=self.nodes, page_size=page_size)
        return GroupedVerifier(VerifyPlan(sizes, "cpu"), self.heads)

    def attend(self, verifier: GroupedVerifier) -> torch.Tensor:
        verifier.prepare(self.base.step, self.heads.query)
        return verifier.attend(
            self.query, (self.keys, self.values), self.base.tree_slots, softmax_scale=SCALE
        )

    def expected(self) -> torch.Tensor:
        parents = self.base.parents
        return grouped_tree_attention(
            self.query,
            self.keys,
            self.values,
            self.base.prefix_slots,
            self.base.tree_slots.view(len(parents), -1),
            [ancestor_mask(own) for own in parents],
            SCALE,
        )


def case_of(
    heads: Heads,
    prefixes: list[int],
    nodes: int,
    *,
    page_size: int = 64,
    topologies: list[str] | None = None,
    seed: int = 0,
) -> Case:
    """Return a step whose cache is NaN wherever no request may look."""
    topologies = topologies or [TOPOLOGIES[(i + 3) % 4] for i in range(len(prefixes))]
    base = make_case(prefixes, topologies, nodes, 1, page_size=page_size, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    used = ~base.cache[:, 0, 0].isnan()
    slots = base.cache.shape[0]
    keys = torch.full((slots, heads.kv, heads.key_dim), float("nan"))
    values = torch.full((slots, heads.kv, heads.value_dim), float("nan"))
    for rows in (keys, values):
        rows[used] = torch.randn(int(used.sum()), *rows.shape[1:], generator=generator)
    # As a slice of a fused projection: rows are further apart than they are long.
    wide = torch.randn(len(prefixes) * nodes, heads.query + 2, heads.key_dim, generator=generator)
    query = wide[:, : heads.query]
    return Case(base=base, heads=heads, nodes=nodes, query=query, keys=keys, values=values)


def check(case: Case, page_size: int = 64) -> None:
    got = case.attend(case.verifier(page_size))
    assert_close(got, case.expected(), absolute=2e-5, relative=2e-6, cosine=1e-10)


SMALL = Heads(query=4, kv=2, key_dim=64, value_dim=64)


@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_every_topology_in_both_page_sizes(topology: str, page_size: int) -> None:
    case = case_of(SMALL, [130, 3], 9, page_size=page_size, topologies=[topology] * 2)
    check(case, page_size)


@pytest.mark.parametrize(
    "heads",
    [
        Heads(query=3, kv=3, key_dim=64, value_dim=64),
        Heads(query=8, kv=1, key_dim=128, value_dim=128),
        Heads(query=6, kv=2, key_dim=80, value_dim=80),
        Heads(query=4, kv=2, key_dim=192, value_dim=128),
        Heads(query=2, kv=1, key_dim=256, value_dim=256),
    ],
    ids=lambda heads: f"{heads.query}-{heads.kv}-{heads.key_dim}-{heads.value_dim}",
)
def test_heads_and_widths(heads: Heads) -> None:
    check(case_of(heads, [70, 0], 7))


@pytest.mark.parametrize("nodes", [1, 16, 17, 33, 65])
def test_trees_of_every_number_of_tiles(nodes: int) -> None:
    check(case_of(Heads(query=2, kv=1, key_dim=16, value_dim=16), [65], nodes, seed=nodes))


@pytest.mark.parametrize("prefix", [0, 1, 63, 64, 65, 900])
def test_every_prefix_edge_amid_others(prefix: int) -> None:
    check(case_of(SMALL, [7, prefix, 66], 5, seed=prefix))


def test_one_verifier_serves_steps_of_every_kind_in_turn() -> None:
    verifier = case_of(SMALL, [1], 5).verifier(64)
    for seed, prefixes in enumerate([[700, 4], [1], [64, 0, 65, 2]]):
        case = case_of(SMALL, prefixes, 5, seed=seed)
        got = case.attend(verifier)
        assert_close(got, case.expected(), absolute=2e-5, relative=2e-6, cosine=1e-10)
    assert verifier.tree_launches == 3


def test_a_tile_is_never_larger_than_the_tree_needs() -> None:
    assert choose_tiles(Heads(query=4, kv=4, key_dim=128, value_dim=128), 16).rows == 16
    assert choose_tiles(Heads(query=32, kv=4, key_dim=128, value_dim=128), 16).rows == 64
    assert choose_tiles(Heads(query=32, kv=4, key_dim=256, value_dim=256), 64).rows == 32


@pytest.mark.parametrize(
    "heads", [{"query": 5, "kv": 2, "key_dim": 64, "value_dim": 64}, {"query": 4, "kv": 2,
    "key_dim": 320, "value_dim": 64}]
)  # fmt: skip
def test_heads_that_do_not_fit_are_refused(heads: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="heads: got Heads"):
        Heads(**heads)


def test_shapes_and_strides_are_checked() -> None:
    case = case_of(SMALL, [10], 5)
    verifier = case.verifier(64)
    verifier.prepare(case.base.step, 4)
    cache = (case.keys, case.values)
    slots = case.base.tree_slots
    with pytest.raises(ValueError, match=r"query: got \(5, 3, 64\), needed \(5, 4, 64\)"):
        verifier.attend(case.query[:, :3], cache, slots, softmax_scale=SCALE)
    with pytest.raises(ValueError, match=r"values: got \(1, 64\), needed \(2, 64\)"):
        verifier.attend(case.query, (case.keys, case.values[:, :1]), slots, softmax_scale=SCALE)
    turned = case.query.transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(ValueError, match="query: got stride 4 in the last dimension"):
        verifier.attend(turned, cache, slots, softmax_scale=SCALE)
