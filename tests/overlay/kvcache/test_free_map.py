"""Which units are free: taken, given back, listed, copied."""

from __future__ import annotations

import torch
from sglang_overlay.kvcache.free_map import FreeMap


def test_what_is_taken_is_not_listed_and_not_counted() -> None:
    free = FreeMap(5, "cpu")
    assert (free.units, free.count, free.listed().tolist()) == (5, 5, [1, 2, 3, 4, 5])
    free.take(torch.tensor([2, 5]))
    assert (free.units, free.count, free.listed().tolist()) == (5, 3, [1, 3, 4])
    free.release(torch.tensor([5], dtype=torch.int32))
    assert (free.count, free.listed().tolist()) == (4, [1, 3, 4, 5])


def test_padding_and_the_end_are_never_free() -> None:
    flags = FreeMap(3, "cpu").flags
    assert flags.tolist() == [0, 1, 1, 1, 0]


def test_a_copy_goes_its_own_way() -> None:
    free = FreeMap(4, "cpu")
    other = free.copy()
    other.take(torch.tensor([1, 2]))
    assert (free.count, free.listed().tolist()) == (4, [1, 2, 3, 4])
    assert (other.count, other.listed().tolist()) == (2, [3, 4])
