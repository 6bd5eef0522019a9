"""Custom logit processors on a tree: called as plain decoding calls them, once per token.

A processor may read the tokens so far (``__req__.output_ids``) and may keep count in what it is
given. So it cannot see every node of a tree at once: requests that have one are walked here, node
by node, with each choice among the outputs before the next call.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from sglang_overlay.tree.layout import DraftTree


def choose_on_paths(
    batch: Any, logits: torch.Tensor, tree: DraftTree, chosen: torch.Tensor
) -> None:
    """Write into ``chosen`` [requests, nodes] int64 what processors make of paths' choices.

    ``logits`` [requests × nodes, vocabulary] are the target's, bias included. Each level of the
    trees is a step of plain decoding: all requests that are still on their path, in the order of
    the batch. Waits for the device at each level, besides for masks and trees at the beginning.
    """
    processors = [
        (processor, mask.tolist())
        for processor, mask in batch.sampling_info.custom_logit_processor.values()
    ]
    rows = [row for row in range(len(batch.reqs)) if any(mask[row] for _, mask in processors)]
    children = _children(tree)
    at = dict.fromkeys(rows, 0)
    nodes = tree.tokens.shape[1]
    with _outputs_put_back([batch.reqs[row] for row in rows]):
        while at:
            places = torch.tensor(
                [row * nodes + node for row, node in at.items()], device=logits.device
            )
            level = logits[places]
            _process(level, list(at), processors, batch.sampling_info.custom_params)
            best = level.argmax(dim=-1)
            chosen.view(-1)[places] = best
            at = {
                row: child
                for (row, node), token in zip(at.items(), best.tolist(), strict=True)
                if (child := children[row].get((node, token))) and _goes_on(batch.reqs[row], token)
            }


def _children(tree: DraftTree) -> list[dict[tuple[int, int], int]]:
    """Return for each request its nodes by parent and token; one copy from the device."""
    tokens, parents = torch.stack([tree.tokens, tree.parents.to(tree.tokens.dtype)]).tolist()
    return [
        {key: node for node, key in enumerate(zip(*each, strict=True))}
        for each in zip(parents, tokens, strict=True)
    ]


def _process(
    level: torch.Tensor,
    rows: Sequence[int],
    processors: Sequence[tuple[Any, list[bool]]],
    custom_params: Sequence[Any],
) -> None:
    """Do what SGLang's ``apply_custom_logit_processor`` does, for some requests of a batch.

    ``level`` [len(rows), vocabulary] holds the logits of ``rows``, numbers of requests.
    """
    for processor, mask in processors:
        own = [place for place, row in enumerate(rows) if mask[row]]
        if own:
            level[own] = processor(level[own], [custom_params[rows[place]] for place in own])


def _goes_on(request: Any, token: int) -> bool:
    """Put ``token`` among the outputs of ``request``; return whether that does not end it.

    Plain decoding calls no processor for a request that has ended. It ends in SGLang's verify, not
    here: what its check writes is taken back.
    """
    request.output_ids.append(token)
    before = copy.copy(vars(request))
    request.check_finished()
    ended = request.finished()
    vars(request).update(before)
    return not ended


@contextmanager
def _outputs_put_back(requests: Sequence[Any]) -> Iterator[None]:
    """Take what is appended to the outputs of ``requests`` away again: the commit appends it."""
    lengths = [len(request.output_ids) for request in requests]
    try:
        yield
    finally:
        for request, length in zip(requests, lengths, strict=True):
            del request.output_ids[length:]
