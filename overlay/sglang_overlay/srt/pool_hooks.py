"""The decorator on SGLang's MLA pool; apart from `hooks`, the file that imports it has torch.

With ``SGLANG_OVERLAY_DISABLE=1`` it returns SGLang's own class as it is.
"""

from __future__ import annotations

from typing import Any

from sglang_overlay import switches
from sglang_overlay.kvcache.mover import move_rows
from sglang_overlay.kvcache.rows import RowBuffers

_ROWS = "overlay_rows"


def mla_pool(stock: type) -> type:
    """Decorate ``MLATokenToKVPool``: give it the ``move_kv_cache`` that SGLang's MHA pool has.

    SGLang's commits of paged trees call it: an accepted path moves to the front of its slots, so
    targets and sources overlap. Lists that a commit makes are in the order that `move_rows` asks.
    """
    if switches.ACTIVE.disabled or hasattr(stock, "move_kv_cache"):
        return stock

    def move_kv_cache(pool: Any, tgt_loc: Any, src_loc: Any) -> None:
        """Copy the rows ``src_loc`` [rows] to ``tgt_loc`` [rows] in every layer.

        Raises:
            NotImplementedError: a subclass keeps scales or an index by the same slots, which would
                stay behind.
        """
        if _class_of(pool) is not stock:
            raise NotImplementedError(
                f"{type(pool).__name__}.move_kv_cache: rows are moved in {stock.__name__} itself "
                "only; what this subclass keeps beside them would stay behind. Set --page-size 1, "
                "or another --kv-cache-dtype"
            )
        rows = getattr(pool, _ROWS, None)
        if rows is None:
            rows = RowBuffers.of(pool.kv_buffer, pool.data_ptrs)
            setattr(pool, _ROWS, rows)
        move_rows(rows, tgt_loc, src_loc, overlap=True)

    stock.move_kv_cache = move_kv_cache  # type: ignore[attr-defined]
    return stock


def _class_of(pool: Any) -> type:
    # Apart, so that a type checker does not take the pool for a bare `type` behind the comparison.
    return type(pool)
