"""Moving rows of SGLang's KV pools, all layers, and which pools that is known for."""

from __future__ import annotations

from typing import Any

import torch

from sglang_overlay.srt.kv_compaction import Mover

# Exact classes: a subclass may keep scales or side tables by the same slots.
_BUFFERS = {
    "MHATokenToKVPool": ("k_buffer", "v_buffer"),
    "MLATokenToKVPool": ("kv_buffer",),
}
_MODULE = "sglang.srt.mem_cache.memory_pool"


def obstacles(pool: Any) -> list[str]:
    """Return why the rows of ``pool`` cannot be moved; nothing if they can."""
    cls = type(pool)
    if cls.__module__ == _MODULE and cls.__name__ in _BUFFERS:
        return []
    return [f"nobody knows what a {cls.__name__} keeps by slot"]


def row_bytes(pool: Any) -> int:
    """Return the bytes that one token takes in all layers of ``pool``."""
    return sum(buffer[0].numel() * buffer.element_size() for buffer in _buffers(pool))


def mover(pool: Any) -> Mover:
    """Return what copies rows of ``pool``, one of those without `obstacles`."""
    buffers = _buffers(pool)

    def move(destination: torch.Tensor, source: torch.Tensor) -> None:
        for buffer in buffers:
            buffer[destination] = buffer[source]

    return move


def _buffers(pool: Any) -> list[torch.Tensor]:
    return [buffer for name in _BUFFERS[type(pool).__name__] for buffer in getattr(pool, name)]
