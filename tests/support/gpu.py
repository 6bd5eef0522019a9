"""What tests on a GPU have in common."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def no_synchronisation() -> Iterator[None]:
    """Fail where the host waits for the device, as far as torch notices."""
    with warnings.catch_warnings():
        # At its first use in a process torch says that the mode is a prototype.
        warnings.filterwarnings("ignore", "Synchronization debug mode")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
