"""KV slots on a server: which level holds, who is told what, what the hooks call."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from sglang_overlay import switches, upstream
from sglang_overlay.kvcache import levels
from sglang_overlay.kvcache.placement import NOTHING, RowEnds
from sglang_overlay.srt import kv_allocators, kv_movers
from sglang_overlay.srt.ddtree.rows import row_buffers
from sglang_overlay.srt.kv_allocators import PlacedTokenAllocator
from sglang_overlay.srt.kv_compaction import Compactor
from sglang_overlay.srt.kv_report import Report
from sglang_overlay.srt.server_info import KV_SLOTS as REPORT
from sglang_overlay.switches import IDLE, LIVE, OFF, PLACEMENT

_COMPACTOR = "overlay_compactor"


def start_placement(model_runner: Any) -> None:
    """Replace the target's new allocator by one that places, if the level says so.

    Raises:
        ImpossibleLevelError: the operator asked for it, and this server cannot have it.
    """
    stock, args = model_runner.token_to_kv_pool_allocator, model_runner.server_args
    level = _level(stock)
    if not levels.includes(level, PLACEMENT):
        return
    obstacles = upstream.allocating_twice(args)
    if type(stock) not in kv_allocators.KNOWN:
        known = " and ".join(cls.__name__ for cls in kv_allocators.KNOWN)
        obstacles.append(f"its allocator is a {type(stock).__name__}, known are {known}")
    if levels.settle(level, obstacles, asked=switches.ACTIVE.kv_slots, otherwise=OFF) != OFF:
        model_runner.token_to_kv_pool_allocator = kv_allocators.placed(
            stock, patient=upstream.writes_behind_the_host(args)
        )


def start(scheduler: Any) -> None:
    """Give ``scheduler`` what its level asks for: a report, from ``idle`` on a compactor.

    Raises:
        ImpossibleLevelError: the operator asked for compaction, and this server has holders of
            slots that it does not know.
    """
    allocator = scheduler.token_to_kv_pool_allocator
    if not isinstance(allocator, kv_allocators.PLACED):
        return
    level, compactor = _level(allocator), None
    if levels.includes(level, IDLE):
        obstacles = _obstacles(scheduler, level)
        asked = switches.ACTIVE.kv_slots
        level = levels.settle(level, obstacles, asked=asked, otherwise=PLACEMENT)
    if levels.includes(level, IDLE):
        compactor = _make_compactor(scheduler)
    setattr(scheduler, _COMPACTOR, compactor)
    setattr(scheduler, REPORT, Report(scheduler, level, compactor))


def _level(allocator: Any) -> str:
    return levels.wanted(switches.ACTIVE.kv_slots, device=torch.device(allocator.device).type)


def _obstacles(scheduler: Any, level: str) -> list[str]:
    obstacles = upstream.slot_holders(scheduler)
    if levels.includes(level, LIVE):
        obstacles += upstream.overlapping(scheduler)
    pools = upstream.slot_pools(scheduler)
    return obstacles + [reason for pool in pools for reason in kv_movers.obstacles(pool)]


def _make_compactor(scheduler: Any) -> Compactor:
    rows = [row_buffers(pool) for pool in upstream.slot_pools(scheduler)]
    return Compactor(
        allocator=scheduler.token_to_kv_pool_allocator,
        tree_cache=scheduler.tree_cache,
        movers=[kv_movers.mover(each) for each in rows],
        row_bytes=sum(kv_movers.row_bytes(each) for each in rows),
    )


def compactor_of(scheduler: Any) -> Compactor | None:
    """Return the compactor of ``scheduler``, or None below level ``idle``."""
    found: Compactor | None = getattr(scheduler, _COMPACTOR, None)
    return found


def compact_idle(scheduler: Any) -> None:
    """Make a pass, where the level says so and nothing is going on; publish the layout."""
    report: Report | None = getattr(scheduler, REPORT, None)
    if report is None or not scheduler.is_fully_idle():
        return
    compactor = compactor_of(scheduler)
    if compactor is None or not compactor.compact():
        report.publish()


def compact_live(scheduler: Any) -> None:
    """Make a pass over what no request holds, where the level says so."""
    compactor = compactor_of(scheduler)
    if compactor is not None and levels.includes(getattr(scheduler, REPORT).level, LIVE):
        compactor.compact_unlocked()


def extending(batch: Any) -> AbstractContextManager[None]:
    """Return a context in which the allocation for a prefill ``batch`` knows its requests."""
    allocator = batch.tree_cache.token_to_kv_pool_allocator
    if not isinstance(allocator, PlacedTokenAllocator) or not batch.reqs:
        return nullcontext()
    nowhere = torch.full((1,), NOTHING, dtype=torch.int64, device=batch.device)
    prefixes = [request.prefix_indices for request in batch.reqs]
    last = [prefix[-1:] if len(prefix) else nowhere for prefix in prefixes]
    return allocator.following(torch.cat(last), batch.extend_lens, prompt=True)


def growing(batch: Any, tokens: int) -> AbstractContextManager[None]:
    """Return a context in which an allocation knows that each request grows by ``tokens``."""
    allocator = batch.tree_cache.token_to_kv_pool_allocator
    requests = len(batch.reqs)
    if not isinstance(allocator, kv_allocators.PLACED) or not requests:
        return nullcontext()
    last = RowEnds(
        table=batch.req_to_token_pool.req_to_token,
        rows=batch.req_pool_indices,
        lengths=batch.seq_lens,
    )
    return allocator.following(last, [tokens] * requests, prompt=False)
