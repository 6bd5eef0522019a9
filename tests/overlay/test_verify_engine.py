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
TRITON = replace(ABLE, backends=("TritonAttnBackend",), page_size=1)
FORCED = Switches(force_tree=True)
FLASHMLA, PORTABLE = Switches(verify_engine="flashmla"), Switches(verify_engine="portable")

# What no engine can do, and what each of them cannot.
SHARED: list[tuple[dict[str, Any], str]] = [
    ({"backends": ("AiterAttnBackend",)}, "target verify runs on AiterAttnBackend, and"),
    ({"backends": ("FlashMLABackend", "Mamba2AttnBackend")}, "FlashMLABackend+Mamba2AttnBackend"),
    ({"backends": ()}, "no known backend"),
    ({"deterministic": True}, "--enable-deterministic-inference keeps SGLang's own kernels"),
    ({"row_width": 320}, "an MLA row has 320 elements, and the engines' 576"),
    ({"odd_layer": "layer 3 has a sliding window"}, "layer 3 has a sliding window, which no"),
    ({"odd_pool": "SWAKVPool"}, "the KV pool is a SWAKVPool, whose slots no engine reads"),
    ({"hidden_layers": True}, "the model's attention layers cannot be seen"),
    ({"tree_size": 257}, "a tree has 257 tokens, and the adapter takes 256"),
    ({"splits_batches": "--enable-pdmux"}, "--enable-pdmux verifies on several backend objects"),
    ({"commits_trees": False}, "its KV pool cannot move rows"),
]
OF_FLASHMLA: list[tuple[dict[str, Any], str]] = [
    ({"capability": (8, 0)}, "need sm_90, and this is cuda with sm_80"),
    ({"capability": (10, 0)}, "need sm_90, and this is cuda with sm_100"),
    ({"capability": (12, 0)}, "need sm_90, and this is cuda with sm_120"),
    ({"page_size": 1}, "the page size is 1, and FlashMLA reads pages of 64"),
    ({"cache_dtype": "float16"}, "the KV cache is float16, and flashmla reads bfloat16"),
    (
        {"model_dtype": "float16", "cache_dtype": "float8_e4m3fn"},
        "the model computes in float16, and flashmla in bfloat16",
    ),
    ({"mla": False}, "the model has no MLA attention, and FlashMLA does no other"),
]
OF_BOTH: list[tuple[dict[str, Any], str]] = [
    ({"device": "cpu", "capability": None}, "sm_80 or later, and this is cpu with no NVIDIA GPU"),
    ({"capability": (7, 5)}, "sm_80 or later, and this is cuda with sm_75"),
    ({"model_dtype": "float32"}, "the model computes in float32, and portable in bfloat16 and flo"),
    ({"model_dtype": "float16"}, "the KV cache is bfloat16 and the model computes in float16"),
    ({"cache_dtype": "float8_e5m2"}, "the KV cache is float8_e5m2, and portable reads bfloat16"),
    ({"cache_dtype": "float8_e4m3fn", "capability": (8, 0)}, "an fp8 KV cache needs sm_89"),
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


@pytest.mark.parametrize("drafts", [CHAIN, Drafts(algorithm="DDTREE", width=7)])
@pytest.mark.parametrize(
    ("change", "engine"),
    [
        ({}, "portable"),
        ({"page_size": 64}, "flashmla"),
        ({"page_size": 64, "capability": (12, 0)}, "portable"),
        ({"page_size": 16}, "portable"),
        ({"capability": (8, 0)}, "portable"),
        ({"capability": (8, 9), "cache_dtype": "float8_e4m3fn"}, "portable"),
        ({"capability": (10, 0)}, "portable"),
        ({"cache_dtype": "float16"}, "portable"),
    ],
)
def test_on_triton_block_drafts_are_verified_by_the_overlay(
    drafts: Drafts, change: dict[str, Any], engine: str
) -> None:
    choice = choose(drafts, replace(TRITON, **change), Switches())
    assert choice.engine == engine
    assert choice.reason == f"SGLang's own kernel verifies {drafts} without splitting the prefix"


@pytest.mark.parametrize("drafts", [TREE, Drafts(algorithm="EAGLE3", width=1)])
def test_on_triton_other_drafts_are_verified_by_the_overlay_when_asked(drafts: Drafts) -> None:
    assert choose(drafts, TRITON, Switches()).engine == "stock"
    assert choose(drafts, TRITON, PORTABLE).engine == "portable"
    assert choose(drafts, replace(TRITON, page_size=64), FLASHMLA).engine == "flashmla"


@pytest.mark.parametrize(("change", "reason"), SHARED + OF_BOTH)
@pytest.mark.parametrize("facts", [ABLE, TRITON])
def test_each_obstacle_leaves_verify_to_stock_and_says_why(
    facts: Facts, change: dict[str, Any], reason: str
) -> None:
    choice = choose(TREE, replace(facts, **change), Switches())
    assert choice.engine == switches.STOCK
    assert not choice.could_run_adapter
    assert reason in choice.reason


@pytest.mark.parametrize(("change", "reason"), OF_FLASHMLA)
def test_where_flashmla_cannot_run_the_portable_engine_does(
    change: dict[str, Any], reason: str
) -> None:
    facts = replace(ABLE, **change)
    assert choose(TREE, facts, Switches()).engine == "portable"
    with pytest.raises(ImpossibleVerifyError) as refusal:
        choose(TREE, facts, FLASHMLA)
    assert reason in str(refusal.value)
    assert str(refusal.value).endswith("SGLANG_OVERLAY_VERIFY_ENGINE=portable would work here.")


@pytest.mark.parametrize(("change", "reason"), SHARED + OF_BOTH)
@pytest.mark.parametrize(
    ("wanted", "asked"),
    [
        (FORCED, "SGLANG_OVERLAY_FORCE_TREE asks for the overlay's verify engine,"),
        (FLASHMLA, "SGLANG_OVERLAY_VERIFY_ENGINE asks for the overlay's verify engine flashmla,"),
        (PORTABLE, "SGLANG_OVERLAY_VERIFY_ENGINE asks for the overlay's verify engine portable,"),
    ],
)
def test_what_is_asked_for_and_impossible_is_refused(
    change: dict[str, Any], reason: str, wanted: Switches, asked: str
) -> None:
    with pytest.raises(ImpossibleVerifyError) as refusal:
        choose(CHAIN, replace(ABLE, **change), wanted)
    assert str(refusal.value).startswith(asked)
    assert f"unset {asked.split()[0]}" in str(refusal.value)
    assert "would work here" not in str(refusal.value)
    if wanted != FLASHMLA or (change, reason) in SHARED:
        assert reason in str(refusal.value)


def test_every_obstacle_is_named_at_once() -> None:
    facts = replace(ABLE, page_size=1, deterministic=True, capability=(7, 5))
    assert len(verify_engine.obstacles("flashmla", facts)) == 3
    assert len(choose(TREE, facts, Switches()).obstacles) == 4


def test_what_is_not_known_yet_is_no_obstacle() -> None:
    facts = replace(ABLE, page_size=None, cache_dtype=None, row_width=None)
    assert verify_engine.obstacles("flashmla", facts) == ()
    assert verify_engine.obstacles("portable", facts) == ()


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
