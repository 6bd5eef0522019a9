"""Verify through the overlay's adapter: the topology in, attention out, on any of its backends.

Which backend takes this path is decided once, at start (`selection`), by configuration. A spec
input cannot decide it: graph capture builds one without any topology, and a path that it chose
would be replayed for every later tree.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sglang_overlay import switches, upstream, verify_engine
from sglang_overlay.attention.adapter import VerifyAdapter
from sglang_overlay.attention.grouped import GroupedVerifier, Heads
from sglang_overlay.attention.plan import PlanSizes, VerifyPlan, VerifyStep
from sglang_overlay.attention.prefix import PrefixEngine
from sglang_overlay.mask_policy import Drafts
from sglang_overlay.srt.verify_backend import LIVE


class TreeVerify:
    """The verify steps of one backend.

    ``steps`` counts those prepared, so that a test or an operator can see which path a server
    takes; ``adapter.tree_launches`` counts its layers, once per capture where a graph replays them.
    ``drafts`` says what the masks of spec inputs are worth.
    """

    def __init__(
        self,
        adapter: VerifyAdapter | GroupedVerifier,
        drafts: Drafts,
        *,
        req_to_token: torch.Tensor,
        heads: int,
    ) -> None:
        sizes = adapter.plan.sizes
        self.adapter = adapter
        self.drafts = drafts
        self.steps = 0
        # --enable-torch-compile would trace what only launches kernels, and compile it anew at
        # every call, for the count of launches. SGLang keeps its own kernels out likewise.
        self.attend: Callable[..., torch.Tensor] = torch.compiler.disable(self._attend)
        self._tokens = 0
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
        self._tokens = request_rows.shape[0] * self.adapter.plan.sizes.nodes
        self.steps += 1

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Store the tree's rows, return attention [tokens, heads × width], like ``forward_extend``.

        ``query`` [tokens, heads × width] or [tokens, heads, width]; ``key`` and ``value`` [tokens,
        KV heads, width], or both None where the rows are in the cache already. With MLA there is
        one KV head, 576 wide for queries and keys and 512 for values. Tokens behind those of the
        step's requests, which fill an eager batch up under DP attention, get zeros.

        Raises:
            ValueError: the layer has attention sinks, which the merge leaves out.
        """
        if sinks is not None:
            raise ValueError(
                f"sinks: got some in layer {layer.layer_id}, needed none: the overlay's verify has "
                f"no attention sinks; start with {switches.VERIFY_ENGINE}={switches.STOCK}"
            )
        pool, slots = forward_batch.token_to_kv_pool, forward_batch.out_cache_loc
        if key is not None and save_kv_cache:
            pool.set_kv_buffer(layer, slots, key, value)
        heads = query.view(-1, layer.tp_q_head_num, layer.head_dim)
        spare = heads.shape[0] - self._tokens
        heads, slots = heads[: self._tokens], slots[: self._tokens]
        # The pool casts keys to fp8 as they are. Where a backend divides them by the layer's
        # k_scale before, a scale other than 1 keeps SGLang's own verify (see `selection`).
        if isinstance(self.adapter, GroupedVerifier):
            cache = pool.get_kv_buffer(layer.layer_id)
            out = self.adapter.attend(heads, cache, slots, softmax_scale=layer.scaling)
        else:
            keys = pool.get_key_buffer(layer.layer_id)
            out = self.adapter.attend(heads, keys, slots, softmax_scale=layer.scaling)
        out = out.view(-1, layer.tp_q_head_num * layer.v_head_dim)
        return out if spare <= 0 else torch.cat([out, out.new_zeros(spare, out.shape[1])])

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
        if full_mask is None or not self._trusts_masks:
            return self._chain[:requests], None
        # EAGLE fills the buffer of bytes that TritonAttnBackend offers it.
        return None, full_mask.view(torch.bool)

    @property
    def _trusts_masks(self) -> bool:
        """Whether a mask is whole when a step is prepared.

        SGLang's overlapped EAGLE prepares verify first and fills the mask after it has drafted; its
        drafts are then always a chain, which needs none.
        """
        return self.drafts.branches or self.drafts.algorithm not in upstream.TREE_ALGORITHMS


def build(
    backend: Any,
    drafts: Drafts,
    *,
    engine: str,
    cache_dtype: torch.dtype,
    page_size: int,
    max_requests: int,
) -> TreeVerify:
    """Return the path for ``backend``, with buffers for batches of up to ``max_requests``.

    ``engine`` is a name of `verify_engine`; ``page_size`` that of the KV pool. A row of
    ``req_to_token`` holds a request's context and its tree: no prefix is longer.
    """
    table, sizes = backend.req_to_token, _sizes(backend, page_size, max_requests)
    heads = int(getattr(backend, upstream.QUERY_HEADS[type(backend).__name__]))
    prefix = prefix_engine(engine, sizes, heads, cache_dtype, table.device)
    adapter = VerifyAdapter(prefix, VerifyPlan(sizes, table.device))
    return TreeVerify(adapter, drafts, req_to_token=table, heads=heads)


def build_grouped(
    backend: Any,
    drafts: Drafts,
    *,
    shape: tuple[int, int, int, int],
    page_size: int,
    max_requests: int,
) -> TreeVerify:
    """Return the path for a ``backend`` of a model without MLA, whose heads have this ``shape``.

    ``shape`` is (query heads, KV heads, key width, value width) of the rank.
    """
    query, kv, key_dim, value_dim = shape
    heads = Heads(query=query, kv=kv, key_dim=key_dim, value_dim=value_dim)
    table = backend.req_to_token
    sizes = _sizes(backend, page_size, max_requests)
    verifier = GroupedVerifier(VerifyPlan(sizes, table.device), heads)
    return TreeVerify(verifier, drafts, req_to_token=table, heads=query)


def _sizes(backend: Any, page_size: int, max_requests: int) -> PlanSizes:
    return PlanSizes(
        max_requests=max_requests,
        max_context=backend.req_to_token.shape[1],
        nodes=int(backend.num_draft_tokens),
        page_size=read_page(page_size),
    )


def read_page(page_size: int) -> int:
    """Return the page size to read a pool of ``page_size`` with; any pool can be read by slots."""
    page = verify_engine.PAGE_SIZE
    return page if page_size == page else 1


def prefix_engine(
    engine: str, sizes: PlanSizes, heads: int, cache_dtype: torch.dtype, device: torch.device
) -> PrefixEngine:
    """Return the prefix engine of this name."""
    # Imported by need: FlashMLA's package is not on every machine that has Triton.
    if engine == verify_engine.FLASHMLA:
        from sglang_overlay.attention.flashmla import FlashMlaEngine

        return FlashMlaEngine(
            max_requests=sizes.max_requests, cache_dtype=cache_dtype, device=device
        )
    from sglang_overlay.attention.portable import PortableEngine

    return PortableEngine(
        page_size=sizes.page_size,
        max_requests=sizes.max_requests,
        rows=sizes.nodes * heads,
        max_context=sizes.max_context,
        cache_dtype=cache_dtype,
        device=device,
    )


def graph_tokens(backend: Any, max_bs: int, max_num_tokens: int) -> int:
    """Return for how many tokens ``backend`` needs the buffers of its own graphs.

    SGLang sizes them for every draft token of a batch, by the context and by the heads: 12.9 GB for
    48 trees of 64 tokens and 8 heads. Where the overlay verifies, nothing but a plain decode could
    read them, one token a request. EAGLE's and NGRAM's masks are made in one of them, and keep it,
    and so may those of algorithms that others registered.
    """
    verify: TreeVerify | None = getattr(backend, LIVE, None)
    if verify is None or verify.drafts.algorithm not in verify_engine.BLOCK_DRAFTS:
        return max_num_tokens
    return min(max_bs, max_num_tokens)


def attach(backend: Any, verify: TreeVerify) -> None:
    """Make ``backend`` verify through ``verify``."""
    setattr(backend, LIVE, verify)


def of(backend: Any, forward_mode: Any) -> TreeVerify | None:
    """Return the path that ``backend`` takes in ``forward_mode``, or None for SGLang's own."""
    if not forward_mode.is_target_verify():
        return None
    verify: TreeVerify | None = getattr(backend, LIVE, None)
    return verify
