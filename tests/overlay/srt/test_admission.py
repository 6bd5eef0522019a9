"""Who is refused, when, and what the way past it does."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang_overlay import mask_table, switches, upstream
from sglang_overlay.mask_policy import Drafts, DroppedMaskError
from sglang_overlay.srt import admission, ranks, selection, verify_backend
from sglang_overlay.srt.ddtree.validation import UnsupportedServerError
from sglang_overlay.switches import Switches
from sglang_overlay.verify_engine import ImpossibleVerifyError


@pytest.fixture(autouse=True)
def _sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    names = frozenset(name.name for name in mask_table.NAMES)
    monkeypatch.setattr(upstream, "registered_backends", lambda: names)
    monkeypatch.setattr(upstream, "release", lambda: "0.5.12.post1")
    monkeypatch.setattr(upstream, "mla_pool_moves_rows", lambda: False)
    monkeypatch.setattr(upstream, "attention_layers", lambda model: model)
    monkeypatch.setattr(selection, "capability_of", lambda device: (9, 0))


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
        "kv_cache_dtype": "auto",
        "dtype": "auto",
        "speculative_num_draft_tokens": 16,
        "enable_deterministic_inference": False,
        "enable_two_batch_overlap": False,
        "enable_pdmux": False,
        "disaggregation_mode": "null",
    } | changes
    args = SimpleNamespace(**fields)
    args.get_attention_backends = lambda: (args.attention_backend, args.decode)
    args.use_mla_backend = lambda: args.mla
    return args


REFUSED = [
    arguments("NGRAM", "flashinfer", speculative_eagle_topk=10),
    # A breadth of 1: every suffix that the trie knows still branches off the root.
    arguments("NGRAM", "flashinfer"),
    arguments("NGRAM", "fa3", mla=False),
    arguments("NGRAM", "torch_native"),
    arguments("NGRAM", "flashmla", page_size=64),
    arguments("EAGLE", "flashinfer", speculative_eagle_topk=2),
    arguments("EAGLE3", "flashmla", speculative_eagle_topk=4, page_size=64),
    arguments("STANDALONE", "cutlass_mla", speculative_eagle_topk=4),
    arguments("EAGLE", "torch_native", speculative_eagle_topk=2),
    # A registered algorithm of somebody else's.
    arguments("PLUGIN", "flashinfer", speculative_eagle_topk=4),
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
    arguments("PLUGIN", "flashmla", speculative_eagle_topk=None, page_size=64),
    arguments("NGRAM", "flashinfer", mla=False),
    arguments("NGRAM", "flashinfer", speculative_eagle_topk=10, mla=False),
    arguments("NGRAM", "triton"),
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
        kv_cache_dtype="torch.bfloat16",
        dtype="torch.bfloat16",
        model=[layer(0), layer(1)],
        token_to_kv_pool=pool("MLATokenToKVPool" if args.mla else "MHATokenToKVPool"),
        sliding_window_size=None,
        tp_rank=0,
        tp_group=SimpleNamespace(world_size=1),
    )


def pool(
    name: str, module: str = "memory_pool", base: type = object, *, moves: bool = False
) -> Any:
    """Return an object whose class has the name and module of SGLang's KV pool."""
    fields = {"__module__": f"sglang.srt.mem_cache.{module}"}
    made = type(name, (base,), fields | ({"move_kv_cache": print} if moves else {}))()
    if name.startswith("MLA"):
        made.kv_cache_dim = 576
    return made


def layer(number: int, **changes: Any) -> Any:
    """Return an attention layer: what the selection reads of it."""
    fields: dict[str, Any] = {
        "layer_id": number,
        "sliding_window_size": -1,
        "logit_cap": 0.0,
        "xai_temperature_len": -1,
        "use_irope": False,
        "is_cross_attention": False,
        "attn_type": SimpleNamespace(value="decoder"),
        "k_scale_float": None,
        "v_scale_float": None,
        "tp_q_head_num": 8,
        "tp_k_head_num": 2,
        "qk_head_dim": 128,
        "v_head_dim": 128,
    } | changes
    return SimpleNamespace(**fields)


def flashmla() -> Any:
    return backend("FlashMLABackend")


def triton() -> Any:
    return backend("TritonAttnBackend")


class Attached(list[Any]):
    """Keeps what the selection was told to attach."""

    def __call__(self, model_runner: Any, drafts: Any, engine: str) -> None:
        self.append((model_runner, str(drafts), engine))


@pytest.fixture
def attached(monkeypatch: pytest.MonkeyPatch) -> Attached:
    kept = Attached()
    monkeypatch.setattr(selection, "attach", kept)
    return kept


def test_objects_show_what_a_name_cannot() -> None:
    args = arguments("EAGLE", "aiter", speculative_eagle_topk=4, mla=False)
    admission.admit_arguments(args)
    admission.admit_runner(runner(args, backend("AiterAttnBackend", use_mla=False)))
    with pytest.raises(DroppedMaskError, match="unified attention verifies with causal=True"):
        admission.admit_runner(
            runner(args, backend("AiterAttnBackend", use_mla=False, _use_unified_verify=True))
        )


def test_a_wrapped_backend_is_refused_by_object() -> None:
    args = arguments("EAGLE", "triton", speculative_eagle_topk=4, page_size=64)
    wrapped = backend("TboAttnBackend", primary=flashmla())
    with pytest.raises(DroppedMaskError, match="verify runs on FlashMLABackend"):
        admission.admit_runner(runner(args, wrapped))


def test_the_runner_keeps_and_logs_its_identity(caplog: pytest.LogCaptureFixture) -> None:
    target = runner(arguments("DFLASH", "flashmla", page_size=64), flashmla())
    with caplog.at_level(logging.INFO):
        admission.admit_runner(target)
    assert target.overlay_identity.verify_path == "causal"
    assert target.overlay_identity.tree_size is None
    assert [record.message for record in caplog.records] == [
        target.overlay_identity.line(),
        "Verify engine: stock, because DFLASH (a chain) needs no mask",
    ]


def test_without_speculation_nothing_is_judged() -> None:
    target = runner(arguments(None, "out_of_tree"), object())
    admission.admit_runner(target)
    assert target.overlay_identity.mask_policy == "no speculative decoding"
    assert target.overlay_identity.verify_path == "none"


@pytest.mark.parametrize("engine", ["", "portable", "flashmla", "stock"])
def test_a_server_that_only_prefills_is_not_held_to_a_verify_that_it_never_runs(
    engine: str, attached: Attached, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr(switches, "ACTIVE", Switches(verify_engine=engine))
    changes = {"speculative_eagle_topk": 4, "mla": True}
    args = arguments("EAGLE", "flashinfer", disaggregation_mode="prefill", **changes)
    admission.admit_arguments(args)
    target = runner(args, backend("FlashInferMLAAttnBackend"))
    with caplog.at_level(logging.INFO):
        admission.admit_runner(target)
    assert target.overlay_identity.mask_policy == "a prefill server verifies nothing"
    assert (target.overlay_identity.verify_path, attached) == ("none", [])
    assert caplog.records[1].message == (
        "Verify engine: stock, because a prefill server verifies nothing"
    )
    args.disaggregation_mode = "decode"
    with pytest.raises((DroppedMaskError, ImpossibleVerifyError)):
        admission.admit_runner(target)


PAGED_TREE = arguments("EAGLE", "flashmla", speculative_eagle_topk=4, page_size=64)


def test_a_tree_on_flashmla_is_refused_with_the_reason_why_the_adapter_cannot_help() -> None:
    reason = "the overlay's tree adapter cannot run: SGLang cannot keep an accepted path"
    with pytest.raises(DroppedMaskError, match=reason):
        admission.admit_arguments(PAGED_TREE)
    with pytest.raises(DroppedMaskError, match=reason):
        admission.admit_runner(runner(PAGED_TREE, flashmla()))


def test_a_tree_on_flashmla_is_admitted_where_the_adapter_runs(
    monkeypatch: pytest.MonkeyPatch, attached: Attached
) -> None:
    monkeypatch.setattr(upstream, "mla_pool_moves_rows", lambda: True)
    admission.admit_arguments(PAGED_TREE)
    target = runner(PAGED_TREE, flashmla())
    target.token_to_kv_pool = pool("MLATokenToKVPool", moves=True)
    admission.admit_runner(target)
    assert attached == [(target, "EAGLE (a tree of width 4)", "flashmla")]
    assert target.overlay_identity.verify_path == "flashmla-tree"
    assert target.overlay_identity.mask_policy == "tree: mask honoured"
    assert target.overlay_identity.tree_size == 16


def test_stock_by_switch_refuses_the_tree_that_stock_would_drop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(upstream, "mla_pool_moves_rows", lambda: True)
    monkeypatch.setattr(switches, "ACTIVE", Switches(verify_engine="stock"))
    with pytest.raises(DroppedMaskError, match="SGLANG_OVERLAY_VERIFY_ENGINE=stock forbids it"):
        admission.admit_runner(runner(PAGED_TREE, flashmla()))


def test_an_engine_that_is_asked_for_and_impossible_ends_the_launch_by_name_and_by_object(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(switches, "ACTIVE", Switches(verify_engine="flashmla"))
    args = arguments("DFLASH", "flashmla", page_size=64, enable_deterministic_inference=True)
    with pytest.raises(ImpossibleVerifyError, match="--enable-deterministic-inference keeps"):
        admission.admit_arguments(args)
    with pytest.raises(ImpossibleVerifyError, match="--enable-deterministic-inference keeps"):
        admission.admit_runner(runner(args, flashmla()))


def test_a_forced_chain_runs_the_adapter(
    monkeypatch: pytest.MonkeyPatch, attached: Attached
) -> None:
    monkeypatch.setattr(switches, "ACTIVE", Switches(force_tree=True))
    args = arguments("DFLASH", "flashmla", page_size=64)
    admission.admit_arguments(args)
    target = runner(args, flashmla())
    admission.admit_runner(target)
    assert attached == [(target, "DFLASH (a chain)", "flashmla")]
    assert target.overlay_identity.verify_path == "flashmla-tree"
    assert target.overlay_identity.mask_policy == "chain: right without a mask"


@pytest.mark.parametrize(
    ("page_size", "mode", "engine"),
    [(1, "prefill", "portable"), (64, "prefill", "flashmla"), (1, "decode", "portable")],
)
def test_dflash_on_triton_runs_the_adapter(
    page_size: int,
    mode: str,
    engine: str,
    attached: Attached,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ("triton", "fa3") if mode == "prefill" else ("fa3", "triton")
    args = arguments(
        "DFLASH",
        names[0],
        decode=names[1],
        speculative_attention_mode=mode,
        page_size=page_size,
    )
    admission.admit_arguments(args)
    monkeypatch.setattr(upstream, "verify_backend_of_hybrid", lambda hybrid: hybrid.verifies)
    target = runner(args, backend("HybridAttnBackend", verifies=triton()))
    with caplog.at_level(logging.INFO):
        admission.admit_runner(target)
    assert attached == [(target, "DFLASH (a chain)", engine)]
    assert target.overlay_identity.verify_path == f"{engine}-tree"
    assert target.overlay_identity.verify_backend == "TritonAttnBackend"
    assert caplog.records[1].message == (
        f"Verify engine: {engine}, because SGLang's own kernel verifies DFLASH (a chain) without "
        "splitting the prefix"
    )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"sliding_window_size": 128}, "layer 1 has a sliding window"),
        ({"logit_cap": 30.0}, "layer 1 has a logit cap"),
        ({"xai_temperature_len": 1024}, "layer 1 has a temperature by position"),
        ({"use_irope": True}, "layer 1 has a chunked window"),
        ({"is_cross_attention": True}, "layer 1 has another mask than the causal one"),
        ({"attn_type": SimpleNamespace(value="encoder_only")}, "another mask than the causal one"),
        ({"k_scale_float": 0.5}, "keys or values have a scale of 0.5"),
    ],
)
def test_a_layer_that_no_engine_can_do_keeps_stock(
    changes: dict[str, Any], reason: str, attached: Attached, caplog: pytest.LogCaptureFixture
) -> None:
    target = runner(arguments("DFLASH", "triton"), triton())
    target.model[1] = layer(1, **changes)
    with caplog.at_level(logging.INFO):
        admission.admit_runner(target)
    assert attached == []
    assert reason in caplog.records[1].message
    assert target.overlay_identity.verify_path == "causal"
    assert target.overlay_identity.tree_size is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"v_scale_float": 2.0}, "keys or values have a scale of 2.0"),
        ({"tp_q_head_num": 4}, "layers have heads of several shapes, which no engine does"),
        ({"sliding_window_size": 128}, "layer 1 has a sliding window, which no engine does"),
    ],
)
def test_a_model_without_mla_is_verified_on_triton_where_its_heads_allow(
    changes: dict[str, Any], reason: str, attached: Attached, caplog: pytest.LogCaptureFixture
) -> None:
    args = arguments("DFLASH", "triton", mla=False, page_size=64)
    target = runner(args, triton())
    target.model[1] = layer(1, **changes)
    with caplog.at_level(logging.INFO):
        admission.admit_runner(target)
    assert bool(attached) == (not reason)
    assert reason in caplog.records[1].message


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("SWAKVPool", "swa_memory_pool"),
        ("MHATokenToKVPoolFP4", "memory_pool"),
        ("NoOpMHATokenToKVPool", "memory_pool"),
        ("MHATokenToKVPool", "of_a_fork"),
    ],
)
def test_a_pool_that_no_engine_reads_keeps_stock(
    name: str, module: str, attached: Attached, caplog: pytest.LogCaptureFixture
) -> None:
    """A pool with two slot spaces is made for a model whose layers may all look plain."""
    target = runner(arguments("DFLASH", "triton", mla=False), triton())
    target.token_to_kv_pool = pool(name, module)
    with caplog.at_level(logging.INFO):
        admission.admit_runner(target)
    assert attached == []
    assert f"the KV pool is a {name}, whose slots no engine reads" in caplog.records[1].message


def test_heads_that_are_too_wide_keep_stock(attached: Attached) -> None:
    target = runner(arguments("DFLASH", "triton", mla=False), triton())
    target.model = [layer(0, v_head_dim=512)]
    facts = selection.facts_by_object(target, Drafts(algorithm="DFLASH", width=1))
    assert facts.odd_layer == "heads are wider than 256"


def test_a_tree_on_a_kernel_that_counts_rows_is_refused_and_a_chain_is_not() -> None:
    tree = arguments("EAGLE", "triton", speculative_eagle_topk=4, mla=False)
    chain = arguments("EAGLE", "triton", mla=False)
    for changes in ({"sliding_window_size": 128}, {"xai_temperature_len": 1024}):
        for args in (tree, chain):
            admission.admit_arguments(args)
            target = runner(args, triton())
            admission.admit_runner(target)
            target.model[1] = layer(1, **changes)
            if args is chain:
                admission.admit_runner(target)
                continue
            with pytest.raises(
                DroppedMaskError, match="takes a draft token's row for its position"
            ):
                admission.admit_runner(target)


def test_flashinfer_cannot_verify_a_model_with_windows_and_is_not_recommended_for_it(
    attached: Attached,
) -> None:
    tree = arguments("EAGLE3", "flashinfer", speculative_eagle_topk=4, mla=False)
    admission.admit_arguments(tree)
    admission.admit_runner(runner(tree, backend("FlashInferAttnBackend")))
    for args, name in (
        (tree, "FlashInferAttnBackend"),
        (arguments("EAGLE3", "triton", speculative_eagle_topk=4, mla=False), "TritonAttnBackend"),
    ):
        target = runner(args, backend(name))
        target.sliding_window_size = 127
        target.model[1] = layer(1, sliding_window_size=127)
        with pytest.raises(DroppedMaskError) as refusal:
            admission.admit_runner(target)
        assert f"verify runs on {name}" in str(refusal.value)
        assert "on this server: fa3 (sm_80 to sm_90; sm_90 for MLA), fa4." in str(refusal.value)


def test_a_model_whose_layers_cannot_be_seen_is_left_to_stock_and_may_have_windows(
    attached: Attached,
) -> None:
    for mla in (True, False):
        chain = runner(arguments("DFLASH", "triton", mla=mla), triton())
        tree = runner(arguments("EAGLE", "triton", speculative_eagle_topk=4, mla=mla), triton())
        chain.model = tree.model = []
        drafts = Drafts(algorithm="DFLASH", width=1)
        choice = admission.choose(drafts, selection.facts_by_object(chain, drafts))
        assert "the model's attention layers cannot be seen" in choice.obstacles
        admission.admit_runner(chain)
        assert chain.overlay_identity.verify_path == "causal"
        with pytest.raises(DroppedMaskError, match="takes a draft token's row for its position"):
            admission.admit_runner(tree)
    assert attached == []


def test_keys_that_triton_stores_in_prefill_may_have_no_scale(
    monkeypatch: pytest.MonkeyPatch, attached: Attached
) -> None:
    """It divides them by the scale; FlashMLA's pool and the engines know none."""
    monkeypatch.setattr(upstream, "verify_backend_of_hybrid", lambda hybrid: hybrid.verifies)
    args = arguments(
        "DDTREE",
        "triton",
        decode="flashmla",
        speculative_attention_mode="decode",
        page_size=64,
    )
    target = runner(args, backend("HybridAttnBackend", verifies=flashmla()))
    for scale, known in ((None, ()), (1.0, ()), (0.5, ("keys or values have a scale of 0.5",))):
        target.model[1] = layer(1, k_scale_float=scale)
        facts = selection.facts_by_object(target, Drafts(algorithm="DDTREE", width=15))
        assert facts.backends == ("FlashMLABackend",)
        assert facts.odd_layer == (known[0] if known else None)


def test_keys_that_flashmla_stores_as_they_are_may_have_a_scale(attached: Attached) -> None:
    target = runner(arguments("DFLASH", "flashmla", page_size=64), flashmla())
    target.model[1] = layer(1, k_scale_float=0.5)
    choice = admission.choose(
        Drafts(algorithm="DFLASH", width=1),
        selection.facts_by_object(target, Drafts(algorithm="DFLASH", width=1)),
    )
    assert choice.could_run_adapter


def test_a_stock_tree_commits_on_page_one_without_moving_rows(attached: Attached) -> None:
    drafts = Drafts(algorithm="EAGLE", width=4)
    for page_size, commits in ((1, True), (64, False)):
        args = arguments("EAGLE", "triton", speculative_eagle_topk=4, page_size=page_size)
        assert selection.facts_by_name(args, drafts, "X").commits_trees is commits


MLA = pool("MLATokenToKVPool", moves=True)
MHA = pool("MHATokenToKVPool", moves=True)
FP4 = pool("MLATokenToKVPoolFP4", base=type(MLA))


@pytest.mark.parametrize(
    ("found", "moves"),
    [
        (MLA, True),
        (MHA, True),
        (pool("MLATokenToKVPool"), False),
        (FP4, False),
        (pool("ScaledPool", base=type(MHA)), True),
        (pool("OfAFork", base=type(MLA), moves=True), True),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_pool_moves_rows_by_a_method_that_takes_its_class(found: Any, *, moves: bool) -> None:
    assert upstream.moves_rows(found) == moves
    both = pool("HybridLinearKVPool", moves=True)
    both.full_kv_pool = found
    assert upstream.moves_rows(both) == moves


def test_a_stock_tree_whose_path_cannot_be_kept_does_not_start(
    monkeypatch: pytest.MonkeyPatch, attached: Attached
) -> None:
    """An FP4 cache of an MLA model: the commit raised while serving, whoever had verified."""
    monkeypatch.setattr(upstream, "mla_pool_moves_rows", lambda: True)
    for page_size, topk, kept in ((64, 4, MLA), (64, 1, FP4), (1, 4, FP4), (64, 4, FP4)):
        args = arguments("EAGLE", "triton", speculative_eagle_topk=topk, page_size=page_size)
        admission.admit_arguments(args)
        target = runner(args, triton())
        target.token_to_kv_pool = kept
        if (page_size, topk, kept) != (64, 4, FP4):
            admission.admit_runner(target)
            continue
        with pytest.raises(
            admission.UnkeptTreeError, match="which the server's MLATokenToKVPoolFP4 cannot"
        ):
            admission.admit_runner(target)


def test_a_class_that_only_has_the_name_runs_no_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switches, "ACTIVE", Switches(force_tree=True))
    double = type("FlashMLABackend", (), {"__module__": "elsewhere"})()
    args = arguments("DFLASH", "flashmla", page_size=64)
    with pytest.raises(ImpossibleVerifyError, match=r"verify runs on elsewhere\.FlashMLABackend"):
        admission.admit_runner(runner(args, double))


def test_an_amd_gpu_has_no_capability_that_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes by the name of cuda, and its numbers look like a Hopper GPU's."""
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.version, "hip", None)
    assert selection.capability_of("cuda") == (9, 0)
    assert selection.capability_of("cpu") is None
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert selection.capability_of("cuda") is None


@pytest.mark.parametrize(("rejoins", "compared"), [(True, 0), (False, 1)])
def test_a_rank_that_rejoins_a_serving_group_does_not_wait_for_it(
    rejoins: bool, compared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(ranks, "compare", lambda group, identity: asked.append(group))
    args = arguments(None, "triton", elastic_ep_rejoin=rejoins)
    admission.admit_runner(runner(args, triton()))
    assert len(asked) == compared


def drafting_trees(attention: str, **changes: Any) -> Any:
    return arguments("DDTREE", attention, disable_cuda_graph=True, **changes)


def ddtree_runner(args: Any, attn_backend: Any) -> Any:
    target = runner(args, attn_backend)
    target.mambaish_config = None
    target.device = "cuda"
    return target


def test_ddtree_on_triton_has_its_mask_built_from_graph_capture_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(switches, "ACTIVE", Switches(verify_engine="stock"))
    args = drafting_trees("triton")
    admission.admit_arguments(args)
    target = ddtree_runner(args, backend("TritonAttnBackend"))
    assert verify_backend.resolve_chain(target.attn_backend) == ("TritonAttnBackend", False)
    admission.admit_runner(target)
    assert verify_backend.resolve_chain(target.attn_backend) == ("TritonAttnBackend", True)
    assert target.overlay_identity.verify_path == "stock-mask"
    assert target.overlay_identity.tree_size == 16


def test_ddtree_on_flashmla_runs_the_adapter_and_builds_no_mask(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attached: list[Any] = []
    monkeypatch.setattr(selection, "attach", lambda target, *_: attached.append(target))
    args = drafting_trees("flashmla", page_size=64)
    admission.admit_arguments(args)
    target = ddtree_runner(args, flashmla())
    admission.admit_runner(target)
    assert attached == [target]
    assert verify_backend.resolve_chain(target.attn_backend) == ("FlashMLABackend", False)
    assert target.overlay_identity.verify_path == "flashmla-tree"


def test_ddtree_where_the_adapter_cannot_run_is_refused() -> None:
    args = drafting_trees("flashmla", page_size=64, enable_pdmux=True)
    with pytest.raises(DroppedMaskError, match=r"DDTREE \(a tree of width 15\).*--enable-pdmux"):
        admission.admit_arguments(args)


def test_ddtree_on_a_recurrent_target_is_refused_by_object(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(switches, "ACTIVE", Switches(verify_engine="stock"))
    target = ddtree_runner(drafting_trees("triton"), backend("TritonAttnBackend"))
    target.mambaish_config = object()
    with pytest.raises(UnsupportedServerError, match="recurrent layers"):
        admission.admit_runner(target)
