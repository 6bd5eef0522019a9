"""The report on KV slots: what it costs, what it leaves out, and that it never ends the loop."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from sglang_overlay.srt import kv_report
from sglang_overlay.srt.kv_report import Report


class Bed:
    """A scheduler as the report sees it, a clock, and what reading its layout gives."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.reads, self.idle = 1000.0, 0, True
        self.fails = False
        self.gauge: dict[str, float] = {}
        self.allocator = SimpleNamespace(changes=0, available_size=lambda: 77)
        self.scheduler = SimpleNamespace(
            token_to_kv_pool_allocator=self.allocator,
            current_scheduler_metrics_enabled=True,
            metrics_collector=SimpleNamespace(labels={"model": "m"}),
            is_fully_idle=lambda: self.idle,
        )
        self.report = Report(self.scheduler, "placement", None)
        monkeypatch.setattr(kv_report, "describe", self.describe)
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(self.report, "_gauges", lambda: self)

    def describe(self, scheduler: Any, *, requests: bool) -> dict[str, float]:
        assert not requests
        self.reads += 1
        if self.fails:
            raise AttributeError("planted: a cache that nobody knows")
        return {"cached_tokens_per_run": 10 * self.reads, "free_tokens": 5}

    def labels(self, *, measure: str, **_: str) -> Any:
        return SimpleNamespace(set=lambda value: self.gauge.update({measure: value}))

    def change(self) -> None:
        self.allocator.changes += 1


@pytest.fixture
def bed(monkeypatch: pytest.MonkeyPatch) -> Bed:
    return Bed(monkeypatch)


def test_the_layout_is_published_at_most_every_interval(bed: Bed) -> None:
    for _ in range(5):
        bed.change()
        bed.report.publish()
    assert (bed.reads, bed.gauge["cached_tokens_per_run"]) == (1, 10)
    bed.now += kv_report.INTERVAL
    bed.report.publish()
    bed.now += kv_report.INTERVAL
    bed.report.publish()
    assert (bed.reads, bed.gauge["cached_tokens_per_run"]) == (2, 20)


def test_a_busy_server_tells_what_the_host_counts_and_the_last_layout(bed: Bed) -> None:
    bed.idle = False
    assert bed.report.as_dict() == {"level": "placement", "free_tokens": 77}
    bed.report.publish()
    bed.change()
    busy = bed.report.as_dict()
    assert busy == {"level": "placement", "cached_tokens_per_run": 10, "free_tokens": 77}
    assert bed.reads == 1
    bed.idle = True
    assert bed.report.as_dict()["cached_tokens_per_run"] == 20
    assert bed.report.as_dict()["cached_tokens_per_run"] == 20


def test_a_report_that_fails_is_left_out_and_told_once(
    bed: Bed, caplog: pytest.LogCaptureFixture
) -> None:
    bed.fails = True
    for _ in range(3):
        bed.change()
        bed.now += 100
        bed.report.publish()
        assert bed.report.as_dict()["level"] == "placement"
    assert [record.exc_info is not None for record in caplog.records] == [True]
    assert "KV slots failed" in caplog.text
