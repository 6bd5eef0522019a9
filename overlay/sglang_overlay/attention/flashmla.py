"""The prefix engine on FlashMLA: sm_90, pages of 64, bf16 or fp8 (e4m3) cache.

Four choices differ from what SGLang's FlashMLA backend does for a chain:

- The scheduler is planned for prefix lengths, not for prefix + tree: a plan for other lengths
  splits the work at the wrong blocks.
- The plan is FlashMLA's own, made by a kernel of the overlay (`flashmla_schedule`). Its op makes it
  where the kernel and this FlashMLA do not agree on a plan at the start.
- Nodes and heads go in as one axis of heads with a query length of 1. Without a mask they are the
  same computation, and the lse then comes out in token order, as one plain [tokens, heads] array.
- fp8: the query is quantised with scale 1 and saturation, and keys are read with ``cache_scale``.
  SGLang stores an fp8 cache without dividing by ``k_scale``, so its cache is read with scale 1.
"""

from __future__ import annotations

import logging

import torch
from sgl_kernel.flash_mla import flash_mla_with_kvcache, get_mla_metadata

from sglang_overlay.attention.flashmla_schedule import (
    FIELDS,
    PAGE_SIZE,
    Layout,
    layout_of,
    parts_for,
    plan_schedule,
)
from sglang_overlay.attention.kernels.quantize import saturate_kernel
from sglang_overlay.attention.prefix import KEY_DIM, LATENT_DIM, PrefixResult

_FP8 = torch.float8_e4m3fn
# Requests that a plan cuts, leaves whole and puts together; see `layout_of`.
_PROBE = [40_000, 1, 64, 65, 9_000, 63, 128, 2_000]
logger = logging.getLogger(__name__)


class FlashMlaEngine:
    """Non-causal FlashMLA over the prefix. See `prefix.PrefixEngine` for the contract."""

    page_size = PAGE_SIZE

    def __init__(
        self, *, max_requests: int, cache_dtype: torch.dtype, device: torch.device | str
    ) -> None:
        if cache_dtype not in (torch.bfloat16, _FP8):
            raise ValueError(
                f"cache_dtype: got {cache_dtype}, needed torch.bfloat16 or {_FP8}; "
                "start the server with another --kv-cache-dtype or another prefix engine"
            )
        self._is_fp8 = cache_dtype is _FP8
        self._processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._schedule = torch.zeros(self._processors, FIELDS, dtype=torch.int32, device=device)
        self._splits = torch.zeros(max_requests + 1, dtype=torch.int32, device=device)
        self._parts = 0
        # Replaced by every plan; until the first there is nothing to run on.
        self._lengths = self._splits[:0]
        self._page_table = self._schedule[:0]
        self._scales: dict[float, torch.Tensor] = {}
        self._device = device
        self._layout = self._layout_of_this_flashmla()

    @property
    def layout(self) -> Layout | None:
        """The layout in which plans are made here; None where FlashMLA's op makes them."""
        return self._layout

    def _layout_of_this_flashmla(self) -> Layout | None:
        probe = torch.tensor(_PROBE, dtype=torch.int32, device=self._device)
        rows = 1
        schedule, splits = get_mla_metadata(probe, rows, 1, is_fp8_kvcache=self._is_fp8)
        known = schedule.shape[0] == parts_for(rows, self._processors)
        layouts = [Layout.SLOTS] if self._is_fp8 else [Layout.FLAGS, Layout.BLOCKS]
        layout = layout_of(probe, schedule, splits, layouts) if known else None
        if layout is None:
            logger.warning("This FlashMLA plans another way than the overlay: its own op will plan")
        return layout

    def plan(self, lengths: torch.Tensor, page_table: torch.Tensor, rows: int) -> None:
        """Plan FlashMLA's tiles for these prefix lengths into the static buffers."""
        if self._layout is None:
            self.plan_by_op(lengths, rows)
        else:
            self._parts = parts_for(rows, self._processors)
            plan_schedule(lengths, self._schedule[: self._parts], self._splits, self._layout)
        self._lengths = lengths
        self._page_table = page_table

    def plan_by_op(self, lengths: torch.Tensor, rows: int) -> None:
        """Plan with FlashMLA's own op into the static buffers, as `plan` does without it."""
        schedule, splits = get_mla_metadata(lengths, rows, 1, is_fp8_kvcache=self._is_fp8)
        self._parts = schedule.shape[0]
        # One launch for both; the op itself cannot write into given buffers.
        torch._foreach_copy_(
            [self._schedule[: self._parts], self._splits[: splits.shape[0]]], [schedule, splits]
        )

    def run(
        self, query: torch.Tensor, cache: torch.Tensor, softmax_scale: float, cache_scale: float
    ) -> PrefixResult:
        """Return out [tokens, heads, 512] and natural-log lse [tokens, heads] over the prefixes."""
        tokens, heads, _ = query.shape
        requests = self._lengths.shape[0]
        scales: dict[str, torch.Tensor] = {}
        if self._is_fp8:
            folded = _saturated(query).view(requests, 1, -1, KEY_DIM)
            scales = {"descale_q": self._scale(1.0), "descale_k": self._scale(cache_scale)}
        elif cache_scale != 1.0:
            raise ValueError(f"cache_scale: got {cache_scale} for a bf16 cache, needed 1.0")
        else:
            folded = query.reshape(requests, 1, -1, KEY_DIM)
        out, lse = flash_mla_with_kvcache(
            folded,
            cache.view(-1, PAGE_SIZE, 1, KEY_DIM),
            self._page_table,
            self._lengths,
            LATENT_DIM,
            self._schedule[: self._parts],
            self._splits[: requests + 1],
            softmax_scale,
            False,
            **scales,
        )
        return PrefixResult(out=out.view(tokens, heads, LATENT_DIM), lse=lse.reshape(tokens, heads))

    def _scale(self, value: float) -> torch.Tensor:
        # One tensor per value, made at the first (uncaptured) call: a graph must not copy from the
        # host.
        if value not in self._scales:
            self._scales[value] = torch.tensor([value], dtype=torch.float32, device=self._device)
        return self._scales[value]


def _saturated(query: torch.Tensor) -> torch.Tensor:
    """Return ``query`` in fp8, values beyond ±448 clamped, where torch's cast gives NaN."""
    tokens, heads, width = query.shape
    out = torch.empty(tokens, heads, width, dtype=_FP8, device=query.device)
    saturate_kernel[(tokens * heads,)](
        query,
        out,
        query.stride(0),
        query.stride(1),
        heads,
        LIMIT=torch.finfo(_FP8).max,
        WIDTH=width,
        BLOCK=1024,
        num_warps=2,
    )
    return out
