"""Launches of compiled kernels that only wait for their arguments.

Triton's own launch takes the host three times as long, to find out the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from triton.runtime.driver import driver

_ready: dict[tuple[Any, ...], Callable[..., None]] = {}


def launch(
    kernel: Any, key: tuple[Any, ...], grid: tuple[int, int], warps: int, *args: Any
) -> None:
    """Launch ``kernel`` over ``grid`` with all its ``args``, the constants too.

    ``key``: all that tells one ``kernel``, one form of it and one device from another. A form may
    not depend on a value or an address, but for the constants.
    """
    ready = _ready.get(key)
    if ready is not None:
        ready(grid, *args)
        return
    compiled = kernel[grid](*args, num_warps=warps)
    # The interpreter compiles nothing.
    if compiled is not None:
        _ready[key] = _bound(compiled)


def _bound(compiled: Any) -> Callable[..., None]:
    """Return what launches ``compiled`` with arguments, past the hooks of Triton's profiler."""
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    active = driver.active

    def ready(grid: tuple[int, int], *args: Any) -> None:
        stream = active.get_current_stream(active.get_current_device())
        run(*grid, 1, stream, function, metadata, None, None, None, *args)

    return ready
