"""The rows of the target's KV pool that a commit on pages moves."""

from __future__ import annotations

from typing import Any

from sglang_overlay.kvcache.rows import RowBuffers
from sglang_overlay.srt.ddtree.validation import UnsupportedServerError

# By class: the attributes with the layers' buffers. A subclass has tables beside them that would
# stay behind (scales, an index), so it is none of these.
_BUFFERS = {
    "MLATokenToKVPool": ("kv_buffer",),
    "MHATokenToKVPool": ("k_buffer", "v_buffer"),
}


def row_buffers(pool: Any) -> RowBuffers:
    """Return every layer's buffers of ``pool``.

    Raises:
        UnsupportedServerError: the pool is of a class whose rows cannot be moved.
    """
    name = type(pool).__name__
    if name not in _BUFFERS:
        raise UnsupportedServerError(
            f"DDTREE moves accepted rows on pages, and cannot in a {name}: it knows "
            f"{' and '.join(_BUFFERS)}. Set --page-size 1, or another --kv-cache-dtype."
        )
    return RowBuffers.of([layer for each in _BUFFERS[name] for layer in getattr(pool, each)])
