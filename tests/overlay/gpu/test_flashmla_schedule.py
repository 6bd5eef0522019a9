"""The overlay's plan for FlashMLA beside FlashMLA's own op, and the attention under both."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
import torch
from sglang_overlay.attention.flashmla_schedule import layout_of
from sglang_overlay.attention.prefix import KEY_DIM, LATENT_DIM

from tests.support.flashmla_schedule import OVERHEAD, check_schedule, fair_share, serial_plan
from tests.support.gpu import no_synchronisation
from tests.support.verify_case import SCALE

if TYPE_CHECKING:
    from sglang_overlay.attention.flashmla import FlashMlaEngine

pytestmark = pytest.mark.gpu
FP8 = torch.float8_e4m3fn
CACHES = pytest.mark.parametrize("cache_dtype", [torch.bfloat16, FP8], ids=["bf16", "fp8"])
LARGEST, PAGES, WIDTH = 300, 700, 64


def engine_for(cache_dtype: torch.dtype) -> FlashMlaEngine:
    from sglang_overlay.attention.flashmla import FlashMlaEngine

    return FlashMlaEngine(max_requests=LARGEST, cache_dtype=cache_dtype, device="cuda")


def ragged(requests: int, seed: int, *, least: int = 0) -> list[int]:
    chance = random.Random(seed)
    longest = WIDTH * 64
    return [
        max(least, chance.choice([0, 1, 63, 64, 65, *(chance.randint(1, longest),) * 4]))
        for _ in range(requests)
    ]


def op_plan(
    lengths: torch.Tensor, rows: int, cache_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    from sgl_kernel.flash_mla import get_mla_metadata

    schedule, splits = get_mla_metadata(lengths, rows, 1, is_fp8_kvcache=cache_dtype is FP8)
    return schedule, splits


@CACHES
@pytest.mark.parametrize("rows", [8, 128, 512])
@pytest.mark.parametrize(
    "lengths",
    [
        [131_072],
        [32_768] * 8,
        [8_192] * 32,
        [1_024] * 128,
        [0] * 5,
        *(ragged(requests, requests) for requests in (1, 8, 33, 128, 256)),
    ],
    ids=lambda lengths: f"{len(lengths)}x{max(lengths)}",
)
def test_the_op_is_read_right_and_its_plan_is_ours(
    lengths: list[int], rows: int, cache_dtype: torch.dtype
) -> None:
    engine = engine_for(cache_dtype)
    layout = engine.layout
    assert layout is not None, "the op plans here"
    given = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    schedule, splits = op_plan(given, rows, cache_dtype)
    costs = check_schedule(schedule.tolist(), splits.tolist(), lengths, layout)
    parts = schedule.shape[0]
    assert max(costs) <= fair_share(lengths, parts, layout) + OVERHEAD
    modelled, modelled_splits = serial_plan(lengths, parts, layout)
    assert splits.tolist() == modelled_splits
    for row, model in zip(schedule.tolist(), modelled, strict=True):
        idle = model[0] == len(lengths)
        fields = 0 if idle else layout.fields
        assert row[:fields] == model[:fields]
        assert not idle or not 0 <= row[0] < len(lengths)
    # What the kernel plans, field by field, and then what the engine does.
    assert layout_of(given, schedule, splits, [layout]) is layout
    engine.plan(given, torch.zeros(1, 1, dtype=torch.int32, device="cuda"), rows)
    assert engine._parts == parts
    assert torch.equal(engine._splits[: len(lengths) + 1], splits)
    own = engine._schedule[:parts].tolist()
    assert check_schedule(own, splits.tolist(), lengths, layout) == costs
    for row, model in zip(own, modelled, strict=True):
        assert row == model or row[0] == model[0] == len(lengths)


@CACHES
@pytest.mark.parametrize(("nodes", "heads"), [(4, 2), (16, 8)])
@pytest.mark.parametrize("requests", [1, 8, 33, 128, 256])
def test_attention_is_the_same_under_both_plans(
    requests: int, nodes: int, heads: int, cache_dtype: torch.dtype
) -> None:
    """One capture of plan and attention, replayed on changed lengths; the op's plan beside it."""
    from sgl_kernel.flash_mla import flash_mla_with_kvcache
    from sglang_overlay.attention.flashmla import _saturated

    fp8 = cache_dtype is FP8
    engine = engine_for(cache_dtype)
    generator = torch.Generator("cuda").manual_seed(requests)
    cache = torch.randn(PAGES * 64, 1, KEY_DIM, device="cuda", generator=generator).to(cache_dtype)
    # Requests share pages here, so that a batch of 256 needs few.
    table = torch.randint(
        PAGES, (requests, WIDTH), device="cuda", generator=generator, dtype=torch.int32
    )
    query = torch.randn(
        requests * nodes, heads, KEY_DIM, device="cuda", generator=generator, dtype=torch.bfloat16
    )
    lengths = torch.ones(requests, dtype=torch.int32, device="cuda")
    rows = nodes * heads

    def forward() -> tuple[torch.Tensor, torch.Tensor]:
        engine.plan(lengths, table, rows)
        result = engine.run(query, cache, SCALE, 1.0)
        return result.out, result.lse

    forward()
    with no_synchronisation():
        forward()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = forward()
    one = torch.ones(1, device="cuda")
    scales = {"descale_q": one, "descale_k": one} if fp8 else {}
    for turn in range(6):
        # FlashMLA's fp8 kernel must not be given an empty row, nor does the adapter give one.
        drawn = ragged(requests, 100 * requests + turn, least=int(fp8))
        lengths.copy_(torch.tensor(drawn, dtype=torch.int32))
        graph.replay()
        want, want_lse = flash_mla_with_kvcache(
            (_saturated(query) if fp8 else query).view(requests, 1, rows, KEY_DIM),
            cache.view(-1, 64, 1, KEY_DIM),
            table,
            lengths,
            LATENT_DIM,
            *op_plan(lengths, rows, cache_dtype),
            SCALE,
            False,
            **scales,
        )
        assert out.isfinite().all()
        assert torch.equal(out.view_as(want), want), (out.view_as(want) - want).abs().max()
        assert torch.equal(lse.reshape(-1), want_lse.reshape(-1))
