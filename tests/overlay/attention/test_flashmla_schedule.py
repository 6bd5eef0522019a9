"""Plans for FlashMLA: what holds of any valid one, and that they are its own op's."""

from __future__ import annotations

import logging
import random
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from sglang_overlay.attention.flashmla_schedule import (
    FIELDS,
    Layout,
    layout_of,
    parts_for,
    plan_schedule,
)

from tests.support.flashmla_schedule import (
    OVERHEAD,
    check_schedule,
    fair_share,
    read_schedule,
    serial_plan,
)

PROBE = [40_000, 1, 64, 65, 9_000, 63, 128, 2_000]


def planned(
    lengths: list[int], parts: int, layout: Layout, *, largest: int = 0
) -> tuple[list[list[int]], list[int]]:
    """Plan into buffers for up to ``largest`` requests, and see that nothing else is written."""
    schedule = torch.full((parts + 1, FIELDS), -9, dtype=torch.int32)
    splits = torch.full((max(largest, len(lengths)) + 1,), -9, dtype=torch.int32)
    plan_schedule(torch.tensor(lengths, dtype=torch.int32), schedule[:parts], splits, layout)
    assert (schedule[parts] == -9).all()
    assert (splits[len(lengths) + 1 :] == -9).all()
    return schedule[:parts].tolist(), splits[: len(lengths) + 1].tolist()


def check(lengths: list[int], parts: int, layout: Layout, *, largest: int = 0) -> None:
    """See that the plan is valid, balanced, and FlashMLA's own."""
    schedule, splits = planned(lengths, parts, layout, largest=largest)
    costs = check_schedule(schedule, splits, lengths, layout)
    assert max(costs) <= fair_share(lengths, parts, layout) + OVERHEAD
    own, own_splits = serial_plan(lengths, parts, layout)
    assert max(costs) <= max(check_schedule(own, own_splits, lengths, layout))
    assert splits == own_splits
    for row, own_row in zip(schedule, own, strict=True):
        assert row == own_row or row[0] == own_row[0] == len(lengths)


@pytest.mark.parametrize("layout", Layout)
def test_random_ragged_batches(layout: Layout) -> None:
    chance = random.Random(layout.value)
    for requests in (1, 2, 5, 13, 33):
        for parts in (1, 2, 9):
            lengths = [
                chance.choice([0, 1, 63, 64, 65, chance.randint(1, 900), chance.randint(1, 40_000)])
                for _ in range(requests)
            ]
            check(lengths, parts, layout)


@pytest.mark.parametrize(
    ("lengths", "parts"),
    [
        ([131_072], 23),
        ([32_768] * 4, 23),
        # Requests of two parts each, then of one: a part stops short at their ends.
        ([8_192] * 11, 23),
        ([1_024] * 22, 23),
        ([0] * 9, 4),
        ([0, 0, 5_000, 0], 8),
        # A share of one block: the overhead alone is longer.
        ([64] * 3, 20),
        ([1], 9),
    ],
    ids=lambda value: f"{len(value)}x{max(value)}" if isinstance(value, list) else str(value),
)
def test_batches_as_they_are_served(lengths: list[int], parts: int) -> None:
    check(lengths, parts, Layout.FLAGS)


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("requests", [128, 129, 500])
def test_large_batches(requests: int, layout: Layout) -> None:
    chance = random.Random(requests)
    check([chance.randint(0, 4_000) for _ in range(requests)], 9, layout, largest=600)


def test_slots_end_where_a_request_does_and_on_a_page_otherwise() -> None:
    schedule, splits = planned([130, 1_000], 3, Layout.SLOTS)
    assert [row[:5] for row in schedule] == [
        [0, 0, 1, 128, 0],
        [1, 128, 1, 768, 1],
        [1, 768, 1, 1_000, 2],
    ]
    assert splits == [0, 1, 4]


def test_a_part_without_work_begins_behind_the_last_request() -> None:
    schedule, _ = planned([1, 1], 5, Layout.FLAGS)
    assert [row[0] for row in schedule] == [0, 1, 2, 2, 2]


def test_parts_are_the_processors_shared_by_tiles_of_64_rows() -> None:
    assert [parts_for(rows, 132) for rows in (1, 64, 65, 128, 2_048, 32_768)] == [
        132,
        132,
        66,
        66,
        4,
        1,
    ]


@pytest.mark.parametrize("fault", ["block", "number", "flag", "splits"])
def test_the_reader_sees_a_wrong_plan(fault: str) -> None:
    lengths = [9_000, 64]
    schedule, splits = serial_plan(lengths, 4, Layout.FLAGS)
    check_schedule(schedule, splits, lengths, Layout.FLAGS)
    assert len(read_schedule(schedule, lengths, Layout.FLAGS)) == 5
    if fault == "splits":
        splits[1] -= 1
    else:
        schedule[1][{"block": 2, "number": 4, "flag": 5}[fault]] -= 1
    with pytest.raises(AssertionError):
        check_schedule(schedule, splits, lengths, Layout.FLAGS)


def tensors(plan: tuple[list[list[int]], list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(plan[0], dtype=torch.int32), torch.tensor(plan[1], dtype=torch.int32)


@pytest.mark.parametrize("layout", Layout)
def test_a_layout_is_told_by_a_plan_whatever_stands_in_unread_fields(layout: Layout) -> None:
    lengths = [3_000, 1, 65]
    schedule, splits = tensors(serial_plan(lengths, 16, layout))
    schedule[:, layout.fields :] = 77
    idle = schedule[:, 0] >= len(lengths)
    assert idle.any()
    schedule[idle] = torch.tensor([-1, *range(40, 47)], dtype=torch.int32)
    given = torch.tensor(lengths, dtype=torch.int32)
    assert layout_of(given, schedule, splits, Layout) is layout


def test_another_plan_has_no_layout() -> None:
    lengths = torch.tensor(PROBE, dtype=torch.int32)
    schedule, splits = tensors(serial_plan(PROBE, 8, Layout.FLAGS))
    assert layout_of(lengths, schedule.flip(0), splits, Layout) is None
    assert layout_of(lengths, schedule, splits + 1, Layout) is None
    assert layout_of(lengths, schedule[:, :5], splits, Layout) is None


def engine_on(monkeypatch: pytest.MonkeyPatch, op: Any, cache_dtype: torch.dtype) -> Any:
    """Return the engine on the CPU, on a FlashMLA that plans with ``op`` for 6 processors."""
    flash_mla: Any = ModuleType("sgl_kernel.flash_mla")
    flash_mla.get_mla_metadata = op
    flash_mla.flash_mla_with_kvcache = None
    monkeypatch.setitem(sys.modules, "sgl_kernel", ModuleType("sgl_kernel"))
    monkeypatch.setitem(sys.modules, "sgl_kernel.flash_mla", flash_mla)
    monkeypatch.delitem(sys.modules, "sglang_overlay.attention.flashmla", raising=False)
    processors = SimpleNamespace(multi_processor_count=6)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: processors)
    from sglang_overlay.attention.flashmla import FlashMlaEngine

    monkeypatch.delitem(sys.modules, "sglang_overlay.attention.flashmla")
    return FlashMlaEngine(max_requests=9, cache_dtype=cache_dtype, device="cpu")


class Op:
    """FlashMLA's op for 6 processors; counts its calls."""

    def __init__(self, layout: Layout, parts: int = 0) -> None:
        self.layout, self.parts, self.calls = layout, parts, 0

    def __call__(
        self, lengths: torch.Tensor, rows: int, kv_heads: int, *, is_fp8_kvcache: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls += 1
        parts = self.parts or parts_for(rows, 6)
        return tensors(serial_plan(lengths.tolist(), parts, self.layout))


@pytest.mark.parametrize("layout", Layout)
def test_the_engine_plans_as_its_flashmla_does(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    op = Op(layout)
    fp8 = layout is Layout.SLOTS
    engine = engine_on(monkeypatch, op, torch.float8_e4m3fn if fp8 else torch.bfloat16)
    assert engine.layout is layout
    assert op.calls == 1
    lengths = torch.tensor([700, 3, 2_000], dtype=torch.int32)
    engine.plan(lengths, torch.zeros(3, 40, dtype=torch.int32), 128)
    assert op.calls == 1
    schedule, splits = tensors(serial_plan(lengths.tolist(), 3, layout))
    assert engine._parts == 3
    assert torch.equal(engine._schedule[:3], schedule)
    assert torch.equal(engine._splits[:4], splits)


def test_the_op_plans_where_the_two_disagree(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    op = Op(Layout.FLAGS, parts=5)
    with caplog.at_level(logging.WARNING):
        engine = engine_on(monkeypatch, op, torch.bfloat16)
    assert engine.layout is None
    assert "its own op will plan" in caplog.text
    lengths = torch.tensor([700, 3], dtype=torch.int32)
    engine.plan(lengths, torch.zeros(2, 40, dtype=torch.int32), 128)
    assert op.calls == 2
    assert torch.equal(engine._schedule[:5], tensors(serial_plan([700, 3], 5, Layout.FLAGS))[0])
