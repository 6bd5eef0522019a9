"""Moving rows of SGLang's KV pools, all layers, and which pools that is known for."""

from __future__ import annotations

from typing import Any

import torch

from sglang_overlay.kvcache.mover import move_rows
from sglang_overlay.kvcache.rows import RowBuffers
from sglang_overlay.srt.ddtree.rows import row_buffers
from sglang_overlay.srt.ddtree.validation import UnsupportedServerError
from sglang_overlay.srt.kv_compaction import Mover

_MODULE = "sglang.srt.mem_cache.memory_pool"


def obstacles(pool: Any) -> list[str]:
    """Return why the rows of ``pool`` cannot be moved; nothing if they can."""
    cls = type(pool)
    # Exact classes: a subclass may keep scales or side tables by the same slots.
    if cls.__module__ != _MODULE:
        return [f"nobody knows what a {cls.__name__} keeps by slot"]
    try:
        row_buffers(pool)
    except UnsupportedServerError:
        return [f"nobody knows what a {cls.__name__} keeps by slot"]
    except ValueError as error:
        return [f"rows of its {cls.__name__} cannot be moved ({error})"]
    return []


def row_bytes(rows: RowBuffers) -> int:
    """Return the bytes that one token takes in all of ``rows``."""
    return sum(buffer[0].numel() * buffer.element_size() for buffer in rows.tensors)


def mover(rows: RowBuffers) -> Mover:
    """Return what copies rows within ``rows``; no destination is a source."""

    def move(destination: torch.Tensor, source: torch.Tensor) -> None:
        move_rows(rows, destination, source)

    return move
