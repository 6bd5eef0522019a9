"""Layouts small enough to count by hand."""

from __future__ import annotations

import numpy as np
import pytest
from sglang_overlay.kvcache.metrics import (
    FreeSpace,
    Layout,
    Piece,
    free_space,
    layout,
    new_runs,
    run_lengths,
    run_starts,
)


def piece(*units: int, after: int = -1) -> Piece:
    return Piece(units=np.array(units, dtype=np.int64), after=after)


@pytest.mark.parametrize(
    ("given", "runs"),
    [
        (piece(), 0),
        (piece(5), 1),
        (piece(5, 6, 7), 1),
        (piece(5, 7, 6), 3),
        (piece(5, 6, after=4), 0),
        (piece(5, 6, 9, after=4), 1),
        (piece(5, 6, after=3), 1),
    ],
)
def test_runs_are_counted_across_the_border_of_pieces(given: Piece, runs: int) -> None:
    assert new_runs(given) == runs


def test_a_layout_adds_its_pieces_up() -> None:
    found = layout([piece(8, 9, 10, 11, 13), piece(14, 15, after=13), piece(2, 3)], block=4)
    assert found == Layout(units=9, runs=3, aligned=4)
    assert found.units_per_run == 3
    assert found.aligned_share == 4 / 9


@pytest.mark.parametrize(
    "units", [(9, 10, 11, 12), (8, 9, 10), (8, 9, 11, 10), (8, 9, 10, 12)], ids=str
)
def test_a_block_that_is_shifted_short_or_broken_is_not_aligned(units: tuple[int, ...]) -> None:
    assert layout([piece(*units)], block=4).aligned == 0


def test_only_blocks_from_the_start_of_a_piece_can_be_read_as_pages() -> None:
    assert layout([piece(7, 8, 9, 10, 11)], block=4).aligned == 0


def test_nothing_has_neither_runs_nor_shares() -> None:
    empty = layout([], block=64)
    assert (empty.units_per_run, empty.aligned_share) == (0, 0)


def test_a_block_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="block: got 0, needed at least 1 unit"):
        layout([], block=0)


@pytest.mark.parametrize(
    ("free", "expected"),
    [
        ((), FreeSpace(units=0, largest_run=0, high_water=9)),
        ((1, 2, 3, 7, 8), FreeSpace(units=5, largest_run=3, high_water=9)),
        ((6, 7, 8, 9), FreeSpace(units=4, largest_run=4, high_water=5)),
        (tuple(range(1, 10)), FreeSpace(units=9, largest_run=9, high_water=0)),
    ],
)
def test_free_space(free: tuple[int, ...], expected: FreeSpace) -> None:
    assert free_space(np.array(free, dtype=np.int64), units=9) == expected
    assert set(expected.as_dict()) == {"units", "largest_run", "high_water"}


def test_runs_of_an_ascending_list() -> None:
    units = np.array([2, 3, 4, 9, 11, 12])
    assert run_starts(units).tolist() == [0, 3, 4]
    assert run_lengths(units).tolist() == [3, 1, 2]
