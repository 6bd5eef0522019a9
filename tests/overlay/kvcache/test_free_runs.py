"""The longest free runs, by the host and by the kernels, against a plain walk over the map."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import groupby
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang_overlay.kvcache import free_runs
from sglang_overlay.kvcache.free_map import FreeMap
from sglang_overlay.kvcache.free_runs import KEPT, LONGEST, PIECE, launch_look, longest_runs

LOOKS = pytest.mark.parametrize("look", [longest_runs, launch_look], ids=["host", "kernel"])
Run = tuple[int, int]
Look = Callable[[FreeMap], free_runs.Runs]


def free_map(flags: list[int]) -> FreeMap:
    made = FreeMap(len(flags), "cpu")
    made.flags[1:-1] = torch.tensor(flags, dtype=torch.uint8)
    return made


def walked(flags: list[int]) -> list[Run]:
    """Return (start, length) of every free run, longest first, the lowest of equal ones first."""
    found, at = [], 1
    for is_free, group in groupby(flags):
        length = len([*group])
        if is_free:
            found.append((at, length))
        at += length
    return sorted(found, key=lambda run: (-run[1], run[0]))


def listed(runs: free_runs.Runs) -> list[Run]:
    return [*zip(runs.starts.tolist(), runs.lengths.tolist(), strict=True)]


def padded(runs: list[Run], most: int = LONGEST) -> list[Run]:
    return (runs + [(0, 0)] * most)[:most]


@LOOKS
def test_the_longest_come_first_and_the_lowest_of_equal_ones(look: Look) -> None:
    flags = [1, 1, 0, 1, 0, 1, 1, 1, 0, 0, 1, 1, 0, 1]
    assert listed(look(free_map(flags))) == padded([(6, 3), (1, 2), (11, 2), (4, 1), (14, 1)])
    assert listed(look(free_map([0] * 9))) == padded([])
    assert listed(look(free_map([1] * 9))) == padded([(1, 9)])


@LOOKS
def test_of_more_than_are_listed_the_lowest_of_the_shortest_ones_are(look: Look) -> None:
    # Two of three units in the first half, of four in the second: those are longer.
    flags = [0, 1, 1] * 200 + [0, 1, 1, 1] * 200
    assert listed(look(free_map(flags))) == padded(walked(flags))


@LOOKS
@pytest.mark.parametrize("ends", [1, PIECE - 3, PIECE - 2, PIECE - 1, PIECE, 2 * PIECE + 5])
def test_a_run_is_whole_wherever_a_piece_ends(look: Look, ends: int) -> None:
    flags = [1] * ends + [0] + [1] * (PIECE + 20) + [0, 0, 1, 1]
    assert listed(look(free_map(flags))) == padded(walked(flags))


@LOOKS
def test_lengths_of_two_and_three_digits_are_told_apart(look: Look) -> None:
    flags = []
    for length in (257, 512, 65_536, 256, 255, 65_537, 511, 300, 300):
        flags += [1] * length + [0]
    for kept in (2, 8):
        # The shortest that is listed has three digits, or two.
        with mock.patch.multiple(free_runs, LONGEST=kept - 1, KEPT=kept, PIECE=1 << 16):
            assert listed(look(free_map(flags))) == padded(walked(flags), kept - 1)


@LOOKS
@pytest.mark.parametrize("free_share", [0.02, 0.5, 0.98])
def test_a_map_of_many_pieces(look: Look, free_share: float) -> None:
    chance = random.Random(3)
    flags = [int(chance.random() < free_share) for _ in range(5 * PIECE + 77)]
    assert listed(look(free_map(flags))) == padded(walked(flags))


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 1), st.integers(1, 40)), min_size=1, max_size=30),
    st.sampled_from([(16, 8, 16), (64, 4, 8), (32, 16, 64)]),
)
def test_whatever_the_map_both_find_the_same(
    stretches: list[tuple[int, int]], tiles: tuple[int, int, int]
) -> None:
    flags = [is_free for is_free, length in stretches for _ in range(length)]
    piece, kept, block = tiles
    with mock.patch.multiple(free_runs, PIECE=piece, KEPT=kept, LONGEST=kept - 1, BLOCK=block):
        for look in (longest_runs, launch_look):
            assert listed(look(free_map(flags))) == padded(walked(flags), kept - 1)


def test_a_piece_can_list_all_that_are_listed_in_the_end() -> None:
    assert KEPT == LONGEST + 1
