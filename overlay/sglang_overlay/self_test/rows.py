"""The rows of the self-test's table. Imports no torch: a host without it still gets rows."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_overlay.self_test.paths import VerifyPath
from sglang_overlay.self_test.shapes import Shape


@dataclass(frozen=True, kw_only=True)
class Row:
    """``status`` is passed, failed or skipped, with the ``reason`` unless passed.

    ``context`` is the longest prefix. ``max_error`` and ``relative_error`` are to the float64
    oracle (see `distance`). ``microseconds`` is one layer's attention, ``stock_microseconds`` that
    of SGLang's Triton kernel under the same tree's FULL_MASK, where this host has it.
    """

    engine: str
    cache_dtype: str
    page_size: int
    requests: int
    context: int
    heads: int
    nodes: int
    status: str
    reason: str = ""
    max_error: float | None = None
    relative_error: float | None = None
    microseconds: float | None = None
    stock_microseconds: float | None = None


def row(
    path: VerifyPath, shape: Shape, status: str, reason: str = "", **found: float | None
) -> Row:
    """Return the row of ``path`` at ``shape`` with what was ``found``."""
    return Row(
        engine=path.engine,
        cache_dtype=path.cache_dtype,
        page_size=path.page_size,
        requests=len(shape.prefixes),
        context=max(shape.prefixes),
        heads=shape.heads,
        nodes=shape.nodes,
        status=status,
        reason=reason,
        **found,
    )
