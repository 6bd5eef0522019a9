"""The memory of static buffers: counted to the byte, and refused with the numbers."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from sglang_overlay.attention import memory, parts, plan
from sglang_overlay.attention.memory import BufferMemoryError
from sglang_overlay.attention.parts import Parts, PartSizes
from sglang_overlay.attention.plan import PlanSizes, VerifyPlan
from sglang_overlay.attention.split_config import SplitConfig

GIB = 1 << 30


def held(made: Any) -> int:
    return sum(one.nbytes for one in vars(made).values() if isinstance(one, torch.Tensor))


@pytest.mark.parametrize(("requests", "nodes"), [(1, 1), (48, 65), (300, 16)])
def test_what_is_asked_for_is_what_the_buffers_take(
    requests: int, nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def note(what: str, needed: int, device: Any) -> None:
        assert f" of {requests} requests" in what
        asked.append(needed)

    monkeypatch.setattr(parts, "require", note)
    monkeypatch.setattr(plan, "require", note)
    config = SplitConfig(rows=16, tile=32, warps=4, stages=1, resident=2)
    sizes = PartSizes(max_requests=requests, max_context=999, blocks=3, rows=nodes * 2, width=32)
    made = (
        VerifyPlan(PlanSizes(max_requests=requests, max_context=999, nodes=nodes), "cpu"),
        Parts(sizes, config, "cpu", processors=100),
    )
    assert asked == [held(one) for one in made]


@pytest.fixture
def _gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU with 3 GiB free, and 1 GiB that torch holds back."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 5 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 4 * GIB)


@pytest.mark.usefixtures("_gpu")
def test_a_gpu_without_the_room_is_refused_with_the_numbers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        memory.require("partial results of 48 requests", 4 * GIB, "cuda")
    (record,) = caplog.records
    assert record.message == (
        "The overlay's verify takes 4.00 GiB of GPU memory: partial results of 48 requests"
    )
    with pytest.raises(BufferMemoryError) as refusal:
        memory.require("partial results of 480 requests", 4 * GIB + GIB // 2, "cuda:0")
    assert str(refusal.value) == (
        "partial results of 480 requests: got 4.00 GiB of free GPU memory, needed 4.50; start the "
        "server with a lower --max-running-requests or --mem-fraction-static"
    )


@pytest.mark.usefixtures("_gpu")
def test_no_other_device_is_asked() -> None:
    memory.require("anything", 1 << 60, "cpu")
