"""The live identity, as server info and the metrics show it."""

from __future__ import annotations

from typing import Any

from sglang_overlay.identity import Identity

KEY = "overlay"
METRIC = "sglang:overlay_info"
# Where a scheduler keeps the report on its KV slots.
KV_SLOTS = "overlay_kv_slots"


def identity_of(scheduler: Any) -> Identity | None:
    """Return the identity of the target that ``scheduler`` runs, or None before it has one."""
    identity = getattr(scheduler.tp_worker.model_runner, "overlay_identity", None)
    assert identity is None or isinstance(identity, Identity)
    return identity


def add_to_internal_state(scheduler: Any, output: Any) -> None:
    """Add the identity to a ``GetInternalStateReqOutput``: ``internal_state["overlay"]``.

    Where the overlay verifies, ``tree_steps`` counts the verify steps that it has prepared; with
    DDTREE, ``draft_trees`` says what its trees came to; from level ``placement`` on, ``kv_slots``
    is the layout of the KV slots.
    """
    identity = identity_of(scheduler)
    if identity is None:
        return
    output.internal_state[KEY] = identity.as_dict()
    verify = getattr(scheduler.tp_worker.model_runner, "overlay_tree_verify", None)
    if verify is not None:
        output.internal_state[KEY]["tree_steps"] = verify.steps
    trees = getattr(scheduler.tp_worker.model_runner, "overlay_draft_trees", None)
    if trees is not None:
        output.internal_state[KEY]["draft_trees"] = trees.as_dict()
    slots = getattr(scheduler, KV_SLOTS, None)
    if slots is not None:
        output.internal_state[KEY]["kv_slots"] = slots.as_dict()


def export_metric(scheduler: Any) -> None:
    """Export the identity as an info gauge: value 1, the identity in its labels."""
    identity = identity_of(scheduler)
    if identity is None or not scheduler.current_scheduler_metrics_enabled:
        return
    # SGLang sets PROMETHEUS_MULTIPROC_DIR late; importing the client earlier would miss it.
    from prometheus_client import Gauge

    labels = {**scheduler.metrics_collector.labels, **identity.as_labels()}
    gauge = Gauge(
        name=METRIC,
        documentation="The DDTree overlay that this scheduler runs; the value is always 1.",
        labelnames=list(labels),
        multiprocess_mode="mostrecent",
    )
    gauge.labels(**labels).set(1)
