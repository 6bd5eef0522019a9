"""Levels: what includes what, and the refusal."""

from __future__ import annotations

import pytest
from sglang_overlay.kvcache.levels import DEFAULT, ImpossibleLevelError, includes, refuse, wanted
from sglang_overlay.switches import IDLE, KV_LEVELS, LIVE, OFF, PLACEMENT


def test_the_operators_choice_comes_before_the_default() -> None:
    assert wanted("") == DEFAULT
    assert [wanted(level) for level in KV_LEVELS] == list(KV_LEVELS)


def test_each_level_includes_those_before_it() -> None:
    assert [includes(LIVE, level) for level in KV_LEVELS] == [True] * 4
    assert includes(PLACEMENT, PLACEMENT)
    assert not includes(PLACEMENT, IDLE)
    assert not includes(OFF, PLACEMENT)


def test_a_refusal_gives_every_reason_and_the_levels_that_are_left() -> None:
    refuse(IDLE, [])
    with pytest.raises(ImpossibleLevelError) as refused:
        refuse(IDLE, ["one reason", "another"])
    assert str(refused.value) == (
        "SGLANG_OVERLAY_KV_SLOTS=idle cannot be had on this server: one reason; another. "
        "Set a lower level (off, placement), or start the server otherwise."
    )
