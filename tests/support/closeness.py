"""Comparison of a kernel's result with a float64 reference."""

from __future__ import annotations

import torch


def assert_close(
    got: torch.Tensor, want: torch.Tensor, *, absolute: float, relative: float, cosine: float
) -> None:
    """Fail unless all three measures hold and inf and NaN sit at the same places.

    ``relative`` bounds ‖got − want‖ / ‖want‖, ``absolute`` the largest single difference,
    ``cosine`` 1 − cosine similarity.
    """
    got, want = got.detach().cpu().double(), want.detach().cpu().double()
    assert got.shape == want.shape, f"shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    for name, where in (("nan", torch.isnan), ("+inf", torch.isposinf), ("-inf", torch.isneginf)):
        differs = where(got) != where(want)
        assert not differs.any(), f"{name} at {int(differs.sum())} places only on one side"
    finite = torch.isfinite(want)
    got, want = got[finite], want[finite]
    gap = (got - want).abs().max().item() if want.numel() else 0.0
    norm = want.norm().item() or 1.0
    ratio = ((got - want).norm() / norm).item()
    product = (got.norm() * want.norm()).item() or 1.0
    turn = 1.0 - (got * want).sum().item() / product if want.norm() > 0 else 0.0
    report = f"absolute {gap:.3e}, relative {ratio:.3e}, 1-cosine {turn:.3e}"
    assert gap <= absolute, report
    assert ratio <= relative, report
    assert turn <= cosine, report
