"""SGLang's slot allocators with an order of preference: `placement` says which units come first.

What is counted stays as it is. In the place of SGLang's list of free units there is a `FreeMap`;
the list is made for whoever asks for it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator

from sglang_overlay.kvcache.free_map import FreeMap
from sglang_overlay.kvcache.free_runs import Runs, longest_runs
from sglang_overlay.kvcache.placement import NOTHING, Demand, RowEnds, place
from sglang_overlay.kvcache.token_slots import Growth, token_slots

# What a request may grow before it runs into the next one, in tokens, where there is room.
HEADROOM = 1024
# Allocations that share one look at the longest free runs, if they are small: as many as would take
# all that is free. A look takes several times as long as an allocation.
FEWEST, KEPT = 8, 64
# Pages: a step adds one or two to a request, a prompt more.
FEW = 2
# Steps of running requests after which what was released can have no writer left. The next step's
# forward may still run when a request is released, and has ended once the one behind it is
# prepared; with one more for good measure.
PATIENCE = 3


@dataclass(kw_only=True, slots=True)
class _Ahead:
    """What a window had for a step, and leaves for the step itself.

    ``asked`` and ``lengths``: see `_Placement._step`. The ``units`` are in no map, but free as soon
    as the window is closed. ``changes``: those there had been.
    """

    asked: Demand
    lengths: tuple[list[int], list[int]] | None
    units: torch.Tensor
    slots: torch.Tensor
    changes: int


class _Placement:
    """What both allocators share.

    ``changes`` counts allocations and releases, so that others can tell whether anything happened.
    ``patient``: what is released is held back for `PATIENCE` steps, or until it is needed. A
    forward may still write it, and whatever writes it next would not wait for that.
    """

    free_map: FreeMap
    changes = 0
    patient = False
    # What is held back: the step at which it was released, and the units.
    _held: list[tuple[int, torch.Tensor]]
    _held_units = 0
    _steps = 0
    # The map that an open window will go back to.
    _kept: FreeMap | None = None
    # The last slot of nobody; `clear` puts one on the device.
    _nowhere = torch.tensor([NOTHING])
    _runs: Runs | None = None
    _uses = 0
    _borrowing = False
    # Units for windows, in no map but free: a window gives them back before anybody else takes any,
    # so that one after another has the same. How many they want, and how many the open one has.
    _aside: torch.Tensor
    _wanted = 0
    _lent = 0
    # What the last window had, until somebody asks for slots.
    _ahead: _Ahead | None = None
    # Whom the next allocation is for, if that is known.
    _demand: Demand | None = None
    _prompt = False

    @property
    def free_pages(self) -> torch.Tensor:
        """Return the free units [n] int64, ascending; waits for the device."""
        return self.free_map.listed()

    @free_pages.setter
    def free_pages(self: Any, units: torch.Tensor | None) -> None:
        if units is not None:
            self.free_map.take(self.free_map.listed())
            self.free_map.release(units)

    @property
    def release_pages(self: Any) -> torch.Tensor:
        """Return the free units [n] int64 that the map does not have: held back, or for windows."""
        ahead = [] if self._ahead is None or self._borrowing else [self._ahead.units]
        return torch.cat([self._aside, *ahead, *(units for _, units in self._held)])

    @release_pages.setter
    def release_pages(self, units: torch.Tensor | None) -> None:
        self._held, self._held_units, self._aside = [], 0, self._nowhere[:0]
        self._ahead = None
        if units is not None and len(units):
            self._hold(units)

    def available_size(self: Any) -> int:
        """Return how many slots are free."""
        return int(self._available_units() * self.page_size)

    def _available_units(self) -> int:
        free: int = self.free_map.count + self._held_units - self._lent
        free += self._aside.numel()
        if self._ahead is not None and not self._borrowing:
            free += self._ahead.units.numel()
        return free

    def backup_state(self) -> FreeMap:
        """Open a window: what is allocated until `restore_state` is given back by it."""
        self._drop_ahead()
        self._borrowing, self._kept = True, self.free_map
        return self.free_map

    def restore_state(self, state: FreeMap) -> None:
        """Close the window."""
        self._borrowing, self._kept, self._lent = False, None, 0
        self.free_map = state

    def clear(self: Any) -> None:
        """Free everything."""
        self.changes += 1
        self.free_map = FreeMap(self.size // self.page_size, self.device)
        self._nowhere = torch.full((1,), NOTHING, dtype=torch.int64, device=self.device)
        self.release_pages = None
        self.is_not_in_free_group = True
        self.free_group: list[torch.Tensor] = []
        self._borrowing, self._kept, self._runs, self._lent = False, None, None, 0

    def quiet(self) -> bool:
        """Say whether no window and no group of releases is open."""
        return not self._borrowing and self.is_not_in_free_group

    def _release(self, units: torch.Tensor, *, own: bool = False) -> None:
        """Free ``units`` [n] int, which nobody else knows if they are ``own``."""
        if self.patient and not self._borrowing:
            self._hold(units)
        else:
            # What is released in a window goes back with it.
            if self._kept is self.free_map:
                self.free_map = self.free_map.copy()
            # A part of a request's row goes to other slots. What is whole is nobody's any more.
            part = not own and units.nbytes != units.untyped_storage().nbytes()
            self.free_map.release(_copied(units) if part else units)

    def _hold(self, units: torch.Tensor) -> None:
        if len(units):
            self._held.append((self._steps, _copied(units)))
            self._held_units += len(units)

    def _let_go(self, needed: int) -> None:
        """Free what was held back long enough, or all of it where ``needed`` units are more."""
        short = needed > self.free_map.count
        while self._held and (short or self._steps - self._held[0][0] >= PATIENCE):
            _, units = self._held.pop(0)
            self._held_units -= len(units)
            self.free_map.release(units)
            # A window that has a map of its own by now must not take them along when it closes.
            if self._kept is not None and self._kept is not self.free_map:
                self._kept.release(units)

    def following(
        self, last: torch.Tensor | RowEnds, counts: Sequence[int], *, prompt: bool
    ) -> AbstractContextManager[None]:
        """Within: an allocation of ``sum(counts)`` slots is for these requests, in this order.

        ``last`` and ``counts``: see `Demand`. ``prompt``: they are prompts, to be filled at once.
        """
        return _Following(self, Demand(last=last, counts=counts), prompt)

    def expect(self, demand: Demand | None, *, prompt: bool) -> None:
        """Let allocations be for ``demand``, or for nobody in particular."""
        self._demand, self._prompt = demand, prompt

    def _place(
        self: Any, demand: Demand, *, prompt: bool, step: bool = False
    ) -> torch.Tensor | None:
        """Return units [demand.total] int64, or None where fewer are free.

        ``prompt``: they may be many, and deserve a fresh look at the free runs. ``step``: running
        requests grow by a step, so that the steps before it are over, or nearly so.
        """
        self.changes += 1
        if not self._borrowing:
            self._steps += step
            self._drop_ahead()
        if self._held:
            self._let_go(demand.total)
        if demand.total > self._available_units():
            return None
        if demand.total == 0:
            return self._nowhere[:0]
        if self._borrowing:
            return self._borrow(demand)
        if demand.total > self.free_map.count:
            self._put_back()
        elif self._wanted > self._aside.numel():
            self._put_aside(demand.total)
        return self._take(demand, prompt=prompt)

    def _put_aside(self, needed: int) -> None:
        """Have as many units for windows as they want, the lowest that are free."""
        # Not where free units are so rare that they would be called back soon.
        if self.free_map.count > needed + 4 * self._wanted:
            self._put_back()
            nothing = torch.zeros_like(self._nowhere)
            runs = Runs(starts=nothing, lengths=nothing)
            self._aside = place(self.free_map, self._newcomer(self._wanted), runs, headroom=0)

    def _put_back(self) -> None:
        self.free_map.release(self._aside)
        self._aside = self._aside[:0]

    def _drop_ahead(self) -> None:
        if self._ahead is not None:
            self.free_map.release(self._ahead.units)
            self._ahead = None

    def _step(
        self,
        demand: Demand,
        asked: Demand,
        lengths: tuple[list[int], list[int]] | None = None,
        slots: Callable[[torch.Tensor], torch.Tensor] = lambda units: units,
    ) -> torch.Tensor | None:
        """Return ``slots`` of units for a step of running requests, or None where fewer are free.

        A drafter's window that is for a step has them first, and leaves them for `_from_window`:
        ``asked`` tells the requests, ``lengths`` how long they are before and after, where the
        slots depend on it.
        """
        if self._borrowing and self._may_take_ahead(demand):
            self.changes += 1
            units = self._take(demand, prompt=False) if demand.total else self._nowhere[:0]
            found = slots(units)
            self._ahead = _Ahead(
                asked=asked, lengths=lengths, units=units, slots=found, changes=self.changes
            )
            return found
        placed_now = self._place(demand, prompt=False, step=True)
        return None if placed_now is None else slots(placed_now)

    def _from_window(
        self, asked: Demand, lengths: tuple[list[int], list[int]] | None
    ) -> torch.Tensor | None:
        """Return what a window had for just this step, or None."""
        ahead = self._ahead
        if (
            ahead is None
            or self._borrowing
            or ahead.changes != self.changes
            or ahead.lengths != lengths
            or not ahead.asked.is_same(asked)
        ):
            return None
        self._ahead = None
        self.changes += 1
        self._steps += 1
        if self._held:
            self._let_go(0)
        return ahead.slots

    def _may_take_ahead(self, demand: Demand) -> bool:
        # Not in a map that is thrown away when the window closes.
        if self._kept is not self.free_map or self._lent or self._ahead is not None:
            return False
        if demand.total > self.free_map.count:
            self._put_back()
        return demand.total <= self.free_map.count

    def _borrow(self, demand: Demand) -> torch.Tensor:
        """Return units [demand.total] for a window: they go back at once, so any will do."""
        self._wanted = max(self._wanted, demand.total)
        if not self._lent and demand.total <= self._aside.numel():
            # A window asks once, as a rule: then nothing need be taken, and given back.
            self._lent = demand.total
            all_of_them = demand.total == self._aside.numel()
            return self._aside if all_of_them else self._aside[: demand.total]
        self.free_map = self.free_map.copy()
        if demand.total > self.free_map.count:
            self.free_map.release(self._aside[self._lent :])
            self._lent = self._aside.numel()
        # What this cuts off the runs comes back.
        runs, uses = self._runs, self._uses
        self._runs = runs and runs.copy()
        units = self._take(demand, prompt=False)
        self._runs, self._uses = runs, uses
        return units

    def _take(self: Any, demand: Demand, *, prompt: bool) -> torch.Tensor:
        self._uses = 0 if prompt else self._uses - 1
        if self._runs is None or self._uses <= 0:
            self._runs = longest_runs(self.free_map)
            self._uses = min(max(self.free_map.count // demand.total, FEWEST), KEPT)
        headroom = HEADROOM // self.page_size
        return place(self.free_map, demand, self._runs, headroom=headroom)

    def _newcomer(self, units: int) -> Demand:
        return Demand(last=self._nowhere, counts=[units])


def _copied(units: torch.Tensor) -> torch.Tensor:
    return units.to(torch.int64, copy=True)


class _Following:
    """A context of `following`; a generator would take twice as long."""

    def __init__(self, allocator: _Placement, demand: Demand, prompt: bool) -> None:
        self._allocator, self._demand, self._prompt = allocator, demand, prompt

    def __enter__(self) -> None:
        self._allocator.expect(self._demand, prompt=self._prompt)

    def __exit__(self, *_: object) -> None:
        self._allocator.expect(None, prompt=False)


class PlacedTokenAllocator(_Placement, TokenToKVPoolAllocator):  # type: ignore[misc]
    """The allocator for pages of one slot. It is told by `following` whom an allocation is for."""

    def alloc(self, need_size: int) -> torch.Tensor | None:
        """Return slots [need_size] int64, or None where fewer are free."""
        demand = self._demand
        if demand is None or demand.total != need_size:
            return self._place(self._newcomer(need_size), prompt=False)
        if self._prompt:
            return self._place(demand, prompt=True)
        found = self._from_window(demand, None)
        return self._step(demand, demand) if found is None else found

    def free(self, free_index: torch.Tensor) -> None:
        """Free slots [n] int."""
        self.changes += 1
        if self.is_not_in_free_group:
            self._release(free_index)
        else:
            self.free_group.append(free_index)


class PlacedPagedAllocator(_Placement, PagedTokenToKVPoolAllocator):  # type: ignore[misc]
    """The allocator for pages of several slots: SGLang tells it where each request ends.

    Which slots tokens get in their pages is as SGLang's `alloc_extend_kernel` has it; one launch
    says so, and it takes the host less than SGLang's calls.
    """

    def alloc(self, need_size: int) -> torch.Tensor | None:
        """Return slots [need_size] int64 in whole pages, or None where fewer are free."""
        needed = need_size // self.page_size
        pages = self._place(self._newcomer(needed), prompt=needed > FEW)
        if pages is None:
            return None
        within = torch.arange(self.page_size, device=self.device)
        return (pages[:, None] * self.page_size + within).reshape(-1)

    def alloc_extend(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
        *_others: Any,
        **_more: Any,
    ) -> torch.Tensor | None:
        """Return slots [tokens] int64 for requests that grow, or None where pages are too few."""
        growth = Growth(
            before=prefix_lens,
            after=seq_lens,
            last=last_loc,
            before_on_host=prefix_lens_cpu.numpy(),
            after_on_host=seq_lens_cpu.numpy(),
            total=extend_num_tokens,
        )
        return self._grow(growth, step=False)

    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
    ) -> torch.Tensor | None:
        """Return slots [requests] int64 for one more token each, or None as well."""
        after = seq_lens_cpu.numpy()
        growth = Growth(
            before=None,
            after=seq_lens,
            last=last_loc,
            before_on_host=after - 1,
            after_on_host=after,
            total=len(after),
        )
        return self._grow(growth, step=True)

    def free(self, free_index: torch.Tensor) -> None:
        """Free the pages of slots [n] int."""
        self.changes += 1
        if not self.is_not_in_free_group:
            self.free_group.append(free_index)
        elif len(free_index):
            self._release(torch.unique(free_index // self.page_size), own=True)

    def _grow(self, growth: Growth, *, step: bool) -> torch.Tensor | None:
        asked = self._demand
        if asked is not None and asked.total != growth.total:
            asked = None
        if asked is not None:
            lengths = growth.before_on_host.tolist(), growth.after_on_host.tolist()
            found = self._from_window(asked, lengths)
            if found is not None:
                return found
        counts = growth.pages(self.page_size)
        # A drafter's own table may have ends that others have by now.
        last = growth.last if asked is None else asked.last
        demand = Demand(last=last, counts=counts, page_size=self.page_size)
        slots = functools.partial(token_slots, growth, size=self.page_size)
        if asked is not None:
            return self._step(demand, asked, lengths, slots)
        pages = self._place(demand, prompt=max(counts, default=0) > FEW, step=step)
        return None if pages is None else slots(pages)


KNOWN = (TokenToKVPoolAllocator, PagedTokenToKVPoolAllocator)
PLACED = (PlacedTokenAllocator, PlacedPagedAllocator)


def placed(stock: Any, *, patient: bool) -> PlacedTokenAllocator | PlacedPagedAllocator:
    """Return an allocator like ``stock``, one of `KNOWN` that has allocated nothing yet.

    ``patient``: see `_Placement`.
    """
    common = {
        "dtype": stock.dtype,
        "device": stock.device,
        "kvcache": stock.get_kvcache(),
        # SGLang's lists are not used: there is nothing to sort.
        "need_sort": False,
    }
    made: PlacedTokenAllocator | PlacedPagedAllocator
    if type(stock) is TokenToKVPoolAllocator:
        made = PlacedTokenAllocator(stock.size, **common)
    else:
        made = PlacedPagedAllocator(stock.size, page_size=stock.page_size, **common)
    made.patient = patient
    return made
