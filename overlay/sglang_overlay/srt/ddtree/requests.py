"""The requests that DDTREE cannot serve exactly: refused one by one, by name."""

from __future__ import annotations

from typing import Any

from sglang_overlay.srt.ddtree import NAME


def admit(request: Any, stock: str | None) -> str | None:
    """Return `refusal`'s answer, and make a request that is refused harmless to its neighbours.

    SGLang lets it through one prefill, of one token, together with others, before it ends.
    """
    reason = refusal(request, stock)
    if reason is not None:
        # One that samples takes the greedy others of its batch into the random sampler.
        request.sampling_params.top_k = 1
        request.custom_logit_processor = None
        request.return_hidden_states = False
        # Would be scattered into the trees of whoever shares the batch afterwards.
        request.positional_embed_overrides = None
    return reason


def refusal(request: Any, stock: str | None) -> str | None:
    """Return why ``request`` (SGLang's ``Req``) is refused, or None where it is served.

    ``stock`` is SGLang's own answer for DFLASH: log-probabilities and grammars.
    """
    if stock is not None:
        return stock.replace("DFLASH", NAME)
    if request.return_hidden_states:
        return (
            f"{NAME} speculative decoding does not support return_hidden_states: a verify has the "
            "drafter's features of a tree, not the hidden states of the output."
        )
    if request.positional_embed_overrides is not None:
        return (
            f"{NAME} speculative decoding does not support positional_embed_overrides: SGLang "
            "leaves them in the batch, whose next tokens are a tree's."
        )
    sampling = request.sampling_params
    # What a verify of several tokens at once cannot keep count of.
    penalties = {
        "frequency_penalty": sampling.frequency_penalty != 0.0,
        "presence_penalty": sampling.presence_penalty != 0.0,
        "repetition_penalty": sampling.repetition_penalty != 1.0,
        "min_new_tokens": sampling.min_new_tokens > 0,
    }
    asked = [name for name, holds in penalties.items() if holds]
    if asked:
        return (
            f"{NAME} speculative decoding does not support {', '.join(asked)}: the penalty changes "
            "with every token, and a tree is verified at once."
        )
    # SGLang turns a temperature of 0 into top_k 1.
    if sampling.top_k != 1:
        return (
            f"{NAME} speculative decoding does not support sampling yet: set temperature to 0 "
            f"(got temperature {sampling.temperature}, top_k {sampling.top_k})."
        )
    return None
