"""Which requests are refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang_overlay.srt.ddtree import requests


def request(**sampling: Any) -> Any:
    greedy = {
        "temperature": 1.0,
        "top_k": 1,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_new_tokens": 0,
    }
    return SimpleNamespace(sampling_params=SimpleNamespace(**(greedy | sampling)))


def test_a_greedy_request_is_served() -> None:
    assert requests.refusal(request(), None) is None


def test_sglangs_own_refusal_is_told_in_ddtrees_name() -> None:
    told = requests.refusal(request(), "DFLASH speculative decoding does not support it.")
    assert told == "DDTREE speculative decoding does not support it."


@pytest.mark.parametrize(
    ("sampling", "named"),
    [
        ({"top_k": 1 << 30, "temperature": 0.7}, "sampling yet"),
        ({"top_k": 2}, "sampling yet"),
        ({"frequency_penalty": 0.1}, "frequency_penalty:"),
        ({"presence_penalty": -1.0, "min_new_tokens": 1}, "presence_penalty, min_new_tokens:"),
        ({"repetition_penalty": 1.1}, "repetition_penalty:"),
    ],
)
def test_what_changes_with_every_token_is_refused(sampling: dict[str, Any], named: str) -> None:
    message = requests.refusal(request(**sampling), None)
    assert message is not None
    assert named in message
