"""Where new tokens go, against a set of free units and by hand."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang_overlay.kvcache.placement import NOTHING, Demand, place


def chosen(
    free: list[int],
    last: list[int],
    counts: list[int],
    *,
    headroom: int = 4,
    prompt: bool = True,
) -> list[list[int]]:
    """Return the units of each request, after a look at what remains."""
    before = torch.tensor(free)
    demand = Demand(last=torch.tensor(last), counts=counts, prompt=prompt)
    units, rest = place(before, demand, headroom=headroom)
    assert before.tolist() == free, "the free list may be held elsewhere"
    assert rest.tolist() == sorted(set(free) - set(units.tolist()))
    assert len(set(units.tolist())) == sum(counts)
    return [part.tolist() for part in units.split(counts)]


def test_a_request_goes_on_where_it_ended() -> None:
    free = [3, 4, 10, 11, 12, 20, 21]
    assert chosen(free, [9, 19, 2], [2, 1, 2]) == [[10, 11], [20], [3, 4]]


def test_it_goes_on_as_far_as_that_is_free_and_the_rest_finds_a_home() -> None:
    free = [10, 11, *range(20, 40)]
    assert chosen(free, [9], [5], headroom=3) == [[10, 11, 23, 24, 25]]


def test_a_unit_further_on_is_not_taken_past_a_gap() -> None:
    # 12 is free too, but would leave a hole that nobody can go on into.
    assert chosen([10, 12, 30, 31, 32], [9], [3], headroom=0) == [[10, 30, 31]]


def test_of_two_that_end_at_the_same_unit_the_first_goes_on() -> None:
    free = [10, 11, 12, 13, *range(20, 30)]
    assert chosen(free, [9, 9], [2, 2], headroom=2) == [[10, 11], [22, 23]]


def test_new_requests_get_the_longest_runs_and_leave_headroom() -> None:
    free = [*range(1, 21), *range(30, 90), 95]
    first, second = chosen(free, [NOTHING, NOTHING], [10, 3], headroom=8)
    assert first == list(range(38, 48))
    assert second == [9, 10, 11]


def test_headroom_shrinks_before_a_request_is_broken() -> None:
    assert chosen(list(range(1, 11)), [NOTHING], [10], headroom=8) == [list(range(1, 11))]
    assert chosen(list(range(1, 11)), [NOTHING], [8], headroom=8) == [list(range(2, 10))]


def test_a_prompt_longer_than_any_run_takes_the_next_longest() -> None:
    free = [1, 3, *range(10, 14), *range(20, 26), 30]
    ((*units,),) = chosen(free, [NOTHING], [11], headroom=0)
    assert units == [*range(20, 26), *range(10, 14), 1]


def test_a_decode_step_without_a_run_takes_the_lowest() -> None:
    free = [1, 3, *range(10, 14), 30]
    ((*units,),) = chosen(free, [NOTHING], [6], headroom=0, prompt=False)
    assert units == [*range(10, 14), 1, 3]


def test_more_requests_than_free_runs_are_served() -> None:
    assert sorted(chosen([5, 7], [NOTHING] * 3, [1, 0, 1])) == [[], [5], [7]]


def test_nothing_is_asked_and_nothing_taken() -> None:
    assert chosen([5, 7], [4, NOTHING], [0, 0]) == [[], []]


def test_more_than_is_free_is_refused() -> None:
    demand = Demand(last=torch.tensor([NOTHING]), counts=[3], prompt=True)
    with pytest.raises(ValueError, match="got 3 units, needed at most the 2 free ones"):
        place(torch.tensor([1, 2]), demand, headroom=0)


@st.composite
def demands(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    free = sorted(draw(st.sets(st.integers(1, 60), min_size=1, max_size=50)))
    used = sorted({*range(62)} - set(free)) + [NOTHING]
    last = draw(st.lists(st.sampled_from(used), min_size=1, max_size=6))
    counts: list[int] = []
    for _ in last:
        counts.append(draw(st.integers(0, len(free) - sum(counts))))
    return free, last, counts


@settings(max_examples=300, deadline=None)
@given(demands(), st.integers(0, 12), st.booleans())
def test_whatever_is_asked_is_served_from_what_is_free(
    case: tuple[list[int], list[int], list[int]], headroom: int, prompt: bool
) -> None:
    free, last, counts = case
    given_units = chosen(free, last, counts, headroom=headroom, prompt=prompt)
    went_on: set[int] = set()
    for end, units in zip(last, given_units, strict=True):
        if units and end + 1 in free and end not in went_on | {NOTHING}:
            went_on.add(end)
            run = next(n for n in range(99) if end + 1 + n not in free)
            whole = min(run, len(units))
            assert units[:whole] == list(range(end + 1, end + 1 + whole))
    fresh = [units for end, units in zip(last, given_units, strict=True) if end == NOTHING]
    longest = max(b - a for a, b in pairwise(sorted({*range(63)} - set(free)))) - 1
    if len(last) == 1 and fresh and len(fresh[0]) <= longest:
        assert all(b == a + 1 for a, b in pairwise(fresh[0]))
