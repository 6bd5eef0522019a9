"""Device memory for static buffers: asked for before they are made, so that a refusal has numbers.

SGLang has shared out the memory by then, without an account of these buffers.
"""

from __future__ import annotations

import logging

import torch

_GIB = float(1 << 30)
logger = logging.getLogger(__name__)


class BufferMemoryError(ValueError):
    """The device has not the memory that the buffers of a verify need."""


def require(what: str, needed: int, device: torch.device | str) -> None:
    """Log that ``what`` takes ``needed`` bytes of ``device``; only a CUDA device is asked.

    Raises:
        BufferMemoryError: it has fewer.
    """
    if torch.device(device).type != "cuda":
        return
    free, _ = torch.cuda.mem_get_info(device)
    # What torch holds back for the next allocations can be had as well.
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if needed > free:
        raise BufferMemoryError(
            f"{what}: got {free / _GIB:.2f} GiB of free GPU memory, needed {needed / _GIB:.2f}; "
            "start the server with a lower --max-running-requests or --mem-fraction-static"
        )
    logger.info("The overlay's verify takes %.2f GiB of GPU memory: %s", needed / _GIB, what)
