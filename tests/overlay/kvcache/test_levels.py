"""Levels: what includes what, and the refusal."""

from __future__ import annotations

import pytest
from sglang_overlay.kvcache import levels
from sglang_overlay.kvcache.levels import ImpossibleLevelError, includes, settle, wanted
from sglang_overlay.switches import IDLE, KV_LEVELS, LIVE, OFF, PLACEMENT


def test_the_operators_choice_comes_before_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for default in KV_LEVELS:
        monkeypatch.setattr(levels, "DEFAULT", default)
        assert wanted("", device="cuda") == default
        for device in ("cuda", "cpu"):
            assert [wanted(level, device=device) for level in KV_LEVELS] == list(KV_LEVELS)


def test_no_default_but_off_applies_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(levels, "DEFAULT", PLACEMENT)
    assert wanted("", device="cpu") == OFF


def test_each_level_includes_those_before_it() -> None:
    assert [includes(LIVE, level) for level in KV_LEVELS] == [True] * 4
    assert includes(PLACEMENT, PLACEMENT)
    assert not includes(PLACEMENT, IDLE)
    assert not includes(OFF, PLACEMENT)


def test_a_refusal_gives_every_reason_and_the_levels_that_are_left() -> None:
    assert settle(IDLE, [], asked=IDLE, otherwise=OFF) == IDLE
    with pytest.raises(ImpossibleLevelError) as refused:
        settle(IDLE, ["one reason", "another"], asked=IDLE, otherwise=OFF)
    assert str(refused.value) == (
        "SGLANG_OVERLAY_KV_SLOTS=idle cannot be had on this server: one reason; another. "
        "Set a lower level (off, placement), or start the server otherwise."
    )


def test_a_default_that_cannot_be_had_is_lowered_with_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    assert settle(PLACEMENT, [], asked="", otherwise=OFF) == PLACEMENT
    assert caplog.messages == []
    assert settle(PLACEMENT, ["one reason", "another"], asked="", otherwise=OFF) == OFF
    assert caplog.messages == [
        "KV slots: off, not the default placement, on this server: one reason; another"
    ]
