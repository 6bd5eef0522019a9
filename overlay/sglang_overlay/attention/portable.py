"""The portable prefix engine: pages of 1 or 64, bf16 or fp8 (e4m3) cache, from sm_80 on.

A prefix is split over many programs, whose partial results the tree kernel combines; so a layer is
two launches. How many parts there are is fixed for a batch size; who gets which is decided once per
step on the device, by the true lengths, so a captured graph stays balanced when lengths change.
"""

from __future__ import annotations

import torch

from sglang_overlay.attention.kernels.split_prefix import split_prefix_kernel
from sglang_overlay.attention.parts import Parts, PartSizes
from sglang_overlay.attention.prefix import KEY_DIM, LATENT_DIM, ROPE_DIM, PrefixParts
from sglang_overlay.attention.split_config import SplitConfig, choose_config

_LOG2_E = 1.4426950408889634
_FP8 = torch.float8_e4m3fn
# Where there is no GPU to ask, the interpreter takes Triton's kernel.
_NO_GPU = 0


class PortableEngine:
    """Split-KV attention over the prefix. See `prefix.PrefixEngine` for the contract.

    ``rows`` is nodes × heads, ``max_context`` the longest prefix in slots. ``capability`` is
    major × 10 + minor; it and ``multi_processor_count`` are asked of the device unless given.
    ``config`` replaces the tiles that would be chosen.
    """

    def __init__(
        self,
        *,
        page_size: int,
        max_requests: int,
        rows: int,
        max_context: int,
        cache_dtype: torch.dtype,
        device: torch.device | str,
        capability: int | None = None,
        multi_processor_count: int | None = None,
        config: SplitConfig | None = None,
    ) -> None:
        """Allocate the static buffers.

        Raises:
            ValueError: a page size other than 1 or 64, or fp8 on a GPU whose compiler has none.

        """
        if page_size not in (1, 64):
            raise ValueError(
                f"page_size: got {page_size}, needed 1 or 64; start the server with another "
                "--page-size or another verify engine"
            )
        self.capability = _ask(device) if capability is None else capability
        self._is_fp8 = cache_dtype is _FP8
        if self._is_fp8 and self.capability < 89 and torch.device(device).type == "cuda":
            raise ValueError(
                f"cache_dtype: got {cache_dtype} on sm_{self.capability}, needed sm_89 or newer; "
                "start the server with --kv-cache-dtype auto"
            )
        self.page_size = page_size
        self._rows = rows
        self.config = config or choose_config(self.capability, fp8=self._is_fp8)
        sizes = PartSizes(
            max_requests=max_requests,
            max_context=max_context,
            blocks=-(-rows // self.config.rows),
            rows=rows,
            width=LATENT_DIM,
        )
        self._parts = Parts(sizes, self.config, device, processors=multi_processor_count)
        # Replaced by every plan; until the first there is nothing to run on.
        self._lengths = self._parts.first[:0]
        self._page_table = self._parts.work[:0]

    def plan(self, lengths: torch.Tensor, page_table: torch.Tensor, rows: int) -> None:
        """Share the prefixes out over the workers; one launch, safe to capture.

        Raises:
            ValueError: ``rows`` are not those that the engine was built for.

        """
        if rows != self._rows:
            raise ValueError(
                f"rows: got {rows}, needed {self._rows} nodes × heads, which the engine was built "
                "for; build one for this size of a tree"
            )
        self._parts.plan(lengths)
        self._lengths = lengths
        self._page_table = page_table

    def run(
        self, query: torch.Tensor, cache: torch.Tensor, softmax_scale: float, cache_scale: float
    ) -> PrefixParts:
        """Return the attention of every part, to be combined by `tree_merge.merge_tree`.

        Raises:
            ValueError: the query has another number of rows than was planned for, or the cache is
                neither of its type nor fp8.

        """
        tokens, heads, _ = query.shape
        requests = self._lengths.shape[0]
        nodes = self._rows // heads
        if tokens != requests * nodes:
            raise ValueError(
                f"query: got {tokens} tokens, needed {requests} requests × {nodes} nodes; pass the "
                "rows of the step that was planned"
            )
        if cache.dtype not in (query.dtype, _FP8):
            raise ValueError(
                f"cache: got {cache.dtype}, needed the query's {query.dtype} or {_FP8}; start the "
                "server with --kv-cache-dtype auto"
            )
        rows_of = cache.view(-1, KEY_DIM)
        part_out, part_lse = self._parts.buffers()
        tensors = (
            query,
            rows_of,
            self._page_table,
            self._lengths,
            self._parts.work,
            part_out,
            part_lse,
            softmax_scale * cache_scale * _LOG2_E,
            cache_scale,
            query.stride(0),
            query.stride(1),
            rows_of.stride(0),
            self._page_table.stride(0),
        )
        grid = (-(-nodes * heads // self.config.rows), self._parts.workers)
        sizes = {"NODES": nodes, "HEADS": heads, "PAGE": self.page_size}
        warps = self.config.warps
        if self.config.kernel == "wgmma":
            from sglang_overlay.attention.kernels.split_prefix_hopper import (
                split_prefix_hopper_kernel,
            )

            # These are the warps of one role of four.
            split_prefix_hopper_kernel[grid](*tensors, **sizes, num_warps=warps // 4)
        elif self.config.kernel == "mma":
            from sglang_overlay.attention.kernels.split_prefix_mma import split_prefix_mma_kernel

            split_prefix_mma_kernel[grid](*tensors, **sizes, num_warps=warps)
        else:
            split_prefix_kernel[grid](
                *tensors,
                **sizes,
                LATENT=LATENT_DIM,
                ROPE=ROPE_DIM,
                ROWS=self.config.rows,
                TILE=self.config.tile,
                num_warps=warps,
                num_stages=self.config.stages,
            )
        return PrefixParts(
            out=part_out.view(-1, nodes, heads, LATENT_DIM),
            lse=part_lse.view(-1, nodes, heads),
            first=self._parts.first[: requests + 1],
        )


def _ask(device: torch.device | str) -> int:
    if torch.device(device).type != "cuda":
        return _NO_GPU
    major, minor = torch.cuda.get_device_capability(device)
    return int(major * 10 + minor)
