"""Launches of compiled kernels that only wait for their arguments.

Triton's own launch takes the host three times as long, to find out the same. And it asks the driver
of every tensor whether the device has it; here that is asked once, when a form is compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from triton.runtime.driver import driver

_ready: dict[tuple[Any, ...], Callable[..., None]] = {}


def launch(
    kernel: Any,
    key: tuple[Any, ...],
    grid: tuple[int, int],
    warps: int,
    tensors: Sequence[torch.Tensor | None],
    others: Sequence[Any],
) -> None:
    """Launch ``kernel`` over ``grid`` with ``tensors`` and, behind them, all ``others``.

    ``key``: all that tells one ``kernel``, one form of it and one device from another. A form may
    not depend on a value or an address, but for the constants. All ``tensors`` are on the device.
    """
    ready = _ready.get(key)
    if ready is not None:
        ready(grid, [None if each is None else each.data_ptr() for each in tensors], others)
        return
    compiled = kernel[grid](*tensors, *others, num_warps=warps)
    # The interpreter compiles nothing.
    if compiled is not None:
        _ready[key] = _bound(compiled)


def _bound(compiled: Any) -> Callable[..., None]:
    """Return what launches ``compiled`` with arguments, past the hooks of Triton's profiler."""
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    active = driver.active

    def ready(grid: tuple[int, int], addresses: list[int | None], others: Sequence[Any]) -> None:
        stream = active.get_current_stream(active.get_current_device())
        run(*grid, 1, stream, function, metadata, None, None, None, *addresses, *others)

    return ready
