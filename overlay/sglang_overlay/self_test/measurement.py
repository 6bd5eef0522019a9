"""One path at one shape: compared with the oracle, then timed beside SGLang's own kernel."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from sglang_overlay.attention.adapter import VerifyAdapter
from sglang_overlay.attention.memory import BufferMemoryError
from sglang_overlay.attention.plan import PlanSizes, VerifyPlan
from sglang_overlay.self_test import distance, timing
from sglang_overlay.self_test.case import SOFTMAX_SCALE, Case
from sglang_overlay.self_test.paths import VerifyPath
from sglang_overlay.self_test.rows import Row, row
from sglang_overlay.self_test.shapes import Shape

# More than four times the L2 of a GPU, so that no layer finds its rows cached.
_ROTATED_BYTES = 256_000_000
_MOST_LAYERS = 64


def measure(path: VerifyPath, shape: Shape) -> Row:
    """Return the row of a path that can run here; an error is a failed row, too."""
    try:
        return _measure(path, shape)
    except (torch.OutOfMemoryError, BufferMemoryError):
        return row(path, shape, "skipped", "this GPU has not enough free memory now")
    except Exception as error:  # noqa: BLE001 - whatever it was, the row tells
        lines = str(error).strip().splitlines() or [""]
        return row(path, shape, "failed", f"{type(error).__name__}: {lines[0]}")


def _measure(path: VerifyPath, shape: Shape) -> Row:
    case = Case(
        shape,
        page_size=path.page_size,
        query_dtype=getattr(torch, path.query_dtype),
        cache_dtype=getattr(torch, path.cache_dtype),
        device=path.device,
    )
    adapter = _adapter(path, case)
    # A copy: the engine may hand out the same buffer again.
    got = _attend(adapter, case, case.cache).clone()
    found = distance.measure(got, case.expected())
    errors = {"max_error": found.absolute, "relative_error": found.relative}
    if not found.within(path.bounds):
        reason = f"off the oracle by more than {path.bounds}"
        return row(path, shape, "failed", reason, **errors)
    # Off a GPU a kernel runs in an interpreter, whose times mean nothing.
    times = _times(adapter, case) if path.device == "cuda" else {}
    return row(path, shape, "passed", "", **errors, **times)


def _adapter(path: VerifyPath, case: Case) -> VerifyAdapter:
    shape = case.shape
    sizes = PlanSizes(
        max_requests=len(shape.prefixes),
        max_context=max(shape.prefixes),
        nodes=shape.nodes,
        page_size=path.page_size,
    )
    adapter = VerifyAdapter(path.build(sizes, shape.heads), VerifyPlan(sizes, path.device))
    adapter.prepare(case.step, shape.heads)
    return adapter


def _attend(adapter: VerifyAdapter, case: Case, cache: torch.Tensor) -> torch.Tensor:
    slots = case.tree_slots.flatten()
    return adapter.attend(case.query, cache, slots, softmax_scale=SOFTMAX_SCALE)


def _times(adapter: VerifyAdapter, case: Case) -> dict[str, float | None]:
    layers = min(_ROTATED_BYTES // case.cache.nbytes + 1, _MOST_LAYERS)
    caches = [case.cache.clone() for _ in range(layers)]
    ours = timing.microseconds([partial(_attend, adapter, case, cache) for cache in caches])
    call = _stock_call(case)
    stock = None if call is None else timing.microseconds([call], rounds=3)
    return {"microseconds": ours, "stock_microseconds": stock}


def _stock_call(case: Case) -> Callable[[], object] | None:
    """Return SGLang's masked verify of ``case``, None where it is absent.

    Or where the cache is fp8: its kernel reads the tree's rows in the query's dtype.
    """
    if case.cache.dtype is not case.query.dtype:
        return None
    try:
        from sglang_overlay.srt.stock_verify import stock_verify
    except ImportError:
        return None
    return stock_verify(
        case.query,
        case.cache,
        case.prefix_slots,
        case.tree_slots,
        case.masks,
        softmax_scale=SOFTMAX_SCALE,
    )
