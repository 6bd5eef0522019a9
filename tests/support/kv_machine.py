"""Random serving on the real allocator and radix cache, checked after every step.

The rows of every token that can be read, by a running request or through the radix cache, are
those that were written for it; no slot is lost or owned twice; counts are those of a bed with
SGLang's own allocator that does the same. Run it with `examine` where SGLang is importable.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang_overlay.kvcache import planner
from sglang_overlay.srt.kv_layout import cached

from tests.support.kv_bed import KvBed, digests

PAGES = {1: 120, 4: 200}
DRAFT = 5
STEPS = 30

# What happened over all histories, so that a run in which nothing did cannot pass for a good one.
HAPPENED = dict.fromkeys(
    (
        *("admitted", "chunked", "moved beside chunked", "decoded", "verified", "verified trees"),
        *("finished", "retracted", "resumed", "evicted", "split", "flushed"),
        *("moved", "scattered", "scattered beside running", "taken back", "refused"),
        "drafted for nothing",
    ),
    0,
)
FAILING = ("reserve", "first copy", "second copy", "rebind", "release")

small = st.integers(0, 2**16)


class Serving(RuleBasedStateMachine):
    """Two beds that are told the same; only one of them places and moves."""

    pages = tuple(PAGES)
    patient = False

    @initialize(choice=st.integers(0, len(PAGES) - 1))
    def start(self, choice: int) -> None:
        page = self.pages[choice % len(self.pages)]
        common: dict[str, Any] = {"page": page, "slots": PAGES[page], "requests": 6, "context": 128}
        self.bed = KvBed(**common, placed=True, layers=2, patient=self.patient)
        self.twin = KvBed(**common, placed=False)
        self.compactor = self.bed.compactor()
        self.failures = 0
        self.asleep: list[tuple[Any, Any]] = []
        # A cache with branches to begin with: most rules have nothing to do without one.
        for bed in self.both():
            for words in ([0, 1, 1, 0], [0, 1, 0], [1, 1, 1]):
                assert bed.admit([token for word in words for token in [word, word + 5, 9]])
            assert bed.step(DRAFT, [[1] * 5, [2] * 3, [3] * 4], None)
            for request in list(bed.running):
                bed.finish(request)

    def both(self) -> Iterator[KvBed]:
        yield self.bed
        yield self.twin

    @rule(
        words=st.lists(st.integers(0, 1), min_size=1, max_size=6),
        tail=st.integers(0, 3),
        first=st.sampled_from([0, 0, 1, 5, 9]),
    )
    def admit(self, words: list[int], tail: int, first: int) -> None:
        prompt = [token for word in words for token in [word, word + 5, 9]] + [3] * tail
        nodes = len(self._nodes())
        with unchanged(self.bed):
            made = [bed.admit(prompt, first=first) for bed in self.both()]
        assert (made[0] is None) == (made[1] is None)
        HAPPENED["admitted"] += made[0] is not None
        HAPPENED["chunked"] += made[0] in self.bed.chunked
        HAPPENED["split"] += len(self._nodes()) > nodes + 1

    @rule(which=small)
    def go_on(self, which: int) -> None:
        if self.bed.chunked:
            which %= len(self.bed.chunked)
            done = [bed.go_on(bed.chunked[which]) for bed in self.both()]
            assert done[0] == done[1]

    @rule(counts=st.lists(st.integers(1, DRAFT), min_size=6, max_size=6), tree=st.booleans())
    def step(self, counts: list[int], tree: bool) -> None:
        if not self._may_grow():
            return
        outputs = [[count % 2] * count for count in counts[: len(self.bed.running)]]
        path = (lambda count: list(range(DRAFT - count, DRAFT))) if tree else None
        with unchanged(self.bed):
            done = [bed.step(DRAFT, outputs, path) for bed in self.both()]
        assert done[0] == done[1]
        HAPPENED["verified trees" if tree else "verified"] += done[0]

    @rule()
    def draft_for_nothing(self) -> None:
        if self._may_grow():
            with unchanged(self.bed):
                done = [bed.window(DRAFT) is None for bed in self.both()]
            assert done[0] == done[1]
            HAPPENED["drafted for nothing"] += not done[0]

    @rule(tokens=st.lists(st.integers(0, 1), min_size=6, max_size=6))
    def decode(self, tokens: list[int]) -> None:
        if not self._may_grow():
            return
        with unchanged(self.bed):
            done = [bed.decode(tokens[: len(bed.running)]) for bed in self.both()]
        assert done[0] == done[1]
        HAPPENED["decoded"] += done[0]

    def _may_grow(self) -> bool:
        lengths = [len(self.bed.row(one)) for one in self.bed.running]
        return 0 < max(lengths, default=0) <= 120 - DRAFT

    @rule(which=small)
    def finish(self, which: int) -> None:
        for bed in self.both():
            if bed.running:
                bed.finish(bed.running[which % len(bed.running)])
                HAPPENED["finished"] += 1

    @rule(which=small)
    def retract(self, which: int) -> None:
        if self.bed.running:
            sleepers = [bed.running[which % len(bed.running)] for bed in self.both()]
            for bed, request in zip(self.both(), sleepers, strict=True):
                bed.retract(request)
            self.asleep.append((sleepers[0], sleepers[1]))
            HAPPENED["retracted"] += 1

    @rule()
    def resume(self) -> None:
        if self.asleep:
            mine, other = self.asleep[-1]
            if self.bed.resume(mine):
                assert self.twin.resume(other)
                self.asleep.pop()
                HAPPENED["resumed"] += 1
            else:
                assert not self.twin.resume(other)

    @rule(tokens=st.integers(1, 40))
    def evict(self, tokens: int) -> None:
        nodes = len(self._nodes())
        for bed in self.both():
            bed.tree.evict(EvictParams(num_tokens=tokens))
        HAPPENED["evicted"] += len(self._nodes()) < nodes

    @rule(really=st.integers(0, 5))
    def flush(self, really: int) -> None:
        if really == 5 and not self._alive():
            for bed in self.both():
                bed.flush()
            HAPPENED["flushed"] += 1

    @rule(seed=small)
    def scatter(self, seed: int) -> None:
        """Move any nodes anywhere: what the planner never would, and leaves it work to do."""
        self.compactor._live.calls = 0
        with planning(Random(seed)), unchanged(self.bed):
            moved = self.compactor.compact_unlocked()
        assert self.compactor.tally.refused_failure == self.failures
        HAPPENED["scattered"] += moved
        HAPPENED["scattered beside running"] += moved * bool(self.bed.running)
        HAPPENED["moved beside chunked"] += moved * bool(self.bed.chunked)

    @rule(live=st.booleans())
    def compact(self, live: bool) -> None:
        with unchanged(self.bed):
            self.compactor._idle.calls = self.compactor._live.calls = 0
            if live or self._alive():
                moved = self.compactor.compact_unlocked()
            else:
                moved = self.compactor.compact()
        assert self.compactor.tally.refused_failure == self.failures
        HAPPENED["moved"] += moved

    @rule(where=st.sampled_from(FAILING))
    def compact_and_fail(self, where: str) -> None:
        before, failures = self._positions(), self.failures
        with failing(self.bed, self.compactor, where), planning(Random(0)):
            assert self.compactor.compact_unlocked() == 0
        assert self._positions() == before
        self.failures = self.compactor.tally.refused_failure
        HAPPENED["taken back"] += self.failures - failures

    @rule()
    def compact_in_a_window(self) -> None:
        allocator, before = self.bed.allocator, self._positions()
        with planning(Random(0)):
            state = allocator.backup_state()
            assert self.compactor._pass() == 0
            allocator.restore_state(state)
            allocator.free_group_begin()
            assert self.compactor._pass() == 0
            allocator.free_group_end()
        assert self._positions() == before
        HAPPENED["refused"] += 2

    @invariant()
    def every_token_that_can_be_read_is_the_one_that_was_written(self) -> None:
        for request in self._alive():
            tokens = (request.origin_input_ids + request.output_ids)[: request.kv_committed_len]
            assert self.bed.holds(self.bed.row(request).long(), digests(tokens))
            path, node = [torch.empty(0, dtype=torch.int64)], request.last_node
            while node.parent is not None:
                path.insert(0, node.value)
                node = node.parent
            shared = self.bed.row(request)[: request.cache_protected_len].long()
            assert torch.equal(torch.cat(path), shared), "a request's row and the cache disagree"
        # Asking the cache itself would change what it evicts next, in this bed alone.
        for tokens, slots in self._paths():
            assert self.bed.holds(slots, digests(tokens))

    @invariant()
    def every_slot_has_one_owner(self) -> None:
        allocator, page = self.bed.allocator, self.bed.page
        free = torch.cat((allocator.free_pages, allocator.release_pages)).tolist()
        nodes = [node.value for node in self._nodes()]
        cached = torch.cat([torch.empty(0, dtype=torch.int64), *nodes]) // page
        own = [self._uncached(request) for request in self._alive()]
        used = cached[::page].tolist() + [unit for units in own for unit in units]
        assert sorted(free + used) == list(range(1, allocator.size // page + 1))
        assert torch.equal(allocator.free_pages.sort().values, allocator.free_pages)

    @invariant()
    def counts_are_those_of_the_other_bed(self) -> None:
        mine, other = [
            (
                bed.allocator.available_size(),
                bed.tree.evictable_size(),
                bed.tree.protected_size(),
                [bed.row(one).shape[0] for one in bed.running + bed.chunked],
                [one.cache_protected_len for one in bed.running + bed.chunked],
            )
            for bed in self.both()
        ]
        assert mine == other

    def _alive(self) -> list[Any]:
        return self.bed.running + self.bed.chunked

    def _uncached(self, request: Any) -> list[int]:
        row = self.bed.row(request)[request.cache_protected_len :].long() // self.bed.page
        return row[:: self.bed.page].tolist()  # type: ignore[no-any-return]

    def _nodes(self) -> list[Any]:
        return list(cached(self.bed.tree).nodes)

    def _paths(self) -> list[tuple[list[int], torch.Tensor]]:
        paths = []
        for node in self._nodes():
            if not node.children:
                tokens: list[int] = []
                values: list[torch.Tensor] = []
                while node.parent is not None:
                    tokens = node.key.token_ids + tokens
                    values.insert(0, node.value)
                    node = node.parent
                paths.append((tokens, torch.cat(values)))
        return paths

    def _positions(self) -> Any:
        allocator = self.bed.allocator
        free = torch.cat((allocator.free_pages, allocator.release_pages)).sort().values.tolist()
        return free, [node.value.tolist() for node in self._nodes()]


@contextmanager
def unchanged(bed: KvBed) -> Iterator[None]:
    """Look after every tensor of slots that somebody may hold meanwhile.

    Those that a match has given out, a node's before it is moved, and the list of free units.
    """
    nodes = [node.value for node in cached(bed.tree).nodes]
    prefixes = [request.prefix_indices for request in bed.running + bed.chunked]
    held = [bed.allocator.free_pages, *nodes, *prefixes]
    copies = [slots.clone() for slots in held]
    yield
    assert all(map(torch.equal, held, copies)), "a view that was held has changed"


@contextmanager
def planning(random: Random) -> Iterator[None]:
    """While it holds, plans are random: some nodes, to any free units."""

    def plan(pieces: Any, parents: Any, free: Any, **_: Any) -> list[planner.Move]:
        units, moves = free.tolist(), []
        random.shuffle(units)
        for index, piece in enumerate(pieces):
            size = len(piece.units)
            if size <= len(units) and random.random() < 0.7:
                destination = np.array([units.pop() for _ in range(size)], dtype=np.int64)
                moves.append(planner.Move(piece=index, destination=destination))
        return moves

    stock, planner.plan = planner.plan, plan
    try:
        yield
    finally:
        planner.plan = stock


class failing:
    """While it holds, a pass of ``compactor`` raises at one of its steps."""

    def __init__(self, bed: KvBed, compactor: Any, where: str) -> None:
        self._bed, self._compactor, self._where = bed, compactor, where

    def __enter__(self) -> None:
        compactor, self._movers = self._compactor, self._compactor._movers
        compactor._live.calls = 0

        def fail(*_: Any) -> None:
            raise RuntimeError("planted: this step fails")

        if self._where == "first copy":
            compactor._movers = [fail, *self._movers[1:]]
        elif self._where == "second copy":
            compactor._movers = [self._movers[0], fail]
        elif self._where == "rebind":
            stock = compactor._rebind

            def fail_halfway(nodes: Any, parts: Any) -> None:
                stock(nodes[:1], parts[:1])
                fail()

            compactor._rebind = fail_halfway
        elif self._where == "release":
            self._bed.allocator.free = fail
        else:
            self._bed.allocator.free_map.take = fail

    def __exit__(self, *_: object) -> None:
        self._compactor._movers = self._movers
        vars(self._compactor).pop("_rebind", None)
        vars(self._bed.allocator.free_map).pop("take", None)
        vars(self._bed.allocator).pop("free", None)


def examine(
    examples: int, *, page: int = 0, patient: bool = False, shrink: bool = True
) -> dict[str, int]:
    """Run ``examples`` random histories, on one page size if that is named; say what `HAPPENED`.

    ``patient``: what is released is held back, as beside a transfer.

    Raises where one of them breaks a promise, after a search for the shortest that does, if that is
    wanted.
    """
    import logging

    # Failures are planted by the thousand; each would be logged with its traceback.
    logging.getLogger("sglang_overlay.srt.kv_compaction").setLevel(logging.CRITICAL)
    run_machine(
        type(
            f"Serving{page}",
            (Serving,),
            {"pages": (page,) if page else tuple(PAGES), "patient": patient},
        ),
        settings=settings(
            max_examples=examples,
            stateful_step_count=STEPS,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            database=None,
            derandomize=True,
            phases=set(Phase) - (set() if shrink else {Phase.shrink, Phase.explain}),
        ),
    )
    return HAPPENED
