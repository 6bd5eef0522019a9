"""What server info and the metrics say about KV slots."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from sglang_overlay.srt.kv_compaction import Compactor
from sglang_overlay.srt.kv_layout import describe

METRIC = "sglang:overlay_kv_slots"


class Report:
    """The layout of one scheduler's slots, and what compaction has done."""

    def __init__(self, scheduler: Any, level: str, compactor: Compactor | None) -> None:
        self._scheduler = scheduler
        self._level = level
        self._compactor = compactor
        self._published_at = -1
        self._gauge: Any = None

    def numbers(self) -> dict[str, float]:
        """Return the layout (see `describe`) and the tally; waits for the device."""
        tally = asdict(self._compactor.tally) if self._compactor is not None else {}
        return {
            name: round(value, 4) for name, value in (describe(self._scheduler) | tally).items()
        }

    def as_dict(self) -> dict[str, Any]:
        """Return what server info shows under ``overlay.kv_slots``."""
        return {"level": self._level, **self.numbers()}

    def publish(self) -> None:
        """Set the gauges, if metrics are on and any slot was given or taken since the last time."""
        changes = self._scheduler.token_to_kv_pool_allocator.changes
        if not self._scheduler.current_scheduler_metrics_enabled or changes == self._published_at:
            return
        self._published_at = changes
        labels = self._scheduler.metrics_collector.labels
        for name, value in self.numbers().items():
            self._gauges().labels(**labels, level=self._level, measure=name).set(value)

    def _gauges(self) -> Any:
        if self._gauge is None:
            # SGLang sets PROMETHEUS_MULTIPROC_DIR late; importing the client earlier misses it.
            from prometheus_client import Gauge

            self._gauge = Gauge(
                name=METRIC,
                documentation="KV slots: layout when last idle, and what compaction has done.",
                labelnames=[*self._scheduler.metrics_collector.labels, "level", "measure"],
                multiprocess_mode="mostrecent",
            )
        return self._gauge
