"""The portable engine in the interpreter: whole adapter against the oracle, shares by hand."""

from __future__ import annotations

import pytest
import torch
from sglang_overlay.attention.adapter import VerifyAdapter
from sglang_overlay.attention.plan import PlanSizes, VerifyPlan
from sglang_overlay.attention.portable import PortableEngine
from sglang_overlay.attention.split_config import SplitConfig

from tests.support.closeness import assert_close
from tests.support.verify_case import SCALE, TOPOLOGIES, VerifyCase, make_case

SMALL = SplitConfig(rows=16, tile=16, warps=4, stages=1, least_tiles=1)


def engine_for(
    rows: int,
    *,
    page_size: int = 64,
    requests: int = 8,
    context: int = 2048,
    config: SplitConfig | None = SMALL,
    processors: int = 8,
) -> PortableEngine:
    return PortableEngine(
        page_size=page_size,
        max_requests=requests,
        rows=rows,
        max_context=context,
        cache_dtype=torch.float32,
        device="cpu",
        multi_processor_count=processors,
        config=config,
    )


def adapter_for(
    nodes: int,
    heads: int,
    *,
    page_size: int = 64,
    requests: int = 8,
    context: int = 2048,
    config: SplitConfig | None = SMALL,
    processors: int = 8,
) -> VerifyAdapter:
    sizes = PlanSizes(max_requests=requests, max_context=context, nodes=nodes, page_size=page_size)
    engine = engine_for(
        nodes * heads,
        page_size=page_size,
        requests=requests,
        context=context,
        config=config,
        processors=processors,
    )
    return VerifyAdapter(engine, VerifyPlan(sizes, "cpu"))


def attend(adapter: VerifyAdapter, case: VerifyCase) -> torch.Tensor:
    adapter.prepare(case.step, case.query.shape[1])
    return adapter.attend(
        case.query, case.cache, case.tree_slots, softmax_scale=SCALE, cache_scale=case.cache_scale
    )


def check(adapter: VerifyAdapter, case: VerifyCase) -> None:
    want, _ = case.expected()
    # Float32 with scores of a few units: a wrong slot or share moves results by 1e-2 and more.
    assert_close(attend(adapter, case), want, absolute=2e-5, relative=2e-6, cosine=1e-10)


@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("prefix", [0, 1, 15, 16, 17, 63, 64, 65, 700])
def test_prefix_edges(prefix: int, page_size: int) -> None:
    case = make_case([prefix], ["random"], nodes=5, heads=2, seed=prefix, page_size=page_size)
    check(adapter_for(5, 2, page_size=page_size), case)


@pytest.mark.parametrize(
    ("nodes", "heads"),
    [(1, 1), (1, 128), (3, 5), (16, 1), (17, 1), (33, 2), (65, 1), (100, 1), (256, 1), (2, 64)],
)
def test_rows_that_are_and_are_not_a_multiple_of_the_tile(nodes: int, heads: int) -> None:
    case = make_case([70], ["random"], nodes=nodes, heads=heads, seed=nodes)
    check(adapter_for(nodes, heads), case)


@pytest.mark.parametrize("page_size", [1, 64])
def test_ragged_batch_with_an_empty_prefix_amid_others(page_size: int) -> None:
    case = make_case(
        [0, 1, 300, 64, 0, 65],
        [TOPOLOGIES[i % 4] for i in range(6)],
        nodes=7,
        heads=3,
        seed=5,
        page_size=page_size,
    )
    check(adapter_for(7, 3, page_size=page_size), case)


@pytest.mark.parametrize(
    "config",
    [
        SplitConfig(rows=16, tile=32, warps=4, stages=2, least_tiles=2),
        SplitConfig(rows=32, tile=64, warps=8, stages=2, least_tiles=1),
        SplitConfig(rows=64, tile=128, warps=8, stages=1, least_tiles=1),
        None,
    ],
)
@pytest.mark.parametrize("page_size", [1, 64])
def test_tiles_do_not_change_the_result(page_size: int, config: SplitConfig | None) -> None:
    case = make_case([260, 31], ["random", "star"], nodes=9, heads=3, page_size=page_size)
    check(adapter_for(9, 3, page_size=page_size, config=config), case)


def test_one_engine_serves_steps_of_every_kind_in_turn() -> None:
    adapter = adapter_for(6, 2)
    for seed, prefixes in enumerate([[900, 4], [1], [64, 0, 65, 2], [3, 3]]):
        case = make_case(prefixes, ["random"] * len(prefixes), nodes=6, heads=2, seed=seed)
        check(adapter, case)


@pytest.mark.parametrize("requests", [4, 1024, 4096])
def test_a_server_for_many_requests_shares_out_a_small_batch_alike(requests: int) -> None:
    engine = engine_for(32, requests=requests, processors=16)
    lengths = torch.tensor([700, 0, 64, 1], dtype=torch.int32)
    engine.plan(lengths, torch.zeros(4, 32, dtype=torch.int32), 32)
    work = engine._parts.work[: engine._parts.workers]
    shares = [[int(request), int(end - start)] for request, start, end, _ in work if end > start]
    assert {request: sum(n for r, n in shares if r == request) for request in (0, 2, 3)} == {
        0: 704,
        2: 64,
        3: 16,
    }
    assert engine._parts.first[:5].tolist()[0] == 0
    assert len(shares) > 3


def test_cache_scale_and_strided_query() -> None:
    case = make_case([50, 7], ["random", "star"], nodes=5, heads=3, strided=True, cache_scale=0.4)
    check(adapter_for(5, 3), case)


def test_rows_of_another_step_and_a_cache_of_another_type_are_refused_before_any_launch() -> None:
    """A kernel would read queries behind the end, or one type's bits as another's."""
    adapter = adapter_for(4, 2)
    case = make_case([70, 3], ["chain", "random"], 4, 2)
    adapter.prepare(case.step, 2)
    with pytest.raises(ValueError, match="query: got 10 tokens, needed 2 requests × 4 nodes"):
        adapter.engine.run(torch.zeros(10, 2, 576), case.cache, SCALE, 1.0)
    with pytest.raises(ValueError, match=r"cache: got torch\.float32, needed the query's"):
        adapter.engine.run(case.query.half(), case.cache, SCALE, 1.0)
