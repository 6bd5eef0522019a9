"""A serving loop without a model: SGLang's real allocator, radix cache and requests, no forward.

Import it where SGLang is importable. What a model would write is written by `KvBed.fill`: the row
of a token is a digest of the token and all before it, so that a row in a wrong place shows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import sglang.srt.mem_cache.allocator as allocators
import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache import common
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import set_global_server_args_for_scheduler
from sglang.srt.speculative.dflash_info import _compute_paged_keep_slots
from sglang_overlay.srt import kv_allocators, kv_movers, kv_slots
from sglang_overlay.srt.ddtree.rows import row_buffers
from sglang_overlay.srt.kv_compaction import Compactor

Path = Callable[[int], list[int]]
_PRIME = (1 << 61) - 1


class _NaiveExtend:
    """SGLang's own CPU form of its paged allocation kernel, in the kernel's place."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(
            prefix: Any, lengths: Any, last: Any, free: Any, out: Any, _: int, page: int
        ) -> None:
            allocators.alloc_extend_naive(prefix, lengths, last, free, out, page, "cpu")

        return launch


class _NaiveDecode:
    """The same for its kernel that allocates one token for each request."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(lengths: Any, last: Any, free: Any, out: Any, _: int, page: int) -> None:
            allocators.alloc_extend_naive(lengths - 1, lengths, last, free, out, page, "cpu")

        return launch


class KvBed:
    """Requests that come, draft, commit and go, on a pool of ``slots`` slots.

    ``placed`` takes the overlay's allocator, ``patient`` one that holds back what is released.
    ``layers`` of rows are kept in each of two pools, the target's and a drafter's; 0 keeps none.
    """

    def __init__(
        self,
        *,
        page: int,
        slots: int,
        placed: bool,
        requests: int = 32,
        context: int = 4096,
        layers: int = 0,
        patient: bool = False,
    ) -> None:
        allocators.alloc_extend_kernel = _NaiveExtend()
        allocators.alloc_decode_kernel = _NaiveDecode()
        set_global_server_args_for_scheduler(
            SimpleNamespace(
                attention_backend="torch_native",
                page_size=page,
                speculative_algorithm="DFLASH",
                strip_thinking_cache=False,
                disaggregation_mode="null",
            )
        )
        self.page = page
        self.pools = [self._pool(slots, layers) for _ in range(2)] if layers else []
        kvcache = self.pools[0] if layers else None
        make: dict[str, Any] = {"dtype": torch.float32, "device": "cpu", "kvcache": kvcache}
        if page == 1:
            stock = allocators.TokenToKVPoolAllocator(slots, need_sort=False, **make)
        else:
            stock = allocators.PagedTokenToKVPoolAllocator(slots, page, need_sort=False, **make)
        self.allocator: Any = stock
        if placed:
            self.allocator = kv_allocators.placed(stock, patient=patient)
        self.table = ReqToTokenPool(requests, context, "cpu", False)
        self.tree: Any = RadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=self.table,
                token_to_kv_pool_allocator=self.allocator,
                page_size=page,
            )
        )
        self.running: list[Any] = []
        # Requests of whose prompt only a first part is there.
        self.chunked: list[Any] = []
        self._made = self._windows = 0

    def _pool(self, slots: int, layers: int) -> Any:
        return MLATokenToKVPool(
            slots, self.page, torch.float32, 1, 1, layers, "cpu", enable_memory_saver=False
        )

    def compactor(self) -> Compactor:
        """Return a compactor for this bed, with a mover for each pool."""
        return Compactor(
            allocator=self.allocator,
            tree_cache=self.tree,
            movers=[kv_movers.mover(row_buffers(pool)) for pool in self.pools],
            row_bytes=sum(kv_movers.row_bytes(row_buffers(pool)) for pool in self.pools),
        )

    def slots_left(self) -> int:
        """Return the slots that are free or may be evicted."""
        return int(self.allocator.available_size() + self.tree.evictable_size())

    def admit(self, prompt: Sequence[int], *, first: int = 0) -> Any | None:
        """Prefill a request, or return None where no room is left for it.

        ``first``: only so many tokens behind what is cached, the rest by `go_on`.
        """
        self._made += 1
        request = Req(f"request-{self._made}", "", list(prompt), SamplingParams(max_new_tokens=1))
        return request if self.resume(request, first=first) else None

    def resume(self, request: Any, *, first: int = 0) -> bool:
        """Prefill ``request``, new or retracted; False where no room is left for it."""
        request.init_next_round_input(self.tree)
        cached = len(request.prefix_indices)
        chunked = 0 < first < len(request.fill_ids) - cached
        if chunked:
            request.fill_ids = request.fill_ids[: cached + first]
        self.tree.inc_lock_ref(request.last_node)
        if not self.table.free_slots or not self._prefill(request, chunked=chunked):
            self.tree.dec_lock_ref(request.last_node)
            return False
        (self.chunked if chunked else self.running).append(request)
        return True

    def go_on(self, request: Any) -> bool:
        """Prefill the rest of a chunked request; False where no room is left for it."""
        request.init_next_round_input()
        if not self._prefill(request, chunked=False):
            return False
        self.chunked.remove(request)
        self.running.append(request)
        return True

    def _prefill(self, request: Any, *, chunked: bool) -> bool:
        tokens, cached = len(request.fill_ids), len(request.prefix_indices)
        if self.slots_left() < tokens - cached + 2 * self.page:
            return False
        request.is_chunked += chunked
        batch = self._batch([request])
        batch.prefix_lens, batch.extend_lens = [cached], [tokens - cached]
        batch.extend_num_tokens = tokens - cached
        batch.seq_lens_cpu = torch.tensor([tokens])
        batch.seq_lens = batch.seq_lens_cpu.clone()
        common.alloc_for_extend(batch)
        request.kv_committed_len = request.kv_allocated_len = tokens
        self.fill(request, cached)
        self.tree.cache_unfinished_req(request, chunked=chunked)
        return True

    def decode(self, outputs: Sequence[int]) -> bool:
        """Commit one of ``outputs`` for each running request; False where no room is left."""
        need = len(self.running) * self.page
        common.evict_from_tree_cache(self.tree, need)
        if self.allocator.available_size() < need:
            return False
        batch = self._batch(self.running)
        lengths = torch.tensor([request.kv_committed_len for request in self.running])
        batch.seq_lens, batch.seq_lens_cpu = lengths, lengths.clone()
        batch.model_config = SimpleNamespace(is_encoder_decoder=False)
        common.alloc_for_decode(batch, 1)
        for request, token in zip(self.running, outputs, strict=True):
            start = request.kv_committed_len
            request.output_ids.append(token)
            request.kv_committed_len = request.kv_allocated_len = start + 1
            self.fill(request, start)
        return True

    def step(self, draft: int, outputs: Sequence[Sequence[int]], path: Path | None = None) -> bool:
        """Draft ``draft`` tokens for every running request and commit ``outputs``, one list each.

        ``path(count)`` gives the ascending draft positions of a tree's accepted path, whose slots
        are then kept where they are; without it the first ``count`` are kept, as with a chain or a
        tree whose rows are moved. Returns False, with nothing done, where no room is left.
        """
        slots = self.draft(draft)
        if slots is None:
            return False
        for request, mine, tokens in zip(self.running, slots, outputs, strict=True):
            self._commit(request, mine, list(tokens), path)
        return True

    def window(self, draft: int) -> SimpleNamespace | None:
        """Draft ``draft`` tokens for each request; return the batch, or None for no room."""
        # Each request may need a page of its own, twice: for the drafter and for verify.
        need = len(self.running) * (-(-draft // self.page) + 1) * self.page
        common.evict_from_tree_cache(self.tree, need)
        if self.allocator.available_size() < need:
            return None
        batch = self._batch(self.running)
        lengths = torch.tensor([request.kv_committed_len for request in self.running])
        batch.seq_lens, batch.seq_lens_cpu = lengths, lengths.clone()
        # Every other one knows whose step it is for.
        self._windows += 1
        with kv_slots.growing(batch, draft) if self._windows % 2 else nullcontext():
            borrowed = self.allocator.backup_state()
            assert self._extend(batch, draft) is not None
            self.allocator.restore_state(borrowed)
        return batch

    def draft(self, draft: int) -> torch.Tensor | None:
        """Return slots [requests, draft] int64 for a draft of each request, or None for no room."""
        batch = self.window(draft)
        if batch is None:
            return None
        with kv_slots.growing(batch, draft):
            slots = self._extend(batch, draft)
        assert slots is not None
        return slots.view(-1, draft)

    def finish(self, request: Any) -> None:
        """End ``request``; the radix cache keeps what it committed."""
        self.running.remove(request)
        common.release_kv_cache(request, self.tree)

    def retract(self, request: Any) -> None:
        """Take everything from ``request``, which may `resume` later."""
        self.running.remove(request)
        common.release_kv_cache(request, self.tree, is_insert=False)
        request.reset_for_retract()

    def flush(self) -> None:
        """Forget the cache, as SGLang does when nothing runs."""
        self.tree.reset()
        self.table.clear()
        self.allocator.clear()

    def row(self, request: Any) -> torch.Tensor:
        """Return the slots [committed] int32 of ``request``."""
        row: torch.Tensor = self.table.req_to_token[request.req_pool_idx]
        return row[: request.kv_committed_len]

    def fill(self, request: Any, start: int) -> None:
        """Write the rows of the committed tokens from position ``start`` on."""
        if self.pools:
            tokens = (request.origin_input_ids + request.output_ids)[: request.kv_committed_len]
            self.write(self.row(request)[start:].long(), digests(tokens)[start:])

    def write(self, slots: torch.Tensor, contents: Sequence[int]) -> None:
        """Write ``contents`` to ``slots``, told apart by pool and layer."""
        for number, buffer in enumerate(self._buffers()):
            buffer[slots] = _rows(contents, number).to(buffer.dtype)

    def holds(self, slots: torch.Tensor, contents: Sequence[int]) -> bool:
        """Say whether ``slots`` hold ``contents``, in every pool and layer."""
        return all(
            torch.equal(buffer[slots], _rows(contents, number).to(buffer.dtype))
            for number, buffer in enumerate(self._buffers())
        )

    def _buffers(self) -> list[torch.Tensor]:
        return [buffer for pool in self.pools for buffer in pool.kv_buffer]

    def _batch(self, requests: Sequence[Any]) -> SimpleNamespace:
        rows = [one.req_pool_idx for one in requests]
        return SimpleNamespace(
            reqs=list(requests),
            device="cpu",
            tree_cache=self.tree,
            req_to_token_pool=self.table,
            req_pool_indices=None if None in rows else torch.tensor(rows, dtype=torch.int64),
            maybe_evict_swa=lambda: None,
        )

    def _extend(self, batch: SimpleNamespace, draft: int) -> torch.Tensor | None:
        """Allocate ``draft`` slots per request, as DFLASH's verify does."""
        total = draft * len(batch.reqs)
        if self.page == 1:
            return self.allocator.alloc(total)
        last = self.table.req_to_token[batch.req_pool_indices, batch.seq_lens - 1].long()
        ends = batch.seq_lens + draft
        return self.allocator.alloc_extend(
            batch.seq_lens, batch.seq_lens_cpu, ends, ends.clone(), last, total
        )

    def _commit(
        self, request: Any, slots: torch.Tensor, tokens: list[int], path: Path | None
    ) -> None:
        start, count = request.kv_committed_len, len(tokens)
        keep = torch.tensor(path(count) if path else range(count), dtype=torch.int64)
        kept = slots[keep]
        if self.page == 1:
            mask = torch.ones(len(slots), dtype=torch.bool)
            mask[keep] = False
            self.allocator.free(slots[mask])
        else:
            whole = _compute_paged_keep_slots(
                prefix_lens=torch.tensor([start]),
                commit_lens=torch.tensor([count]),
                draft_token_num=len(slots),
                page_size=self.page,
            )
            self.allocator.free(slots[int(whole) :])
            kept = slots[:count]
        request.output_ids += tokens
        request.kv_committed_len = request.kv_allocated_len = start + count
        self.table.req_to_token[request.req_pool_idx, start : start + count] = kept.int()
        self.fill(request, start)


def digests(tokens: Sequence[int]) -> list[int]:
    """Return for each token a number for it and all before it."""
    state, out = 7, []
    for token in tokens:
        state = (state * 1_000_003 + token + 1) % _PRIME
        out.append(state)
    return out


def _rows(contents: Sequence[int], number: int) -> torch.Tensor:
    """Return rows [n, 1, 2] for one buffer; float32 holds integers below 2²⁴."""
    flat = torch.tensor(contents, dtype=torch.int64) + 977 * number
    return torch.stack((flat % 16_777_213, flat // 16_777_213 % 16_777_213), dim=-1)[:, None]
