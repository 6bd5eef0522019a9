"""A few small steps for compute-sanitizer; exits non-zero when a result is wrong.

``compute-sanitizer --tool memcheck python -m tests.overlay.gpu.sanitize_case`` (and ``--tool
racecheck``). Only the overlay's own kernels are of interest; they run on the reference prefix
result, without FlashMLA.
"""

from __future__ import annotations

import torch
from sglang_overlay.attention.flashmla_schedule import FIELDS, Layout, plan_schedule
from sglang_overlay.attention.plan import PlanSizes, VerifyPlan, VerifyStep
from sglang_overlay.attention.prefix import PrefixResult
from sglang_overlay.attention.tree_merge import merge_tree

from tests.support.closeness import assert_close
from tests.support.flashmla_schedule import check_schedule
from tests.support.prefix_reference import ReferencePrefixEngine
from tests.support.verify_case import SCALE, full_mask, make_case


def main() -> None:
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
