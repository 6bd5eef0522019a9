"""Tree verification: prepare once per step, attend once per layer."""

from __future__ import annotations

import torch

from sglang_overlay.attention.plan import VerifyPlan, VerifyStep
from sglang_overlay.attention.prefix import LATENT_DIM, PrefixEngine, PrefixParts
from sglang_overlay.attention.tree_merge import merge_tree


class VerifyAdapter:
    """A prefix engine and the tree kernel on one plan.

    ``tree_launches`` counts tree kernels issued by Python (once per captured call, not per replay),
    so that a test can prove which path a layer took.
    """

    def __init__(self, engine: PrefixEngine, plan: VerifyPlan) -> None:
        if engine.page_size != plan.sizes.page_size:
            raise ValueError(
                f"page_size: the engine reads pages of {engine.page_size}, the plan has "
                f"{plan.sizes.page_size}; build both for the pool's page size"
            )
        self.engine = engine
        self.plan = plan
        self.tree_launches = 0
        self._requests = 0

    def prepare(self, step: VerifyStep, heads: int) -> None:
        """Refill the plan and the engine's schedule; no synchronisation, safe to capture."""
        self._requests = step.prefix_lens.shape[0]
        self.plan.fill(step)
        self.engine.plan(
            self.plan.planned_lengths[: self._requests],
            self.plan.page_table[: self._requests],
            self.plan.sizes.nodes * heads,
        )

    def attend(
        self,
        query: torch.Tensor,
        cache: torch.Tensor,
        slots: torch.Tensor,
        *,
        softmax_scale: float,
        cache_scale: float = 1.0,
    ) -> torch.Tensor:
        """Return attention over prefix ∪ ancestors, [tokens, heads, 512] in the query's dtype.

        ``query`` [requests × nodes, heads, 576], ``cache`` [slots, 1, 576] of this layer with the
        tree's rows already stored, ``slots`` [requests × nodes] their rows. The result replaces the
        engine's own output in place, unless that is in parts.
        """
        prefix = self.engine.run(query, cache, softmax_scale, cache_scale)
        if isinstance(prefix, PrefixParts):
            out = query.new_empty(query.shape[0], query.shape[1], LATENT_DIM)
        else:
            out = prefix.out
        merge_tree(
            query,
            cache,
            slots,
            self.plan.ancestors[: self._requests],
            self.plan.lengths[: self._requests],
            prefix,
            out,
            softmax_scale=softmax_scale,
            cache_scale=cache_scale,
        )
        self.tree_launches += 1
        return out
