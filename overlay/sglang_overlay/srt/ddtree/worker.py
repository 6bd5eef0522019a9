"""The worker of DDTREE: SGLang's DFLASH worker, whose drafts are a tree."""

from __future__ import annotations

import copy
from typing import Any

import torch
from sglang.srt.distributed import get_tp_group
from sglang.srt.speculative.dflash_worker import DFlashWorker

from sglang_overlay.srt.ddtree.head import vocab_parallel
from sglang_overlay.srt.ddtree.rows import row_buffers
from sglang_overlay.srt.ddtree.tally import Tally
from sglang_overlay.srt.ddtree.verify_input import TreeVerifyInput
from sglang_overlay.tree.build import build_tree, candidates_needed
from sglang_overlay.tree.marginals import top_log_probs


class DraftTreeWorker(DFlashWorker):  # type: ignore[misc]
    """Drafts with DFLASH's pass, and keeps more of it than the best token per position.

    The base class does the pass, the drafter's KV and the step around the verify. Its sizes are the
    drafter's: block, positions, buffers; the target's verify has the tree's.
    """

    def __init__(self, server_args: Any, *args: Any, **kwargs: Any) -> None:
        drafter_args = copy.deepcopy(server_args)
        drafter_args.speculative_num_draft_tokens = server_args.speculative_dflash_block_size
        super().__init__(drafter_args, *args, **kwargs)
        self.server_args = server_args
        self.tree_size = int(server_args.speculative_num_draft_tokens)
        # The base class appends at most a block of committed tokens to the drafter's cache.
        assert self.tree_size >= self.block_size, "validated at start"
        pool = self.model_runner.token_to_kv_pool
        self._rows = None if self.page_size == 1 else row_buffers(pool)
        # On the target's runner, where server info looks for what the overlay does.
        self.model_runner.overlay_draft_trees = Tally(self.device)
        self._candidates_kept = candidates_needed(
            self.tree_size, int(self.model_runner.model_config.vocab_size)
        )
        self._log_probs: torch.Tensor | None = None
        self._candidates: torch.Tensor | None = None

    def plant(self, batch: Any, chain: Any) -> TreeVerifyInput:
        """Return the input of a verify of the tree that the drafter's last pass gives.

        ``chain`` is the input that DFLASH would verify: the root and the best token per position.
        """
        assert self._log_probs is not None
        assert self._candidates is not None
        spine = chain.draft_token.view(len(batch.reqs), self.block_size)
        shape = (len(batch.reqs), self.block_size - 1, -1)
        tree = build_tree(
            self._log_probs.view(shape),
            self._candidates.view(shape),
            spine[:, 0].contiguous(),
            self.tree_size,
        )
        self._log_probs = self._candidates = None
        return TreeVerifyInput.of(
            tree,
            batch.seq_lens,
            spine=spine,
            rows=self._rows,
            tally=self.model_runner.overlay_draft_trees,
        )

    def _greedy_sample_from_vocab_parallel_head(
        self, *, hidden_states: torch.Tensor, lm_head: Any, chunk_size: int = 256
    ) -> torch.Tensor:
        """Return the best token per drafted position, [positions] int64, and keep the others.

        ``hidden_states`` [requests × (block − 1), hidden] are the drafter's.
        """
        head = vocab_parallel(lm_head, get_tp_group())
        self._log_probs, self._candidates = top_log_probs(
            hidden_states, head, self._candidates_kept
        )
        return self._candidates[:, 0]
