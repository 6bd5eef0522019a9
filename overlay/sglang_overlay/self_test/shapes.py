"""The sizes that every path is tried at."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One verify step: a prefix length per request, and the sizes that all requests share."""

    prefixes: tuple[int, ...]
    nodes: int
    heads: int


SHAPES = (
    # Every edge of a page, and a request that has no prefix at all.
    Shape(prefixes=(0, 1, 63, 64, 65, 300), nodes=16, heads=8),
    # More nodes than one word of the mask holds.
    Shape(prefixes=(700, 70), nodes=100, heads=4),
    # What servers run: a long context alone, and batches.
    Shape(prefixes=(32768,), nodes=16, heads=8),
    Shape(prefixes=(8192,) * 8, nodes=16, heads=8),
    Shape(prefixes=(4096,) * 4, nodes=64, heads=16),
)
