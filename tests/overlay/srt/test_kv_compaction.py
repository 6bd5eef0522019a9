"""When compaction makes a pass, and how much of the cache one reads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang_overlay.kvcache import planner
from sglang_overlay.kvcache.free_map import FreeMap
from sglang_overlay.srt import kv_compaction
from sglang_overlay.srt.kv_compaction import Compactor
from sglang_overlay.srt.kv_layout import cached

SLOTS = 400


class Allocator:
    """What compaction needs of an allocator, over pages of one slot."""

    page_size, size, device = 1, SLOTS, "cpu"

    def __init__(self) -> None:
        self.free_map, self.changes, self.open = FreeMap(SLOTS, "cpu"), 0, False

    def quiet(self) -> bool:
        return not self.open

    def free(self, slots: torch.Tensor) -> None:
        self.changes += 1
        self.free_map.release(slots)


def node(*slots: int) -> Any:
    return SimpleNamespace(value=torch.tensor(slots), lock_ref=0, children={})


class Bed:
    """A cache of ``scattered`` nodes of two tokens each, every second slot taken."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, scattered: int) -> None:
        self.nodes = [node(4 * n + 1, 4 * n + 3) for n in range(scattered)]
        self.allocator = Allocator()
        self.allocator.free_map.take(torch.cat([each.value for each in self.nodes]))
        root = SimpleNamespace(children=dict(enumerate(self.nodes)))
        self.compactor = Compactor(
            allocator=self.allocator,
            tree_cache=SimpleNamespace(root_node=root),
            movers=[],
            row_bytes=1,
        )
        self.read: list[int] = []
        stock = planner.plan

        def plan(pieces: Any, *args: Any, **kwargs: Any) -> Any:
            self.read.append(len(pieces))
            return stock(pieces, *args, **kwargs)

        monkeypatch.setattr(planner, "plan", plan)

    def passes(self, calls: int, *, live: bool = False) -> list[int]:
        """Return at which of so many calls a pass was made."""
        made = []
        for call in range(calls):
            before = len(self.read)
            (self.compactor.compact_unlocked if live else self.compactor.compact)()
            made += [call] * (len(self.read) - before)
        return made


def test_idle_passes_are_some_idle_moments_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_compaction, "IDLE_PAUSE", 5)
    monkeypatch.setattr(kv_compaction, "BUDGET", 4)
    bed = Bed(monkeypatch, scattered=6)
    # Three that move two nodes each, and one that finds nothing more to do.
    assert bed.passes(60) == [0, 6, 12, 18]
    assert bed.compactor.tally.moved_tokens == 12
    bed.allocator.changes += 1
    assert bed.passes(60) == [0]


def test_live_passes_are_apart_whether_or_not_they_move(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_compaction, "LIVE_PAUSE", 3)
    monkeypatch.setattr(kv_compaction, "BUDGET", 4)
    bed = Bed(monkeypatch, scattered=6)
    assert bed.passes(50, live=True) == [0, 4, 8, 12, 19, 32]


def test_a_pass_reads_a_part_of_the_nodes_and_a_round_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_compaction, "IDLE_PAUSE", 0)
    monkeypatch.setattr(kv_compaction, "NODES", 4)
    bed = Bed(monkeypatch, scattered=10)
    bed.passes(50)
    # A round that moves all, and one that finds nothing to do.
    assert bed.read == [4, 4, 2] * 2
    assert all(int(each.value.diff()) == 1 for each in bed.nodes)
    # What changes in the middle of a round is seen by the next.
    bed.allocator.changes += 1
    bed.passes(2)
    bed.allocator.changes += 1
    bed.passes(50)
    assert bed.read == [4, 4, 2] * 4


def test_a_part_knows_only_the_parents_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    bed = Bed(monkeypatch, scattered=1)
    child, grandchild = node(20, 21), node(22, 23)
    bed.nodes[0].children, child.children = {0: child}, {0: grandchild}
    found = cached(bed.compactor._tree_cache)
    assert [found.part(first, 3).parents for first in range(3)] == [[-1, 0, 1], [-1, 0], [-1]]
    assert found.part(2, 9).pieces(1)[0].after == -1


def test_nodes_on_the_host_only_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    bed = Bed(monkeypatch, scattered=2)
    bed.nodes[0].value = None
    bed.nodes[0].children = {0: node(20, 21)}
    found = cached(bed.compactor._tree_cache)
    assert sorted(each.value.tolist() for each in found.nodes) == [[5, 7], [20, 21]]
    assert found.parents == [-1, -1]
