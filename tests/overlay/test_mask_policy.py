"""Judging a backend under the facts of a server, and putting a refusal in words."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sglang_overlay import mask_policy, mask_table
from sglang_overlay.mask_policy import (
    Case,
    Chain,
    Condition,
    Drafts,
    Judgement,
    Row,
    Traits,
    Tree,
    Verdict,
    judge,
)

NEWEST = mask_table.newest_rows()
EVERY_NAME = frozenset(name.name for name in mask_table.NAMES)


def tree_on(class_name: str, traits: Traits) -> Tree | None:
    return judge(NEWEST[class_name], traits).tree


@pytest.mark.parametrize(
    ("class_name", "traits", "expected"),
    [
        ("TritonAttnBackend", Traits(), Tree.HONOURED),
        ("FlashInferAttnBackend", Traits(), Tree.HONOURED),
        ("FlashInferAttnBackend", Traits(window=True), Tree.FAILS),
        ("FlashInferMLAAttnBackend", Traits(), Tree.DROPPED),
        ("FlashMLABackend", Traits(), Tree.DROPPED),
        ("FlashMLABackend", Traits(tree_adapter=True), Tree.HONOURED),
        ("FlashInferMLAAttnBackend", Traits(tree_adapter=True), Tree.DROPPED),
        ("FlashAttentionBackend", Traits(topk=4, mla=False, fa_version=3), Tree.HONOURED),
        ("FlashAttentionBackend", Traits(topk=4, mla=False, fa_version=4), Tree.HONOURED),
        ("FlashAttentionBackend", Traits(topk=1, mla=False, fa_version=3), Tree.DROPPED),
        (
            "FlashAttentionBackend",
            Traits(topk=4, mla=True, page_size=1, fa_version=3),
            Tree.HONOURED,
        ),
        (
            "FlashAttentionBackend",
            Traits(topk=4, mla=True, page_size=64, fa_version=3),
            Tree.MISREAD,
        ),
        ("FlashAttentionBackend", Traits(topk=4, mla=True, fa_version=4), Tree.FAILS),
        (
            "FlashAttentionBackend",
            Traits(topk=4, mla=False, page_size=64, fa_version=3, window=True),
            Tree.FAILS,
        ),
        (
            "FlashAttentionBackend",
            Traits(topk=4, mla=False, page_size=1, fa_version=3, window=True),
            Tree.HONOURED,
        ),
        (
            "FlashAttentionBackend",
            Traits(topk=4, mla=False, page_size=64, fa_version=3),
            Tree.HONOURED,
        ),
        ("XPUAttentionBackend", Traits(topk=4, page_size=64), Tree.MISREAD),
        ("XPUAttentionBackend", Traits(topk=4, page_size=1), Tree.HONOURED),
        ("AiterAttnBackend", Traits(mla=True), Tree.DROPPED),
        ("AiterAttnBackend", Traits(mla=False, unified_verify=True), Tree.DROPPED),
        ("AiterAttnBackend", Traits(mla=False, unified_verify=False), Tree.HONOURED),
        ("AiterAttnBackend", Traits(mla=False), None),
        ("DeepseekV4AttnBackend", Traits(topk=4), Tree.REJECTED),
        ("DeepseekV4AttnBackend", Traits(topk=1), Tree.DROPPED),
        ("GDNAttnBackend", Traits(topk=1), Tree.DROPPED),
        ("KDAAttnBackend", Traits(topk=4), Tree.FAILS),
    ],
)
def test_a_tree_is_judged_by_class_and_facts(
    class_name: str, traits: Traits, expected: Tree | None
) -> None:
    assert tree_on(class_name, traits) is expected


def test_an_unknown_fact_decides_nothing_that_the_cases_disagree_on() -> None:
    row = Row(
        class_name="X",
        module="m",
        releases=frozenset(),
        cases=(
            Case(when=(Condition.MLA,), chain=Chain.CAUSAL, tree=Tree.DROPPED, because="first"),
            Case(chain=Chain.CAUSAL, tree=Tree.HONOURED, because="second"),
        ),
    )
    judgement = judge(row, Traits())
    assert (judgement.chain, judgement.tree) == (Chain.CAUSAL, None)
    assert judge(row, Traits(mla=False)).tree is Tree.HONOURED


def verdict_on(judgement: Judgement, width: int) -> Verdict:
    return Verdict(drafts=Drafts(algorithm="EAGLE", width=width), judgements=(judgement,))


def test_a_chain_is_never_held_against_a_backend() -> None:
    for row in NEWEST.values():
        if row.cases:
            assert verdict_on(judge(row, Traits(topk=1)), width=1).unable is None


def test_an_unknown_class_is_unable_and_its_chain_gets_a_mask() -> None:
    judgement = mask_policy.unknown("MyBackend")
    assert judgement.needs_chain_mask
    verdict = verdict_on(judgement, width=2)
    assert verdict.unable is judgement
    assert verdict.summary == "unknown backend class"
    assert "does not know the class" in mask_policy.refusal_message(
        verdict, chosen_by="--attention-backend mine", able=[]
    )


def test_what_is_undecided_by_name_is_left_to_the_object() -> None:
    assert verdict_on(judge(NEWEST["AiterAttnBackend"], Traits(mla=False)), width=4).unable is None


def test_the_weaker_half_of_a_hybrid_model_decides() -> None:
    halves = tuple(
        judge(NEWEST[name], Traits(topk=4))
        for name in ("TritonAttnBackend", "LightningAttentionBackend")
    )
    verdict = Verdict(drafts=Drafts(algorithm="EAGLE", width=4), judgements=halves)
    assert verdict.unable is halves[1]
    assert verdict.backend == "TritonAttnBackend+LightningAttentionBackend"


@pytest.mark.parametrize(
    ("verdict", "summary", "path"),
    [
        (Verdict(drafts=None), "no speculative decoding", "none"),
        (
            verdict_on(judge(NEWEST["FlashMLABackend"], Traits()), width=1),
            "chain: right without a mask",
            "causal",
        ),
        (
            verdict_on(judge(NEWEST["AiterAttnBackend"], Traits(mla=False)), width=1),
            "chain: undecided",
            "stock-mask",
        ),
        (
            verdict_on(judge(NEWEST["TritonAttnBackend"], Traits()), width=4),
            "tree: mask honoured",
            "stock-mask",
        ),
        (
            verdict_on(judge(NEWEST["FlashMLABackend"], Traits()), width=4),
            "tree: mask dropped in silence",
            "causal",
        ),
        (
            replace(
                verdict_on(judge(NEWEST["FlashMLABackend"], Traits(tree_adapter=True)), width=4),
                tree_engine="flashmla",
            ),
            "tree: mask honoured",
            "flashmla-tree",
        ),
    ],
)
def test_a_verdict_says_what_is_live(verdict: Verdict, summary: str, path: str) -> None:
    assert (verdict.summary, verdict.verify_path) == (summary, path)


def test_the_message_says_what_was_asked_what_fails_what_works_and_the_way_past() -> None:
    verdict = Verdict(
        drafts=Drafts(algorithm="NGRAM", width=10),
        judgements=(judge(NEWEST["FlashInferMLAAttnBackend"], Traits(topk=10)),),
    )
    message = mask_policy.refusal_message(
        verdict, chosen_by="--attention-backend flashinfer", able=["triton", "fa3 (sm_90)"]
    )
    assert message == (
        "NGRAM (a tree of width 10) was asked for, but target verify runs on "
        "FlashInferMLAAttnBackend (--attention-backend flashinfer), which would drop the tree's "
        "mask and verify the tree as if it were a chain: it fetches the mask, never passes it on, "
        "and plans with causal=True. Backends that honour the mask on this server: triton, "
        "fa3 (sm_90). Choose one of these, or make the drafts a chain (--speculative-eagle-topk 1, "
        "or DFLASH in place of DDTREE; NGRAM's are always a tree). "
        "SGLANG_OVERLAY_ALLOW_DROPPED_MASK=1 starts the server all the same; its output is then "
        "not the target model's."
    )


def able(traits: Traits, device: str | None = "cuda") -> list[str]:
    return mask_policy.able_names(
        mask_table.NAMES, NEWEST, traits, device=device, registered=EVERY_NAME
    )


def test_what_would_work_depends_on_model_page_and_device() -> None:
    fa3 = "fa3 (sm_80 to sm_90; sm_90 for MLA"
    assert able(Traits(topk=4, mla=True, page_size=1)) == ["triton", f"{fa3})"]
    assert able(Traits(topk=4, mla=False, page_size=1)) == [
        "triton",
        "flashinfer",
        f"{fa3})",
        "fa4",
    ]
    assert able(Traits(topk=4, mla=True, page_size=64)) == [
        "triton (with --page-size 1)",
        f"{fa3}, with --page-size 1)",
    ]
    assert able(Traits(topk=4, mla=True, page_size=1), device="cpu") == ["triton"]


def test_a_window_rules_out_flashinfer_and_pages_on_flash_attention() -> None:
    for page_size in (1, 64):
        traits = Traits(topk=4, mla=False, page_size=page_size, counts_rows=True, window=True)
        remark = "" if page_size == 1 else "with --page-size 1"
        assert able(traits) == [
            f"fa3 (sm_80 to sm_90; sm_90 for MLA{', ' + remark if remark else ''})",
            f"fa4 ({remark})" if remark else "fa4",
        ]


def test_the_adapter_is_no_way_out_for_the_trees_that_sglang_rejects_on_it() -> None:
    assert "flashmla" not in "".join(
        able(Traits(topk=4, mla=True, page_size=64, tree_adapter=True))
    )


def test_only_backends_that_this_sglang_registers_are_offered() -> None:
    offered = mask_policy.able_names(
        mask_table.NAMES,
        NEWEST,
        Traits(topk=4, mla=False, page_size=1),
        device="cuda",
        registered=frozenset({"flashinfer"}),
    )
    assert offered == ["flashinfer"]
