"""The portable engine's kernels on the GPU, whole steps against the float64 oracle."""

from __future__ import annotations

import pytest
import torch
from sglang_overlay.attention.adapter import VerifyAdapter
from sglang_overlay.attention.plan import PlanSizes, VerifyPlan
from sglang_overlay.attention.portable import PortableEngine
from sglang_overlay.attention.split_config import MMA, SAFE, SAFE_FP8, SplitConfig

from tests.support.closeness import assert_close
from tests.support.verify_case import SCALE, VerifyCase, make_case

pytestmark = pytest.mark.gpu
# None is what the GPU gets.
IDS = ["own", "safe", "mma"]
CONFIGS = pytest.mark.parametrize("config", [None, SAFE, MMA], ids=IDS)
PAGES = pytest.mark.parametrize("page", [1, 64])


def adapter_for(
    case: VerifyCase, nodes: int, heads: int, page: int, config: SplitConfig | None
) -> VerifyAdapter:
    requests, context = len(case.parents), case.step.req_to_token.shape[1]
    engine = PortableEngine(
        page_size=page,
        max_requests=requests,
        rows=nodes * heads,
        max_context=context,
        cache_dtype=case.cache.dtype,
        device="cuda",
        config=config,
    )
    sizes = PlanSizes(max_requests=requests, max_context=context, nodes=nodes, page_size=page)
    return VerifyAdapter(engine, VerifyPlan(sizes, "cuda"))


def check(
    prefixes: list[int],
    nodes: int,
    heads: int,
    page: int,
    config: SplitConfig | None,
    *,
    rising: bool = False,
    cache_dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Run a step; with ``rising``, the scores of the first request grow along its prefix."""
    case = make_case(
        prefixes,
        ["random"] * len(prefixes),
        nodes,
        heads,
        seed=nodes,
        dtype=torch.bfloat16,
        cache_dtype=cache_dtype,
        page_size=page,
        device="cuda",
    )
    if rising:
        growth = torch.linspace(0.2, 2.5, prefixes[0], device="cuda", dtype=torch.bfloat16)
        case.cache[case.prefix_slots[0].cuda()] *= growth[:, None, None]
    adapter = adapter_for(case, nodes, heads, page, config)
    adapter.prepare(case.step, heads)
    got = adapter.attend(case.query, case.cache, case.tree_slots, softmax_scale=SCALE)
    # As for FlashMLA's adapter: bf16 results, and weights of 8 bits.
    absolute = 0.2 if rising else 4e-2
    assert_close(got, case.expected()[0], absolute=absolute, relative=5e-3, cosine=2e-5)


@CONFIGS
@PAGES
def test_ragged_requests(page: int, config: SplitConfig | None) -> None:
    check([0, 1, 15, 16, 17, 63, 64, 65, 1000, 5000], 9, 3, page, config)


@CONFIGS
@pytest.mark.parametrize(("nodes", "heads"), [(1, 1), (1, 128), (16, 8), (65, 1), (256, 1)])
def test_rows(nodes: int, heads: int, config: SplitConfig | None) -> None:
    check([700, 130], nodes, heads, 64, config)


@CONFIGS
@PAGES
def test_a_long_prefix(page: int, config: SplitConfig | None) -> None:
    check([40_000], 4, 2, page, config)


@CONFIGS
def test_a_maximum_that_rises(config: SplitConfig | None) -> None:
    check([3000], 4, 2, 1, config, rising=True)


@PAGES
@pytest.mark.parametrize("config", [None, SAFE_FP8, MMA], ids=IDS)
def test_fp8(config: SplitConfig | None, page: int) -> None:
    check([0, 1, 17, 64, 5000], 9, 8, page, config, cache_dtype=torch.float8_e4m3fn)
