"""Where new tokens go, by the host and by the kernel, by hand and against a set of free units."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain, pairwise
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang_overlay.kvcache import free_runs, placement
from sglang_overlay.kvcache.free_map import FreeMap
from sglang_overlay.kvcache.free_runs import Runs, longest_runs
from sglang_overlay.kvcache.placement import (
    NOTHING,
    Demand,
    RowEnds,
    launch_place,
    place,
)

UNITS = 100
BY = pytest.mark.parametrize("by", ["host", "kernel"])


def free_map(free: list[int], units: int = UNITS) -> FreeMap:
    made = FreeMap(units, "cpu")
    made.take(torch.tensor(sorted({*range(1, units + 1)} - set(free)), dtype=torch.int64))
    return made


def chosen(
    free: list[int],
    last: list[int],
    counts: list[int],
    *,
    headroom: int = 4,
    by: str = "host",
    runs: Runs | None = None,
    page_size: int = 1,
    in_table: bool = False,
    back: Sequence[int] = (),
    left: list[Runs] | None = None,
) -> list[list[int]]:
    """Return the units of each request, after a look at what remains.

    Of the ``free`` units those that are ``back`` were given back last. ``left`` gets the runs.
    """
    before = free_map(free, max(UNITS, *free))
    before.take(torch.tensor(back, dtype=torch.int64))
    before.release(torch.tensor(back, dtype=torch.int64))
    slots = torch.tensor(
        [end if end == NOTHING else end * page_size + page_size // 2 for end in last]
    )
    demand = Demand(
        last=in_a_table(slots) if in_table else slots, counts=counts, page_size=page_size
    )
    # A copy: what is taken of them is cut off.
    if runs is None:
        runs = longest_runs(free_map(sorted({*free} - {*back}), max(UNITS, *free)))
    runs = runs.copy()
    if left is not None:
        left.append(runs)
    if by == "host":
        units = place(before, demand, runs, headroom=headroom)
    else:
        units = launch_place(before, demand, runs, headroom)
        before.count -= sum(counts)
    assert before.listed().tolist() == sorted(set(free) - set(units.tolist()))
    assert before.count == len(free) - sum(counts)
    assert len(set(units.tolist())) == sum(counts)
    return [part.tolist() for part in units.split(counts)]


def in_a_table(slots: torch.Tensor) -> RowEnds:
    """Let request i have i + 1 tokens in row 2 * i of a table that has other slots elsewhere."""
    requests = slots.shape[0]
    rows, lengths = 2 * torch.arange(requests), 1 + torch.arange(requests)
    table = torch.full((2 * requests, requests + 1), 4, dtype=torch.int32)
    table[rows, lengths - 1] = slots.int()
    return RowEnds(table=table, rows=rows, lengths=lengths)


@BY
def test_a_request_goes_on_where_it_ended(by: str) -> None:
    free = [3, 4, 10, 11, 12, 20, 21]
    assert chosen(free, [9, 19, 2], [2, 1, 2], by=by) == [[10, 11], [20], [3, 4]]


@BY
def test_it_goes_on_as_far_as_that_is_free_and_the_rest_finds_a_home(by: str) -> None:
    free = [10, 11, *range(20, 40)]
    assert chosen(free, [9], [5], headroom=3, by=by) == [[10, 11, 23, 24, 25]]


@BY
def test_a_unit_further_on_is_not_taken_past_a_gap(by: str) -> None:
    # 12 is free too, but would leave a hole that nobody can go on into.
    assert chosen([10, 12, 30, 31, 32], [9], [3], headroom=0, by=by) == [[10, 30, 31]]


@BY
def test_of_two_that_end_at_the_same_unit_the_first_goes_on(by: str) -> None:
    free = [10, 11, 12, 13, *range(20, 30)]
    assert chosen(free, [9, 9], [2, 2], headroom=2, by=by) == [[10, 11], [22, 23]]


@BY
def test_of_many_that_end_at_the_same_unit_the_first_goes_on(by: str) -> None:
    # More than the kernel looks at at once, and one in front that asks for nothing.
    free, last = [10, 11, 12, 13, *range(20, 99)], [9, NOTHING, *[9] * 70]
    parts = chosen(free, last, [0, 1, 2, *[1] * 69], headroom=0, by=by)
    assert (parts[1], parts[2]) == ([20], [10, 11])
    assert parts[3:] == [[unit] for unit in range(21, 90)]


@BY
def test_nobody_goes_on_behind_what_is_free(by: str) -> None:
    # The second would take what the first takes at the same time.
    free = [10, 11, 12, 13, 14, *range(30, 40)]
    assert chosen(free, [9, 11], [4, 2], headroom=2, by=by) == [[10, 11, 12, 13], [32, 33]]


@BY
def test_a_count_that_drifted_gives_the_padding_unit_and_nothing_else(by: str) -> None:
    free = free_map([20, 21, 22])
    free.count = 9
    demand = Demand(last=torch.tensor([NOTHING]), counts=[5])
    if by == "host":
        units = place(free, demand, longest_runs(free), headroom=0)
    else:
        # Memory that nobody has written would show as ones.
        with mock.patch.object(torch.Tensor, "new_empty", torch.Tensor.new_ones):
            units = launch_place(free, demand, longest_runs(free), 0)
    assert units.tolist() == [20, 21, 22, 0, 0]
    assert not free.flags.any()


@BY
def test_new_requests_get_the_longest_runs_and_leave_headroom(by: str) -> None:
    free = [*range(1, 21), *range(30, 90), 95]
    first, second = chosen(free, [NOTHING, NOTHING], [10, 3], headroom=8, by=by)
    assert first == list(range(38, 48))
    # What is left of the longest run, 48 to 89, is longer than the next one.
    assert second == [56, 57, 58]


@BY
def test_the_requests_of_a_batch_share_the_room_in_a_run(by: str) -> None:
    free = list(range(1, 1001))
    parts = chosen(free, [NOTHING] * 4, [10, 30, 10, 10], headroom=500, by=by)
    rooms = [b[0] - a[-1] - 1 for a, b in pairwise([[0], *parts, [1001]])]
    assert all(b == a + 1 for part in parts for a, b in pairwise(part))
    assert all(150 <= room <= 250 for room in rooms)
    # As many runs as requests: each has its own, and half of it is before it.
    free = [unit for unit in free if unit % 250]
    parts = chosen(free, [NOTHING] * 4, [20] * 4, headroom=500, by=by)
    assert sorted(part[0] % 250 for part in parts) == [115] * 4


@BY
def test_what_is_left_of_a_run_is_for_the_next_batch(by: str) -> None:
    free = free_map([*range(1, 300)], 300)
    runs, demand = longest_runs(free), Demand(last=torch.tensor([NOTHING] * 2), counts=[5, 5])
    how = partial(place, headroom=20) if by == "host" else partial(launch_place, headroom=20)
    found = [how(free, demand, runs).view(2, 5)[:, 0].tolist() for _ in range(2)]
    assert found == [[21, 46], [71, 96]]
    assert (int(runs.starts[0]), int(runs.lengths[0])) == (101, 199)


@BY
def test_half_of_a_run_in_which_somebody_sits_is_tried_again(by: str) -> None:
    runs = Runs(starts=torch.tensor([1]), lengths=torch.tensor([1000]))
    free = [unit for unit in range(1, 1001) if not 5 <= unit < 400]
    assert chosen(free, [NOTHING], [2], headroom=10, by=by, runs=runs) == [[511, 512]]


@BY
def test_what_was_given_back_can_be_taken(by: str) -> None:
    free = free_map([5])
    free.release(torch.tensor([7, 8]))
    free.release(torch.tensor([9], dtype=torch.int32))
    runs, last = Runs(starts=torch.tensor([0]), lengths=torch.tensor([0])), torch.tensor([6])
    how = partial(place, headroom=0) if by == "host" else partial(launch_place, headroom=0)
    assert how(free, Demand(last=last, counts=[3]), runs).tolist() == [7, 8, 9]
    free.release(torch.tensor([8, 7]))
    assert how(free, Demand(last=last, counts=[2]), runs).tolist() == [7, 8]
    free.release(torch.tensor([8, 7]))
    assert free.listed().tolist() == [5, 7, 8]


@BY
def test_headroom_shrinks_before_a_request_is_broken(by: str) -> None:
    free = list(range(1, 11))
    assert chosen(free, [NOTHING], [10], headroom=8, by=by) == [list(range(1, 11))]
    assert chosen(free, [NOTHING], [8], headroom=8, by=by) == [list(range(2, 10))]


@BY
def test_a_prompt_longer_than_any_run_takes_the_next_longest(by: str) -> None:
    free = [1, 3, *range(10, 14), *range(20, 26), 30]
    ((*units,),) = chosen(free, [NOTHING], [11], headroom=0, by=by)
    assert units == [*range(20, 26), *range(10, 14), 1]


@BY
def test_runs_that_are_out_of_date_are_passed_over(by: str) -> None:
    runs = longest_runs(free_map([*range(10, 20), *range(30, 36), 40, 41]))
    free = [3, 5, *range(16, 20), *range(30, 36)]
    found = chosen(free, [NOTHING] * 3, [2, 3, 4], headroom=0, by=by, runs=runs)
    assert found == [[16, 17], [30, 31, 32], [33, 34, 35, 18]]
    # What is in no run of the list is found all the same.
    assert chosen([3, 5, 7], [NOTHING], [3], by=by, runs=runs) == [[3, 5, 7]]


@BY
def test_those_without_a_home_take_the_lowest_units_in_their_order(by: str) -> None:
    # Two short homes for 40 requests, of which some ask for nothing.
    free = [*range(1, 90, 2), *range(100, 120), *range(130, 150), *range(160, 200, 3)]
    counts = [request % 7 % 3 for request in range(40)]
    runs = Runs(starts=torch.tensor([100, 130, 0]), lengths=torch.tensor([2, 3, 0]))
    parts = chosen(free, [9] * 40, counts, headroom=0, by=by, runs=runs)
    assert parts[:6] == [[], [130], [100, 101], [], [131], [132, 1]]
    rest = [unit for unit in free if unit not in {*chain(*parts[:6])}]
    assert [*chain(*parts[6:])] == rest[: sum(counts[6:])]


@BY
def test_more_requests_than_free_runs_are_served(by: str) -> None:
    assert sorted(chosen([5, 7], [NOTHING] * 3, [1, 0, 1], by=by)) == [[], [5], [7]]


def test_more_than_is_free_is_refused() -> None:
    free, demand = free_map([1, 2]), Demand(last=torch.tensor([NOTHING]), counts=[3])
    with pytest.raises(ValueError, match="got 3 units, needed at most the 2 free"):
        place(free, demand, longest_runs(free), headroom=0)


@BY
@pytest.mark.parametrize("page_size", [1, 64])
def test_where_requests_ended_is_read_from_their_rows(by: str, page_size: int) -> None:
    free, last, counts = [*range(10, 30), 41, 42, 50], [40, NOTHING, 9], [3, 2, 1]
    want = chosen(free, last, counts)
    assert (want[0][:2], want[2]) == ([41, 42], [10])
    assert want == chosen(free, last, counts, by=by, page_size=page_size, in_table=True)


def test_nothing_waits_for_the_device() -> None:
    # Tensors of this device have no contents: to ask for one is an error.
    free = FreeMap(1000, "meta")
    launched: list[str] = []

    def noting(name: str) -> Any:
        return {(1, 1): lambda *_, **__: launched.append(name)}

    ends = RowEnds(
        table=torch.empty(4, 8, dtype=torch.int32, device="meta"),
        rows=torch.empty(2, dtype=torch.int64, device="meta"),
        lengths=torch.empty(2, dtype=torch.int64, device="meta"),
    )
    with (
        mock.patch.object(free_runs, "list_runs_kernel", noting("list")),
        mock.patch.object(free_runs, "pick_runs_kernel", noting("pick")),
        mock.patch.object(placement, "place_units_kernel", noting("place")),
    ):
        runs = longest_runs(free)
        units = place(free, Demand(last=ends, counts=[3, 2]), runs, headroom=8)
        assert (len(units), free.count) == (5, 995)
        assert launched == ["list", "pick", "place"]
        free.release(units)
        free.take(units[:4])
        assert free.copy().count == 996
    with pytest.raises((NotImplementedError, RuntimeError)):
        free.listed()


@BY
def test_what_is_larger_than_a_tile_of_the_kernel(by: str) -> None:
    free = [*range(1, 200), *range(300, 2700), *range(3000, 3050)]
    last, counts = [NOTHING, 2999, 299, NOTHING, *[NOTHING] * 40], [90, 70, 130, 2300, *[1] * 40]
    parts = chosen(free, last, counts, headroom=8, by=by)
    assert parts[1][:50] == list(range(3000, 3050))
    assert parts[2] == list(range(300, 430))
    assert parts == chosen(free, last, counts, headroom=8)


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
@given(demands(), st.integers(0, 12))
def test_whatever_is_asked_is_served_from_what_is_free(
    case: tuple[list[int], list[int], list[int]], headroom: int
) -> None:
    free, last, counts = case
    given_units = chosen(free, last, counts, headroom=headroom)
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


@settings(max_examples=20, deadline=None)
@given(demands(), demands(), st.integers(0, 12))
def test_the_kernel_takes_what_the_host_takes(
    case: tuple[list[int], list[int], list[int]],
    earlier: tuple[list[int], list[int], list[int]],
    headroom: int,
) -> None:
    free, last, counts = case
    stale = longest_runs(free_map(earlier[0]))
    for runs in (None, stale):
        left: list[Runs] = []
        case_of = partial(chosen, free, last, counts, headroom=headroom, runs=runs)
        case_of = partial(case_of, back=free[::3], left=left)
        # Few at once, so that loops go round more than once.
        with mock.patch.multiple(placement, LANES=8, WIDE=16):
            assert case_of(by="kernel") == case_of()
        by_kernel, by_host = left
        assert torch.equal(by_kernel.starts, by_host.starts)
        assert torch.equal(by_kernel.lengths, by_host.lengths)
