"""The environment variables of the overlay."""

from __future__ import annotations

import pytest
from sglang_overlay.switches import (
    ALLOW_DROPPED_MASK,
    DISABLE,
    FORCE_TREE,
    KV_LEVELS,
    KV_SLOTS,
    VERIFY_ENGINE,
    Switches,
    read_switches,
)


def test_all_is_off_by_default() -> None:
    assert read_switches({}) == Switches(disabled=False, allow_dropped_mask=False)
    assert read_switches({DISABLE: "0", ALLOW_DROPPED_MASK: ""}) == Switches()


def test_one_switches_on() -> None:
    assert read_switches({DISABLE: "1"}).disabled
    assert read_switches({ALLOW_DROPPED_MASK: "1"}).allow_dropped_mask
    assert read_switches({FORCE_TREE: "1"}).force_tree


@pytest.mark.parametrize("engine", ["flashmla", "stock", ""])
def test_an_engine_is_named(engine: str) -> None:
    assert read_switches({VERIFY_ENGINE: engine}).verify_engine == engine


@pytest.mark.parametrize("value", ["1", "triton", "Stock"])
def test_an_unknown_engine_is_an_error(value: str) -> None:
    with pytest.raises(
        ValueError, match="is not understood: set it to flashmla, portable or stock, or unset"
    ):
        read_switches({VERIFY_ENGINE: value})


@pytest.mark.parametrize("value", ["true", "yes", "2", " 1"])
def test_a_misspelt_switch_is_an_error(value: str) -> None:
    with pytest.raises(ValueError, match="is not understood: set it to 1, or to 0, or unset it"):
        read_switches({DISABLE: value})


@pytest.mark.parametrize("level", ["", *KV_LEVELS])
def test_a_level_for_kv_slots_is_named(level: str) -> None:
    assert read_switches({KV_SLOTS: level}).kv_slots == level


@pytest.mark.parametrize("value", ["1", "on", "Idle"])
def test_an_unknown_level_is_an_error(value: str) -> None:
    with pytest.raises(ValueError, match="set it to off, placement, idle or live, or unset it"):
        read_switches({KV_SLOTS: value})
