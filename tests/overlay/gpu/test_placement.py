"""Placement on the GPU: what the kernel takes is what the host takes, without a synchronisation."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from sglang_overlay.kvcache.free_map import FreeMap
from sglang_overlay.kvcache.free_runs import PIECE, Runs, longest_runs
from sglang_overlay.kvcache.placement import Demand, RowEnds, place
from sglang_overlay.kvcache.token_slots import Growth, token_slots

from tests.support.gpu import no_synchronisation

pytestmark = pytest.mark.gpu


def maps(chance: random.Random, units: int, share: float) -> tuple[FreeMap, FreeMap]:
    """Return the same map on the CPU and on the GPU, with runs of taken units in it."""
    generator = torch.Generator().manual_seed(chance.randrange(1 << 30))
    length = chance.choice([1, 7, 90, 3000])
    coarse = torch.rand(-(-units // length), generator=generator) < share
    taken = coarse.repeat_interleave(length)[:units].nonzero().flatten() + 1
    both = FreeMap(units, "cpu"), FreeMap(units, "cuda")
    for each in both:
        each.take(taken.to(each.flags.device))
    return both


def same_runs(units: int, taken: torch.Tensor) -> None:
    """Compare what both find in a map of which ``taken`` units are taken."""
    host, gpu = FreeMap(units, "cpu"), FreeMap(units, "cuda")
    host.take(taken)
    gpu.take(taken.cuda())
    longest_runs(gpu)
    torch.cuda.synchronize()
    with no_synchronisation():
        found = [longest_runs(gpu) for _ in range(3)]
    want = longest_runs(host)
    for runs in found:
        assert torch.equal(runs.starts.cpu(), want.starts)
        assert torch.equal(runs.lengths.cpu(), want.lengths)


@pytest.mark.parametrize("units", [1, 500, PIECE - 2, PIECE - 1, 70_000, 1_000_000, 4_000_000])
@pytest.mark.parametrize("spacing", [0, 1, 2, 3, 17, 64, 5000, 100_000])
def test_the_kernels_find_the_runs_that_the_host_finds(units: int, spacing: int) -> None:
    """All free, all taken, many of one length, few of many lengths."""
    units_of_map = torch.arange(1, units + 1)
    same_runs(units, units_of_map[spacing - 1 :: spacing] if spacing else units_of_map[:0])
    generator = torch.Generator().manual_seed(units + spacing)
    mixed = torch.rand(units, generator=generator) * max(spacing, 1) < 1
    same_runs(units, units_of_map[mixed])


def ends(chance: random.Random, free: FreeMap, requests: int) -> RowEnds:
    """Return last slots of ``requests``, taken ones, some twice, some none."""
    taken = (free.flags[1:-1] == 0).nonzero().flatten() + 1
    some = taken.tolist() or [-1]
    picked = [chance.choice(some) for _ in range(requests)]
    table = torch.full((requests, 3), -1, dtype=torch.int32)
    table[:, 1] = torch.tensor([chance.choice([end, end, picked[0], -1]) for end in picked])
    lengths = torch.full((requests,), 2, dtype=torch.int64)
    return RowEnds(table=table, rows=torch.arange(requests), lengths=lengths)


def on_gpu(found: RowEnds) -> RowEnds:
    return RowEnds(table=found.table.cuda(), rows=found.rows.cuda(), lengths=found.lengths.cuda())


@pytest.mark.parametrize("seed", range(40))
def test_the_kernel_takes_what_the_host_takes(seed: int) -> None:
    chance = random.Random(seed)
    units = chance.choice([500, 70_000, 1_000_000])
    host, gpu = maps(chance, units, share=chance.choice([0.3, 0.9, 0.99]))
    stale = chance.random() < 0.3
    runs, gpu_runs = longest_runs(host), longest_runs(gpu)
    assert torch.equal(runs.starts, gpu_runs.starts.cpu())
    assert torch.equal(runs.lengths, gpu_runs.lengths.cpu())
    if stale:
        runs = Runs(starts=runs.starts.roll(3), lengths=runs.lengths.roll(1))
        gpu_runs = Runs(starts=runs.starts.cuda(), lengths=runs.lengths.cuda())
    requests = chance.choice([1, 8, 33, 256, 1024])
    most = host.count // (2 * requests)
    counts = [chance.randint(0, min(most, chance.choice([2, 16, 5000]))) for _ in range(requests)]
    last = ends(chance, host, requests)
    torch.cuda.synchronize()
    moved, warmed = on_gpu(last), Demand(last=on_gpu(last), counts=[0] * requests)
    place(gpu.copy(), warmed, gpu_runs, headroom=64)
    with no_synchronisation():
        got = [place(gpu, Demand(last=moved, counts=counts), gpu_runs, headroom=64)]
        # What is given back is there for the next one, which goes on in the same runs.
        gpu.release(got[0][::3].contiguous())
        got.append(place(gpu, Demand(last=moved, counts=counts[::-1]), gpu_runs, headroom=64))
    want = [place(host, Demand(last=last, counts=counts), runs, headroom=64)]
    host.release(want[0][::3])
    want.append(place(host, Demand(last=last, counts=counts[::-1]), runs, headroom=64))
    assert all(torch.equal(mine.cpu(), theirs) for mine, theirs in zip(got, want, strict=True))
    assert torch.equal(gpu.flags.cpu(), host.flags)
    assert gpu.count == host.count
    assert torch.equal(gpu_runs.starts.cpu(), runs.starts)
    assert torch.equal(gpu_runs.lengths.cpu(), runs.lengths)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("requests", [1, 8, 300])
@pytest.mark.parametrize("most", [1, 16, 5000])
def test_tokens_get_the_slots_that_the_host_gives(
    dtype: torch.dtype, requests: int, most: int
) -> None:
    generator = torch.Generator().manual_seed(requests + most)
    before = torch.randint(0, 2000, (requests,), generator=generator).to(dtype)
    # Of one token each, SGLang does not say how many there were.
    grown = torch.randint(1, most + 1, (requests,), generator=generator).to(dtype)
    after, last = before + grown, torch.arange(requests, dtype=dtype) * 64 + (before - 1) % 64
    numbers: dict[str, Any] = {
        "before_on_host": before.numpy(),
        "after_on_host": after.numpy(),
        "total": int((after - before).sum()),
    }
    host = Growth(before=before, after=after, last=last, **numbers)
    gpu = Growth(
        before=None if most == 1 else before.cuda(), after=after.cuda(), last=last.cuda(), **numbers
    )
    pages = torch.randperm(sum(host.pages(64)), generator=generator) + 1
    pages_on_gpu = pages.cuda()
    token_slots(gpu, pages_on_gpu, 64)
    torch.cuda.synchronize()
    with no_synchronisation():
        got = token_slots(gpu, pages_on_gpu, 64)
    assert torch.equal(got.cpu(), token_slots(host, pages, 64))
