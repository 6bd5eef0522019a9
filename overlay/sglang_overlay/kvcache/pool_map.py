"""A pool as a picture: one small square per unit, in rows, as SVG."""

from __future__ import annotations

import numpy as np

from sglang_overlay.kvcache.metrics import Units

FREE, CACHED = -1, 0
_CELL = 3
_COLOURS = {FREE: "#f2f2f2", CACHED: "#9aa5b1"}
# For running requests, in turn.
_RUNNING = ("#1f77b4", "#d62728", "#2ca02c", "#ff7f0e", "#9467bd", "#17becf", "#8c564b", "#e377c2")


def draw(owners: Units, *, width: int = 256) -> str:
    """Return an SVG of ``owners`` [units] int64: `FREE`, `CACHED`, or 1, 2, … for a request.

    ``width`` is in units; the picture has as many rows as it takes.
    """
    rows = -(-len(owners) // width)
    shapes = []
    for row in range(rows):
        line = owners[row * width : (row + 1) * width]
        starts = np.concatenate(([0], np.flatnonzero(np.diff(line)) + 1))
        ends = np.append(starts[1:], len(line))
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            shapes.append(
                f'<rect x="{start * _CELL}" y="{row * _CELL}" width="{(end - start) * _CELL}" '
                f'height="{_CELL}" fill="{_colour(int(line[start]))}"/>'
            )
    size = f'width="{width * _CELL}" height="{rows * _CELL}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>' + "\n".join(shapes) + "</svg>\n"


def _colour(owner: int) -> str:
    return _COLOURS.get(owner) or _RUNNING[(owner - 1) % len(_RUNNING)]
