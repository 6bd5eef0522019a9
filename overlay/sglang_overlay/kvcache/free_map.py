"""Which units are free: a byte for each on the device, and their number on the host.

Taking and giving back cost what is taken or given back, whatever the size of the pool, and nobody
waits for the device.
"""

from __future__ import annotations

import torch

# Units that whoever takes some next may give back on the way: more are given back by themselves.
ON_THE_WAY = 4096


class FreeMap:
    """Units 1 … ``units`` of a pool, all free to begin with.

    ``units``: how many there are, free or not. ``count``: how many are free. ``on_host``: whether
    the bytes are in the host's memory. What is given back is written down when it matters, all of
    it at once: a step gives back what it did not need, and the next one asks for more.
    """

    def __init__(self, units: int, device: torch.device | str) -> None:
        self._flags = torch.ones(units + 2, dtype=torch.uint8, device=device)
        self._flags[0] = self._flags[-1] = 0
        self.units = self.count = units
        self.on_host = self._flags.is_cpu
        self._given_back: list[torch.Tensor] = []
        self._scratch = self._flags.new_empty(0, dtype=torch.int64)

    @property
    def flags(self) -> torch.Tensor:
        """Return for each unit whether it is free, [units + 2] uint8: 1 where it is.

        Unit 0, which is padding, and the end are never free, so that every run has a neighbour on
        both sides.
        """
        if self._given_back:
            back = self._given_back
            self._given_back = []
            units = back[0] if len(back) == 1 else torch.cat(back)
            self._flags.index_fill_(0, units, 1)
        return self._flags

    def flags_to_take_from(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return `flags` without the units [n] int64 beside them, which the caller must set."""
        back = self._given_back
        if len(back) == 1 and back[0].numel() <= ON_THE_WAY:
            self._given_back = []
            return self._flags, back[0]
        return self.flags, None

    def take(self, units: torch.Tensor) -> None:
        """Take ``units`` [n] int, all free."""
        self.flags.index_fill_(0, units.long(), 0)
        self.count -= len(units)

    def release(self, units: torch.Tensor) -> None:
        """Give back ``units`` [n] int, none twice and none free; nobody may write them any more."""
        # A tensor's `len` takes the host several times as long.
        released = units.numel()
        if released:
            self._given_back.append(units.long())
            self.count += released

    def listed(self) -> torch.Tensor:
        """Return the free units [count] int64, ascending; waits for the device."""
        return self.flags.nonzero().flatten()

    def copy(self) -> FreeMap:
        """Return one that goes its own way."""
        other = FreeMap.__new__(FreeMap)
        other.units, other.count, other.on_host = self.units, self.count, self.on_host
        other._flags = self.flags.clone()
        other._given_back, other._scratch = [], self._scratch
        return other

    def scratch(self, size: int) -> torch.Tensor:
        """Return [≥ ``size``] int64 for one launch to write: the next gets the same."""
        if len(self._scratch) < size:
            self._scratch = self._scratch.new_empty(2 * size)
        return self._scratch
