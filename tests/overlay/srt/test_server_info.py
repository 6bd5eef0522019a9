"""The live identity in server info and in the metrics."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from sglang_overlay.identity import Identity
from sglang_overlay.srt import server_info

IDENTITY = Identity(
    overlay="1.0",
    fingerprint="f" * 64,
    release="0.5.12",
    verify_backend="FlashMLABackend",
    mask_policy="chain: right without a mask",
    verify_path="causal",
)


def scheduler(**changes: Any) -> Any:
    fields = {
        "tp_worker": SimpleNamespace(model_runner=SimpleNamespace(overlay_identity=IDENTITY)),
        "current_scheduler_metrics_enabled": True,
        "metrics_collector": SimpleNamespace(labels={"model_name": "m", "tp_rank": 0}),
    }
    return SimpleNamespace(**(fields | changes))


BEFORE = scheduler(tp_worker=SimpleNamespace(model_runner=SimpleNamespace()))


class Gauge:
    """As much of prometheus_client.Gauge as is used, with a memory."""

    made: ClassVar[list[Gauge]] = []

    def __init__(
        self, *, name: str, documentation: str, labelnames: list[str], multiprocess_mode: str
    ) -> None:
        self.name, self.labelnames, self.value = name, labelnames, 0
        assert documentation
        assert multiprocess_mode == "mostrecent"
        Gauge.made.append(self)

    def labels(self, **labels: Any) -> Gauge:
        assert list(labels) == self.labelnames
        self.given = labels
        return self

    def set(self, value: int) -> None:
        self.value = value


@pytest.fixture(autouse=True)
def _prometheus(monkeypatch: pytest.MonkeyPatch) -> None:
    Gauge.made = []
    monkeypatch.setitem(sys.modules, "prometheus_client", SimpleNamespace(Gauge=Gauge))


def test_server_info_carries_the_identity() -> None:
    output = SimpleNamespace(internal_state={"page_size": 64})
    server_info.add_to_internal_state(scheduler(), output)
    assert output.internal_state == {"page_size": 64, "overlay": IDENTITY.as_dict()}


def test_server_info_tells_what_the_draft_trees_came_to() -> None:
    trees = SimpleNamespace(as_dict=lambda: {"steps": 3})
    runner = SimpleNamespace(overlay_identity=IDENTITY, overlay_draft_trees=trees)
    output = SimpleNamespace(internal_state={})
    server_info.add_to_internal_state(
        scheduler(tp_worker=SimpleNamespace(model_runner=runner)), output
    )
    assert output.internal_state["overlay"] == IDENTITY.as_dict() | {"draft_trees": {"steps": 3}}


def test_server_info_carries_the_layout_of_kv_slots() -> None:
    report = SimpleNamespace(as_dict=lambda: {"level": "placement", "high_water": 64})
    output = SimpleNamespace(internal_state={})
    server_info.add_to_internal_state(scheduler(overlay_kv_slots=report), output)
    assert output.internal_state["overlay"]["kv_slots"] == {"level": "placement", "high_water": 64}


def test_a_runner_without_an_identity_adds_nothing() -> None:
    output = SimpleNamespace(internal_state={})
    server_info.add_to_internal_state(BEFORE, output)
    server_info.export_metric(BEFORE)
    assert output.internal_state == {}
    assert Gauge.made == []


def test_the_gauge_is_one_with_the_identity_in_its_labels() -> None:
    server_info.export_metric(scheduler())
    (gauge,) = Gauge.made
    assert (gauge.name, gauge.value) == ("sglang:overlay_info", 1)
    assert gauge.given == {"model_name": "m", "tp_rank": 0, **IDENTITY.as_labels()}


def test_without_metrics_there_is_no_gauge() -> None:
    server_info.export_metric(scheduler(current_scheduler_metrics_enabled=False))
    assert Gauge.made == []
