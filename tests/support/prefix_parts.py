"""The portable engine alone: its parts combined, and what the oracle says of the prefixes."""

from __future__ import annotations

import torch
from sglang_overlay.attention.oracle import tree_attention
from sglang_overlay.attention.plan import PlanSizes, VerifyPlan
from sglang_overlay.attention.portable import PortableEngine
from sglang_overlay.attention.split_config import SplitConfig

from tests.support.verify_case import SCALE, VerifyCase, make_case


def attend(
    case: VerifyCase, config: SplitConfig, page: int, processors: int = 1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (out, lse) over the prefixes, from the engine's parts, and how many each request has.

    The parts are combined here, as the tree kernel would: in the interpreter it takes most of the
    time, and computes bf16 wrongly.
    """
    tokens, heads, _ = case.query.shape
    requests, context = case.step.req_to_token.shape[0] - 1, case.step.req_to_token.shape[1]
    nodes = tokens // requests
    plan = VerifyPlan(
        PlanSizes(max_requests=requests, max_context=context, nodes=nodes, page_size=page), "cpu"
    )
    plan.fill(case.step)
    engine = PortableEngine(
        page_size=page,
        max_requests=requests,
        rows=nodes * heads,
        max_context=context,
        cache_dtype=case.cache.dtype,
        device="cpu",
        multi_processor_count=processors,
        config=config,
    )
    engine.plan(plan.planned_lengths, plan.page_table, nodes * heads)
    parts = engine.run(case.query, case.cache, SCALE, case.cache_scale)
    out, lse = [], []
    for request in range(requests):
        own = slice(int(parts.first[request]), int(parts.first[request + 1]))
        weight = torch.softmax(parts.lse[own].double(), dim=0)  # [parts, nodes, heads]
        out.append((parts.out[own] * weight[..., None]).sum(0))
        lse.append(torch.logsumexp(parts.lse[own].double(), dim=0))
    return torch.cat(out), torch.cat(lse), parts.first.diff()


def expected(case: VerifyCase) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the oracle says of nodes that see nothing of their tree."""
    requests = len(case.parents)
    nodes = case.query.shape[0] // requests
    return tree_attention(
        case.query,
        case.cache[:, 0].double(),
        case.prefix_slots,
        case.tree_slots.view(requests, nodes),
        [torch.zeros(nodes, nodes, dtype=torch.bool)] * requests,
        SCALE,
        case.cache_scale,
    )


def rising_case(nodes: int, heads: int, dtype: torch.dtype = torch.float32) -> VerifyCase:
    """Return a step whose scores grow along the prefix, so that the maximum moves all the time."""
    case = make_case([300, 1], ["chain"] * 2, nodes, heads, seed=3, page_size=1, dtype=dtype)
    case.cache[case.prefix_slots[0]] *= torch.linspace(0.2, 2.5, 300).to(dtype)[:, None, None]
    return case
