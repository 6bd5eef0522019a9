"""KV slots on the real engine: with slots placed and moved, every token stays what it was."""

from __future__ import annotations

from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.engine.launch import Launch
from tests.support.engine.models import BLOCK
from tests.support.engine.processes import EngineFailure
from tests.support.engine.quick import quicken
from tests.support.engine.scene import Report, play
from tests.support.engine.workload import Workload, generate, generate_by_steps

pytestmark = pytest.mark.engine

TOKENS = Random(3).choices(range(256), k=300)
HEAD = tuple(TOKENS[:130])
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
    from sglang_overlay.srt import kv_layout, kv_movers
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


def test_tokens_of_draft_trees_are_stocks_too(overlay: Path, stock: Path) -> None:
    plain = generate(Launch(tree=stock).plain(), ROUNDS)
    report = moved(overlay, stock, 64, algorithm="DDTREE")
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
