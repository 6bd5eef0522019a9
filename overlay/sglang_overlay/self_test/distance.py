"""How far a result is from the oracle's."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from sglang_overlay.self_test.paths import Bounds


@dataclass(frozen=True, kw_only=True)
class Distance:
    """``absolute`` is the largest difference of an element, ``relative`` ‖got − want‖ / ‖want‖.

    Both are infinite where one side has a NaN or an infinity.
    """

    absolute: float
    relative: float

    def within(self, bounds: Bounds) -> bool:
        """Return whether both measures hold."""
        return self.absolute <= bounds.absolute and self.relative <= bounds.relative


def measure(got: torch.Tensor, want: torch.Tensor) -> Distance:
    """Return the distance of ``got`` to the float64 ``want``, of the same shape."""
    gap = got.to(want.device).double() - want
    absolute = float(gap.abs().max())
    if not math.isfinite(absolute):
        return Distance(absolute=math.inf, relative=math.inf)
    return Distance(absolute=absolute, relative=float(gap.norm() / want.norm()))
