"""The bed itself: on stock SGLang the drivers agree, and planted faults turn comparisons red."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support import trees
from tests.support.engine.launch import Launch
from tests.support.engine.models import BLOCK
from tests.support.engine.processes import EngineFailure
from tests.support.engine.scene import play
from tests.support.engine.workload import SMALL, STANDARD, generate

pytestmark = pytest.mark.engine

EVERY_LENGTH = set(range(1, BLOCK + 1))


def test_drafted_tokens_are_those_of_plain_decoding(stock: Path) -> None:
    launch = Launch(tree=stock)
    plain = generate(launch.plain(), STANDARD)
    drafted = generate(launch, STANDARD, known=plain.known())
    assert drafted.tokens == plain.tokens
    assert drafted.committed() == EVERY_LENGTH
    # Two whole pages of the shared head come from the radix cache, with and without drafts.
    assert drafted.cached == plain.cached == (0, 128, 128, 0, 0)


def test_steps_are_recorded_as_they_happened(stock: Path) -> None:
    launch = Launch(tree=stock)
    plain = generate(launch.plain(), STANDARD)
    (steps,) = generate(launch, STANDARD, known=plain.known()).steps
    first = [step for step in steps if step.batch_size == 1][:2]
    assert first[0].contexts == (len(STANDARD.prompts[0]),)
    assert first[1].contexts == (first[0].contexts[0] + first[0].committed[0],)
    # The second round starts as a batch of three, which thins out as its requests finish.
    assert {step.batch_size for step in steps} >= {1, 3}
    # The first token of each request comes from its prefill, the rest from verify steps.
    committed = sum(sum(step.committed) for step in steps)
    assert committed == len(STANDARD.prompts) * (STANDARD.tokens - 1)


def test_engine_gives_the_tokens_of_the_stepped_scheduler(stock: Path) -> None:
    launch = Launch(tree=stock)
    plain = generate(launch.plain(), SMALL)
    whole = generate(launch, SMALL, driver="engine", known=plain.known())
    assert whole.tokens == plain.tokens
    assert whole.committed() == EVERY_LENGTH


def test_an_off_by_one_in_the_verify_length_changes_the_tokens(stock: Path) -> None:
    launch = Launch(tree=stock)
    plain = generate(launch.plain(), SMALL)
    faulty = generate(launch, SMALL, known=plain.known(), fault="short-verify")
    differs = [ours != theirs for ours, theirs in zip(faulty.tokens, plain.tokens, strict=True)]
    assert all(differs)


def test_wrong_known_drafts_show_in_the_commits_and_never_in_the_tokens(stock: Path) -> None:
    launch = Launch(tree=stock)
    plain = generate(launch.plain(), SMALL)
    faulty = generate(launch, SMALL, known=plain.known(), fault="wrong-drafts")
    assert faulty.tokens == plain.tokens
    assert faulty.committed() < EVERY_LENGTH


def test_a_lost_slot_ends_the_run(stock: Path) -> None:
    launch = Launch(tree=stock)
    with pytest.raises(EngineFailure) as failure:
        generate(launch, SMALL, fault="lost-slot")
    assert "Full Pool Mem Leak Detected" in failure.value.log


def test_a_harness_that_fails_fails_the_run(stock: Path) -> None:
    with pytest.raises(EngineFailure, match="exit code 70"):
        generate(Launch(tree=stock), SMALL, fault="broken-harness")


def test_a_harness_that_is_not_loaded_fails_the_run(stock: Path) -> None:
    launch = Launch(tree=stock, variables=(("SGLANG_PLUGINS", "another"),))
    with pytest.raises(EngineFailure, match="did not load the harness plugin"):
        generate(launch, SMALL)


# The example of tests/support/engine/README.md, word for word (a test below compares them).
# --- example
def two_requests_share_a_page(bed: Any, head: list[int]) -> dict[str, int]:
    bed.submit(head, tokens=4)
    bed.run()
    second = bed.submit([*head, 7, 8, 9], tokens=4)
    bed.step()
    return {"cached": second.cached_tokens, "free": bed.free_slots()}


def test_a_request_finds_the_page_of_an_earlier_one(stock: Path) -> None:
    report = play(two_requests_share_a_page, Launch(tree=stock), head=list(range(70)))
    assert report.result["cached"] == 64
    assert [step.batch_size for step in report.steps[0]] == [1] * len(report.steps[0])


# --- end of the example


def test_the_readme_shows_the_example_above() -> None:
    source = Path(__file__).read_text()
    example = source.split("# --- example\n")[1].split("\n\n# --- end of the example")[0]
    readme = Path(__file__).parents[1] / "support" / "engine" / "README.md"
    assert example.strip() in readme.read_text()


@pytest.mark.full
def test_experts_are_no_exception(stock: Path) -> None:
    launch = Launch(tree=stock, experts=True)
    plain = generate(launch.plain(), SMALL)
    drafted = generate(launch, SMALL, known=plain.known())
    assert drafted.tokens == plain.tokens
    assert drafted.committed() == EVERY_LENGTH


@pytest.mark.full
@pytest.mark.parametrize("release", ["0.5.11", "0.5.12"])
def test_the_other_releases_run_too(release: str) -> None:
    launch = Launch(tree=trees.tree(release))
    plain = generate(launch.plain(), SMALL)
    drafted = generate(launch, SMALL, known=plain.known())
    assert drafted.tokens == plain.tokens
    assert drafted.committed() == EVERY_LENGTH
