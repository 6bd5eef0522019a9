"""What server info and the metrics say about KV slots.

The layout is read at idle moments only: that walks the radix cache and waits for the device. A
moment with running requests shows what the host counts, beside the layout as it was last read.
Nothing in a report may end the scheduler's loop: what cannot be told is left out.
"""

from __future__ import annotations

import logging
import time
from dataclasses import asdict
from typing import Any

from sglang_overlay.srt.kv_compaction import Compactor
from sglang_overlay.srt.kv_layout import describe

logger = logging.getLogger(__name__)

METRIC = "sglang:overlay_kv_slots"
# Seconds between two readings for the metrics, as SGLang has between its own of an idle server.
INTERVAL = 30.0


class Report:
    """The layout of one scheduler's slots, and what compaction has done."""

    def __init__(self, scheduler: Any, level: str, compactor: Compactor | None) -> None:
        self.level = level
        self._scheduler = scheduler
        self._compactor = compactor
        self._layout: dict[str, float] = {}
        self._read_at = self._published_at = -1
        self._published_when = float("-inf")
        self._gauge: Any = None
        self._failed = False

    def as_dict(self) -> dict[str, Any]:
        """Return what server info shows under ``overlay.kv_slots``."""
        try:
            if self._scheduler.is_fully_idle():
                self._read()
            return {"level": self.level, **self._numbers()}
        except Exception:  # noqa: BLE001  whatever it is, the server goes on
            self._tell_failure()
            return {"level": self.level}

    def publish(self) -> None:
        """Set the gauges, if metrics are on and any slot was given or taken since the last time.

        For idle moments; not before `INTERVAL` is over.
        """
        changes = self._scheduler.token_to_kv_pool_allocator.changes
        if not self._scheduler.current_scheduler_metrics_enabled or changes == self._published_at:
            return
        now = time.monotonic()
        if now < self._published_when + INTERVAL:
            return
        self._published_at, self._published_when = changes, now
        try:
            self._read()
            labels = self._scheduler.metrics_collector.labels
            for name, value in self._numbers().items():
                self._gauges().labels(**labels, level=self.level, measure=name).set(value)
        except Exception:  # noqa: BLE001  whatever it is, the server goes on
            self._tell_failure()

    def _read(self) -> None:
        """Read the layout, if any slot was given or taken since the last time."""
        changes = self._scheduler.token_to_kv_pool_allocator.changes
        if changes != self._read_at:
            self._read_at = changes
            # Nothing runs at an idle moment, and at another it is not read.
            self._layout = describe(self._scheduler, requests=False)

    def _numbers(self) -> dict[str, float]:
        counted = {"free_tokens": self._scheduler.token_to_kv_pool_allocator.available_size()}
        tally = asdict(self._compactor.tally) if self._compactor is not None else {}
        numbers: dict[str, float] = self._layout | counted | tally
        return {name: round(value, 4) for name, value in numbers.items()}

    def _tell_failure(self) -> None:
        if not self._failed:
            self._failed = True
            logger.exception("the report on KV slots failed; it is left out, and not told again")

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
