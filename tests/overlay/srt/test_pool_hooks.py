"""The decorator on the MLA pool, on a class that stands for it."""

from __future__ import annotations

import pytest
import torch
from sglang_overlay import switches
from sglang_overlay.srt import pool_hooks
from sglang_overlay.switches import Switches


def decorated() -> type:
    class MLATokenToKVPool:
        def __init__(self) -> None:
            self.kv_buffer = [torch.randn(12, 1, 8) for _ in range(3)]
            self.data_ptrs = torch.tensor(
                [layer.data_ptr() for layer in self.kv_buffer], dtype=torch.uint64
            )

    return pool_hooks.mla_pool(MLATokenToKVPool)


def test_a_path_moves_to_the_front_in_every_layer() -> None:
    pool = decorated()()
    before = [layer.clone() for layer in pool.kv_buffer]
    # Slot 4 is read for slot 3 and written from slot 6, as in a commit.
    pool.move_kv_cache(torch.tensor([2, 3, 4]), torch.tensor([2, 4, 6], dtype=torch.int32))
    for old, new in zip(before, pool.kv_buffer, strict=True):
        assert torch.equal(new[[2, 3, 4]], old[[2, 4, 6]])
        rest = [0, 1, 5, 6, 7, 8, 9, 10, 11]
        assert torch.equal(new[rest], old[rest])


def test_an_empty_list_moves_nothing() -> None:
    nothing = torch.empty(0, dtype=torch.int64)
    decorated()().move_kv_cache(nothing, nothing)


def test_a_subclass_with_tables_of_its_own_refuses() -> None:
    subclass = type("NSATokenToKVPool", (decorated(),), {})
    slots = torch.tensor([1])
    with pytest.raises(NotImplementedError, match=r"NSATokenToKVPool.move_kv_cache.*stay behind"):
        subclass().move_kv_cache(slots, slots)


def test_the_kill_switch_and_a_pool_that_can_move_are_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    able = type("Able", (), {"move_kv_cache": lambda pool: "stock"})
    assert pool_hooks.mla_pool(able)().move_kv_cache() == "stock"
    monkeypatch.setattr(switches, "ACTIVE", Switches(disabled=True))
    assert not hasattr(decorated(), "move_kv_cache")
