"""The longest runs of free units: where requests that have no place yet find one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from sglang_overlay.kvcache.free_map import FreeMap
from sglang_overlay.kvcache.kernels.longest_runs import list_runs_kernel, pick_runs_kernel
from sglang_overlay.kvcache.ready_kernels import launch

# Runs that a list of the longest ones has, and with one more, a power of two, those that are kept
# of each piece of the map.
LONGEST = 255
KEPT = LONGEST + 1
# Units of a piece, at most 2¹⁶, and runs that are looked at at once when the longest are picked.
PIECE = 8192
BLOCK = 4096
WARPS = 8


@dataclass(frozen=True, kw_only=True)
class Runs:
    """The longest free runs as they once were, less what `place` took: ``starts``, ``lengths``.

    Both are [k] int64, longest first to begin with. A length of 0 is no run.
    """

    starts: torch.Tensor
    lengths: torch.Tensor

    def copy(self) -> Runs:
        """Return runs that are cut by themselves."""
        return Runs(starts=self.starts.clone(), lengths=self.lengths.clone())


def longest_runs(free: FreeMap) -> Runs:
    """Return the `LONGEST` longest free runs, of equal ones the lowest first."""
    return _look_on_host(free) if free.on_host else launch_look(free)


def launch_look(free: FreeMap) -> Runs:
    """Launch the kernels."""
    flags = free.flags
    size, device = flags.shape[0], flags.device
    pieces = -(-size // PIECE)
    notes = torch.empty(2 * pieces * (KEPT + 1), dtype=torch.int32, device=device)
    starts = torch.empty(LONGEST, dtype=torch.int64, device=device)
    lengths = torch.empty(LONGEST, dtype=torch.int64, device=device)
    listing, picking = ("list_runs", device), ("pick_runs", device)
    grid = pieces, 1
    sizes = size, pieces, PIECE, KEPT
    launch(list_runs_kernel, listing, grid, WARPS, (flags, notes), sizes)
    lists = notes, starts, lengths
    launch(pick_runs_kernel, picking, (1, 1), WARPS, lists, (pieces, KEPT, BLOCK))
    return Runs(starts=starts, lengths=lengths)


def _look_on_host(free: FreeMap) -> Runs:
    flags = free.flags.numpy()
    edges = np.flatnonzero(flags[1:] != flags[:-1])
    first, last = edges[::2], edges[1::2]
    order = np.argsort(first - last, kind="stable")[:LONGEST]
    found = np.zeros((2, LONGEST), dtype=np.int64)
    found[:, : len(order)] = first[order] + 1, (last - first)[order]
    return Runs(starts=torch.from_numpy(found[0]), lengths=torch.from_numpy(found[1]))
