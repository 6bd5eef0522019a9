"""Moves against a copy aside: overlapping paths, far slots, gaps, canaries, refusals."""

from __future__ import annotations

import random

import pytest
import torch
from sglang_overlay.kvcache import mover
from sglang_overlay.kvcache.move_list import PATH_LIMIT
from sglang_overlay.kvcache.mover import Tiles, launch_disjoint, launch_overlapping, move_rows
from sglang_overlay.kvcache.rows import RowBuffers

Pairs = list[tuple[int, int]]  # target, source
SLOTS = 64


def pool(*widths: int, slots: int = SLOTS) -> list[torch.Tensor]:
    """Return one buffer per width in bytes, all bytes of all rows random."""
    generator = torch.Generator().manual_seed(len(widths))
    return [
        torch.randint(0, 256, (slots, width), dtype=torch.uint8, generator=generator)
        for width in widths
    ]


def moved(tensors: list[torch.Tensor], groups: list[Pairs]) -> list[torch.Tensor]:
    """Return what the buffers must hold: every row read before any is written."""
    after = [tensor.clone() for tensor in tensors]
    for old, new in zip(tensors, after, strict=True):
        for target, source in (pair for group in groups for pair in group):
            if target >= 0 and source >= 0:
                new[target] = old[source]
    return after


def lists(
    groups: list[Pairs], dtype: torch.dtype = torch.int64
) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(len(group) for group in groups)
    padded = [[*group, *[(-1, -1)] * (longest - len(group))] for group in groups]
    both = torch.tensor(padded, dtype=dtype)
    return both[:, :, 0].contiguous(), both[:, :, 1].contiguous()


def check(tensors: list[torch.Tensor], groups: list[Pairs], way: str) -> None:
    """Move by ``way`` and compare every byte, those of the rows around the moved included."""
    want = moved(tensors, groups)
    buffers = RowBuffers.of(tensors)
    targets, sources = lists(groups)
    if way == "torch":
        move_rows(buffers, targets, sources, overlap=True)
    elif way == "overlapping":
        launch_overlapping(buffers, targets, sources)
    else:
        launch_disjoint(buffers, targets, sources)
    for got, expected in zip(tensors, want, strict=True):
        assert torch.equal(got, expected)


def path_to_the_front(chance: random.Random, first: int, nodes: int, length: int) -> Pairs:
    """A path through a tree in slots ``first`` … moves to the front, as a commit does it."""
    path = [0, *sorted(chance.sample(range(1, nodes), length - 1))]
    return [(first + place, first + node) for place, node in enumerate(path)]


OVERLAPPING: dict[str, Pairs] = {
    "shift by one": [(slot, slot + 1) for slot in range(1, 20)],
    "shift back by one": [(slot + 1, slot) for slot in range(1, 20)],
    "cycle": [(3, 4), (4, 5), (5, 6), (6, 3)],
    "swap": [(3, 60), (60, 3)],
    "reversal": [(slot, 40 - slot) for slot in range(10, 31)],
    "one source, several targets": [(7, 5), (5, 9), (8, 5), (9, 7)],
    "some stay": [(1, 1), (2, 3), (3, 2), (4, 4)],
    "gaps": [(-1, 5), (5, 6), (6, -1), (-1, -1), (7, 5)],
    "one": [(1, 2)],
}


@pytest.mark.parametrize("way", ["torch", "overlapping"])
@pytest.mark.parametrize("name", OVERLAPPING)
def test_rows_that_overlap_are_all_read_first(name: str, way: str) -> None:
    check(pool(1152, 1152), [OVERLAPPING[name]], way)


@pytest.mark.parametrize("way", ["torch", "overlapping"])
@pytest.mark.parametrize("widths", [(1152,), (576, 576), (256, 256, 512, 128), (16,)])
def test_a_batch_of_paths_in_pools_of_every_kind(widths: tuple[int, ...], way: str) -> None:
    """MLA in bf16 and fp8, MHA with values of another width than keys, a row of one vector."""
    chance = random.Random(7)
    groups = [
        path_to_the_front(chance, 1 + 13 * at, 13, length)
        for at, length in enumerate((5, 1, 13, 8))
    ]
    check(pool(*widths), groups, way)


def test_a_whole_block_of_pairs_may_be_permuted_at_random() -> None:
    chance = random.Random(1)
    slots = list(range(PATH_LIMIT))
    shuffled = chance.sample(slots, len(slots))
    check(pool(32, slots=PATH_LIMIT), [list(zip(slots, shuffled, strict=True))], "overlapping")


def test_paths_longer_than_a_block_move_to_the_front() -> None:
    """What SGLang's flat lists look like: many requests' paths, one behind the other.

    A path of 40 lies across the border of two blocks, with targets behind it that are sources
    before it: the blocks' order shows.
    """
    chance = random.Random(2)
    flat = [pair for at in range(14) for pair in path_to_the_front(chance, 1 + 64 * at, 64, 40)]
    early = {source for _, source in flat[:PATH_LIMIT]}
    assert len(flat) > 2 * PATH_LIMIT
    assert early & {target for target, _ in flat[PATH_LIMIT:]}
    check(pool(48, slots=900), [flat], "overlapping")


@pytest.mark.parametrize(
    "tiles", [Tiles(rows=1, vectors=72, warps=4), Tiles(rows=32, vectors=5, warps=1)]
)
def test_tiles_that_divide_nothing(tiles: Tiles) -> None:
    tensors = pool(1152, 176)
    pairs = [(target, target + 32) for target in range(30)]
    want = moved(tensors, [pairs])
    targets, sources = lists([pairs])
    buffers = RowBuffers.of(tensors)
    launch_disjoint(
        buffers, targets, sources, Tiles(rows=tiles.rows, vectors=72, warps=tiles.warps)
    )
    assert all(torch.equal(a, b) for a, b in zip(tensors, want, strict=True))
    launch_overlapping(buffers, sources, targets, tiles)  # and back
    assert all(torch.equal(a, b) for a, b in zip(tensors, want, strict=True))


@pytest.mark.parametrize("way", ["torch", "overlapping", "disjoint"])
def test_scattered_rows_without_overlap(way: str) -> None:
    chance = random.Random(3)
    slots = chance.sample(range(SLOTS), 40)
    check(pool(1152, 1152, 1152), [list(zip(slots[:20], slots[20:], strict=True))], way)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("way", ["overlapping", "disjoint"])
def test_slots_whose_offsets_pass_int32_in_bytes_and_in_words(way: str, dtype: torch.dtype) -> None:
    """The last slots that int32 holds, in a pool that begins that far below eight real rows."""
    first, (rows,) = (1 << 31) - 9, pool(1152, slots=8)
    start = torch.tensor([rows.data_ptr() - first * 1152], dtype=torch.uint64)
    want = rows[[4, 1, 7, 3, 4, 5, 6, 7]]
    targets, sources = lists([[(first, first + 4), (first + 2, first + 7)]], dtype)
    launch = launch_overlapping if way == "overlapping" else launch_disjoint
    launch(RowBuffers.of([rows], start), targets, sources)
    assert torch.equal(rows, want)


def test_one_dimension_is_one_group_and_int32_slots_do() -> None:
    tensors = pool(32)
    want = moved(tensors, [OVERLAPPING["cycle"]])
    targets, sources = lists([OVERLAPPING["cycle"]], torch.int32)
    move_rows(RowBuffers.of(tensors), targets[0], sources[0], overlap=True)
    assert torch.equal(tensors[0], want[0])
    launch_overlapping(RowBuffers.of(tensors), targets[0], sources[0])
    assert torch.equal(tensors[0], moved(want, [OVERLAPPING["cycle"]])[0])


def test_an_empty_list_launches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mover, "_move_on_cpu", None)
    none = torch.empty(0, dtype=torch.int64)
    move_rows(RowBuffers.of(pool(16)), none, none)


def test_pointers_of_the_pool_are_used_as_they_are() -> None:
    tensors = pool(16, 16)
    addresses = torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.uint64)
    assert RowBuffers.of(tensors, addresses).pointers is addresses


@pytest.mark.parametrize(
    ("groups", "overlap", "message"),
    [
        ([[(1, 2), (1, 3)]], True, "got 1 twice, needed distinct"),
        ([[(1, 1), (1, 3)]], True, "got 1 twice"),
        (
            [[(1, 2), (2, 3)]],
            False,
            r"got 2 for target 1, which another pair writes; .*overlap=True",
        ),
        ([[(1, 2)], [(2, 3)]], True, "got 2 for target 1.*in the same group"),
        ([[(1, SLOTS)]], True, r"the pair 1, 64, needed slots below 64"),
        ([[(SLOTS, 1)]], False, "needed slots below 64"),
        (
            [[(0, 1), *[(-1, -1)] * (PATH_LIMIT - 1), (2, 0)]],
            True,
            "got 0 for target 2.*not in an earlier block",
        ),
    ],
)
def test_lists_that_a_cpu_refuses(groups: list[Pairs], overlap: bool, message: str) -> None:
    tensors = pool(16)
    before = tensors[0].clone()
    with pytest.raises(ValueError, match=message):
        move_rows(RowBuffers.of(tensors), *lists(groups), overlap=overlap)
    assert torch.equal(tensors[0], before)


def test_a_disjoint_list_may_name_a_row_that_stays() -> None:
    tensors = pool(16)
    want = moved(tensors, [[(5, 5), (6, 5)]])
    move_rows(RowBuffers.of(tensors), *lists([[(5, 5), (6, 5)]]))
    assert torch.equal(tensors[0], want[0])


def test_refusals_name_the_argument() -> None:
    buffers = RowBuffers.of(pool(16))
    slots = torch.zeros(4, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"targets: got torch.float32 on cpu"):
        move_rows(buffers, slots.float(), slots)
    with pytest.raises(ValueError, match=r"got \(4,\) and \(2,\), needed one shape"):
        move_rows(buffers, slots, slots[:2])
    with pytest.raises(ValueError, match=r"sources: got shape \(2,\) with strides \(2,\)"):
        move_rows(buffers, slots[:2], slots[::2])
    with pytest.raises(ValueError, match=r"got shape \(1, 2, 2\)"):
        move_rows(buffers, slots.view(1, 2, 2), slots.view(1, 2, 2))
    with pytest.raises(ValueError, match=r"tensors\[0\]: got strides \(2, 1\)"):
        RowBuffers.of([torch.zeros(4, 2)[:, :1]])
    with pytest.raises(ValueError, match="tensors: got none"):
        RowBuffers.of([])
