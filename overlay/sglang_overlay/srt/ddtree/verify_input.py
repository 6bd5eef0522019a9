"""A draft tree on its way through the target's verify, in the shape that SGLang gives a chain."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import torch
from sglang.srt.speculative.dflash_info import DFlashVerifyInput

from sglang_overlay.kvcache.rows import RowBuffers
from sglang_overlay.srt.ddtree import choice, commit
from sglang_overlay.srt.ddtree.tally import Tally
from sglang_overlay.tree.accept import walk
from sglang_overlay.tree.layout import DraftTree, positions, write_full_mask


@dataclass
class TreeVerifyInput(DFlashVerifyInput):  # type: ignore[misc]
    """The drafts of one step: per request a tree of ``draft_token_num`` nodes.

    ``tree`` is on the device. Its topology goes to the overlay's adapter as ``parents`` and to
    SGLang's masked kernels as ``custom_mask``, whichever of the two the target's backend reads.
    ``spine`` [requests, depth + 1] int64 is what DFLASH would have drafted, the root included.
    ``rows`` are those of the target's KV pool, None where its pages are slots.
    """

    tree: DraftTree = field(kw_only=True)
    spine: torch.Tensor = field(kw_only=True)
    rows: RowBuffers | None = field(kw_only=True)
    tally: Tally = field(kw_only=True)

    @classmethod
    def of(
        cls,
        tree: DraftTree,
        prefix_lens: torch.Tensor,
        *,
        spine: torch.Tensor,
        rows: RowBuffers | None,
        tally: Tally,
    ) -> TreeVerifyInput:
        """Return the input for ``tree`` behind ``prefix_lens`` [requests] int committed tokens."""
        return cls(
            draft_token=tree.tokens.reshape(-1),
            positions=positions(tree, prefix_lens).reshape(-1),
            draft_token_num=tree.tokens.shape[1],
            tree=tree,
            spine=spine,
            rows=rows,
            tally=tally,
        )

    @property
    def parents(self) -> torch.Tensor:
        """Every node's parent, [requests, nodes] int32; negative for a root."""
        return self.tree.parents

    def prepare_for_verify(
        self, batch: Any, page_size: int, *, build_custom_mask: bool = True
    ) -> None:
        """Allocate a slot per node, and build SGLang's FULL_MASK where the backend reads one."""
        super().prepare_for_verify(batch, page_size, build_custom_mask=False)
        if not build_custom_mask or batch.forward_mode.is_idle():
            return
        nodes = self.draft_token_num
        columns = int(batch.seq_lens_cpu.sum()) + len(batch.reqs) * nodes
        self.custom_mask = torch.empty(columns * nodes, dtype=torch.bool, device=batch.device)
        write_full_mask(self.parents, batch.seq_lens, self.custom_mask)

    def verify(
        self, *, batch: Any, logits_output: Any, page_size: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[int]]:
        """Walk the tree by the target's choices and commit the accepted path.

        Arguments and result are those of ``DFlashVerifyInput.verify``.
        """
        if batch.forward_mode.is_idle():
            nothing = super().verify(batch=batch, logits_output=logits_output, page_size=page_size)
            return cast("tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[int]]", nothing)
        chosen = choice.choose(batch, logits_output.next_token_logits, self.tree)
        path, lengths = walk(self.tree, chosen)
        accepted = commit.Path.of(self.tree.tokens, chosen, path, lengths)
        self.tally.count(accepted, self.spine)
        return commit.commit(accepted, batch, logits_output, page_size, self.rows)
