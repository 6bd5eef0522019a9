"""Which cached pieces to move where, so that scattered ones become runs. Pure and deterministic.

The plan depends on the order of the pieces, their units and the budget, never on time: ranks that
hold the same layout make the same plan. Destinations are free units only, so that a copy never
writes over what it, or anyone, still needs. Each move lowers the number of runs, so that planning
over and over comes to an end.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sglang_overlay.kvcache.metrics import (
    NOTHING,
    Piece,
    Units,
    new_runs,
    run_lengths,
    run_starts,
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Move:
    """Piece number ``piece`` of the plan's input goes, whole, to ``destination`` [n] int64."""

    piece: int
    destination: Units


def plan(
    pieces: Sequence[Piece], parents: Sequence[int], free: Units, *, budget: int, scarce: bool
) -> list[Move]:
    """Return moves of at most ``budget`` units in all, those that can save most per unit first.

    ``parents`` names for each piece the one that it goes on from, `NOTHING` where there is none.
    ``free`` [f] int64, ascending: the units that may be written. A piece goes right behind its
    parent if there is room; else to the shortest free run that holds it; else over the longest
    ones. It stays where it is unless that saves runs. With ``scarce``, runs of free units count as
    much as those of the pieces: in a full pool, a piece made whole at the price of scattered free
    units would only scatter the next request.
    """
    layout = _Layout(pieces, parents)
    space = _FreeRuns(free, highest=max((int(piece.units.max()) for piece in pieces), default=0))
    moves = []
    for index in layout.ranked():
        units, end = pieces[index].units, layout.end_of_parent(index)
        saved = layout.runs_saved_by_leaving(index)
        most = saved - 1
        if scarce:
            most = min(saved, most - space.runs_added_by_release(units))
        if len(units) > budget or most < 0:
            continue
        found = space.take(len(units), behind=end, most_runs=most)
        if found is None:
            continue
        # What the piece leaves may have bordered on the very units that it has taken.
        added = space.runs_added_by_release(units) if scarce else 0
        if new_runs(Piece(units=found, after=end)) + added >= saved:
            space.release(found)
            continue
        layout.move(index, found)
        space.release(units)
        moves.append(Move(piece=index, destination=found))
        budget -= len(units)
    return moves


class _Layout:
    """Where the pieces lie while the plan grows."""

    def __init__(self, pieces: Sequence[Piece], parents: Sequence[int]) -> None:
        self._units = [piece.units for piece in pieces]
        self._parents = parents
        self._children: list[list[int]] = [[] for _ in pieces]
        for index, parent in enumerate(parents):
            if parent != NOTHING:
                self._children[parent].append(index)

    def ranked(self) -> list[int]:
        """Return the pieces that could save runs, most per unit first."""
        gains = [self.runs_saved_by_leaving(index) for index in range(len(self._units))]
        able = [index for index, gain in enumerate(gains) if gain > 0]
        return sorted(able, key=lambda index: (-gains[index] / len(self._units[index]), index))

    def end_of_parent(self, index: int) -> int:
        """Return the unit that piece ``index`` goes on from, or `NOTHING`."""
        parent = self._parents[index]
        return NOTHING if parent == NOTHING else int(self._units[parent][-1])

    def runs_saved_by_leaving(self, index: int) -> int:
        """Return the runs of the piece, less those that it would leave behind at its end."""
        units = self._units[index]
        runs = new_runs(Piece(units=units, after=self.end_of_parent(index)))
        following = int(units[-1]) + 1
        return runs - sum(int(self._units[c][0]) == following for c in self._children[index])

    def move(self, index: int, destination: Units) -> None:
        """Take note that the piece goes to ``destination``."""
        self._units[index] = destination


class _FreeRuns:
    """The free runs, to take from."""

    def __init__(self, free: Units, *, highest: int) -> None:
        starts, lengths = free[run_starts(free)], run_lengths(free)
        self._length = dict(zip(starts.tolist(), lengths.tolist(), strict=True))
        self._runs = sorted((length, start) for start, length in self._length.items())
        # What will be free after the plan; what it releases can only be written by the next one.
        self._free = np.zeros(max(highest, int(free.max(initial=0))) + 2, dtype=bool)
        self._free[free] = True

    def runs_added_by_release(self, units: Units) -> int:
        """Return how many free runs there are more once ``units``, a piece's, are free."""
        starts, lengths = units[run_starts(units)], run_lengths(units)
        before, behind = self._free[starts - 1], self._free[starts + lengths]
        return len(starts) - int(np.count_nonzero(before)) - int(np.count_nonzero(behind))

    def release(self, units: Units) -> None:
        """Take note that ``units`` will be free."""
        self._free[units] = True

    def take(self, size: int, *, behind: int, most_runs: int) -> Units | None:
        """Take ``size`` units in at most ``most_runs`` new runs, or None and take nothing."""
        if behind != NOTHING and self._length.get(behind + 1, 0) >= size:
            return self._cut((self._length[behind + 1], behind + 1), size)
        if most_runs < 1:
            return None
        best = bisect.bisect_left(self._runs, (size, 0))
        if best < len(self._runs):
            return self._cut(self._runs[best], size)
        if sum(length for length, _ in self._runs[-most_runs:]) < size:
            return None
        parts = []
        while size:
            run = self._runs[-1]
            parts.append(self._cut(run, min(size, run[0])))
            size -= len(parts[-1])
        return np.concatenate(parts)

    def _cut(self, run: tuple[int, int], size: int) -> Units:
        length, start = run
        del self._runs[bisect.bisect_left(self._runs, run)], self._length[start]
        if length > size:
            bisect.insort(self._runs, (length - size, start + size))
            self._length[start + size] = length - size
        self._free[start : start + size] = False
        return np.arange(start, start + size, dtype=np.int64)
