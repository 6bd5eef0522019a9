"""What a layout of KV slots is like: runs, aligned blocks, free stretches. Pure, on the host."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

Units = npt.NDArray[np.int64]
NOTHING = -1


@dataclass(frozen=True, kw_only=True, eq=False)
class Piece:
    """Consecutive tokens, as one owner keeps them.

    ``units`` [n] int64 in token order; ``after`` is the unit of the token before the first,
    `NOTHING` where there is none.
    """

    units: Units
    after: int = NOTHING


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The layout of the tokens of one kind, in units.

    ``aligned`` counts the units in whole blocks that a kernel with pages of a block could read in
    place: consecutive, and the first a multiple of the block.
    """

    units: int
    runs: int
    aligned: int

    @property
    def units_per_run(self) -> float:
        """Return the mean length of a run; 0 where nothing lies."""
        return self.units / self.runs if self.runs else 0.0

    @property
    def aligned_share(self) -> float:
        """Return the share of units in aligned blocks; 0 where nothing lies."""
        return self.aligned / self.units if self.units else 0.0


@dataclass(frozen=True, kw_only=True)
class FreeSpace:
    """The free units: how many, the longest run of them, and the highest unit that is in use."""

    units: int
    largest_run: int
    high_water: int

    def as_dict(self) -> dict[str, int]:
        """Return the fields as plain values."""
        return asdict(self)


def layout(pieces: Iterable[Piece], *, block: int) -> Layout:
    """Return the layout of ``pieces``. Blocks are of ``block`` units and begin with a piece.

    Raises:
        ValueError: ``block`` is not positive.
    """
    if block < 1:
        raise ValueError(f"block: got {block}, needed at least 1 unit; pass 64 for pages of 64")
    units = runs = aligned = 0
    for piece in pieces:
        units += len(piece.units)
        runs += new_runs(piece)
        aligned += _aligned_units(piece.units, block)
    return Layout(units=units, runs=runs, aligned=aligned)


def new_runs(piece: Piece) -> int:
    """Return how many runs ``piece`` adds; one that goes on where ``after`` ends is not new."""
    if not len(piece.units):
        return 0
    breaks = int(np.count_nonzero(np.diff(piece.units) != 1))
    return breaks + int(piece.after == NOTHING or int(piece.units[0]) != piece.after + 1)


def free_space(free: Units, *, units: int) -> FreeSpace:
    """Return what is free of units 1 … ``units``; ``free`` [f] int64, ascending, no unit twice."""
    lengths = run_lengths(free)
    used = np.ones(units + 1, dtype=bool)
    used[free] = False
    # Unit 0 is padding: it is never free, and nobody's.
    used[0] = False
    return FreeSpace(
        units=len(free),
        largest_run=int(lengths.max(initial=0)),
        high_water=int(np.flatnonzero(used).max(initial=0)),
    )


def run_starts(ascending: Units) -> npt.NDArray[np.int64]:
    """Return the positions in ``ascending`` at which its runs start."""
    if not len(ascending):
        return np.empty(0, dtype=np.int64)
    return np.concatenate(([0], np.flatnonzero(np.diff(ascending) != 1) + 1))


def run_lengths(ascending: Units) -> npt.NDArray[np.int64]:
    """Return the lengths of the runs of ``ascending``, in its order."""
    return np.diff(np.append(run_starts(ascending), len(ascending)))


def _aligned_units(units: Units, block: int) -> int:
    whole = units[: len(units) // block * block].reshape(-1, block)
    if not len(whole):
        return 0
    fits = (whole[:, 0] % block == 0) & (np.diff(whole, axis=1) == 1).all(axis=1)
    return int(np.count_nonzero(fits)) * block
