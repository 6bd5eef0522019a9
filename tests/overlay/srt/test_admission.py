"""Who is refused, when, and what the way past it does."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from sglang_overlay import mask_table, switches, upstream
from sglang_overlay.mask_policy import DroppedMaskError
from sglang_overlay.srt import admission
from sglang_overlay.switches import Switches


@pytest.fixture(autouse=True)
def _sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    names = frozenset(name.name for name in mask_table.NAMES)
    monkeypatch.setattr(upstream, "registered_backends", lambda: names)
    monkeypatch.setattr(upstream, "release", lambda: "0.5.12.post1")


def arguments(algorithm: str | None, attention: str, **changes: Any) -> Any:
    """Return resolved server arguments: what the admission reads of them."""
    fields: dict[str, Any] = {
        "speculative_algorithm": algorithm,
        "speculative_eagle_topk": 1,
        "speculative_attention_mode": "prefill",
        "attention_backend": attention,
        "decode": attention,
        "page_size": 1,
        "device": "cuda",
        "mla": True,
    } | changes
    args = SimpleNamespace(**fields)
    args.get_attention_backends = lambda: (args.attention_backend, args.decode)
    args.use_mla_backend = lambda: args.mla
    return args


REFUSED = [
    arguments("NGRAM", "flashinfer", speculative_eagle_topk=10),
    arguments("EAGLE", "flashinfer", speculative_eagle_topk=2),
    arguments("EAGLE3", "flashmla", speculative_eagle_topk=4, page_size=64),
    arguments("STANDALONE", "cutlass_mla", speculative_eagle_topk=4),
    arguments("EAGLE", "torch_native", speculative_eagle_topk=2),
    arguments("EAGLE", "out_of_tree", speculative_eagle_topk=2),
    arguments(
        "EAGLE",
        "fa3",
        decode="flashmla",
        speculative_attention_mode="decode",
        speculative_eagle_topk=4,
        page_size=64,
    ),
]
ADMITTED = [
    arguments(None, "flashmla"),
    arguments("DFLASH", "flashmla", page_size=64),
    arguments("EAGLE", "flashinfer"),
    arguments("NGRAM", "torch_native"),
    arguments("NGRAM", "flashinfer", speculative_eagle_topk=10, mla=False),
    arguments("EAGLE", "triton", speculative_eagle_topk=4),
    arguments("EAGLE", "fa3", speculative_eagle_topk=4),
    arguments("EAGLE", "triton", decode="flashmla", speculative_eagle_topk=4),
    arguments("EAGLE", "aiter", speculative_eagle_topk=4, mla=False),
]


@pytest.mark.parametrize("args", REFUSED)
def test_a_tree_is_refused_by_name_where_its_mask_would_not_hold(args: Any) -> None:
    with pytest.raises(DroppedMaskError, match=rf"{args.speculative_algorithm} \(a tree of width"):
        admission.admit_arguments(args)


@pytest.mark.parametrize("args", ADMITTED)
def test_chains_and_honoured_trees_are_admitted(args: Any) -> None:
    admission.admit_arguments(args)


def test_the_refusal_names_the_option_that_chose_the_backend() -> None:
    with pytest.raises(
        DroppedMaskError,
        match=r"FlashMLABackend \(--decode-attention-backend flashmla with "
        r"--speculative-attention-mode decode\)",
    ):
        admission.admit_arguments(REFUSED[-1])


def test_the_way_past_lets_it_start_with_the_same_text_as_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(DroppedMaskError) as refusal:
        admission.admit_arguments(REFUSED[0])
    monkeypatch.setattr(switches, "ACTIVE", Switches(allow_dropped_mask=True))
    with caplog.at_level(logging.WARNING):
        admission.admit_arguments(REFUSED[0])
    assert str(refusal.value) in caplog.text
    assert caplog.records[0].levelname == "WARNING"


def backend(class_name: str, **attributes: Any) -> Any:
    """Return an object whose class has the name and module of SGLang's."""
    row = mask_table.newest_rows()[class_name]
    made = type(class_name, (), {"__module__": row.module})()
    made.__dict__.update(attributes)
    return made


def runner(args: Any, attn_backend: Any) -> Any:
    return SimpleNamespace(
        server_args=args,
        attn_backend=attn_backend,
        use_mla_backend=args.mla,
        tp_rank=0,
        tp_group=SimpleNamespace(world_size=1),
    )


def test_objects_show_what_a_name_cannot() -> None:
    args = arguments("EAGLE", "aiter", speculative_eagle_topk=4, mla=False)
    admission.admit_arguments(args)
    admission.admit_runner(runner(args, backend("AiterAttnBackend", use_mla=False)))
    with pytest.raises(DroppedMaskError, match="unified attention verifies with causal=True"):
        admission.admit_runner(
            runner(args, backend("AiterAttnBackend", use_mla=False, _use_unified_verify=True))
        )


def test_a_wrapped_backend_is_refused_by_object() -> None:
    args = arguments("EAGLE", "triton", speculative_eagle_topk=4)
    wrapped = backend("TboAttnBackend", primary=backend("FlashMLABackend"))
    with pytest.raises(DroppedMaskError, match="verify runs on FlashMLABackend"):
        admission.admit_runner(runner(args, wrapped))


def test_the_runner_keeps_and_logs_its_identity(caplog: pytest.LogCaptureFixture) -> None:
    target = runner(arguments("DFLASH", "flashmla", page_size=64), backend("FlashMLABackend"))
    with caplog.at_level(logging.INFO):
        admission.admit_runner(target)
    assert target.overlay_identity.verify_path == "causal"
    assert [record.message for record in caplog.records] == [target.overlay_identity.line()]


def test_without_speculation_nothing_is_judged() -> None:
    target = runner(arguments(None, "out_of_tree"), object())
    admission.admit_runner(target)
    assert target.overlay_identity.mask_policy == "no speculative decoding"
    assert target.overlay_identity.verify_path == "none"
