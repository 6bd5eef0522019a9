"""The whole adapter on a CPU: plan, reference prefix engine, tree kernel, against the oracle."""

from __future__ import annotations

import pytest
import torch
from sglang_overlay.attention.adapter import VerifyAdapter
from sglang_overlay.attention.plan import PlanSizes, VerifyPlan, VerifyStep

from tests.support.closeness import assert_close
from tests.support.prefix_reference import ReferencePrefixEngine
from tests.support.verify_case import SCALE, TOPOLOGIES, VerifyCase, full_mask, make_case


def adapter_for(nodes: int, *, requests: int = 8, page_size: int = 64) -> VerifyAdapter:
    sizes = PlanSizes(max_requests=requests, max_context=2048, nodes=nodes, page_size=page_size)
    return VerifyAdapter(ReferencePrefixEngine(page_size=page_size), VerifyPlan(sizes, "cpu"))


def attend(adapter: VerifyAdapter, case: VerifyCase) -> torch.Tensor:
    adapter.prepare(case.step, case.query.shape[1])
    return adapter.attend(
        case.query, case.cache, case.tree_slots, softmax_scale=SCALE, cache_scale=case.cache_scale
    )


def check(adapter: VerifyAdapter, case: VerifyCase) -> None:
    want, _ = case.expected()
    # Float32 with scores of a few units: a wrong mask bit or slot moves results by 1e-2 and more.
    assert_close(attend(adapter, case), want, absolute=2e-5, relative=2e-6, cosine=1e-10)


@pytest.mark.parametrize("prefix", [0, 1, 63, 64, 65, 1000])
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_every_topology_on_every_prefix_edge(topology: str, prefix: int) -> None:
    check(adapter_for(13), make_case([prefix], [topology], nodes=13, heads=2, seed=prefix))


@pytest.mark.parametrize("nodes", [1, 2, 16, 17, 33, 64, 65, 100, 256])
def test_every_number_of_mask_words(nodes: int) -> None:
    check(adapter_for(nodes), make_case([70], ["random"], nodes=nodes, heads=1, seed=nodes))


@pytest.mark.parametrize("heads", [1, 2, 5, 8, 16, 64, 128])
def test_heads(heads: int) -> None:
    check(adapter_for(3), make_case([66, 3], ["binary", "random"], nodes=3, heads=heads))


def test_ragged_batch_with_an_empty_prefix_amid_others() -> None:
    topologies = ["random", "chain", "star", "binary", "random", "random"]
    case = make_case([0, 1, 300, 64, 0, 65], topologies, nodes=20, heads=2, seed=5)
    check(adapter_for(20), case)


def test_page_size_one() -> None:
    case = make_case([0, 37, 5], ["random"] * 3, nodes=9, heads=3, page_size=1)
    check(adapter_for(9, page_size=1), case)


def test_strided_query() -> None:
    case = make_case([50, 7], ["random", "star"], nodes=11, heads=3, strided=True)
    assert not case.query.is_contiguous()
    check(adapter_for(11), case)


def test_cache_scale_applies_to_scores_and_values() -> None:
    case = make_case([40, 0], ["random", "random"], nodes=6, heads=2, cache_scale=0.37)
    check(adapter_for(6), case)


def test_full_mask_gives_what_parents_give() -> None:
    prefixes = [5, 0, 130]
    case = make_case(prefixes, ["random", "chain", "binary"], nodes=70, heads=1, seed=3)
    step = VerifyStep(
        prefix_lens=case.step.prefix_lens,
        request_rows=case.step.request_rows,
        req_to_token=case.step.req_to_token,
        full_mask=full_mask(prefixes, case.parents),
    )
    from_parents = attend(adapter_for(70), case)
    case.step = step
    assert torch.equal(attend(adapter_for(70), case), from_parents)


def test_one_plan_serves_steps_of_every_kind_in_turn() -> None:
    adapter = adapter_for(18)
    for seed, prefixes in enumerate([[900, 4], [1], [64, 0, 65, 2], [3, 3]]):
        topologies = [TOPOLOGIES[(seed + i) % 4] for i in range(len(prefixes))]
        check(adapter, make_case(prefixes, topologies, nodes=18, heads=1, seed=seed))
    assert adapter.tree_launches == 4


def test_page_sizes_must_agree() -> None:
    plan = VerifyPlan(PlanSizes(max_requests=1, max_context=64, nodes=4, page_size=64), "cpu")
    with pytest.raises(ValueError, match="engine reads pages of 1, the plan has 64"):
        VerifyAdapter(ReferencePrefixEngine(page_size=1), plan)
