"""What the planner moves, and that it is worth it."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang_overlay.kvcache.metrics import NOTHING, Piece, new_runs, run_starts
from sglang_overlay.kvcache.planner import plan


def piece(*units: int, after: int = -1) -> Piece:
    return Piece(units=np.array(units, dtype=np.int64), after=after)


def moved(
    pieces: list[Piece],
    free: list[int],
    budget: int = 1000,
    parents: list[int] | None = None,
    scarce: bool = False,
) -> dict[int, list[int]]:
    ancestry = parents or [NOTHING] * len(pieces)
    moves = plan(pieces, ancestry, np.array(free, dtype=np.int64), budget=budget, scarce=scarce)
    return {move.piece: move.destination.tolist() for move in moves}


def test_a_scattered_piece_goes_to_the_shortest_run_that_holds_it() -> None:
    free = [*range(20, 40), *range(50, 54), *range(60, 63)]
    assert moved([piece(1, 3, 5)], free) == {0: [60, 61, 62]}


def test_a_whole_piece_stays() -> None:
    assert moved([piece(1, 2, 3)], list(range(10, 20))) == {}


def test_a_piece_that_goes_on_from_its_parent_counts_as_whole() -> None:
    free = list(range(20, 29))
    parents = [NOTHING, 0]
    assert moved([piece(0), piece(1, 2)], free, parents=parents) == {}
    # Anywhere but behind its parent it would be a run of its own.
    assert moved([piece(0), piece(1, 2, 9)], free, parents=parents) == {}
    assert moved([piece(0), piece(1, 2, 9, 11)], free, parents=parents) == {1: [20, 21, 22, 23]}


def test_the_place_behind_the_parent_is_the_best() -> None:
    free = [*range(12, 15), *range(20, 30)]
    pieces = [piece(10, 11), piece(31, 33), piece(41, 43, 45)]
    # Both save as much per unit: the first of them is the first to choose.
    assert moved(pieces, free, parents=[NOTHING, 0, 0]) == {1: [12, 13], 2: [20, 21, 22]}


def test_a_parent_whose_child_goes_on_from_it_needs_to_save_more() -> None:
    free = list(range(20, 29))
    pieces = [piece(1, 3, 4), piece(5, 6)]
    assert moved(pieces, free, parents=[NOTHING, 0]) == {}
    assert moved(pieces, free) == {0: [20, 21, 22]}


def test_without_a_long_run_fewer_runs_are_better_than_many() -> None:
    free = [20, 21, 22, 30, 31, 40]
    assert moved([piece(1, 3, 5, 7, 9)], free) == {0: [20, 21, 22, 30, 31]}


def test_what_saves_nothing_is_not_moved() -> None:
    assert moved([piece(1, 2, 5, 6)], [20, 22, 24, 26]) == {}
    assert moved([piece(1, 2, 5, 6)], [20, 21, 30, 31]) == {}
    assert moved([piece(1, 3)], []) == {}


def test_in_a_full_pool_runs_are_not_bought_with_scattered_free_units() -> None:
    # Whole at 20, it would leave three free units alone where there was one run.
    assert moved([piece(1, 3, 5)], [20, 21, 22, 23], scarce=True) == {}
    assert moved([piece(1, 3, 5)], [2, 4, 20, 21, 22, 23], scarce=True) == {0: [20, 21, 22]}


def test_in_a_full_pool_a_piece_that_parts_free_units_moves_out_of_the_way() -> None:
    free = [2, 5, 20, 21]
    assert moved([piece(3, 4)], free, scarce=True) == {0: [20, 21]}
    assert moved([piece(3, 4)], free) == {}


def test_what_borders_on_the_room_that_is_taken_is_counted_as_left_alone() -> None:
    # 8 would join the free run behind it, but that is where the piece would go.
    assert moved([piece(8, 13)], [9, 10, 11], scarce=True) == {}
    assert moved([piece(8, 13)], [9, 10, 11]) == {0: [9, 10]}


def test_the_budget_goes_where_it_saves_most() -> None:
    long = piece(1, 2, 3, 4, 6, 7, 8, 9)
    short = piece(11, 13, 15)
    free = list(range(40, 80))
    assert moved([long, short], free, budget=8) == {1: [40, 41, 42]}
    assert moved([long, short], free, budget=11) == {1: [40, 41, 42], 0: list(range(43, 51))}
    assert moved([long, short], free, budget=2) == {}


@st.composite
def pools(draw: st.DrawFn) -> tuple[list[Piece], list[int], list[int], int]:
    order = draw(st.permutations(range(1, 40)) | st.just(list(range(1, 40))))
    cuts = sorted(draw(st.lists(st.integers(0, 39), min_size=1, max_size=6)))
    parts = [order[a:b] for a, b in zip([0, *cuts], [*cuts, 39], strict=True)]
    free = sorted(parts.pop(draw(st.integers(0, len(parts) - 1))))
    pieces = [piece(*part) for part in parts if part]
    parents = [draw(st.integers(NOTHING, index - 1)) for index in range(len(pieces))]
    return pieces, parents, free, draw(st.integers(0, 50))


def runs(pieces: list[Piece], parents: list[int]) -> int:
    return sum(
        new_runs(Piece(units=one.units, after=int(pieces[p].units[-1]) if p != NOTHING else p))
        for one, p in zip(pieces, parents, strict=True)
    )


def free_runs(free: Iterable[int]) -> int:
    return len(run_starts(np.array(sorted(free), dtype=np.int64)))


@settings(max_examples=200, deadline=None)
@given(pools(), st.booleans())
def test_a_plan_saves_runs_uses_free_units_once_and_keeps_the_budget(
    case: tuple[list[Piece], list[int], list[int], int], scarce: bool
) -> None:
    pieces, parents, free, budget = case
    moves = plan(pieces, parents, np.array(free, dtype=np.int64), budget=budget, scarce=scarce)
    written = [unit for move in moves for unit in move.destination.tolist()]
    assert len(set(written)) == len(written) <= budget
    assert set(written) <= set(free)
    after, left = list(pieces), set(free) - set(written)
    for move in moves:
        assert len(move.destination) == len(pieces[move.piece].units)
        after[move.piece] = Piece(units=move.destination)
        left |= set(pieces[move.piece].units.tolist())
    assert runs(after, parents) <= runs(pieces, parents)
    saved = runs(pieces, parents) - runs(after, parents)
    if scarce:
        saved += free_runs(free) - free_runs(left)
    assert saved >= len(moves)
    assert {move.piece: move.destination.tolist() for move in moves} == moved(
        pieces, free, budget, parents, scarce
    )
