"""Which engine verifies, under the facts of a server and the operator's switches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from sglang_overlay import switches, verify_engine
from sglang_overlay.mask_policy import Drafts
from sglang_overlay.switches import Switches
from sglang_overlay.verify_engine import Facts, ImpossibleVerifyError, choose

CHAIN, TREE = Drafts(algorithm="DFLASH", width=1), Drafts(algorithm="EAGLE", width=4)
ABLE = Facts(
    backends=("FlashMLABackend",),
    device="cuda",
    capability=(9, 0),
    tree_size=16,
    deterministic=False,
    commits_trees=True,
    page_size=64,
    cache_dtype="bfloat16",
    row_width=576,
)
FORCED = Switches(force_tree=True)

OBSTACLES: list[tuple[dict[str, Any], str]] = [
    ({"backends": ("TritonAttnBackend",)}, "target verify runs on TritonAttnBackend, and"),
    ({"backends": ("FlashMLABackend", "Mamba2AttnBackend")}, "FlashMLABackend+Mamba2AttnBackend"),
    ({"backends": ()}, "no known backend"),
    ({"deterministic": True}, "--enable-deterministic-inference keeps SGLang's own kernels"),
    ({"capability": (10, 0)}, "need sm_90, and this is cuda with sm_100"),
    ({"capability": (12, 0)}, "need sm_90, and this is cuda with sm_120"),
    ({"device": "cpu", "capability": None}, "need sm_90, and this is cpu with no CUDA device"),
    ({"page_size": 1}, "the page size is 1, and FlashMLA reads pages of 64"),
    ({"cache_dtype": "float8_e5m2"}, "the KV cache is float8_e5m2, and the adapter reads bfloat16"),
    ({"row_width": 320}, "a KV row has 320 elements, and FlashMLA's have 576"),
    ({"tree_size": 257}, "a tree has 257 tokens, and the adapter takes 256"),
    ({"splits_batches": "--enable-pdmux"}, "--enable-pdmux verifies on several backend objects"),
    ({"commits_trees": False}, "its MLA pool has no move_kv_cache"),
]


def test_a_tree_goes_to_the_adapter_and_a_chain_does_not() -> None:
    tree, chain = choose(TREE, ABLE, Switches()), choose(CHAIN, ABLE, Switches())
    assert (tree.engine, tree.reason) == ("flashmla", "EAGLE (a tree of width 4) needs a mask")
    assert (chain.engine, chain.reason) == ("stock", "DFLASH (a chain) needs no mask")
    assert tree.line() == (
        "Verify engine: flashmla, because EAGLE (a tree of width 4) needs a mask"
    )
    assert tree.could_run_adapter
    assert chain.could_run_adapter


def test_a_chain_can_be_forced_through_the_adapter() -> None:
    choice = choose(CHAIN, ABLE, FORCED)
    assert (choice.engine, choice.reason) == ("flashmla", "of SGLANG_OVERLAY_FORCE_TREE=1")


@pytest.mark.parametrize(("change", "reason"), OBSTACLES)
def test_each_obstacle_leaves_verify_to_stock_and_says_why(
    change: dict[str, Any], reason: str
) -> None:
    choice = choose(TREE, replace(ABLE, **change), Switches())
    assert choice.engine == switches.STOCK
    assert not choice.could_run_adapter
    assert reason in choice.reason
    assert len(choice.obstacles) == 1


@pytest.mark.parametrize(("change", "reason"), OBSTACLES)
@pytest.mark.parametrize(
    ("wanted", "variable"),
    [
        (FORCED, "SGLANG_OVERLAY_FORCE_TREE"),
        (Switches(verify_engine="flashmla"), "SGLANG_OVERLAY_VERIFY_ENGINE"),
    ],
)
def test_what_is_asked_for_and_impossible_is_refused(
    change: dict[str, Any], reason: str, wanted: Switches, variable: str
) -> None:
    with pytest.raises(ImpossibleVerifyError) as refusal:
        choose(CHAIN, replace(ABLE, **change), wanted)
    assert str(refusal.value).startswith(f"{variable} asks for the overlay's verify engine")
    assert reason in str(refusal.value)
    assert f"unset {variable}" in str(refusal.value)


def test_every_obstacle_is_named_at_once() -> None:
    facts = replace(ABLE, page_size=1, deterministic=True, capability=(8, 0))
    assert len(verify_engine.obstacles(facts)) == 3


def test_what_is_not_known_yet_is_no_obstacle() -> None:
    facts = replace(ABLE, page_size=None, cache_dtype=None, row_width=None)
    assert verify_engine.obstacles(facts) == ()


def test_stock_by_switch_is_stock_for_trees_too() -> None:
    choice = choose(TREE, ABLE, Switches(verify_engine="stock"))
    assert choice.engine == switches.STOCK
    assert not choice.could_run_adapter
    assert choice.reason == "of SGLANG_OVERLAY_VERIFY_ENGINE=stock"


def test_switches_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ImpossibleVerifyError, match="contradict each other"):
        choose(CHAIN, ABLE, Switches(force_tree=True, verify_engine="stock"))


def test_without_speculation_there_is_nothing_to_choose() -> None:
    facts = replace(ABLE, backends=(), tree_size=0)
    choice = choose(None, facts, FORCED)
    assert (choice.engine, choice.reason) == ("stock", "there is no speculative decoding")
