"""Verify on a FlashMLA backend through the overlay's adapter: the topology in, attention out.

Which backend takes this path is decided once, at start (`selection`), by configuration. A spec
input cannot decide it: graph capture builds one without any topology, and a path that it chose
would be replayed for every later tree.
"""

from __future__ import annotations

from typing import Any

import torch

from sglang_overlay.attention.adapter import VerifyAdapter
from sglang_overlay.attention.flashmla import FlashMlaEngine
from sglang_overlay.attention.plan import PlanSizes, VerifyPlan, VerifyStep
from sglang_overlay.attention.prefix import PrefixEngine

_ATTRIBUTE = "overlay_tree_verify"


class TreeVerify:
    """The verify steps of one backend.

    ``steps`` counts those prepared, so that a test or an operator can see which path a server
    takes; ``adapter.tree_launches`` counts its layers, once per capture where a graph replays them.
    """

    def __init__(self, adapter: VerifyAdapter, *, req_to_token: torch.Tensor, heads: int) -> None:
        sizes = adapter.plan.sizes
        self.adapter = adapter
        self.steps = 0
        self._req_to_token = req_to_token
        self._heads = heads
        chain = torch.arange(-1, sizes.nodes - 1, dtype=torch.int32, device=req_to_token.device)
        self._chain = chain.expand(sizes.max_requests, -1)
        # Padding rows of a graph keep an older step's topology, which is always a valid one.
        self._parents = self._chain.clone()

    def prepare(
        self, request_rows: torch.Tensor, prefix_lens: torch.Tensor, spec_info: Any = None
    ) -> None:
        """Refill the static buffers for one step; no synchronisation.

        ``request_rows`` and ``prefix_lens`` [requests] int as in `VerifyStep`. ``spec_info`` brings
        the topology: ``parents`` [≤ requests, nodes] int, or SGLang's flat ``custom_mask`` over
        prefix and tree (FULL_MASK). With neither, or without ``spec_info``, each request has a
        chain.

        Raises:
            ValueError: ``spec_info`` drafts another number of tokens than the server was started
                for, or its parents do not fit the batch.
        """
        parents, full_mask = self._topology(spec_info, request_rows.shape[0])
        self.adapter.prepare(
            VerifyStep(
                prefix_lens=prefix_lens,
                request_rows=request_rows,
                req_to_token=self._req_to_token,
                parents=parents,
                full_mask=full_mask,
            ),
            self._heads,
        )
        self.steps += 1

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool,
    ) -> torch.Tensor:
        """Store the tree's rows, return attention [tokens, heads × 512], like ``forward_extend``.

        ``query`` [tokens, heads × 576] or [tokens, heads, 576]; ``key`` [tokens, 1, 576] and
        ``value`` [tokens, 1, 512], or both None where the rows are in the cache already.
        """
        pool, slots = forward_batch.token_to_kv_pool, forward_batch.out_cache_loc
        if key is not None and save_kv_cache:
            pool.set_kv_buffer(layer, slots, key, value)
        out = self.adapter.attend(
            query.view(-1, layer.tp_q_head_num, layer.head_dim),
            pool.get_key_buffer(layer.layer_id),
            slots,
            # The pool casts keys to fp8 without dividing them by the layer's k_scale.
            softmax_scale=layer.scaling,
        )
        return out.view(-1, layer.tp_q_head_num * layer.v_head_dim)

    def _topology(
        self, spec_info: Any, requests: int
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return parents [requests, nodes] or the flat mask, the other None."""
        nodes = self.adapter.plan.sizes.nodes
        if spec_info is None:
            return self._chain[:requests], None
        if spec_info.draft_token_num != nodes:
            raise ValueError(
                f"draft_token_num: got {spec_info.draft_token_num}, needed {nodes}, which the "
                "server was started with; do not change the size of a draft tree while it runs"
            )
        parents = getattr(spec_info, "parents", None)
        if parents is not None:
            drafted = parents.shape[0]
            if drafted > requests or parents.shape[1] != nodes:
                raise ValueError(
                    f"parents: got {tuple(parents.shape)}, needed at most {requests} × {nodes}; "
                    "pass one row of parents per request of the batch"
                )
            self._parents[:drafted].copy_(parents)
            return self._parents[:requests], None
        full_mask = getattr(spec_info, "custom_mask", None)
        if full_mask is not None:
            return None, full_mask
        return self._chain[:requests], None


def build(backend: Any, *, nodes: int, page_size: int) -> TreeVerify:
    """Return the path for a ``FlashMLABackend``, with buffers for the largest batch of its server.

    A row of ``req_to_token`` holds a request's context and its tree: no prefix is longer.
    """
    table = backend.req_to_token
    rows, width = table.shape
    sizes = PlanSizes(max_requests=rows, max_context=width, nodes=nodes, page_size=page_size)
    engine = prefix_engine(backend, max_requests=rows)
    adapter = VerifyAdapter(engine, VerifyPlan(sizes, table.device))
    return TreeVerify(adapter, req_to_token=table, heads=backend.num_q_heads)


def prefix_engine(backend: Any, *, max_requests: int) -> PrefixEngine:
    """Return FlashMLA as the engine over the prefixes of ``backend``."""
    return FlashMlaEngine(
        max_requests=max_requests,
        cache_dtype=backend.data_type,
        device=backend.req_to_token.device,
    )


def attach(backend: Any, verify: TreeVerify) -> None:
    """Make ``backend`` verify through ``verify``."""
    setattr(backend, _ATTRIBUTE, verify)


def of(backend: Any, forward_mode: Any) -> TreeVerify | None:
    """Return the path that ``backend`` takes in ``forward_mode``, or None for SGLang's own."""
    if not forward_mode.is_target_verify():
        return None
    verify: TreeVerify | None = getattr(backend, _ATTRIBUTE, None)
    return verify
