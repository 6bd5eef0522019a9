"""The mover on the GPU: threads of a program really run at once there, and graphs replay it."""

from __future__ import annotations

import random

import pytest
import torch
from sglang_overlay.kvcache.move_list import PATH_LIMIT
from sglang_overlay.kvcache.mover import Tiles, move_rows
from sglang_overlay.kvcache.rows import RowBuffers

from tests.support.gpu import no_synchronisation

pytestmark = pytest.mark.gpu
SLOTS, LAYERS = 4096, 5


def pool(*widths: int, slots: int = SLOTS) -> list[torch.Tensor]:
    return [
        torch.randint(0, 256, (slots, width), dtype=torch.uint8, device="cuda") for width in widths
    ]


def moved(
    tensors: list[torch.Tensor], targets: torch.Tensor, sources: torch.Tensor
) -> list[torch.Tensor]:
    """Return the buffers after a copy aside."""
    kept = (targets >= 0) & (sources >= 0)
    after = [tensor.clone() for tensor in tensors]
    for old, new in zip(tensors, after, strict=True):
        new[targets[kept].long()] = old[sources[kept].long()]
    return after


def assert_same(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other)


def paths(chance: random.Random, groups: int, nodes: int, length: int) -> tuple[torch.Tensor, ...]:
    """Return padded targets and sources of paths that move to the front of scattered slots."""
    slots = chance.sample(range(1, SLOTS), groups * nodes)
    targets = torch.full((groups, length), -1)
    sources = torch.full((groups, length), -1)
    for group in range(groups):
        own = slots[group * nodes : (group + 1) * nodes]
        count = chance.randint(1, length)
        path = [0, *sorted(chance.sample(range(1, nodes), count - 1))]
        targets[group, :count] = torch.tensor(own[:count])
        sources[group, :count] = torch.tensor([own[node] for node in path])
    return targets.cuda(), sources.cuda()


@pytest.mark.parametrize(
    "widths", [(1152,) * LAYERS, (576,) * LAYERS, (2048, 2048, 1024, 1024), (16,)]
)
def test_batches_of_paths_in_pools_of_every_kind(widths: tuple[int, ...]) -> None:
    chance = random.Random(0)
    tensors = pool(*widths)
    buffers = RowBuffers.of(tensors)
    for groups, nodes, length in ((1, 16, 16), (64, 16, 8), (8, 256, 32), (3, 256, 200)):
        targets, sources = paths(chance, groups, nodes, length)
        want = moved(tensors, targets, sources)
        move_rows(buffers, targets, sources, overlap=True)
        assert_same(tensors, want)


def test_permutations_of_a_whole_block() -> None:
    """Every row is read by one thread and written by another: a race would show in some round."""
    tensors = pool(*(1152,) * 61, slots=PATH_LIMIT)
    buffers = RowBuffers.of(tensors)
    for _ in range(30):
        targets = torch.randperm(PATH_LIMIT, device="cuda")
        sources = torch.randperm(PATH_LIMIT, device="cuda")
        want = moved(tensors, targets, sources)
        move_rows(buffers, targets, sources, overlap=True)
        assert_same(tensors, want)


def test_flat_lists_longer_than_a_block() -> None:
    chance = random.Random(4)
    tensors = pool(*(1152,) * 61)
    buffers = RowBuffers.of(tensors)
    for _ in range(5):
        targets, sources = paths(chance, 150, 16, 16)
        kept = targets >= 0
        targets, sources = targets[kept], sources[kept]
        assert targets.numel() > 2 * PATH_LIMIT
        want = moved(tensors, targets, sources)
        move_rows(buffers, targets, sources, overlap=True)
        assert_same(tensors, want)


@pytest.mark.parametrize("tiles", [None, Tiles(rows=7, vectors=72, warps=2)])
def test_disjoint_lists(tiles: Tiles | None) -> None:
    tensors = pool(*(1152,) * LAYERS)
    slots = torch.randperm(SLOTS, device="cuda")
    for pairs in (1, 13, 320, 2048):
        targets, sources = slots[:pairs].int(), slots[SLOTS - pairs :].int()
        want = moved(tensors, targets, sources)
        move_rows(RowBuffers.of(tensors), targets, sources, tiles=tiles)
        assert_same(tensors, want)


@pytest.mark.parametrize("overlap", [False, True])
def test_slots_whose_byte_offsets_pass_int32(overlap: bool) -> None:
    first = (1 << 31) // 576 + 100
    buffer = torch.empty(first + 8, 1, 576, dtype=torch.bfloat16, device="cuda")
    buffer[first:].normal_()
    rows = buffer[first:].clone()
    targets = torch.tensor([first, first + 2], dtype=torch.int32, device="cuda")
    sources = torch.tensor([first + 4, first + 7], dtype=torch.int32, device="cuda")
    move_rows(RowBuffers.of([buffer]), targets, sources, overlap=overlap)
    assert torch.equal(buffer[first:], rows[[4, 1, 7, 3, 4, 5, 6, 7]])


def test_one_capture_serves_changing_lists_without_waiting() -> None:
    chance = random.Random(5)
    tensors = pool(*(1152,) * LAYERS)
    buffers = RowBuffers.of(tensors)
    targets, sources = paths(chance, 32, 16, 8)
    move_rows(buffers, targets, sources, overlap=True)
    torch.cuda.synchronize()
    with no_synchronisation():
        move_rows(buffers, targets, sources, overlap=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        move_rows(buffers, targets, sources, overlap=True)
    for _ in range(20):
        fresh = paths(chance, 32, 16, 8)
        targets.copy_(fresh[0])
        sources.copy_(fresh[1])
        want = moved(tensors, targets, sources)
        graph.replay()
        assert_same(tensors, want)


def test_rows_that_are_no_vectors_are_refused() -> None:
    with pytest.raises(ValueError, match="got rows of 24 bytes"):
        RowBuffers.of(pool(24))
    with pytest.raises(ValueError, match="cannot be moved by the kernel"):
        RowBuffers.of([pool(16)[0].view(-1)[8:-8].view(-1, 16)])
