"""SGLang's own MLA pool, as a server has it, moves rows once the overlay is applied."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.engine.launch import Launch
from tests.support.engine.scene import play

pytestmark = pytest.mark.engine


def move_an_accepted_path(bed: Any) -> dict[str, Any]:
    """Scene: rows 70, 73, 74 move to 70, 71, 72 as EAGLE's commit asks; 73 is written after."""
    import torch
    from sglang.srt.mem_cache import memory_pool

    pool = bed.scheduler.token_to_kv_pool_allocator.get_kvcache()
    if not hasattr(pool, "move_kv_cache"):
        return {"moves": False}
    from sglang_overlay import upstream

    for layer in pool.kv_buffer:
        layer.normal_()
    before = [layer.clone() for layer in pool.kv_buffer]
    targets, sources = torch.tensor([70, 71, 72, 73]), torch.tensor([70, 73, 74, 72])
    pool.move_kv_cache(targets, sources)
    for layer in before:
        layer[targets] = layer[sources]
    refused, able = [], [upstream.moves_rows(pool)]
    for name in ("MLATokenToKVPoolFP4", "NSATokenToKVPool"):
        made = object.__new__(getattr(memory_pool, name))
        able.append(upstream.moves_rows(made))
        try:
            made.move_kv_cache(targets, sources)
        except NotImplementedError as error:
            refused.append(str(error).split(".")[0])
    return {
        "moves": True,
        "pool": type(pool).__name__,
        "layers": len(before),
        "same": all(torch.equal(a, b) for a, b in zip(before, pool.kv_buffer, strict=True)),
        "known": upstream.mla_pool_moves_rows(),
        "refused": refused,
        "able": able,
    }


def test_the_pool_moves_rows_and_its_subclasses_refuse(overlay: Path) -> None:
    result = play(move_an_accepted_path, Launch(tree=overlay)).result
    assert result["pool"] == "MLATokenToKVPool"
    assert result["layers"] > 1
    assert result["same"]
    assert result["known"]
    assert result["able"] == [True, False, False]
    assert result["refused"] == ["MLATokenToKVPoolFP4", "NSATokenToKVPool"]


def test_the_stock_pool_cannot(stock: Path) -> None:
    assert play(move_an_accepted_path, Launch(tree=stock)).result == {"moves": False}
