"""The commit of an accepted path: it is a chain, and SGLang's own verify commits it as one.

The path's nodes are gathered to the front: tokens, the target's choices, hidden states and KV. Then
``DFlashVerifyInput.verify`` accepts exactly that chain once more and does what it does for DFLASH:
finish checks token by token, slots, accounting, the drafter's next context.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.speculative.dflash_info import DFlashVerifyInput

from sglang_overlay.kvcache.mover import move_rows
from sglang_overlay.kvcache.rows import RowBuffers

# No token: a draft that no choice of the target can equal.
_NO_TOKEN = -1
# No row: a pair that is not moved.
_NO_SLOT = -1


@dataclass(frozen=True, kw_only=True)
class Path:
    """The accepted path of each request, root first, in a batch of trees of ``tree_size`` nodes.

    All are [requests, depth + 1] int64: ``nodes`` with 0 behind the end of a path, ``tokens`` with
    −1 there, and ``choices``, the target's token after each node. ``held`` is True up to the end.
    """

    nodes: torch.Tensor
    tokens: torch.Tensor
    choices: torch.Tensor
    held: torch.Tensor
    tree_size: int

    @classmethod
    def of(
        cls, tokens: torch.Tensor, chosen: torch.Tensor, path: torch.Tensor, lengths: torch.Tensor
    ) -> Path:
        """Return the path that a walk found.

        ``tokens`` and ``chosen`` [requests, nodes] int64 belong to the tree, ``path`` and
        ``lengths`` [requests] are as ``tree.accept.walk`` returns them.
        """
        held = torch.arange(path.shape[1], device=path.device) < lengths[:, None]
        nodes = path.masked_fill(~held, 0)
        return cls(
            nodes=nodes,
            tokens=tokens.gather(1, nodes).masked_fill(~held, _NO_TOKEN),
            choices=chosen.gather(1, nodes),
            held=held,
            tree_size=tokens.shape[1],
        )

    @property
    def rows(self) -> torch.Tensor:
        """The nodes' rows in the flat batch, [requests × (depth + 1)] int64."""
        first = torch.arange(self.nodes.shape[0], device=self.nodes.device) * self.tree_size
        return (first[:, None] + self.nodes).view(-1)


def commit(
    path: Path, batch: Any, logits_output: Any, page_size: int, rows: RowBuffers | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[int]]:
    """Commit ``path`` for every request of ``batch``; the result is DFLASH's verify's.

    ``rows`` are the target's KV rows, to be moved on pages; None where a page is a slot.
    """
    chain = DFlashVerifyInput(
        draft_token=path.tokens.view(-1),
        positions=None,
        draft_token_num=path.tokens.shape[1],
    )
    output = LogitsProcessorOutput(
        next_token_logits=as_logits(path.choices, logits_output.next_token_logits.shape[-1]),
        hidden_states=logits_output.hidden_states[path.rows],
    )
    # As SGLang does: nobody behind this may take them for a chain's.
    logits_output.hidden_states = None
    with _decided(batch), _released_at_once(batch.token_to_kv_pool_allocator):
        if rows is None:
            keep_slots(path, batch)
        else:
            move_to_front(path, batch, page_size, rows)
        committed: tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[int]] = chain.verify(
            batch=batch, logits_output=output, page_size=page_size
        )
    return committed


def as_logits(choices: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Return logits [requests × (depth + 1), vocabulary] int8 whose argmax is ``choices``.

    SGLang's verify takes logits. The path's own would be four times as many bytes to copy.
    """
    flat = choices.view(-1, 1)
    return torch.zeros(flat.shape[0], vocabulary, dtype=torch.int8, device=choices.device).scatter_(
        1, flat, 1
    )


def keep_slots(path: Path, batch: Any) -> None:
    """Put the path's slots first in ``batch.out_cache_loc`` and free those behind its width."""
    slots = batch.out_cache_loc.view(-1, path.tree_size)
    width = path.nodes.shape[1]
    # A path's nodes sort by their place in it, the others behind them by their own number. The
    # padding of a short path points at the root, which keeps the smaller place: its own.
    node = torch.arange(path.tree_size, device=slots.device)
    place = (
        (node + width)
        .expand(slots.shape)
        .scatter_reduce(1, path.nodes, node[:width].expand(path.nodes.shape), "amin")
    )
    slots = slots.gather(1, place.argsort(dim=1))
    batch.token_to_kv_pool_allocator.free(slots[:, width:].reshape(-1))
    batch.out_cache_loc = slots[:, :width].reshape(-1)


def move_to_front(path: Path, batch: Any, page_size: int, rows: RowBuffers) -> None:
    """Move the path's KV rows to its request's first slots, and free the pages behind its width.

    On pages the slots of a request follow one another, so the order of slots has to stay.
    """
    slots = batch.out_cache_loc.view(-1, path.tree_size)
    width = path.nodes.shape[1]
    target = slots[:, :width].contiguous()
    source = slots.gather(1, path.nodes).masked_fill_(~path.held, _NO_SLOT)
    move_rows(rows, target, source, overlap=True)
    # SGLang's verify looks at the pages up to the width: which of them the path has come to fill.
    # The host knows the lengths: to ask the device which slots are behind would wait for it.
    behind = behind_pages(batch.seq_lens_cpu, width, path.tree_size, page_size)
    if behind.numel():
        unused = slots.view(-1)[behind.to(slots.device, non_blocking=True)]
        batch.token_to_kv_pool_allocator.free(unused)
    batch.out_cache_loc = target.view(-1)


def behind_pages(
    prefix_lens: torch.Tensor, width: int, tree_size: int, page_size: int
) -> torch.Tensor:
    """Return the places [count] int64 in the flat batch behind the page that holds the width's end.

    ``prefix_lens`` [requests] int is on the CPU, and so is the result. A request's ``tree_size``
    slots follow its prefix; those up to ``width`` and the rest of their last page are not behind.
    """
    looked_at = (prefix_lens + width + page_size - 1) // page_size * page_size
    place = prefix_lens[:, None] + torch.arange(tree_size)
    return (place >= looked_at[:, None]).view(-1).nonzero().view(-1)


@contextmanager
def _decided(batch: Any) -> Iterator[None]:
    """Let SGLang's verify take the choices as they are: adjusted already, and all of them made."""
    stock = batch.sampling_info
    if stock is not None:
        decided = copy.copy(stock)
        decided.is_all_greedy = True
        decided.has_custom_logit_processor = False
        decided.logit_bias = None
        decided.penalizer_orchestrator = SimpleNamespace(is_required=False)
        batch.sampling_info = decided
    try:
        yield
    finally:
        batch.sampling_info = stock


@contextmanager
def _released_at_once(allocator: Any) -> Iterator[None]:
    """Let ``allocator`` take all slots that are freed within at the end.

    On pages each release of its own looks for whole pages, and waits for the device.
    """
    assert allocator.is_not_in_free_group, "SGLang verifies outside of its own groups"
    allocator.free_group_begin()
    try:
        yield
    finally:
        allocator.free_group_end()
