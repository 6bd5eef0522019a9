"""Which units are free: a byte for each on the device, and their number on the host.

Taking and giving back cost what is taken or given back, whatever the size of the pool, and nobody
waits for the device.
"""

from __future__ import annotations

import torch


class FreeMap:
    """Units 1 … ``units`` of a pool, all free to begin with.

    ``units``: how many there are, free or not. ``count``: how many are free. ``flags`` [units + 2]
    uint8: 1 where a unit is free. Unit 0, which is padding, and the end are never free, so that
    every run has a neighbour on both sides.
    """

    def __init__(self, units: int, device: torch.device | str) -> None:
        self.flags = torch.ones(units + 2, dtype=torch.uint8, device=device)
        self.flags[0] = self.flags[-1] = 0
        self.units = self.count = units

    def take(self, units: torch.Tensor) -> None:
        """Take ``units`` [n] int, all free."""
        self.flags.index_fill_(0, units.long(), 0)
        self.count -= units.shape[0]

    def release(self, units: torch.Tensor) -> None:
        """Give back ``units`` [n] int, none twice and none free."""
        self.flags.index_fill_(0, units.long(), 1)
        self.count += units.shape[0]

    def listed(self) -> torch.Tensor:
        """Return the free units [count] int64, ascending; waits for the device."""
        return self.flags.nonzero().flatten()

    def copy(self) -> FreeMap:
        """Return one that goes its own way."""
        other = FreeMap.__new__(FreeMap)
        other.units, other.count = self.units, self.count
        other.flags = self.flags.clone()
        return other
