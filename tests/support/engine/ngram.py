"""STAND-IN for what NGRAM needs of a GPU, and known-good drafts for it beside wrong ones.

SGLang takes NGRAM on CUDA devices only, by a guard in its arguments and by device names in its
worker. Both are told here that the CPU is one. Its kernels are loops in Python; its corpus, which
SGLang compiles, is one that knows how a text goes on. Verify, commit and pages are SGLang's own.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch

from tests.support.engine.eagle import verify_greedily
from tests.support.engine.models import VOCABULARY
from tests.support.engine.orders import Known


def install(known: Known) -> None:
    """Make SGLang in this process accept NGRAM, with drafts of ``known``."""
    from sglang.srt.server_args import ServerArgs

    names: Any = ServerArgs
    stock = ServerArgs._handle_speculative_decoding

    def handle(server_args: Any) -> Any:
        if server_args.speculative_algorithm != "NGRAM":
            return stock(server_args)
        _replace_kernels(known)
        device, server_args.device = server_args.device, "cuda"
        try:
            return stock(server_args)
        finally:
            server_args.device = device

    names._handle_speculative_decoding = handle


def _replace_kernels(known: Known) -> None:
    # The compiled corpus: its module needs a package that the bed has not.
    compiled: Any = ModuleType("sglang.jit_kernel.ngram_corpus")
    compiled.get_ngram_corpus_cls = None
    sys.modules[compiled.__name__] = compiled
    import sglang.srt.speculative.ngram_info as ngram_info
    import sglang.srt.speculative.ngram_worker as ngram_worker

    names: Any = ngram_worker
    names.reconstruct_indices_from_tree_mask = link_nodes
    names.NgramCorpus = lambda **options: Corpus(known, options["draft_token_num"])
    names.NGRAMWorker._init_preallocated_tensors = _on_the_cpu(
        names.NGRAMWorker._init_preallocated_tensors
    )
    names = ngram_info
    names.verify_tree_greedy = _verify
    names = torch.Tensor
    names.cuda = lambda tensor: tensor
    # SGLang compiles its index arithmetic; there need not be a compiler here.
    names = torch._dynamo.config
    names.disable = True


def _on_the_cpu(stock: Any) -> Any:
    def init(worker: Any) -> None:
        worker.device = "cpu"
        stock(worker)

    return init


def _verify(
    *, retrive_index: Any, retrive_next_token: Any, retrive_next_sibling: Any, **others: Any
) -> None:
    verify_greedily(
        retrieve_index=retrive_index,
        retrieve_next_token=retrive_next_token,
        retrieve_next_sibling=retrive_next_sibling,
        topk=-1,
        **others,
    )


def link_nodes(
    mask: torch.Tensor,
    seq_lens: torch.Tensor,
    positions: torch.Tensor,
    index: torch.Tensor,
    next_token: torch.Tensor,
    next_sibling: torch.Tensor,
    requests: int,
    nodes: int,
) -> None:
    """Do what ``sgl_kernel``'s ``reconstruct_indices_from_tree_mask`` does.

    ``mask`` is flat, nodes × nodes per request; a node's parent is its last ancestor.
    """
    ancestors = mask.view(requests, nodes, nodes).tril(diagonal=-1).tolist()
    next_token.fill_(-1)
    next_sibling.fill_(-1)
    for row, length in enumerate(seq_lens.tolist()):
        last: dict[int, int] = {}
        for node, above in enumerate(ancestors[row]):
            index[row, node] = row * nodes + node
            positions[row * nodes + node] = length + sum(above)
            parents = [at for at, held in enumerate(above) if held]
            if not parents:
                continue
            if parents[-1] in last:
                next_sibling[row, last[parents[-1]]] = node
            else:
                next_token[row, parents[-1]] = node
            last[parents[-1]] = node


class Corpus:
    """Drafts, behind each node of the known path, a wrong token and then the right one."""

    def __init__(self, known: Known, nodes: int) -> None:
        self._texts = [[*prompt, *tokens] for prompt, tokens in known]
        self._nodes = nodes
        self._drafted = 0

    def batch_get(
        self, requests: Sequence[str], ends: Sequence[list[int]], lengths: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return drafts [requests × nodes] int64 and a mask [requests × nodes × nodes]."""
        drafts, masks = [], []
        for end, length in zip(ends, lengths, strict=True):
            tail: list[int] = []
            for text in self._texts:
                if text[length - len(end) : length] == end:
                    tail = text[length:]
            self._drafted += 1
            tree, mask = self._tree(end[-1], tail[: self._drafted % (self._nodes // 2 + 1)])
            drafts.append(tree)
            masks.append(mask)
        return np.concatenate(drafts), np.concatenate(masks)

    def _tree(self, root: int, tail: list[int]) -> tuple[np.ndarray, np.ndarray]:
        tokens, parents, here = [root], [-1], 0
        for token in tail:
            tokens += [(token + 1) % VOCABULARY, token]
            parents += [here, here]
            here = len(tokens) - 1
        while len(tokens) < self._nodes:
            # Distinct siblings, none of which anybody knows to be right.
            tokens.append((tokens[-1] + 3) % VOCABULARY)
            parents.append(here)
        mask = np.eye(self._nodes, dtype=np.int64)
        for node, parent in enumerate(parents):
            if parent >= 0:
                mask[node] |= mask[parent]
        return np.array(tokens[: self._nodes]), mask.reshape(-1)

    def synchronize(self) -> None:
        """Nothing runs beside."""

    def batch_put(self, texts: Any) -> None:
        """Nothing is learnt."""

    def erase_match_state(self, requests: Any) -> None:
        """Nothing is kept by request."""

    def reset(self) -> None:
        """Nothing is kept."""
