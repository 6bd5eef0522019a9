"""Brings cached tokens together: reserve → copy → rebind → release, or nothing at all.

Only nodes of the radix cache that no request holds are moved. Their slots have one holder, the
node's ``value``: a request that waits is matched again before it runs, one that runs or is chunked
holds its nodes, and what lies in ``req_to_token`` of requests that are gone is read by nobody. The
drafter's pool is indexed by the same slots and moved with the target's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sglang_overlay.kvcache import planner
from sglang_overlay.kvcache.metrics import Units
from sglang_overlay.srt.kv_layout import Cached, cached

logger = logging.getLogger(__name__)

Mover = Callable[[torch.Tensor, torch.Tensor], None]
"""Copies the rows of slots ``source`` [n] int64 to ``destination`` [n], of all layers of a pool."""

# Tokens that one pass moves at most: a request that arrives meanwhile waits for it.
BUDGET = 16384
# Nodes that one pass reads at most: reading and planning take longer than the copy.
NODES = 512
# Idle moments, and batches, from one pass to the next. Counted, not timed: ranks agree on them.
IDLE_PAUSE = 64
LIVE_PAUSE = 32
LONGEST_PAUSE = 512
# Below this share of free tokens, free runs are what the next request will be made of.
SCARCE = 1 / 8


@dataclass
class Tally:
    """What has been done since the start, for server info and the metrics."""

    passes: int = 0
    moved_tokens: int = 0
    moved_bytes: int = 0
    pass_seconds: float = 0.0
    refused_open: int = 0
    refused_failure: int = 0


class Pause:
    """A pause of so many ``calls``, after which one may act."""

    def __init__(self) -> None:
        self.calls = self._made = 0

    def over(self) -> bool:
        """Count a call, and say whether the pause is over."""
        self._made += 1
        return self._made > self.calls

    def begin(self, calls: int) -> None:
        """Begin a pause of ``calls``."""
        self.calls, self._made = calls, 0


class Compactor:
    """Compaction of one scheduler's cache. ``movers`` has one for each pool with the same slots.

    ``row_bytes`` is what one token takes in all of them.
    """

    def __init__(
        self, *, allocator: Any, tree_cache: Any, movers: Sequence[Mover], row_bytes: int
    ) -> None:
        self.tally = Tally()
        self._allocator = allocator
        self._tree_cache = tree_cache
        self._movers = movers
        self._row_bytes = row_bytes
        self._settled_at = -1
        self._idle, self._live = Pause(), Pause()
        # The round over all nodes: the next one to read, and what is known of the round so far.
        self._next = 0
        self._round_began_at = -1
        self._round_moved = False

    def compact(self) -> int:
        """Make one pass on an idle server; return the tokens moved.

        Passes are `IDLE_PAUSE` calls apart: a request that arrives during one waits for it. After
        a round over all nodes that found nothing to do, the next comes when a slot was given or
        taken.
        """
        if not self._idle.over() or self._settled_at == self._allocator.changes:
            return 0
        self._idle.begin(IDLE_PAUSE)
        return self._pass()

    def compact_unlocked(self) -> int:
        """Make one pass between two batches; return the tokens moved.

        Passes are `LIVE_PAUSE` calls apart, and ever further while they find nothing to do.
        """
        if not self._live.over():
            return 0
        moved, longer = self._pass(), max(2 * self._live.calls, LIVE_PAUSE, 1)
        self._live.begin(LIVE_PAUSE if moved else min(longer, LONGEST_PAUSE))
        return moved

    def _pass(self) -> int:
        """Bring together what no request holds; return the tokens moved."""
        if not self._allocator.quiet():
            self.tally.refused_open += 1
            self._settled_at = self._allocator.changes
            return 0
        started = time.perf_counter()
        moved = self._move(self._some_nodes())
        self.tally.passes += bool(moved)
        self.tally.moved_tokens += moved
        self.tally.moved_bytes += moved * self._row_bytes
        self.tally.pass_seconds += (time.perf_counter() - started) * bool(moved)
        self._end_of_round(moved)
        return moved

    def _some_nodes(self) -> Cached:
        """Return the next `NODES` nodes of the round."""
        found = cached(self._tree_cache, unlocked=True)
        if self._next == 0:
            self._round_began_at, self._round_moved = self._allocator.changes, False
        some = found.part(self._next, self._next + NODES)
        self._next = self._next + NODES if self._next + NODES < len(found.nodes) else 0
        return some

    def _end_of_round(self, moved: int) -> None:
        self._round_moved |= moved > 0
        if self._next == 0 and not self._round_moved:
            self._settled_at = self._round_began_at

    def _move(self, found: Cached) -> int:
        allocator, page = self._allocator, self._allocator.page_size
        free = allocator.free_map.listed().cpu().numpy()
        moves = planner.plan(
            found.pieces(page),
            found.parents,
            free,
            budget=BUDGET // page,
            scarce=len(free) * page < allocator.size * SCARCE,
        )
        if not moves:
            return 0
        return self._carry_out(
            [found.nodes[move.piece] for move in moves], [move.destination for move in moves]
        )

    def _carry_out(self, nodes: Sequence[Any], destinations: Sequence[Units]) -> int:
        """Move ``nodes`` to the units ``destinations``; put everything back if anything fails."""
        allocator = self._allocator
        before = allocator.free_map.copy()
        values = [node.value for node in nodes]
        try:
            units = torch.from_numpy(np.concatenate(destinations)).to(allocator.device)
            destination = self._slots(units)
            allocator.free_map.take(units)
            source = torch.cat(values)
            for mover in self._movers:
                mover(destination, source)
            self._rebind(nodes, destination.split([len(value) for value in values]))
            allocator.free(source)
        except Exception:
            # Nothing was written over what the old slots hold: going back to them is enough.
            for node, value in zip(nodes, values, strict=True):
                node.value = value
            allocator.free_map = before
            self.tally.refused_failure += 1
            logger.exception("a pass of KV compaction failed and was taken back")
            return 0
        return len(source)

    def _rebind(self, nodes: Sequence[Any], parts: Sequence[torch.Tensor]) -> None:
        for node, part in zip(nodes, parts, strict=True):
            # A tensor of its own: a part would keep all of them alive, and the old one may be held.
            node.value = part.clone()

    def _slots(self, units: torch.Tensor) -> torch.Tensor:
        page = self._allocator.page_size
        within = torch.arange(page, device=units.device)
        return (units[:, None] * page + within).reshape(-1)
