"""STAND-IN for what EAGLE needs of a GPU, and known-good drafts for it on chosen branches.

SGLang builds EAGLE's tree, walks it and packs it by CUDA kernels of ``sgl_kernel``; here are the
same loops in Python. The drafts of a random model would be accepted next to never: the drafter's
logits are replaced by ones whose two best tokens hold the known continuation, on the first branch
or beside it. Everything else is SGLang's own: beams, pages, verify, commit, draft extension.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from tests.support.engine.models import VOCABULARY
from tests.support.engine.orders import Known, Orders

# The best two tokens behind a node that is on the known path, and behind one that is not. A child
# of the path always beats one off it, whichever branch it is, so the beams never lose the path.
_ON_PATH, _OFF_PATH = (0.6, 0.3), (0.02, 0.01)
# The rank of the known token, by its position in the text; −1: it is not drafted, so paths have
# every length. They leave the first branch often.
_RANKS = (1, 0, 1, 1, 0, 0, 1, -1, -1, 1, -1, 0, 1, -1)


@contextmanager
def eagle(bed: Any) -> Iterator[None]:
    """Give the scheduler of ``bed`` EAGLE's kernels and known-good drafts for a while."""
    import sglang.srt.speculative.eagle_info as eagle_info
    import sglang.srt.speculative.eagle_utils as eagle_utils

    runner = bed.scheduler.draft_worker.draft_model_runner
    drafts = _Drafts(bed, Orders.read().known)
    _silence(bed.scheduler.draft_worker)
    with (
        # SGLang compiles its index arithmetic; there need not be a compiler here.
        torch._dynamo.config.patch(disable=True),
        mock.patch.object(eagle_utils, "sgl_build_tree_kernel_efficient", build_tree, create=True),
        mock.patch.object(eagle_info, "verify_tree_greedy_func", verify_greedily),
        mock.patch.object(runner, "forward", drafts.wrap(runner.forward)),
    ):
        yield


def _silence(worker: Any) -> None:
    """Let the drafter attend to nothing: its logits are replaced, and the interpreter is slow.

    Its cache rows are stored, and moved by SGLang, as ever.
    """

    def extend(q: torch.Tensor, k: Any, v: Any, out: torch.Tensor, *args: Any, **kw: Any) -> None:
        out.zero_()

    def decode(
        q: torch.Tensor, k: Any, v: Any, layer: Any, forward_batch: Any, **kwargs: Any
    ) -> torch.Tensor:
        pool, slots = forward_batch.token_to_kv_pool, forward_batch.out_cache_loc
        pool.set_kv_buffer(layer, slots, k, v)
        return q.new_zeros(q.shape[0], layer.tp_q_head_num * layer.v_head_dim)

    for backend in (worker.draft_model_runner.attn_backend, worker.draft_extend_attn_backend):
        backend.extend_attention_fwd = extend
    for step in worker.draft_attn_backend.attn_backends:
        step.forward_decode = decode
    worker.draft_attn_backend.init_forward_metadata = lambda forward_batch: None


def build_tree(
    parents: torch.Tensor,
    selected: torch.Tensor,
    seq_lens: torch.Tensor,
    mask: torch.Tensor,
    positions: torch.Tensor,
    index: torch.Tensor,
    next_token: torch.Tensor,
    next_sibling: torch.Tensor,
    topk: int,
    steps: int,
    nodes: int,
    mode: int,
) -> None:
    """Do what ``sgl_kernel.build_tree_kernel_efficient`` does, for a FULL_MASK.

    ``selected`` [requests, nodes − 1] numbers candidates level by level, ``parents`` says which
    candidate a beam was. ``mask`` and ``positions`` are flat, the links [requests, nodes].
    """
    assert int(mode) == 0, "the bed's backends take a FULL_MASK"
    start = 0
    for row, length in enumerate(seq_lens.tolist()):
        chosen = selected[row].tolist()
        above = [-1]
        for candidate in chosen:
            beam = candidate // topk
            above.append(chosen.index(int(parents[row, beam])) + 1 if beam else 0)
        width = length + nodes
        own = mask[start : start + nodes * width].view(nodes, width)
        own[:, length:] = False
        for node in range(nodes):
            depth, at = 0, node
            own[node, length] = True
            while at:
                own[node, length + at] = True
                depth, at = depth + 1, above[at]
            positions[row * nodes + node] = length + depth
            index[row, node] = row * nodes + node
        for node in range(nodes - 1, 0, -1):
            next_sibling[row, node] = next_token[row, above[node]]
            next_token[row, above[node]] = node
        start += nodes * width


def verify_greedily(
    *,
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
    topk: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Do what ``sgl_kernel.verify_tree_greedy`` does: the path along the target's choices."""
    for row in range(candidates.shape[0]):
        here, accepted = 0, 0
        accept_index[row, 0] = retrieve_index[row, 0]
        while accepted + 1 < accept_index.shape[1]:
            child = int(retrieve_next_token[row, here])
            while child >= 0 and candidates[row, child] != target_predict[row, here]:
                child = int(retrieve_next_sibling[row, child])
            if child < 0:
                break
            predicts[retrieve_index[row, here]] = target_predict[row, here]
            here, accepted = child, accepted + 1
            accept_index[row, accepted] = retrieve_index[row, here]
        accept_token_num[row] = accepted
        predicts[retrieve_index[row, here]] = target_predict[row, here]
    return predicts, accept_index, accept_token_num


class _Drafts:
    """Puts known continuations among the drafter's two best tokens."""

    def __init__(self, bed: Any, known: Known) -> None:
        self._bed = bed
        self._texts = {tuple(prompt): [*prompt, *tokens] for prompt, tokens in known}

    def wrap(self, stock: Any) -> Any:
        def forward(forward_batch: Any, **kwargs: Any) -> Any:
            output = stock(forward_batch, **kwargs)
            logits = output.logits_output.next_token_logits
            requests = forward_batch.req_pool_indices.tolist()
            rows = self._rows(forward_batch, len(logits))
            for at, logit in enumerate(logits):
                text = self._text_of(requests[at * len(requests) // len(logits)])
                # EAGLE's drafter reads the token behind the one whose features it has.
                read = int(forward_batch.positions[rows[at]]) + 1
                right = text[read : read + 1] == [int(forward_batch.input_ids[rows[at]])]
                self._overwrite(logit, text[read + 1 : read + 2] if right else [], read + 1)
            return output

        return forward

    def _rows(self, forward_batch: Any, count: int) -> list[int]:
        """Return the rows of the batch that the ``count`` rows of logits belong to."""
        mode = forward_batch.forward_mode
        if mode.is_decode():
            return list(range(count))
        lengths = forward_batch.extend_seq_lens.tolist()
        if mode.is_draft_extend():
            lengths = forward_batch.spec_info.num_accept_tokens.tolist()
        return [sum(lengths[: at + 1]) - 1 for at in range(count)]

    def _text_of(self, pool_index: int) -> list[int]:
        for request in self._bed.scheduler.cur_batch.reqs:
            if request.req_pool_idx == pool_index:
                return self._texts.get(tuple(request.origin_input_ids), [])
        raise LookupError(f"no request of the batch has row {pool_index}")

    def _overwrite(self, logit: torch.Tensor, good: list[int], position: int) -> None:
        """Make ``logit`` [vocabulary] one of two tokens, of which one is ``good`` if there is."""
        rank = _RANKS[position % len(_RANKS)]
        if rank < 0:
            good = []
        shares = _ON_PATH if good else _OFF_PATH
        token = good[0] if good else int(logit.argmax())
        other = (token + 1 + position) % VOCABULARY
        pair = [token, other if other != token else (token + 1) % VOCABULARY]
        if good and rank:
            pair.reverse()
        rest = (1 - sum(shares)) / VOCABULARY
        logit.fill_(max(rest, 1e-9)).log_()
        logit[pair] = torch.tensor(shares).log()
