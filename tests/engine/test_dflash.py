"""DFLASH on the real engine with the overlay: stock's tokens, no mask, a launch refused in time."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from patcher import verify
from patcher.checks import Status
from tests.support import trees
from tests.support.engine.launch import Launch
from tests.support.engine.models import BLOCK
from tests.support.engine.processes import EngineFailure
from tests.support.engine.record import Step
from tests.support.engine.server import serving, started
from tests.support.engine.workload import SMALL, STANDARD, Outcome, Workload, generate

pytestmark = pytest.mark.engine

EVERY_LENGTH = set(range(1, BLOCK + 1))
TRITON: dict[str, Any] = {"attention": "triton", "options": (("page_size", 1),)}
HYBRID: dict[str, Any] = {
    "attention": "flashinfer",
    "options": (
        ("decode_attention_backend", "flashmla"),
        ("speculative_attention_mode", "decode"),
    ),
}


def drafted(tree: Path, stock: Path, workload: Workload, **settings: Any) -> Outcome:
    """Run ``workload`` with DFLASH on ``tree``; known-good drafts come from plain FlashMLA."""
    plain = generate(Launch(tree=stock).plain(), workload)
    return generate(Launch(tree=tree, **settings), workload, known=plain.known())


def full_mask(step: Step) -> int:
    """Return the elements of a mask over all of each request's context and block."""
    return sum(BLOCK * (context + BLOCK) for context in step.contexts)


@pytest.mark.parametrize(
    ("workload", "settings"),
    [
        pytest.param(STANDARD, {}, id="flashmla-page-64"),
        pytest.param(SMALL, HYBRID, id="hybrid-with-flashmla-decode"),
        pytest.param(SMALL, TRITON, id="triton-page-1"),
    ],
)
def test_tokens_are_stocks_and_no_mask_is_built(
    stock: Path, overlay: Path, workload: Workload, settings: dict[str, Any]
) -> None:
    plain = generate(Launch(tree=stock).plain(), workload)
    before = drafted(stock, stock, workload, **settings)
    after = drafted(overlay, stock, workload, **settings)

    assert after.tokens == before.tokens == plain.tokens
    assert after.committed() == before.committed() == EVERY_LENGTH

    (stock_steps,), (overlay_steps,) = before.steps, after.steps
    assert [step.mask_elements for step in stock_steps] == list(map(full_mask, stock_steps))
    assert [step.mask_elements for step in overlay_steps] == [0] * len(overlay_steps)
    assert [step.bool_elements for step in overlay_steps] == [0] * len(overlay_steps)
    # Nothing else about a step changed.
    assert [step.contexts for step in overlay_steps] == [step.contexts for step in stock_steps]
    assert [step.committed for step in overlay_steps] == [step.committed for step in stock_steps]


def test_memory_of_a_step_no_longer_grows_with_context(stock: Path, overlay: Path) -> None:
    def by_context(tree: Path) -> list[tuple[int, int]]:
        (steps,) = drafted(tree, stock, STANDARD).steps
        return sorted((s.contexts[0], s.allocated_bytes) for s in steps if s.batch_size == 1)

    before, after = by_context(stock), by_context(overlay)
    assert after[-1][0] > 3 * after[0][0], "the workload has a short and a long context"
    assert len({size for _, size in after}) == 1
    assert all(short[1] < long[1] for short, long in pairwise(before))


def test_the_kill_switch_brings_stocks_steps_back(stock: Path, overlay: Path) -> None:
    switched_off = (("SGLANG_OVERLAY_DISABLE", "1"),)
    before = drafted(stock, stock, SMALL)
    after = drafted(overlay, stock, SMALL, variables=switched_off)
    assert after == before


def test_two_ranks_agree_with_plain_decoding_on_two_ranks(stock: Path, overlay: Path) -> None:
    # The harness fills each rank's shard on its own, so two ranks are another model than one.
    launch = Launch(tree=stock, ranks=2)
    plain = generate(launch.plain(), SMALL, driver="engine")
    after = generate(launch.on(overlay), SMALL, driver="engine", known=plain.known())
    assert after.tokens == plain.tokens
    assert after.committed() == EVERY_LENGTH
    first, second = after.steps
    assert first == second
    assert {step.mask_elements for step in first} == {0}


@pytest.mark.full
def test_two_ranks_without_the_overlay(stock: Path) -> None:
    launch = Launch(tree=stock, ranks=2)
    plain = generate(launch.plain(), SMALL, driver="engine")
    before = generate(launch, SMALL, driver="engine", known=plain.known())
    assert before.tokens == plain.tokens
    assert [step.mask_elements for step in before.steps[0]] == [
        full_mask(step) for step in before.steps[0]
    ]


@pytest.mark.full
@pytest.mark.parametrize("release", ["0.5.11", "0.5.12"])
def test_the_other_releases(release: str) -> None:
    stock, overlay = trees.tree(release), trees.patched(release)
    plain = generate(Launch(tree=stock).plain(), SMALL)
    after = drafted(overlay, stock, SMALL)
    assert after.tokens == plain.tokens
    assert after.committed() == EVERY_LENGTH
    assert {step.mask_elements for step in after.steps[0]} == {0}


def branching(tree: Path, *variables: tuple[str, str]) -> Launch:
    """Return a launch whose draft tree would be verified by stock FlashMLA, which drops its mask.

    SGLang lets it pass: it looks at the prefill backend's name alone.
    """
    return Launch(
        tree=tree,
        algorithm="",
        attention="flashinfer",
        options=(
            *HYBRID["options"],
            ("speculative_algorithm", "EAGLE"),
            ("speculative_num_steps", 3),
            ("speculative_eagle_topk", 2),
            ("speculative_num_draft_tokens", 4),
        ),
        variables=(("SGLANG_OVERLAY_VERIFY_ENGINE", "stock"), *variables),
    )


def test_a_dropped_tree_mask_ends_the_launch_before_anything_is_loaded(overlay: Path) -> None:
    with (
        started(branching(overlay)) as server,
        pytest.raises(EngineFailure, match="exit code 1: did not load a model") as ended,
    ):
        server.wait_until_model()
    lines = ended.value.log.splitlines()
    (message,) = [line for line in lines if "DroppedMaskError: " in line]
    for part in (
        "EAGLE (a tree of width 2) was asked for",
        "FlashMLABackend (--decode-attention-backend flashmla",
        "Backends that honour the mask on this server: triton",
        "SGLANG_OVERLAY_ALLOW_DROPPED_MASK=1",
    ):
        assert part in message


def test_the_opt_out_lets_the_launch_through_with_a_warning(overlay: Path) -> None:
    allowed = branching(overlay, ("SGLANG_OVERLAY_ALLOW_DROPPED_MASK", "1"))
    with started(allowed) as server:
        server.wait_until_model()
        stderr = server.process.stderr()
    assert "Allowed by SGLANG_OVERLAY_ALLOW_DROPPED_MASK: EAGLE (a tree of width 2)" in stderr
    assert "DroppedMaskError" not in stderr


def test_the_server_tells_who_it_is_and_generates(stock: Path, overlay: Path) -> None:
    plain = generate(Launch(tree=stock).plain(), SMALL)
    launch = Launch(tree=overlay, options=(("enable_metrics", True),))
    with serving(launch, known=plain.known()) as server:
        sampling = {"temperature": 0, "max_new_tokens": SMALL.tokens, "ignore_eos": True}
        answer = server.post(
            "/generate", {"input_ids": list(SMALL.prompts[0]), "sampling_params": sampling}
        )
        (state,) = json.loads(server.get("/server_info"))["internal_states"]
        metrics = server.get("/metrics")
        verified = verify.verify(
            verify.Request(
                target=str(overlay), skip=frozenset({"import", "gpu"}), server=server.url
            )
        )
    checks = {check.name: check for check in verified.checks}
    assert checks["server"].status is Status.PASSED, checks["server"].message
    assert tuple(answer["output_ids"]) == plain.tokens[0]
    identity = state["overlay"]
    assert identity["release"] == launch.release()
    assert identity["verify_backend"] == "FlashMLABackend"
    assert identity["mask_policy"] == "chain: right without a mask"
    assert identity["verify_path"] == "causal"
    assert identity["allow_dropped_mask"] is False
    (gauge,) = [line for line in metrics.splitlines() if line.startswith("sglang:overlay_info{")]
    assert f'fingerprint="{identity["fingerprint"]}"' in gauge
    assert gauge.endswith(" 1.0")
