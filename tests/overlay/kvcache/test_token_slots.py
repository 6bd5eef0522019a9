"""Slots of new tokens on pages, by the host and by the kernel, against SGLang's way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang_overlay.kvcache.token_slots import TOKENS, Growth, launch_token_slots, token_slots

Slots = Callable[[Growth, torch.Tensor, int], torch.Tensor]
WAYS = pytest.mark.parametrize("way", [token_slots, launch_token_slots], ids=["host", "kernel"])
NUMBERS = pytest.mark.parametrize("dtype", [torch.int32, torch.int64])


def growth(rows: list[tuple[int, int]], size: int, dtype: torch.dtype) -> Growth:
    """Return requests that grow from and to so many tokens; each ends in a page of its own."""
    before, after = (torch.tensor(each, dtype=dtype) for each in zip(*rows, strict=True))
    # From unit 1000 on, so that none of the new pages is among them; −1 for those without tokens.
    ends = torch.arange(len(rows)) * size + 1000 * size + (before - 1) % size
    last = torch.where(before > 0, ends, -1).to(dtype)
    numbers: dict[str, Any] = {
        "before_on_host": before.numpy(),
        "after_on_host": after.numpy(),
        "total": int((after - before).sum()),
    }
    return Growth(before=before, after=after, last=last, **numbers)


def walked(grown: Growth, pages: list[int], size: int) -> list[int]:
    """Give each token in its turn the next slot of its page, or the first one of a new page."""
    slots, left = [], list(pages)
    lasts = grown.last.tolist()
    for before, after, last in zip(grown.before_on_host, grown.after_on_host, lasts, strict=True):
        slot = last
        for token in range(before, after):
            slot = left.pop(0) * size if token % size == 0 else slot + 1
            slots.append(slot)
    assert not left, "more pages were asked for than are used"
    return slots


def check(way: Slots, rows: list[tuple[int, int]], size: int, dtype: torch.dtype) -> None:
    grown = growth(rows, size, dtype)
    needed = sum(grown.pages(size))
    pages = torch.randperm(needed, generator=torch.Generator().manual_seed(len(rows))) + 1
    found = way(grown, pages, size)
    assert found.dtype == torch.int64
    assert found.tolist() == walked(grown, pages.tolist(), size)


@WAYS
@NUMBERS
def test_pages_are_filled_then_taken_in_order(way: Slots, dtype: torch.dtype) -> None:
    check(way, [(5, 9), (0, 1), (4, 8), (7, 8), (8, 8), (3, 21), (0, 4), (63, 65)], 4, dtype)


@WAYS
def test_more_tokens_than_a_program_takes(way: Slots) -> None:
    check(way, [(1, 3), (0, TOKENS + 1), (70, 70 + TOKENS), (64, 2 * TOKENS)], 64, torch.int64)


@WAYS
def test_more_requests_than_are_looked_at_at_once(way: Slots) -> None:
    check(way, [(number % 7, number % 7 + number % 5) for number in range(300)], 4, torch.int64)


@WAYS
def test_one_token_each(way: Slots) -> None:
    grown = growth([(number, number + 1) for number in range(9)], 4, torch.int64)
    grown.before = None
    pages = torch.tensor([5, 7, 6])
    assert way(grown, pages, 4).tolist() == walked(grown, pages.tolist(), 4)


@WAYS
@pytest.mark.parametrize("rows", [[(3, 3), (8, 8)], []])
def test_no_tokens_need_no_slots(way: Slots, rows: list[tuple[int, int]]) -> None:
    none = torch.tensor([], dtype=torch.int64)
    grown = (
        growth(rows, 4, torch.int64)
        if rows
        else Growth(
            before=none,
            after=none,
            last=none,
            before_on_host=none.numpy(),
            after_on_host=none.numpy(),
            total=0,
        )
    )
    found = way(grown, none, 4)
    assert found.dtype == torch.int64
    assert found.shape == (0,)


ROWS = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 40)).map(lambda row: (row[0], sum(row))),
    min_size=1,
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(rows=ROWS, size=st.sampled_from([2, 4, 64]))
def test_the_host_does_what_sglang_does(rows: list[tuple[int, int]], size: int) -> None:
    check(token_slots, rows, size, torch.int64)


@settings(max_examples=20, deadline=None)
@given(rows=ROWS, size=st.sampled_from([2, 4, 64]))
def test_the_kernel_does_what_sglang_does(rows: list[tuple[int, int]], size: int) -> None:
    check(launch_token_slots, rows, size, torch.int64)
