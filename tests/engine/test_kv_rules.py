"""Which level of KV slots a server has, what its allocator holds back, what its report says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.engine.launch import Launch
from tests.support.engine.scene import play

pytestmark = pytest.mark.engine

PLACED = (("SGLANG_OVERLAY_KV_SLOTS", "placement"),)


def starts(bed: Any) -> dict[str, str]:
    """Scene: what becomes of allocators at the start, by the level asked for and the default."""
    from types import SimpleNamespace

    import sglang.srt.mem_cache.allocator as allocators
    import torch
    from sglang_overlay import switches
    from sglang_overlay.kvcache import levels
    from sglang_overlay.srt import kv_allocators, kv_slots

    class SWATokenToKVPoolAllocator(allocators.TokenToKVPoolAllocator):  # type: ignore[misc]
        pass

    def outcome(cls: Any, *, asked: str, default: str, device: str, pdmux: bool = False) -> str:
        allocator = cls(64, dtype=torch.float32, device="cpu", kvcache=None, need_sort=False)
        allocator.device = device
        args = SimpleNamespace(
            enable_pdmux=pdmux,
            disable_overlap_schedule=True,
            pp_size=1,
            disaggregation_mode="null",
            enable_hierarchical_cache=False,
            enable_lmcache=False,
        )
        runner = SimpleNamespace(token_to_kv_pool_allocator=allocator, server_args=args)
        switches.ACTIVE = switches.Switches(kv_slots=asked)
        levels.DEFAULT = default
        try:
            kv_slots.start_placement(runner)
        except levels.ImpossibleLevelError as refusal:
            return f"refused: {refusal}"
        return type(runner.token_to_kv_pool_allocator).__name__

    plain, window = allocators.TokenToKVPoolAllocator, SWATokenToKVPoolAllocator
    # Tensors of this device have no contents, and need none here.
    gpu, cpu = "meta", "cpu"
    found = {
        "default off": outcome(plain, asked="", default="off", device=gpu),
        "default": outcome(plain, asked="", default="placement", device=gpu),
        "default on a CPU": outcome(plain, asked="", default="placement", device=cpu),
        "default, unknown": outcome(window, asked="", default="placement", device=gpu),
        "default, pdmux": outcome(plain, asked="", default="placement", pdmux=True, device=gpu),
        "asked": outcome(plain, asked="placement", default="off", device=gpu),
        "asked on a CPU": outcome(plain, asked="placement", default="off", device=cpu),
        "asked, unknown": outcome(window, asked="placement", default="off", device=gpu),
        "asked, pdmux": outcome(plain, asked="placement", default="off", pdmux=True, device=gpu),
    }
    # Of a compaction that nobody asked for, placement is left.
    levels.DEFAULT, switches.ACTIVE = "idle", switches.Switches()
    scheduler = bed.scheduler
    stock = scheduler.token_to_kv_pool_allocator
    scheduler.token_to_kv_pool_allocator = kv_allocators.placed(stock, patient=False)
    scheduler.token_to_kv_pool_allocator.device = "meta"
    scheduler.server_args.enable_lmcache = True
    kv_slots.start(scheduler)
    found["default idle, a holder"] = scheduler.overlay_kv_slots.level
    return found | {"its compactor": str(kv_slots.compactor_of(scheduler))}


def test_what_is_asked_for_is_had_or_refused_and_a_default_gives_way(overlay: Path) -> None:
    found = play(starts, Launch(tree=overlay, algorithm="")).result
    unknown, pdmux = found.pop("asked, unknown"), found.pop("asked, pdmux")
    assert found == {
        "default off": "TokenToKVPoolAllocator",
        "default": "PlacedTokenAllocator",
        "default on a CPU": "TokenToKVPoolAllocator",
        "default, unknown": "SWATokenToKVPoolAllocator",
        "default, pdmux": "TokenToKVPoolAllocator",
        "asked": "PlacedTokenAllocator",
        "asked on a CPU": "PlacedTokenAllocator",
        "default idle, a holder": "placement",
        "its compactor": "None",
    }
    assert unknown.startswith(
        "refused: SGLANG_OVERLAY_KV_SLOTS=placement cannot be had on this server: its allocator is "
        "a SWATokenToKVPoolAllocator"
    )
    assert pdmux.startswith(
        "refused: SGLANG_OVERLAY_KV_SLOTS=placement cannot be had on this server: --enable-pdmux"
    )


def held_back(bed: Any) -> dict[str, Any]:
    """Scene: when a slot that was released is given out again, on either page size."""
    import torch

    from tests.support.kv_bed import KvBed

    found: dict[str, Any] = {}
    for page in (1, 4):
        for patient in (False, True):
            mine = KvBed(page=page, slots=400, placed=True, patient=patient)
            allocator = mine.allocator
            assert mine.admit([1] * 38)
            assert mine.admit([2] * 38)
            slots = allocator.alloc(40)
            allocator.free(slots)
            steps = 0
            while not set((slots // page).tolist()) & set(allocator.free_pages.tolist()):
                # Allocations for newcomers, as a transfer's, say nothing of the forward.
                for _ in range(8):
                    assert allocator.alloc(page) is not None
                assert mine.decode([0] * 2)
                steps += 1
            listed = torch.cat((allocator.free_pages, allocator.release_pages))
            counted = allocator.available_size() - len(listed) * page
            name = f"{page}, {'patient' if patient else 'hasty'}"
            found[name] = {"steps": steps, "counted": counted}
            # All that is free can be had at once, in a window as well, and is had once.
            allocator.free(allocator.alloc(20))
            size, before = allocator.available_size(), allocator.free_pages.tolist()
            state = allocator.backup_state()
            assert allocator.alloc(page) is not None
            borrowed = allocator.alloc(size - page)
            found[name]["borrowed"] = len(set(borrowed.tolist())) - (size - page)
            allocator.restore_state(state)
            found[name]["back"] = allocator.available_size() - size
            found[name]["lost"] = len(set(before) - set(allocator.free_pages.tolist()))
            taken = allocator.alloc(size)
            found[name]["short"] = size - len(set(taken.tolist()))
            assert allocator.alloc(page) is None
            allocator.free(taken)
            allocator.clear()
            found[name]["cleared"] = allocator.available_size()
    return found


def test_a_released_slot_waits_for_the_forward_that_may_still_write_it(overlay: Path) -> None:
    found = play(held_back, Launch(tree=overlay, algorithm="")).result
    rest = {"counted": 0, "borrowed": 0, "back": 0, "lost": 0, "short": 0, "cleared": 400}
    # Hasty, it is free before the first step; patient, the third step after its release frees it.
    assert found == {
        f"{page}, {name}": {"steps": steps} | rest
        for page in (1, 4)
        for name, steps in (("hasty", 0), ("patient", 3))
    }


def windows(bed: Any) -> dict[str, Any]:
    """Scene: what windows take, one after another, and what is left for others."""
    import torch

    from tests.support.kv_bed import KvBed

    found: dict[str, Any] = {}
    for page in (1, 4):
        allocator = KvBed(page=page, slots=400, placed=True).allocator

        def window(*sizes: int, allocator: Any = allocator) -> list[list[int]]:
            state = allocator.backup_state()
            taken = [allocator.alloc(size) for size in sizes]
            left = allocator.available_size()
            allocator.restore_state(state)
            assert left == allocator.available_size() - sum(sizes)
            return [slots.tolist() for slots in taken]

        (first,) = window(40)
        kept = allocator.alloc(20)
        before = allocator.free_map.flags.clone()
        (second,), (third, others) = window(40), window(40, 80)
        assert torch.equal(allocator.free_map.flags, before)
        size = allocator.available_size()
        listed = torch.cat((allocator.free_pages, allocator.release_pages)).unique()
        (all_of_them,) = window(size)
        taken = allocator.alloc(size)
        found[str(page)] = {
            "distinct": len({*first}),
            "the same": second == third,
            "shared": len({*third} & {*others}) + len({*kept.tolist()} & {*third, *others}),
            "listed": len(listed) * page - size,
            "all in a window": len({*all_of_them}) - size,
            "all": len({*taken.tolist(), *kept.tolist()}),
        }
        allocator.free(taken)
        found[str(page)]["back"] = allocator.available_size() - size
    return found


def test_windows_share_their_slots_and_keep_none_from_others(overlay: Path) -> None:
    found = play(windows, Launch(tree=overlay, algorithm="")).result
    none = {"shared": 0, "listed": 0, "all in a window": 0, "back": 0}
    same = {"distinct": 40, "the same": True, "all": 400}
    assert found == {"1": none | same, "4": none | same}


def ahead(bed: Any) -> dict[str, Any]:
    """Scene: what a window has that knows whose step it is for, and who has it then."""
    from sglang_overlay.srt import kv_allocators, kv_slots

    from tests.support.kv_bed import KvBed

    mine = KvBed(page=1, slots=400, placed=True)
    assert mine.admit([1] * 30)
    assert mine.admit([2] * 30)
    batch, allocator = mine._batch(mine.running), mine.allocator
    batch.seq_lens = torch_of([len(mine.row(one)) for one in mine.running])
    batch.req_to_token_pool = mine.table
    placed: list[int] = []
    names: Any = kv_allocators
    stock = names.place

    def counting(*args: Any, **kwargs: Any) -> Any:
        placed.append(args[1].total)
        return stock(*args, **kwargs)

    def window(tokens: int = 8) -> list[int]:
        size = allocator.available_size()
        with kv_slots.growing(batch, 8):
            state = allocator.backup_state()
            taken = allocator.alloc(2 * tokens)
            assert allocator.available_size() == size - 2 * tokens
            allocator.restore_state(state)
        assert allocator.available_size() == size
        listed = [*allocator.free_pages.tolist(), *allocator.release_pages.tolist()]
        assert len({*listed}) == len(listed) == size
        return [int(slot) for slot in taken]

    def step(tokens: int = 8) -> list[int]:
        with kv_slots.growing(batch, tokens):
            return [int(slot) for slot in allocator.alloc(2 * tokens)]

    names.place = counting
    try:
        ends = [int(mine.row(one)[-1]) for one in mine.running]
        first = window()
        found: dict[str, Any] = {"behind": first == [end + n for end in ends for n in range(1, 9)]}
        found["again"] = window() == first
        found["the step's"] = step() == first
        found["placed"] = placed[:]
        allocator.free(torch_of(first))
        # If anything happened since, nobody can tell that it is the same step.
        kept = allocator.alloc(4)
        window()
        placed.clear()
        allocator.free(kept)
        allocator.free(torch_of(step()))
        found["not since"] = placed[:]
        # Nobody's and another's are theirs alone, and leave the step what it had.
        window()
        placed.clear()
        others = allocator.alloc(16).tolist()
        found["another's"] = sorted({*others} & {*window()})
        allocator.free(torch_of(others))
        window()
        found["longer"] = len({*step(9)})
        found["placed for others"] = placed[:]
        # What is released in a window was free when it closes, and is so once.
        state = allocator.backup_state()
        allocator.free(torch_of(step()))
        allocator.restore_state(state)
        size = allocator.available_size()
        listed = [*allocator.free_pages.tolist(), *allocator.release_pages.tolist()]
        found["released in a window"] = [len(listed) - size, len({*listed}) - size]
        # Behind another allocation of the same window nothing is taken for longer than that.
        state = allocator.backup_state()
        assert allocator.alloc(40) is not None
        step()
        allocator.restore_state(state)
        size = allocator.available_size()
        everything = allocator.alloc(size)
        found["all"] = len({*everything.tolist()}) - size
        allocator.clear()
        found["cleared"] = allocator.available_size()
    finally:
        names.place = stock
    return found


def ahead_on_pages(bed: Any) -> dict[str, Any]:
    """Scene: the same on pages of 4, and when a request has grown meanwhile."""
    from sglang_overlay.srt import kv_allocators, kv_slots

    from tests.support.kv_bed import KvBed

    mine = KvBed(page=4, slots=400, placed=True)
    assert mine.admit([1] * 30)
    assert mine.admit([2] * 31)
    batch, allocator = mine._batch(mine.running), mine.allocator
    lengths = torch_of([len(mine.row(one)) for one in mine.running])
    batch.seq_lens, batch.seq_lens_cpu = lengths, lengths.clone()
    calls: list[int] = []
    names: Any = kv_allocators
    stock = names.token_slots

    def counting(growth: Any, pages: Any, size: int) -> Any:
        calls.append(len(pages))
        return stock(growth, pages, size)

    def step(tokens: int = 8) -> list[int]:
        with kv_slots.growing(batch, 8):
            slots: Any = mine._extend(batch, tokens)
        return [int(slot) for slot in slots]

    def window(tokens: int = 8) -> list[int]:
        state = allocator.backup_state()
        taken = step(tokens)
        allocator.restore_state(state)
        return taken

    names.token_slots = counting
    try:
        ends = [int(mine.row(one)[-1]) for one in mine.running]
        first = window()
        found: dict[str, Any] = {
            "in their pages": [first[0] - ends[0], first[8] - ends[1]],
            "the step's": step() == first,
            "calls": calls[:],
        }
        new = {slot // 4 for slot in first} - {end // 4 for end in ends}
        allocator.free(torch_of([4 * page for page in new]))
        second = window()
        lengths += 1
        batch.seq_lens_cpu += 1
        calls.clear()
        third = step()
        found["grown"] = [third[0] != second[0], calls[:]]
        window(5)
        found["shorter"] = [len(step(5)), len(calls)]
    finally:
        names.token_slots = stock
    return found


def test_so_it_has_on_pages(overlay: Path) -> None:
    found = play(ahead_on_pages, Launch(tree=overlay, algorithm="")).result
    assert found == {
        "in their pages": [1, 1],
        "the step's": True,
        "calls": [4],
        "grown": [True, [4]],
        "shorter": [10, 3],
    }


def torch_of(numbers: list[int]) -> Any:
    """Return ``numbers`` as a tensor [n] int64."""
    import torch

    return torch.tensor(numbers)


def test_a_step_has_the_slots_that_its_window_had(overlay: Path) -> None:
    found = play(ahead, Launch(tree=overlay, algorithm="")).result
    assert found == {
        "behind": True,
        "again": True,
        "the step's": True,
        "placed": [16, 16],
        "not since": [16],
        "another's": [],
        "released in a window": [0, 0],
        "longer": 18,
        "placed for others": [16, 16, 16, 18],
        "all": 0,
        "cleared": 400,
    }


def reported(bed: Any) -> dict[str, Any]:
    """Scene: what a server tells at an idle moment, as server info and as metrics."""
    from types import SimpleNamespace

    from sglang_overlay.srt import server_info

    scheduler = bed.scheduler
    bed.step()
    bed.submit(list(range(40)), tokens=3)
    bed.run()
    bed.step()
    output = SimpleNamespace(internal_state={})
    server_info.add_to_internal_state(scheduler, output)
    report = scheduler.overlay_kv_slots
    (family,) = report._gauge.collect() if report._gauge is not None else [None]
    return {
        "cache": type(scheduler.tree_cache).__name__,
        "info": output.internal_state["overlay"]["kv_slots"],
        "gauges": sorted({each.labels["measure"] for each in family.samples}) if family else [],
        "failed": report._failed,
    }


@pytest.mark.parametrize("cached", [True, False])
def test_a_server_tells_of_its_slots_whatever_its_cache_is(overlay: Path, cached: bool) -> None:
    options = (("page_size", 1), ("enable_metrics", True), ("disable_radix_cache", not cached))
    launch = Launch(
        tree=overlay, attention="triton", algorithm="", options=options, variables=PLACED
    )
    result = play(reported, launch).result
    measures = ["free_tokens", "high_water", "largest_free_run"]
    if cached:
        measures = ["cached_aligned_share", "cached_tokens_per_run", *measures]
    assert result["cache"] == ("RadixCache" if cached else "ChunkCache")
    assert result["gauges"] == measures
    assert sorted(result["info"]) == sorted([*measures, "level"])
    assert not result["failed"]
    # The prompt and all but the last of its tokens are kept, or nothing is.
    assert result["info"]["free_tokens"] == 4096 - (42 if cached else 0)
