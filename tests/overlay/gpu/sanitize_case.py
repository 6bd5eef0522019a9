"""A few small steps for compute-sanitizer; exits non-zero when a result is wrong.

``compute-sanitizer --tool memcheck python -m tests.overlay.gpu.sanitize_case`` (and ``--tool
racecheck``). Only the overlay's own kernels are of interest; FlashMLA's do not run.
"""

from __future__ import annotations

import random

import torch
from sglang_overlay.attention.flashmla_schedule import FIELDS, Layout, plan_schedule
from sglang_overlay.attention.plan import PlanSizes, VerifyPlan, VerifyStep
from sglang_overlay.attention.prefix import PrefixResult
from sglang_overlay.attention.split_config import MMA
from sglang_overlay.attention.tree_merge import merge_tree

from tests.overlay.gpu import test_draft_tree, test_placement, test_portable
from tests.support.closeness import assert_close
from tests.support.flashmla_schedule import check_schedule
from tests.support.prefix_reference import ReferencePrefixEngine
from tests.support.verify_case import SCALE, full_mask, make_case

# Seeds of the placement test that draw 500 slots.
SMALL_POOLS = [seed for seed in range(12) if random.Random(seed).choice([0, 1, 2]) == 0]


def main() -> None:
    """Run every kind of kernel."""
    merge_trees()
    plan_schedules()
    for page in (1, 64):
        for config in (None, MMA):
            test_portable.check([0, 1, 17, 200], 9, 8, page, config)
            test_portable.check([70, 130], 9, 8, page, config, cache_dtype=torch.float8_e4m3fn)
        print("ok", "portable, pages of", page, flush=True)
    test_draft_tree.test_the_top_tokens_are_those_of_a_stable_sort(5000, 3, 63, torch.bfloat16)
    print("ok", "top tokens", flush=True)
    for units in (500, 20_000):
        for spacing in (0, 2, 17):
            test_placement.test_the_kernels_find_the_runs_that_the_host_finds(units, spacing)
    print("ok", "longest runs", flush=True)
    for seed in SMALL_POOLS:
        test_placement.test_the_kernel_takes_what_the_host_takes(seed)
    for requests, most in ((8, 16), (300, 5000)):
        test_placement.test_tokens_get_the_slots_that_the_host_gives(torch.int64, requests, most)
    print("ok", "placement", flush=True)


def merge_trees() -> None:
    """Trees on the reference's prefix results."""
    for nodes, heads, requests in ((16, 8, 1), (16, 8, 40), (64, 8, 8), (70, 3, 2), (256, 2, 1)):
        prefixes = [0, 65, 1, 64] * 10
        prefixes = prefixes[:requests]
        case = make_case(
            prefixes,
            ["random"] * requests,
            nodes,
            heads,
            dtype=torch.bfloat16,
            device="cuda",
            poison=False,
        )
        plan = VerifyPlan(PlanSizes(max_requests=requests, max_context=256, nodes=nodes), "cuda")
        plan.fill(
            VerifyStep(
                prefix_lens=case.step.prefix_lens,
                request_rows=case.step.request_rows,
                req_to_token=case.step.req_to_token,
                full_mask=full_mask(prefixes, case.parents).cuda(),
            )
        )
        plan.fill(case.step)
        engine = ReferencePrefixEngine()
        engine.plan(plan.planned_lengths.cpu(), plan.page_table.cpu(), nodes * heads)
        reference = engine.run(case.query.cpu(), case.cache.cpu(), SCALE, 1.0)
        prefix = PrefixResult(out=reference.out.cuda(), lse=reference.lse.cuda())
        merge_tree(
            case.query,
            case.cache,
            case.tree_slots,
            plan.ancestors,
            plan.lengths,
            prefix,
            prefix.out,
            softmax_scale=SCALE,
        )
        if requests <= 8:
            want, _ = case.expected()
            assert_close(prefix.out, want, absolute=4e-2, relative=5e-3, cosine=2e-5)
        print("ok", nodes, heads, requests, flush=True)


def plan_schedules() -> None:
    """FlashMLA's schedule in every layout."""
    for requests in (1, 33, 128, 300):
        lengths = [(37 * index * index) % 5_000 for index in range(requests)]
        for layout in Layout:
            schedule = torch.empty(66, FIELDS, dtype=torch.int32, device="cuda")
            splits = torch.empty(requests + 1, dtype=torch.int32, device="cuda")
            given = torch.tensor(lengths, dtype=torch.int32, device="cuda")
            plan_schedule(given, schedule, splits, layout)
            check_schedule(schedule.tolist(), splits.tolist(), lengths, layout)
        print("ok", "schedule", requests, flush=True)


if __name__ == "__main__":
    main()
