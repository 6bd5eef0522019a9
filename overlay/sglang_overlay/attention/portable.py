"""The portable prefix engine: Triton, pages of 1 or 64, bf16 or fp8 (e4m3) cache, from sm_80 on.

A prefix is split over many programs, whose partial results the tree kernel combines; so a layer is
two launches. How many parts there are is fixed for a batch size; who gets which is decided once per
step on the device, by the true lengths, so a captured graph stays balanced when lengths change.
"""

from __future__ import annotations

import torch
import triton

from sglang_overlay.attention.kernels.split_prefix import share_work_kernel, split_prefix_kernel
from sglang_overlay.attention.prefix import KEY_DIM, LATENT_DIM, ROPE_DIM, PrefixParts
from sglang_overlay.attention.split_config import (
    MAX_WAVES,
    SplitConfig,
    choose_config,
    count_workers,
)

_LOG2_E = 1.4426950408889634
_FP8 = torch.float8_e4m3fn
_WORK_BLOCK = 32
# What the schedule assumes where there is no GPU to ask (the interpreter).
_NO_GPU = (80, 8)


class PortableEngine:
    """Split-KV attention over the prefix. See `prefix.PrefixEngine` for the contract.

    ``max_rows`` is nodes × heads, ``max_context`` the longest prefix in slots. ``capability`` is
    major × 10 + minor; it and ``multi_processor_count`` are asked of the device unless given.
    ``config`` replaces the tiles that would be chosen.
    """

    def __init__(
        self,
        *,
        page_size: int,
        max_requests: int,
        max_rows: int,
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
        found = _ask(device)
        self.capability = found[0] if capability is None else capability
        self._processors = found[1] if multi_processor_count is None else multi_processor_count
        self._is_fp8 = cache_dtype is _FP8
        if self._is_fp8 and self.capability < 89 and torch.device(device).type == "cuda":
            raise ValueError(
                f"cache_dtype: got {cache_dtype} on sm_{self.capability}, needed sm_89 or newer; "
                "start the server with --kv-cache-dtype auto"
            )
        self.page_size = page_size
        self._max_context = max_context
        self.config = config or choose_config(self.capability, max_rows, fp8=self._is_fp8)
        programs = self._processors * self.config.resident * MAX_WAVES
        workers = max(max_requests, programs)
        padded = -(-max_rows // self.config.rows) * self.config.rows
        room = max(max_requests * padded, programs * self.config.rows)
        self._work = torch.zeros(workers, 4, dtype=torch.int32, device=device)
        self._first_part = torch.zeros(max_requests + 1, dtype=torch.int32, device=device)
        self._part_out = torch.zeros(room * LATENT_DIM, dtype=torch.float32, device=device)
        self._part_lse = torch.zeros(room, dtype=torch.float32, device=device)
        self._request_block = triton.next_power_of_2(max_requests)
        self._workers = 0
        # Replaced by every plan; until the first there is nothing to run on.
        self._lengths = self._first_part[:0]
        self._page_table = self._work[:0]

    def plan(self, lengths: torch.Tensor, page_table: torch.Tensor, rows: int) -> None:
        """Share the prefixes out over the workers; one launch, safe to capture."""
        requests = lengths.shape[0]
        self._workers = count_workers(
            requests, rows, self._max_context, self._processors, self.config
        )
        if self._workers * rows > self._part_lse.shape[0]:
            raise ValueError(
                f"requests × rows: got {requests} × {rows}, more than the engine was built for; "
                "build it with larger max_requests and max_rows"
            )
        share_work_kernel[(-(-self._workers // _WORK_BLOCK),)](
            lengths,
            self._work,
            self._first_part,
            requests,
            self._workers,
            TILE=self.config.tile,
            LEAST_TILES=self.config.least_tiles,
            REQUESTS=self._request_block,
            WORKERS=_WORK_BLOCK,
            num_warps=4,
        )
        self._lengths = lengths
        self._page_table = page_table

    def run(
        self, query: torch.Tensor, cache: torch.Tensor, softmax_scale: float, cache_scale: float
    ) -> PrefixParts:
        """Return the attention of every part, to be combined by `tree_merge.merge_tree`."""
        tokens, heads, _ = query.shape
        requests = self._lengths.shape[0]
        nodes = tokens // requests
        rows = nodes * heads
        rows_of = cache.view(-1, KEY_DIM)
        part_out = self._part_out[: self._workers * rows * LATENT_DIM]
        part_out = part_out.view(self._workers, nodes, heads, LATENT_DIM)
        part_lse = self._part_lse[: self._workers * rows].view(self._workers, nodes, heads)
        tensors = (
            query,
            rows_of,
            self._page_table,
            self._lengths,
            self._work,
            part_out,
            part_lse,
            softmax_scale * cache_scale * _LOG2_E,
            cache_scale,
            query.stride(0),
            query.stride(1),
            rows_of.stride(0),
            self._page_table.stride(0),
        )
        grid = (-(-rows // self.config.rows), self._workers)
        sizes = {"NODES": nodes, "HEADS": heads, "PAGE": self.page_size}
        if self.config.gluon:
            from sglang_overlay.attention.kernels.split_prefix_hopper import (
                split_prefix_hopper_kernel,
            )

            split_prefix_hopper_kernel[grid](*tensors, **sizes, num_warps=self.config.warps)
        else:
            split_prefix_kernel[grid](
                *tensors,
                **sizes,
                LATENT=LATENT_DIM,
                ROPE=ROPE_DIM,
                ROWS=self.config.rows,
                TILE=self.config.tile,
                num_warps=self.config.warps,
                num_stages=self.config.stages,
            )
        return PrefixParts(out=part_out, lse=part_lse, first=self._first_part[: requests + 1])


def _ask(device: torch.device | str) -> tuple[int, int]:
    if torch.device(device).type != "cuda":
        return _NO_GPU
    properties = torch.cuda.get_device_properties(device)
    return properties.major * 10 + properties.minor, properties.multi_processor_count
