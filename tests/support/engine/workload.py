"""The bed's standard runs: fixed prompts, greedy tokens, and what was counted meanwhile."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any

from tests.support.engine.launch import Launch
from tests.support.engine.orders import Known
from tests.support.engine.record import Step
from tests.support.engine.scene import Driver, play

Tokens = tuple[int, ...]
Rounds = tuple[tuple[Tokens, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Prompts of one round run together, rounds one after the other; ``tokens`` new ones each."""

    rounds: Rounds
    tokens: int

    @property
    def prompts(self) -> tuple[Tokens, ...]:
        """Return all prompts in order."""
        return tuple(prompt for prompts in self.rounds for prompt in prompts)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a workload gave, prompt by prompt: new tokens, and prompt tokens found in the cache."""

    workload: Workload
    tokens: tuple[Tokens, ...]
    cached: Tokens
    steps: tuple[tuple[Step, ...], ...]

    def known(self) -> Known:
        """Return the run as a source of known-good drafts for another one."""
        return tuple(zip(self.workload.prompts, self.tokens, strict=True))

    def committed(self) -> set[int]:
        """Return every number of tokens that some verify step committed for some request."""
        return {count for rank in self.steps for step in rank for count in step.committed}


def _random_tokens(count: int, *, seed: int) -> Tokens:
    random = Random(seed)
    return tuple(random.randrange(256) for _ in range(count))


_HEAD = _random_tokens(130, seed=0)

STANDARD = Workload(
    # A shared head of two pages, a batch of unequal contexts, and one long context alone.
    rounds=(
        (_HEAD + _random_tokens(5, seed=1),),
        (
            _HEAD + _random_tokens(40, seed=2),
            _HEAD + _random_tokens(61, seed=3),
            _random_tokens(20, seed=4),
        ),
        (_random_tokens(400, seed=5),),
    ),
    tokens=44,
)

# For kernels in the Triton interpreter, which take about a second per step.
SMALL = Workload(rounds=((_random_tokens(20, seed=6), _random_tokens(33, seed=7)),), tokens=36)


@cache
def generate(
    launch: Launch,
    workload: Workload,
    *,
    driver: Driver = "stepper",
    known: Known = (),
    fault: str = "",
) -> Outcome:
    """Run ``workload`` in a fresh process; equal calls within a session share one run.

    Raises what `play` raises.
    """
    report = play(
        generate_by_steps if driver == "stepper" else generate_by_engine,
        launch,
        driver=driver,
        known=known,
        fault=fault,
        rounds=workload.rounds,
        tokens=workload.tokens,
    )
    return Outcome(
        workload=workload,
        tokens=tuple(map(tuple, report.result["tokens"])),
        cached=tuple(report.result["cached"]),
        steps=report.steps,
    )


def generate_by_steps(bed: Any, rounds: list[list[list[int]]], tokens: int) -> dict[str, Any]:
    """Scene: run the workload by hand, and see every slot come back."""
    free = bed.free_slots()
    done = []
    for prompts in rounds:
        done += [bed.submit(prompt, tokens=tokens) for prompt in prompts]
        bed.run()
    if bed.free_slots() != free:
        raise RuntimeError(f"{free} slots were free before the run, {bed.free_slots()} after it")
    return {
        "tokens": [list(request.output_ids) for request in done],
        "cached": [request.cached_tokens for request in done],
    }


def generate_by_engine(engine: Any, rounds: list[list[list[int]]], tokens: int) -> dict[str, Any]:
    """Scene: run the workload through ``sglang.Engine``."""
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    done = []
    for prompts in rounds:
        done += engine.generate(input_ids=prompts, sampling_params=sampling)
    return {
        "tokens": [answer["output_ids"] for answer in done],
        "cached": [answer["meta_info"]["cached_tokens"] for answer in done],
    }
