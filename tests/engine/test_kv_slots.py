"""KV slots on the real engine: with slots placed and moved, every token stays what it was."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.engine.faults import PASSES
from tests.support.engine.launch import Launch
from tests.support.engine.models import BLOCK, TARGET_LAYERS
from tests.support.engine.processes import EngineFailure
from tests.support.engine.quick import quicken
from tests.support.engine.scene import Report, play
from tests.support.engine.server import Server, serving
from tests.support.engine.workload import (
    Workload,
    generate,
    generate_by_engine,
    generate_by_steps,
)

pytestmark = pytest.mark.engine

TOKENS = Random(3).choices(range(256), k=300)
HEAD = tuple(TOKENS[:130])
# Elements of a token in one layer of the bed's target: latent and rotary part.
LATENT_ROW = 576
# Rounds that find the head of the first in the cache: what a wrong move would have changed.
ROUNDS = Workload(
    rounds=(
        (HEAD + tuple(TOKENS[130:150]),),
        (HEAD + tuple(TOKENS[150:190]), tuple(TOKENS[190:215])),
        (HEAD + tuple(TOKENS[130:150]) + tuple(TOKENS[215:230]),),
    ),
    tokens=14,
)
PAGES: dict[int, dict[str, Any]] = {
    1: {"attention": "triton", "options": (("page_size", 1),)},
    64: {"attention": "flashmla"},
}


def settings(page: int, level: str) -> dict[str, Any]:
    return {**PAGES[page], "variables": (("SGLANG_OVERLAY_KV_SLOTS", level),)}


def moving_everything(
    bed: Any, rounds: list[list[list[int]]], tokens: int, forgets: str = ""
) -> dict[str, Any]:
    """Scene: the workload, with every cached node moved at every safe point, to scattered units.

    After each pass every node's rows, in both pools, must be the ones it had before.
    ``forgets`` plants a fault: the pool that is not moved.
    """
    import numpy as np
    import torch
    from sglang_overlay import upstream
    from sglang_overlay.kvcache import planner
    from sglang_overlay.kvcache.planner import Move
    from sglang_overlay.srt import kv_compaction, kv_layout, kv_movers
    from sglang_overlay.srt.ddtree.rows import row_buffers

    def scatter(pieces: Any, parents: Any, free: Any, **_: Any) -> list[Move]:
        spread, moves = free[::-1], []
        for index, piece in enumerate(pieces):
            size = len(piece.units)
            if size <= len(spread):
                moves.append(Move(piece=index, destination=spread[:size].astype(np.int64)))
                spread = spread[size:]
        return moves

    scheduler = bed.scheduler
    compactor = scheduler.overlay_compactor
    pools = dict(zip(("target", "drafter"), upstream.slot_pools(scheduler), strict=True))
    stock_pass = compactor._pass

    def rows() -> list[Any]:
        nodes = kv_layout.cached(scheduler.tree_cache).nodes
        buffers = [buffer for pool in pools.values() for buffer in row_buffers(pool).tensors]
        return [buffer[node.value].clone() for node in nodes for buffer in buffers]

    def checked_pass() -> int:
        before, free = rows(), bed.free_slots()
        moved: int = stock_pass()
        if bed.free_slots() != free:
            raise RuntimeError("a pass changed the number of free slots")
        if not all(map(torch.equal, before, rows())):
            raise RuntimeError("a pass changed what a cached token's slots hold")
        return moved

    kv_compaction.IDLE_PAUSE = kv_compaction.LIVE_PAUSE = 0
    planner.plan = scatter
    compactor._pass = checked_pass
    if scheduler.server_args.speculative_algorithm == "DDTREE":
        # A tree's step in Triton's interpreter takes seconds.
        quicken(bed)
    compactor._movers = [
        kv_movers.mover(row_buffers(pool)) for name, pool in pools.items() if name != forgets
    ]
    result = generate_by_steps(bed, rounds, tokens)
    return result | {"moved": compactor.tally.moved_tokens, "passes": compactor.tally.passes}


def moved(overlay: Path, stock: Path, page: int, algorithm: str = "DFLASH", **more: Any) -> Report:
    plain = generate(Launch(tree=stock).plain(), ROUNDS)
    return play(
        moving_everything,
        Launch(tree=overlay, algorithm=algorithm, **settings(page, "live")),
        known=plain.known(),
        rounds=ROUNDS.rounds,
        tokens=ROUNDS.tokens,
        **more,
    )


@pytest.mark.parametrize("page", [1, 64])
def test_tokens_are_stocks_when_everything_is_moved_all_the_time(
    overlay: Path, stock: Path, page: int
) -> None:
    plain = generate(Launch(tree=stock).plain(), ROUNDS)
    report = moved(overlay, stock, page)
    assert tuple(map(tuple, report.result["tokens"])) == plain.tokens
    committed = {count for step in report.steps[0] for count in step.committed}
    assert max(committed) == BLOCK
    assert report.result["passes"] >= 4
    assert report.result["moved"] > 500
    assert max(report.result["cached"]) >= 128


@pytest.mark.parametrize("page", [pytest.param(1, marks=pytest.mark.full), 64])
def test_tokens_of_draft_trees_are_stocks_too(overlay: Path, stock: Path, page: int) -> None:
    plain = generate(Launch(tree=stock).plain(), ROUNDS)
    report = moved(overlay, stock, page, algorithm="DDTREE")
    assert tuple(map(tuple, report.result["tokens"])) == plain.tokens
    assert report.result["passes"] >= 2


@pytest.mark.parametrize("forgets", ["target", "drafter"])
def test_a_pool_that_is_forgotten_is_noticed(overlay: Path, stock: Path, forgets: str) -> None:
    with pytest.raises(EngineFailure, match="changed what a cached token's slots hold"):
        moved(overlay, stock, 64, forgets=forgets)


def placed_runs(bed: Any, rounds: list[list[list[int]]], tokens: int) -> dict[str, Any]:
    """Scene: the workload; what the layout is like in its middle and at its end."""
    from sglang_overlay.srt import kv_layout, server_info

    allocator = bed.scheduler.token_to_kv_pool_allocator
    stock_step, seen = bed.step, []

    def step() -> str:
        mode: str = stock_step()
        seen.append(kv_layout.describe(bed.scheduler)["running_tokens_per_run"])
        return mode

    bed.step = step
    result = generate_by_steps(bed, rounds, tokens)
    output = SimpleNamespace(internal_state={})
    server_info.add_to_internal_state(bed.scheduler, output)
    return result | {
        "allocator": type(allocator).__name__,
        "running": max(seen),
        "info": output.internal_state["overlay"].get("kv_slots"),
    }


@pytest.mark.parametrize("page", [pytest.param(1, marks=pytest.mark.full), 64])
def test_placement_keeps_the_tokens_of_a_request_in_one_run(
    overlay: Path, stock: Path, page: int
) -> None:
    plain = generate(Launch(tree=stock).plain(), ROUNDS)
    reports = {
        level: play(
            placed_runs,
            Launch(tree=overlay, **settings(page, level)),
            known=plain.known(),
            rounds=ROUNDS.rounds,
            tokens=ROUNDS.tokens,
        ).result
        for level in ("off", "placement")
    }
    for result in reports.values():
        assert tuple(map(tuple, result["tokens"])) == plain.tokens
    name = {1: "TokenToKVPoolAllocator", 64: "PagedTokenToKVPoolAllocator"}[page]
    assert reports["off"]["allocator"] == name
    assert reports["placement"]["allocator"].startswith("Placed")
    assert reports["off"]["info"] is None
    assert reports["placement"]["info"]["level"] == "placement"
    assert reports["placement"]["info"]["high_water"] > 0
    assert reports["placement"]["running"] >= reports["off"]["running"]


@pytest.mark.parametrize("level", ["idle", "live"])
def test_a_level_that_cannot_hold_ends_the_launch(overlay: Path, level: str) -> None:
    launch = Launch(tree=overlay, **settings(64, level)).plain()
    without_cache = Launch(
        tree=overlay,
        algorithm="",
        variables=launch.variables,
        options=(("disable_radix_cache", True),),
    )
    with pytest.raises(EngineFailure, match="known is RadixCache") as failure:
        play(generate_by_steps, without_cache, rounds=((TOKENS[:5],),), tokens=2)
    assert f"ImpossibleLevelError: SGLANG_OVERLAY_KV_SLOTS={level} cannot be had" in (
        failure.value.log
    )


MEASURE = re.compile(r'^sglang:overlay_kv_slots\{.*level="idle",measure="(\w+)".*\} (\S+)$', re.M)


@pytest.mark.full
def test_the_server_tells_what_its_slots_are_like(overlay: Path) -> None:
    launch = Launch(
        tree=overlay,
        variables=(("SGLANG_OVERLAY_KV_SLOTS", "idle"),),
        options=(("enable_metrics", True),),
    ).plain()
    # Three, two and one page are left in the cache; of the last one's tokens none fills a page.
    prompts = [TOKENS[:200], TOKENS[60:190], TOKENS[120:190], TOKENS[5:15]]
    seen: list[dict[str, float]] = []
    with serving(launch, fault="restless-slots") as server:
        for prompt in prompts:
            sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
            server.post("/generate", {"input_ids": prompt, "sampling_params": sampling})
            seen.append(settled(server, requests=len(seen) + 1))
        (state,) = json.loads(server.get("/server_info"))["internal_states"]
    assert state["overlay"]["kv_slots"] == {"level": "idle", **seen[-1]}
    first, window, failed, last = seen
    # Scattered, and gathered again.
    assert (first["passes"], first["moved_tokens"]) == (2, 2 * 192)
    assert first["moved_bytes"] == 2 * 192 * TARGET_LAYERS * LATENT_ROW * 4
    assert 0 < first["pass_seconds"] < 60
    assert [each["cached_tokens_per_run"] for each in seen] == [192, 160, 128, 128]
    assert [each["cached_aligned_share"] for each in seen] == [1] * 4
    assert [each["free_tokens"] for each in seen] == [4096 - n for n in (192, 320, 384, 384)]
    assert [each["refused_open"] for each in seen] == [0, 1, 1, 1]
    assert [each["refused_failure"] for each in seen] == [0, 0, 1, 1]
    assert window["moved_tokens"] == failed["moved_tokens"] == first["moved_tokens"]
    assert last["passes"] == 2
    assert all(each["largest_free_run"] <= each["free_tokens"] for each in seen)
    assert all(384 <= each["high_water"] <= 4096 for each in seen[2:])


def settled(server: Server, requests: int) -> dict[str, float]:
    """Return the gauges, by measure, once they are those of an idle server after ``requests``."""
    deadline = time.monotonic() + 60
    known: dict[str, float] = {}
    while time.monotonic() < deadline:
        time.sleep(0.3)
        found = {name: float(value) for name, value in MEASURE.findall(server.get("/metrics"))}
        passes = server.process.stderr().count("pass of ")
        if found and found == known and passes >= requests + 2:
            return found
        known = found
    raise AssertionError(f"the gauges did not settle: {known}; {server.process.stderr()[-2000:]}")


def generate_with_pauses(engine: Any, rounds: list[list[list[int]]], tokens: int) -> Any:
    """Scene: the workload through ``sglang.Engine``, with idle moments between the rounds."""
    found = []
    for prompts in rounds:
        found.append(generate_by_engine(engine, [prompts], tokens)["tokens"])
        time.sleep(5)
    return [row for each in found for row in each]


@pytest.mark.full
def test_two_ranks_move_the_same_tokens_to_the_same_slots(overlay: Path, stock: Path) -> None:
    plain = generate(Launch(tree=stock, ranks=2).plain(), ROUNDS, driver="engine")
    report = play(
        generate_with_pauses,
        Launch(tree=overlay, ranks=2, **settings(64, "idle")),
        driver="engine",
        known=plain.known(),
        fault="restless-slots",
        rounds=ROUNDS.rounds,
        tokens=ROUNDS.tokens,
    )
    assert tuple(map(tuple, report.result)) == plain.tokens
    passes: dict[str, list[str]] = {}
    for process, what in re.findall(r"^pass of (\d+): (.*)$", report.stderr, re.M):
        passes.setdefault(process, []).append(what)
    first, second = passes.values()
    assert first == second, passes
    assert [what.rsplit(maxsplit=2)[0] for what in first[:5]] == list(PASSES[:5])
    assert sum(int(what.split()[-2]) for what in first) >= 256
    assert len(set(first)) > 3


def flushed(bed: Any, rounds: list[list[list[int]]], tokens: int) -> dict[str, Any]:
    """Scene: the workload, a flush, and the workload again, with passes at every idle moment."""
    allocator = bed.scheduler.token_to_kv_pool_allocator
    compactor = bed.scheduler.overlay_compactor
    runs, moved = [], []
    for _ in range(2):
        runs.append(generate_by_steps(bed, rounds, tokens)["tokens"])
        moved.append(compactor.tally.moved_tokens)
        if not bed.scheduler.flush_cache():
            raise RuntimeError("the cache was not flushed")
        if allocator.available_size() != allocator.size:
            raise RuntimeError("slots are missing after the flush")
        # A pass over the empty cache, and SGLang's own checks.
        bed.step()
    return {"tokens": runs, "moved": moved, "refused": compactor.tally.refused_failure}


def test_a_flush_lets_go_of_what_was_moved(overlay: Path, stock: Path) -> None:
    plain = generate(Launch(tree=stock).plain(), ROUNDS)
    result = play(
        flushed,
        Launch(tree=overlay, variables=(("SGLANG_OVERLAY_KV_SLOTS", "idle"),)).plain(),
        fault="restless-slots",
        rounds=ROUNDS.rounds,
        tokens=ROUNDS.tokens,
    ).result
    for tokens in result["tokens"]:
        assert tuple(map(tuple, tokens)) == plain.tokens
    assert result["moved"][0] > 128
    assert result["refused"] == 1
