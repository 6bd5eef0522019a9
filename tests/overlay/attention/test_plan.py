"""The static buffers: what a step writes, and what it leaves alone."""

from __future__ import annotations

import pytest
import torch
from sglang_overlay.attention.plan import PlanSizes, VerifyPlan, VerifyStep

from tests.support.verify_case import full_mask


def step(prefixes: list[int], nodes: int, *, context: int = 4096) -> VerifyStep:
    """Return a step whose request r owns pages 100·r, 100·r + 1, … in descending table order."""
    requests = len(prefixes)
    pages = torch.arange(context // 64).flip(0) + 100 * torch.arange(requests)[:, None]
    slots = pages[:, :, None] * 64 + torch.arange(64)
    return VerifyStep(
        prefix_lens=torch.tensor(prefixes),
        request_rows=torch.arange(requests),
        req_to_token=slots.reshape(requests, -1).int(),
        parents=torch.full((requests, nodes), -1),
    )


def test_the_table_holds_the_prefixes_pages_and_nothing_else_is_written() -> None:
    plan = VerifyPlan(PlanSizes(max_requests=4, max_context=4096, nodes=4), "cpu")
    plan.page_table.fill_(-7)
    prefixes = [1, 64, 65, 4096]
    given = step(prefixes, 4)
    plan.fill(given)
    for request, prefix in enumerate(prefixes):
        used = -(-prefix // 64)
        want = given.req_to_token[request, ::64][:used] // 64
        assert torch.equal(plan.page_table[request, :used], want)
        assert (plan.page_table[request, used:] == -7).all()
    assert plan.lengths.tolist() == prefixes


def test_an_empty_prefix_is_planned_as_one_slot() -> None:
    plan = VerifyPlan(PlanSizes(max_requests=2, max_context=128, nodes=4), "cpu")
    plan.fill(step([0, 9], 4, context=128))
    assert plan.lengths.tolist() == [0, 9]
    assert plan.planned_lengths.tolist() == [1, 9]
    assert plan.page_table[0].tolist() == [0, 0, 0]  # the padding page: valid for every engine


@pytest.mark.parametrize(("nodes", "pages"), [(1, 65), (64, 65), (65, 66), (256, 68)])
def test_a_tree_behind_a_full_context_has_its_own_columns(nodes: int, pages: int) -> None:
    """SGLang's own table is (context + 64) // 64 = 65 wide: trees above 65 overflow a row."""
    sizes = PlanSizes(max_requests=2, max_context=4096, nodes=nodes)
    assert VerifyPlan(sizes, "cpu").page_table.shape == (2, pages)


def test_a_smaller_batch_leaves_the_other_rows_alone() -> None:
    plan = VerifyPlan(PlanSizes(max_requests=3, max_context=256, nodes=4), "cpu")
    plan.fill(step([5, 6, 7], 4, context=256))
    addresses = plan.page_table.data_ptr(), plan.ancestors.data_ptr()
    plan.fill(step([100], 4, context=256))
    assert plan.lengths.tolist() == [100, 6, 7]
    assert (plan.page_table.data_ptr(), plan.ancestors.data_ptr()) == addresses


def test_refusals() -> None:
    plan = VerifyPlan(PlanSizes(max_requests=1, max_context=256, nodes=4), "cpu")
    with pytest.raises(ValueError, match="requests: got 2, needed at most 1"):
        plan.fill(step([1, 1], 4, context=256))
    given = step([1], 4, context=256)
    both = VerifyStep(
        prefix_lens=given.prefix_lens,
        request_rows=given.request_rows,
        req_to_token=given.req_to_token,
        parents=given.parents,
        full_mask=full_mask([1], [[-1, 0, 1, 2]]),
    )
    with pytest.raises(ValueError, match="exactly one of parents and full_mask"):
        plan.fill(both)
    with pytest.raises(ValueError, match="nodes: got 0"):
        PlanSizes(max_requests=1, max_context=1, nodes=0)
    with pytest.raises(ValueError, match="max_context: got 0"):
        PlanSizes(max_requests=1, max_context=0, nodes=4)
