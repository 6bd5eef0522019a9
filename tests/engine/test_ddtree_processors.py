"""Custom logit processors under DDTREE: plain decoding's tokens, call for call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.test_ddtree import Words, ddtree
from tests.support.engine.launch import Launch
from tests.support.engine.quick import quicken
from tests.support.engine.scene import play
from tests.support.engine.workload import SMALL

pytestmark = pytest.mark.engine

START, END, NEW_LINE = 300, 301, 302
STOP = 257
SCRIPT = [11, 12, 13, 14, 15, 16, 17, STOP]
# Each sort's prompt is its own, so that drafts are told apart by it.
PROMPTS = {
    "free": [START, *SMALL.prompts[0][:9]],
    "large budget": [START, *SMALL.prompts[0][:7]],
    "small budget": [START, *SMALL.prompts[1][:12]],
    "no repetition": [*SMALL.prompts[1][:12]],
    "counted": [*SMALL.prompts[0][:9]],
    "script": [*SMALL.prompts[1][:5]],
    "forced": [*SMALL.prompts[0][:5]],
}


def process(bed: Any, prompts: dict[str, list[int]], tokens: int, quick: bool) -> dict[str, Any]:
    """Scene: requests with processors of every sort, together."""
    import torch
    from sglang.srt.sampling import custom_logit_processor as stock

    class Budget(stock.ThinkingBudgetLogitProcessor):  # type: ignore[misc]
        THINKING_START_TOKEN_ID = START
        THINKING_END_TOKEN_ID = END
        NEW_LINE_TOKEN_ID = NEW_LINE

    class Count(stock.CustomLogitProcessor):  # type: ignore[misc]
        """Forbids the best token at every third call, and writes down how often it was called."""

        def __call__(self, logits: torch.Tensor, custom_param_list: Any = None) -> torch.Tensor:
            for row, params in enumerate(custom_param_list):
                params["calls"] += 1
                if params["calls"] % 3 == 0:
                    logits[row, logits[row].argmax()] = float("-inf")
            return logits

    class Script(stock.CustomLogitProcessor):  # type: ignore[misc]
        """Forces the tokens of a list, and has no answer behind its end."""

        def __call__(self, logits: torch.Tensor, custom_param_list: Any = None) -> torch.Tensor:
            for row, params in enumerate(custom_param_list):
                logits[row, params["script"][len(params["__req__"].output_ids)]] = 1000.0
            return logits

    class Force(stock.CustomLogitProcessor):  # type: ignore[misc]
        """Forces one token at every second place."""

        def __call__(self, logits: torch.Tensor, custom_param_list: Any = None) -> torch.Tensor:
            for row, params in enumerate(custom_param_list):
                logits[row, 5 if len(params["__req__"].output_ids) % 2 else 6] = 1000.0
            return logits

    if quick:
        quicken(bed)
    bed.scheduler.tokenizer = Words()
    ngram = stock.DeepseekOCRNoRepeatNGramLogitProcessor
    # Added first; added last it would forbid what the processor forces.
    bias = {"5": -2000.0}
    asked: dict[str, tuple[Any, dict[str, Any]]] = {
        "free": (None, {}),
        "large budget": (Budget, {"custom_params": {"thinking_budget": 1000}}),
        "small budget": (Budget, {"custom_params": {"thinking_budget": 18}}),
        "no repetition": (ngram, {"custom_params": {"ngram_size": 2, "window_size": 60}}),
        "counted": (Count, {"custom_params": {"calls": 0}}),
        "script": (Script, {"custom_params": {"script": SCRIPT}, "ignore_eos": False}),
        "forced": (Force, {"custom_params": {}, "logit_bias": bias}),
    }
    done = {}
    for name, (processor, sampling) in asked.items():
        fields = {"custom_logit_processor": processor and processor.to_str()}
        done[name] = bed.submit(prompts[name], tokens=tokens, asked=fields, **sampling)
    bed.run()
    return {
        "tokens": {name: list(request.output_ids) for name, request in done.items()},
        "reasons": {name: str(request.finished_reason.to_json()) for name, request in done.items()},
        "calls": done["counted"].sampling_params.custom_params["calls"],
    }


@pytest.mark.parametrize(
    ("attention", "page"),
    [("flashmla", 64), pytest.param("triton", 1, marks=pytest.mark.full)],
)
def test_processors_give_plains_tokens(
    stock: Path, overlay: Path, attention: str, page: int
) -> None:
    """The two thinking budgets index rows by request; both count a path's own tokens."""
    options = (("enable_custom_logit_processor", True), ("max_running_requests", len(PROMPTS)))
    scene: dict[str, Any] = {"prompts": PROMPTS, "tokens": 24}
    plain = play(process, Launch(tree=stock, options=options).plain(), quick=False, **scene).result
    known = tuple((tuple(prompt), tuple(plain["tokens"][name])) for name, prompt in PROMPTS.items())
    launch = ddtree(overlay, attention, page, options=options)
    report = play(process, launch, known=known, quick=True, **scene)
    assert report.result == plain
    # Each sort did something, and drafts were accepted behind what a processor had chosen.
    assert plain["tokens"]["small budget"][6:8] == [NEW_LINE, END]
    assert plain["tokens"]["script"] == SCRIPT
    assert plain["tokens"]["forced"] == [6, 5] * 12
    assert plain["calls"] == 24
    assert max(count for step in report.steps[0] for count in step.committed) > 3
