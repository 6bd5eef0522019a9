"""Which requests are refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang_overlay.srt.ddtree import requests


def request(*, hidden: bool = False, embeds: Any = None, **sampling: Any) -> Any:
    greedy = {
        "temperature": 1.0,
        "top_k": 1,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_new_tokens": 0,
    }
    return SimpleNamespace(
        sampling_params=SimpleNamespace(**(greedy | sampling)),
        return_hidden_states=hidden,
        positional_embed_overrides=embeds,
        custom_logit_processor="processor",
    )


def test_a_greedy_request_is_served() -> None:
    assert requests.refusal(request(), None) is None


@pytest.mark.parametrize("stock", [None, "DFLASH does not support it."])
def test_a_refused_request_is_left_nothing_that_its_batch_would_feel(stock: str | None) -> None:
    asked = request(hidden=True, embeds="embeds", top_k=40, temperature=0.9)
    assert requests.admit(asked, stock) == requests.refusal(request(hidden=True), stock)
    # All requests of a batch have top_k 1, or all go through the random sampler.
    assert asked.sampling_params.top_k == 1
    assert asked.positional_embed_overrides is None
    assert asked.custom_logit_processor is None
    assert not asked.return_hidden_states


def test_a_request_that_is_served_keeps_what_it_asked_for() -> None:
    asked = request()
    assert requests.admit(asked, None) is None
    assert asked.custom_logit_processor == "processor"


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
        ({"hidden": True}, "return_hidden_states:"),
        ({"embeds": "embeds"}, "positional_embed_overrides:"),
    ],
)
def test_what_a_verify_of_trees_cannot_give_is_refused(
    sampling: dict[str, Any], named: str
) -> None:
    message = requests.refusal(request(**sampling), None)
    assert message is not None
    assert named in message
