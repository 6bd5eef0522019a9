"""Prefixes cut into parts: who computes which, decided on the device, and where they are kept."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from sglang_overlay.attention.kernels.split_prefix import share_work_kernel
from sglang_overlay.attention.memory import require
from sglang_overlay.attention.split_config import MAX_WAVES, SplitConfig, count_workers

# A program shares out work for up to so many workers, and holds so many cells, workers × requests:
# with more it would spill, and take half a minute to compile.
_WORK_BLOCK, _WORK_CELLS = 32, 16_384
# Multiprocessors that are assumed where there is no GPU to ask (the interpreter).
_NO_GPU = 8


@dataclass(frozen=True, kw_only=True)
class PartSizes:
    """Upper bounds for the life of a server.

    ``blocks`` programs work on one part; a part has ``rows`` results of ``width`` float32 values.
    """

    max_requests: int
    max_context: int
    blocks: int
    rows: int
    width: int


class Parts:
    """The shares of work and the partial results of one verify step, in static buffers.

    ``work`` and ``first`` are as `kernels.split_prefix.share_work_kernel` writes them; ``workers``
    is the number of parts of the step that was planned last.
    """

    def __init__(
        self,
        sizes: PartSizes,
        config: SplitConfig,
        device: torch.device | str,
        *,
        processors: int | None = None,
    ) -> None:
        """Allocate the buffers; ``processors`` replaces the number of multiprocessors.

        Raises:
            BufferMemoryError: the GPU has not the memory.
        """
        self._sizes = sizes
        self._config = config
        self._processors = processors or multiprocessors(device)
        programs = self._processors * config.resident * MAX_WAVES
        most = max(sizes.max_requests, programs)
        # No batch has more parts than requests, unless all its programs fit these waves.
        room = max(sizes.max_requests, -(-programs // sizes.blocks)) * sizes.rows
        values = most * 4 + sizes.max_requests + 1 + room * (sizes.width + 1)
        require(f"partial results of {sizes.max_requests} requests", values * 4, device)
        self.work = torch.zeros(most, 4, dtype=torch.int32, device=device)
        self.first = torch.zeros(sizes.max_requests + 1, dtype=torch.int32, device=device)
        self._out = torch.zeros(room * sizes.width, dtype=torch.float32, device=device)
        self._lse = torch.zeros(room, dtype=torch.float32, device=device)
        self._request_block = triton.next_power_of_2(sizes.max_requests)
        self._work_block = max(1, min(_WORK_BLOCK, _WORK_CELLS // self._request_block))
        self.workers = 0

    def plan(self, lengths: torch.Tensor) -> None:
        """Share prefixes of these ``lengths`` [requests] int32 out; one launch, safe to capture."""
        requests = lengths.shape[0]
        sizes, config = self._sizes, self._config
        self.workers = count_workers(
            requests, sizes.blocks * config.rows, sizes.max_context, self._processors, config
        )
        assert self.workers * sizes.rows <= self._lse.numel(), "the buffers hold every batch"
        share_work_kernel[(-(-self.workers // self._work_block),)](
            lengths,
            self.work,
            self.first,
            requests,
            self.workers,
            TILE=config.tile,
            LEAST_TILES=config.least_tiles,
            REQUESTS=self._request_block,
            WORKERS=self._work_block,
            num_warps=4,
        )

    def buffers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return out [workers, rows, width] and lse [workers, rows], float32, for the step."""
        rows, width = self._sizes.rows, self._sizes.width
        out = self._out[: self.workers * rows * width].view(self.workers, rows, width)
        return out, self._lse[: self.workers * rows].view(self.workers, rows)


def multiprocessors(device: torch.device | str) -> int:
    """Return the multiprocessors of ``device``, or a small number where it is no GPU."""
    if torch.device(device).type != "cuda":
        return _NO_GPU
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
