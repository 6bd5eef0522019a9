"""SGLang's slot allocators with an order of preference: `placement` says which units come first.

What is counted stays as it is. The free list is kept ascending, with freed units waiting apart in
``release_pages`` (SGLang's own ``need_sort``), and rebound as a whole: an allocation returns a view
of it, and a speculative step holds the old one to go back to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator

from sglang_overlay.kvcache.placement import NOTHING, Demand, place

# What a request may grow before it runs into the next one, in tokens, where there is room.
HEADROOM = 1024


class _Placement:
    """What both allocators share.

    ``changes`` counts allocations and releases, so that others can tell whether anything happened.
    """

    changes = 0
    _demand: Demand | None = None
    _borrowing = False

    def backup_state(self: Any) -> Any:
        """Open a window: what is allocated until `restore_state` is given back by it."""
        self._borrowing = True
        return super().backup_state()  # type: ignore[misc]

    def restore_state(self: Any, state: Any) -> None:
        """Close the window."""
        self._borrowing = False
        super().restore_state(state)  # type: ignore[misc]

    def free(self: Any, free_index: torch.Tensor) -> None:
        """Free slots [n] int."""
        self.changes += 1
        super().free(free_index)  # type: ignore[misc]

    def clear(self: Any) -> None:
        """Free everything."""
        self.changes += 1
        self._borrowing = False
        super().clear()  # type: ignore[misc]

    def quiet(self) -> bool:
        """Say whether no window and no group of releases is open."""
        return not self._borrowing and bool(self.is_not_in_free_group)  # type: ignore[attr-defined]

    def _place(self: Any, demand: Demand) -> None:
        """Put the units for ``demand`` first in the free list, if there are enough.

        A window's units go back before anybody else is served: any will do, and the lowest are in
        nobody's way.
        """
        self.changes += 1
        if self._borrowing or not demand.total:
            return
        self.merge_and_sort_free()
        if demand.total <= len(self.free_pages):
            headroom = HEADROOM // self.page_size
            self.free_pages = torch.cat(place(self.free_pages, demand, headroom=headroom))

    def _newcomer(self: Any, units: int) -> Demand:
        nowhere = torch.full((1,), NOTHING, dtype=torch.int64, device=self.device)
        return Demand(last=nowhere, counts=[units], prompt=True)


class PlacedTokenAllocator(_Placement, TokenToKVPoolAllocator):  # type: ignore[misc]
    """The allocator for pages of one slot. It is told by `following` whom an allocation is for."""

    @contextmanager
    def following(
        self, last_slots: torch.Tensor, counts: Sequence[int], *, prompt: bool
    ) -> Iterator[None]:
        """Within: an allocation of ``sum(counts)`` slots is for these requests, in this order.

        ``last_slots`` [requests] int, `NOTHING` for one that has none; see `Demand`.
        """
        self._demand = Demand(last=last_slots.to(torch.int64), counts=counts, prompt=prompt)
        try:
            yield
        finally:
            self._demand = None

    def alloc(self, need_size: int) -> torch.Tensor | None:
        """Return slots [need_size] int64, or None where fewer are free."""
        demand = self._demand
        if demand is None or demand.total != need_size:
            demand = self._newcomer(need_size)
        self._place(demand)
        slots: torch.Tensor | None = super().alloc(need_size)
        return slots


class PlacedPagedAllocator(_Placement, PagedTokenToKVPoolAllocator):  # type: ignore[misc]
    """The allocator for pages of several slots: SGLang tells it where each request ends."""

    def alloc(self, need_size: int) -> torch.Tensor | None:
        """Return slots [need_size] int64 in whole pages, or None where fewer are free."""
        self._place(self._newcomer(need_size // self.page_size))
        slots: torch.Tensor | None = super().alloc(need_size)
        return slots

    def alloc_extend(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
        *others: Any,
        **more: Any,
    ) -> torch.Tensor | None:
        """Return slots [extend_num_tokens] int64 for requests that grow, as SGLang's does."""
        self._place(self._growth(prefix_lens_cpu, seq_lens_cpu, last_loc))
        slots: torch.Tensor | None = super().alloc_extend(
            prefix_lens,
            prefix_lens_cpu,
            seq_lens,
            seq_lens_cpu,
            last_loc,
            extend_num_tokens,
            *others,
            **more,
        )
        return slots

    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
    ) -> torch.Tensor | None:
        """Return slots [requests] int64 for one more token each, as SGLang's does."""
        self._place(self._growth(seq_lens_cpu - 1, seq_lens_cpu, last_loc))
        slots: torch.Tensor | None = super().alloc_decode(seq_lens, seq_lens_cpu, last_loc)
        return slots

    def _growth(self, before: torch.Tensor, after: torch.Tensor, last: torch.Tensor) -> Demand:
        size = self.page_size
        pages = (after + size - 1) // size - (before + size - 1) // size
        # Slot −1, which is none, is on page −1.
        return Demand(last=last.to(torch.int64) // size, counts=pages.tolist(), prompt=True)


KNOWN = (TokenToKVPoolAllocator, PagedTokenToKVPoolAllocator)


def placed(stock: Any) -> PlacedTokenAllocator | PlacedPagedAllocator:
    """Return an allocator like ``stock``, one of `KNOWN` that has allocated nothing yet."""
    common = {
        "dtype": stock.dtype,
        "device": stock.device,
        "kvcache": stock.get_kvcache(),
        "need_sort": True,
    }
    if type(stock) is TokenToKVPoolAllocator:
        return PlacedTokenAllocator(stock.size, **common)
    return PlacedPagedAllocator(stock.size, page_size=stock.page_size, **common)
