"""The adapter with FlashMLA as its prefix engine, on the GPU, against the float64 oracle.

Tolerances are not chosen: on a chain both the adapter and FlashMLA's own causal kernel are measured
against the oracle, and the adapter may be off by 1.5 times what FlashMLA is, no more.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from sglang_overlay.attention.adapter import VerifyAdapter
from sglang_overlay.attention.plan import PlanSizes, VerifyPlan, VerifyStep
from sglang_overlay.attention.prefix import KEY_DIM, LATENT_DIM

from tests.support.closeness import assert_close
from tests.support.gpu import no_synchronisation
from tests.support.verify_case import SCALE, TOPOLOGIES, VerifyCase, full_mask, make_case

pytestmark = pytest.mark.gpu
FP8 = torch.float8_e4m3fn
# Bounds that a wrong mask bit breaks by an order of magnitude: one bf16 rounding of the output is
# 2e-3 relative; fp8 queries, keys and weights carry 3 mantissa bits.
BOUNDS = {
    torch.bfloat16: {"absolute": 4e-2, "relative": 5e-3, "cosine": 2e-5},
    FP8: {"absolute": 4e-1, "relative": 5e-2, "cosine": 1.5e-3},
}


def adapter_for(
    nodes: int, cache_dtype: torch.dtype, *, requests: int = 8, context: int = 4096
) -> VerifyAdapter:
    from sglang_overlay.attention.flashmla import FlashMlaEngine

    engine = FlashMlaEngine(max_requests=requests, cache_dtype=cache_dtype, device="cuda")
    sizes = PlanSizes(max_requests=requests, max_context=context, nodes=nodes)
    return VerifyAdapter(engine, VerifyPlan(sizes, "cuda"))


def case_for(
    prefixes: list[int],
    topologies: list[str],
    nodes: int,
    heads: int,
    *,
    seed: int = 0,
    cache_dtype: torch.dtype = torch.bfloat16,
    poison: bool = True,
) -> VerifyCase:
    return make_case(
        prefixes,
        topologies,
        nodes,
        heads,
        dtype=torch.bfloat16,
        cache_dtype=cache_dtype,
        device="cuda",
        seed=seed,
        poison=poison,
    )


def attend(adapter: VerifyAdapter, case: VerifyCase) -> torch.Tensor:
    adapter.prepare(case.step, case.query.shape[1])
    return adapter.attend(
        case.query, case.cache, case.tree_slots, softmax_scale=SCALE, cache_scale=case.cache_scale
    )


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, FP8], ids=["bf16", "fp8"])
@pytest.mark.parametrize(
    ("prefixes", "nodes", "heads"),
    [
        ([1000], 16, 8),
        ([1, 63, 64, 65, 300], 16, 8),
        ([0, 128, 0], 7, 16),
        ([70, 700], 64, 4),
        ([2000], 65, 2),
        ([65, 5], 256, 1),
        ([90], 5, 128),
        ([200, 77], 33, 1),
    ],
)
def test_against_the_oracle(
    prefixes: list[int], nodes: int, heads: int, cache_dtype: torch.dtype
) -> None:
    topologies = [TOPOLOGIES[(i + 3) % 4] for i in range(len(prefixes))]
    case = case_for(prefixes, topologies, nodes, heads, seed=nodes, cache_dtype=cache_dtype)
    want, _ = case.expected()
    assert_close(attend(adapter_for(nodes, cache_dtype), case), want, **BOUNDS[cache_dtype])


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, FP8], ids=["bf16", "fp8"])
def test_no_further_from_the_oracle_than_flashmla_itself(cache_dtype: torch.dtype) -> None:
    from sgl_kernel.flash_mla import flash_mla_with_kvcache, get_mla_metadata
    from sglang_overlay.attention.flashmla import _saturated

    prefixes, nodes, heads = [500, 64, 1], 16, 8
    case = case_for(prefixes, ["chain"] * 3, nodes, heads, cache_dtype=cache_dtype, seed=9)
    lengths = (case.step.prefix_lens + nodes).int()
    slots = case.step.req_to_token[case.step.request_rows]
    table = (slots[:, ::64] // 64).int().contiguous()
    fp8 = cache_dtype is FP8
    one = torch.ones(1, device="cuda")
    plan = get_mla_metadata(lengths, nodes * heads, 1, is_fp8_kvcache=fp8)
    chain, _ = flash_mla_with_kvcache(
        (_saturated(case.query) if fp8 else case.query).view(3, nodes, heads, KEY_DIM),
        case.cache.view(-1, 64, 1, KEY_DIM),
        table,
        lengths,
        LATENT_DIM,
        *plan,
        SCALE,
        True,
        **({"descale_q": one, "descale_k": one} if fp8 else {}),
    )
    want, _ = case.expected()
    got = attend(adapter_for(nodes, cache_dtype), case).cpu().double()
    ours = (got - want).norm() / want.norm()
    theirs = (chain.view_as(got).cpu().double() - want).norm() / want.norm()
    print(f"\n{cache_dtype}: adapter {ours:.3e}, FlashMLA causal {theirs:.3e}")
    assert ours <= 1.5 * theirs


@pytest.mark.filterwarnings("ignore")  # importing SGLang warns of what it uses itself
@pytest.mark.parametrize(
    ("prefixes", "nodes", "heads"),
    [([1000], 16, 8), ([0, 1, 63, 64, 65, 300], 16, 8), ([70, 700], 100, 4), ([33], 7, 128)],
)
def test_sglangs_own_masked_kernel_agrees(prefixes: list[int], nodes: int, heads: int) -> None:
    """The second oracle: another implementation, the same FULL_MASK, bf16 on both sides."""
    from sglang_overlay.attention.oracle import ancestor_mask
    from sglang_overlay.srt.stock_verify import stock_verify

    topologies = [TOPOLOGIES[(i + 3) % 4] for i in range(len(prefixes))]
    case = case_for(prefixes, topologies, nodes, heads, seed=nodes)
    case.step = replace(case.step, parents=None, full_mask=full_mask(prefixes, case.parents).cuda())
    stock = stock_verify(
        case.query,
        case.cache,
        [slots.cuda() for slots in case.prefix_slots],
        case.tree_slots.view(len(prefixes), -1),
        [ancestor_mask(parents).cuda() for parents in case.parents],
        softmax_scale=SCALE,
    )()
    want, _ = case.expected()
    assert_close(stock, want, **BOUNDS[torch.bfloat16])
    assert_close(attend(adapter_for(nodes, torch.bfloat16), case), stock, **BOUNDS[torch.bfloat16])


def test_full_mask_on_the_gpu_gives_what_parents_give() -> None:
    prefixes = [5, 0, 130]
    case = case_for(prefixes, ["random", "chain", "binary"], 70, 2)
    from_parents = attend(adapter_for(70, torch.bfloat16), case).clone()
    case.step = VerifyStep(
        prefix_lens=case.step.prefix_lens,
        request_rows=case.step.request_rows,
        req_to_token=case.step.req_to_token,
        full_mask=full_mask(prefixes, case.parents).cuda(),
    )
    assert torch.equal(attend(adapter_for(70, torch.bfloat16), case), from_parents)


def test_nothing_synchronises() -> None:
    case = case_for([100, 3], ["random", "star"], 16, 8)
    adapter = adapter_for(16, torch.bfloat16)
    attend(adapter, case)
    with no_synchronisation():
        attend(adapter, case)


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, FP8], ids=["bf16", "fp8"])
def test_one_capture_serves_100_steps(cache_dtype: torch.dtype) -> None:
    """Lengths, topology, page table, slots and the count of padding rows change between replays."""
    nodes, heads, requests = 16, 8, 6
    adapter = adapter_for(nodes, cache_dtype, requests=requests)
    chance = random.Random(1)
    pool_slots = 400 * 64
    cache = torch.zeros(pool_slots, 1, KEY_DIM, device="cuda").to(cache_dtype)
    query = torch.zeros(requests * nodes, heads, KEY_DIM, device="cuda", dtype=torch.bfloat16)
    slots = torch.zeros(requests * nodes, dtype=torch.int64, device="cuda")
    step = VerifyStep(
        prefix_lens=torch.ones(requests, dtype=torch.int64, device="cuda"),
        request_rows=torch.zeros(requests, dtype=torch.int64, device="cuda"),
        req_to_token=torch.zeros(requests + 1, 4096, dtype=torch.int32, device="cuda"),
        parents=torch.full((requests, nodes), -1, dtype=torch.int32, device="cuda"),
    )

    def forward() -> torch.Tensor:
        adapter.prepare(step, heads)
        return adapter.attend(query, cache, slots, softmax_scale=SCALE)

    forward()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = forward()
    allocated = -1
    for turn in range(100):
        live = chance.randint(1, requests)
        prefixes = [chance.choice([1, 2, 63, 64, 65, chance.randint(1, 900)]) for _ in range(live)]
        topologies = [chance.choice(TOPOLOGIES) for _ in range(live)]
        case = case_for(
            prefixes, topologies, nodes, heads, seed=turn, cache_dtype=cache_dtype, poison=False
        )
        used = case.cache.shape[0]
        cache[:used].view(torch.uint8).copy_(case.cache.view(torch.uint8))
        query[: live * nodes].copy_(case.query)
        # What SGLang's runner writes into the rows that only pad the batch.
        slots.zero_()
        slots[: live * nodes].copy_(case.tree_slots)
        step.prefix_lens.fill_(1)
        step.prefix_lens[:live].copy_(case.step.prefix_lens)
        step.request_rows.zero_()
        step.request_rows[:live].copy_(case.step.request_rows)
        table = case.step.req_to_token
        step.req_to_token[: table.shape[0], : table.shape[1]].copy_(table)
        assert step.parents is not None
        assert case.step.parents is not None
        step.parents[:live].copy_(case.step.parents)
        out.fill_(float("nan"))
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        graph.replay()
        torch.cuda.synchronize()
        allocated = torch.cuda.memory_stats()["allocation.all.allocated"] - before
        assert allocated == 0
        want, _ = case.expected()
        assert_close(out[: live * nodes], want, **BOUNDS[cache_dtype])
        assert torch.isfinite(out).all()
