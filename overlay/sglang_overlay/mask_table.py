"""The capability table: one row per attention backend class of each supported release.

Read from the code of the releases named in each row, class by class: what
``init_forward_metadata`` and its capture and replay twins do with ``spec_info.custom_mask`` in
TARGET_VERIFY, and what ``forward_extend`` passes on. "causal" means that the kernel call sets
``causal=True`` (or has no other mode) over prefix + draft tokens, which is right for a chain. Most
of it was not run on the hardware that the backend needs; the tests hold the rows against the class
definitions of every release.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType

from sglang_overlay.mask_policy import BackendName, Case, Chain, Condition, Kind, Row, Tree

RELEASES = ("0.5.11", "0.5.12", "0.5.12.post1")

_ALL = frozenset(RELEASES)
_FROM_0_5_12 = _ALL - {"0.5.11"}
_ATTENTION = "sglang.srt.layers.attention"
_NPU = "sglang.srt.hardware_backend.npu.attention"


def _causal_only(because: str) -> tuple[Case, ...]:
    return (Case(chain=Chain.CAUSAL, tree=Tree.DROPPED, because=because),)


def _no_verify(because: str) -> tuple[Case, ...]:
    return (Case(chain=Chain.FAILS, tree=Tree.FAILS, because=because),)


_ADAPTER = Case(
    when=(Condition.TREE_ADAPTER,),
    chain=Chain.CAUSAL,
    tree=Tree.HONOURED,
    because="the overlay attends to the prefix unmasked and masks the tree in its own kernel",
)
_CASCADE_MISREADS = Case(
    when=(Condition.TOPK_ABOVE_ONE, Condition.MLA, Condition.PAGE_ABOVE_ONE),
    chain=Chain.CAUSAL,
    tree=Tree.MISREAD,
    because="its second pass looks slots up in a cache that is viewed in pages (MLA only)",
)
_CASCADE_WINDOW_FAILS = Case(
    when=(Condition.TOPK_ABOVE_ONE, Condition.PAGE_ABOVE_ONE, Condition.WINDOW),
    chain=Chain.CAUSAL,
    tree=Tree.FAILS,
    because="its metadata for the window in a tree asserts page size 1",
)
_CASCADE_HONOURS = Case(
    when=(Condition.TOPK_ABOVE_ONE,),
    chain=Chain.CAUSAL,
    tree=Tree.HONOURED,
    because="a second pass attends each draft token to the slots that its mask row allows",
)
_CASCADE_OFF = Case(
    chain=Chain.CAUSAL,
    tree=Tree.DROPPED,
    because="it reads the mask only when speculative_eagle_topk > 1, else the call is causal",
)
_AITER_MLA = Case(
    when=(Condition.MLA,),
    chain=Chain.CAUSAL,
    tree=Tree.DROPPED,
    because="its MLA decode kernel takes no mask and is causal",
)
_AITER_UNIFIED = Case(
    when=(Condition.UNIFIED_VERIFY,),
    chain=Chain.CAUSAL,
    tree=Tree.DROPPED,
    because="unified attention verifies with causal=True; the target's backend is made with topk 1",
)
_AITER_EXTEND = Case(
    chain=Chain.MASK,
    tree=Tree.HONOURED,
    because="its extend kernel gets the mask, and graph capture cannot do without one",
)
_RECURRENT_TREE = (
    Case(
        when=(Condition.TOPK_ABOVE_ONE,),
        chain=Chain.CAUSAL,
        tree=Tree.HONOURED,
        because="its state follows the tree's parent links when speculative_eagle_topk > 1",
    ),
    Case(
        chain=Chain.CAUSAL,
        tree=Tree.DROPPED,
        because="its state follows parent links only when speculative_eagle_topk > 1",
    ),
)

ROWS: tuple[Row, ...] = (
    Row(
        class_name="TritonAttnBackend",
        module=f"{_ATTENTION}.triton_backend",
        releases=_ALL,
        cases=(
            _ADAPTER,
            Case(
                when=(Condition.COUNTS_ROWS,),
                chain=Chain.CAUSAL,
                tree=Tree.MISREAD,
                because="its kernel takes a draft token's row for its position: wrong in a tree",
            ),
            Case(
                when=(Condition.BIDIRECTIONAL_EXTEND,),
                chain=Chain.MASK,
                tree=Tree.HONOURED,
                because="without a mask its extend kernel is not causal in bidirectional layers",
            ),
            Case(
                chain=Chain.CAUSAL,
                tree=Tree.HONOURED,
                because="its extend kernel applies the mask, and is causal without one",
            ),
        ),
    ),
    Row(
        class_name="FlashInferAttnBackend",
        module=f"{_ATTENTION}.flashinfer_backend",
        releases=_ALL,
        cases=(
            Case(
                when=(Condition.WINDOW,),
                chain=Chain.FAILS,
                tree=Tree.FAILS,
                because="its window metadata subtracts prefix_lens, which verify lacks",
            ),
            Case(
                chain=Chain.CAUSAL,
                tree=Tree.HONOURED,
                because="the mask goes into the wrapper's plan, at capture and at replay",
            ),
        ),
    ),
    Row(
        class_name="FlashInferMLAAttnBackend",
        module=f"{_ATTENTION}.flashinfer_mla_backend",
        releases=_ALL,
        cases=_causal_only("it fetches the mask, never passes it on, and plans with causal=True"),
    ),
    Row(
        class_name="CutlassMLABackend",
        module=f"{_ATTENTION}.cutlass_mla_backend",
        releases=_ALL,
        cases=_causal_only("it verifies through FlashInfer MLA, which plans with causal=True"),
    ),
    Row(
        class_name="FlashMLABackend",
        module=f"{_ATTENTION}.flashmla_backend",
        releases=_ALL,
        cases=(
            _ADAPTER,
            *_causal_only("it never reads the mask and calls the kernel with causal=True"),
        ),
    ),
    Row(
        class_name="TRTLLMMLABackend",
        module=f"{_ATTENTION}.trtllm_mla_backend",
        releases=_ALL,
        cases=_causal_only("it never reads the mask; its decode kernel is causal"),
    ),
    Row(
        class_name="TokenspeedMLABackend",
        module=f"{_ATTENTION}.tokenspeed_mla_backend",
        releases=_FROM_0_5_12,
        cases=_causal_only("it never reads the mask; its decode kernel is causal"),
    ),
    Row(
        class_name="TRTLLMHAAttnBackend",
        module=f"{_ATTENTION}.trtllm_mha_backend",
        releases=_ALL,
        cases=_causal_only("it never reads the mask; its decode kernel is causal"),
    ),
    Row(
        class_name="FlashAttentionBackend",
        module=f"{_ATTENTION}.flashattention_backend",
        releases=_ALL,
        cases=(
            Case(
                when=(Condition.MLA, Condition.FA4),
                chain=Chain.FAILS,
                tree=Tree.FAILS,
                because="its absorbed MLA path asserts FlashAttention 3",
            ),
            _CASCADE_MISREADS,
            _CASCADE_WINDOW_FAILS,
            _CASCADE_HONOURS,
            _CASCADE_OFF,
        ),
    ),
    Row(
        class_name="MusaFlashAttentionBackend",
        module="sglang.srt.hardware_backend.musa.attention.flashattention_backend",
        releases=_ALL,
        cases=(_CASCADE_MISREADS, _CASCADE_WINDOW_FAILS, _CASCADE_HONOURS, _CASCADE_OFF),
    ),
    Row(
        class_name="XPUAttentionBackend",
        module=f"{_ATTENTION}.xpu_backend",
        releases=_ALL,
        cases=(
            Case(
                when=(Condition.TOPK_ABOVE_ONE, Condition.PAGE_ABOVE_ONE),
                chain=Chain.CAUSAL,
                tree=Tree.MISREAD,
                because="its second pass looks slots up in a cache that is viewed in pages",
            ),
            _CASCADE_HONOURS,
            _CASCADE_OFF,
        ),
    ),
    Row(
        class_name="NativeSparseAttnBackend",
        module=f"{_ATTENTION}.nsa_backend",
        releases=_ALL,
        cases=_causal_only(
            "it attends by sequence length per draft token and never reads the mask"
        ),
    ),
    Row(
        class_name="DeepseekV4AttnBackend",
        module=f"{_ATTENTION}.deepseek_v4_backend",
        releases=_FROM_0_5_12,
        cases=(
            Case(
                when=(Condition.TOPK_ABOVE_ONE,),
                chain=Chain.CAUSAL,
                tree=Tree.REJECTED,
                because="its constructor asserts topk 0 or 1",
            ),
            *_causal_only("it attends by sequence length per draft token and never reads the mask"),
        ),
    ),
    Row(
        class_name="AiterAttnBackend",
        module=f"{_ATTENTION}.aiter_backend",
        releases=frozenset({"0.5.11"}),
        cases=(_AITER_MLA, _AITER_EXTEND),
    ),
    Row(
        class_name="AiterAttnBackend",
        module=f"{_ATTENTION}.aiter_backend",
        releases=_FROM_0_5_12,
        cases=(_AITER_MLA, _AITER_UNIFIED, _AITER_EXTEND),
    ),
    Row(
        class_name="AscendAttnBackend",
        module=f"{_NPU}.ascend_backend",
        releases=_ALL,
        cases=_causal_only("its verify applies a fixed causal mask of its own"),
    ),
    Row(
        class_name="WaveAttnBackend",
        module=f"{_ATTENTION}.wave_backend",
        releases=_ALL,
        cases=_no_verify("its forward takes the maximum of extend_seq_lens, which verify lacks"),
    ),
    Row(
        class_name="TorchNativeAttnBackend",
        module=f"{_ATTENTION}.torch_native_backend",
        releases=_ALL,
        cases=_no_verify("its extend reads extend_prefix_lens, which verify lacks"),
    ),
    Row(
        class_name="TorchFlexAttnBackend",
        module=f"{_ATTENTION}.torch_flex_backend",
        releases=_ALL,
        cases=_no_verify("its extend reads extend_prefix_lens, which verify lacks"),
    ),
    Row(
        class_name="IntelAMXAttnBackend",
        module=f"{_ATTENTION}.intel_amx_backend",
        releases=_ALL,
        cases=_no_verify("its metadata takes the maximum of extend_seq_lens, which verify lacks"),
    ),
    Row(
        class_name="DualChunkFlashAttentionBackend",
        module=f"{_ATTENTION}.dual_chunk_flashattention_backend",
        releases=_ALL,
        cases=_no_verify("its metadata sums extend_seq_lens, which verify lacks"),
    ),
    Row(
        class_name="GDNAttnBackend",
        module=f"{_ATTENTION}.linear.gdn_backend",
        releases=_ALL,
        kind=Kind.RECURRENT,
        cases=_RECURRENT_TREE,
    ),
    Row(
        class_name="Mamba2AttnBackend",
        module=f"{_ATTENTION}.hybrid_linear_attn_backend",
        releases=_ALL,
        kind=Kind.RECURRENT,
        cases=_RECURRENT_TREE,
    ),
    Row(
        class_name="KDAAttnBackend",
        module=f"{_ATTENTION}.linear.kda_backend",
        releases=_ALL,
        kind=Kind.RECURRENT,
        cases=_no_verify("its extend reads extend_prefix_lens, which verify lacks"),
    ),
    Row(
        class_name="LightningAttentionBackend",
        module=f"{_ATTENTION}.linear.lightning_backend",
        releases=_ALL,
        kind=Kind.RECURRENT,
        cases=_causal_only("its kernel runs the draft tokens in row order, whatever their parents"),
    ),
    Row(
        class_name="AscendGDNAttnBackend",
        module=f"{_NPU}.ascend_gdn_backend",
        releases=_ALL,
        kind=Kind.RECURRENT,
        cases=_RECURRENT_TREE,
    ),
    Row(
        class_name="AscendMamba2AttnBackend",
        module=f"{_NPU}.ascend_hybrid_linear_attn_backend",
        releases=_ALL,
        kind=Kind.RECURRENT,
        cases=_RECURRENT_TREE,
    ),
    Row(
        class_name="HybridAttnBackend",
        module=f"{_ATTENTION}.hybrid_attn_backend",
        releases=_ALL,
        kind=Kind.WRAPPER,
    ),
    Row(
        class_name="HybridLinearAttnBackend",
        module=f"{_ATTENTION}.hybrid_linear_attn_backend",
        releases=_ALL,
        kind=Kind.WRAPPER,
    ),
    Row(
        class_name="AscendHybridLinearAttnBackend",
        module=f"{_NPU}.ascend_hybrid_linear_attn_backend",
        releases=_ALL,
        kind=Kind.WRAPPER,
    ),
    Row(
        class_name="TboAttnBackend",
        module=f"{_ATTENTION}.tbo_backend",
        releases=_ALL,
        kind=Kind.WRAPPER,
    ),
    Row(
        class_name="DeepseekV4MultiStepBackend",
        module=f"{_ATTENTION}.deepseek_v4_backend",
        releases=_FROM_0_5_12,
        kind=Kind.DRAFT,
    ),
    Row(
        class_name="MambaAttnBackendBase",
        module=f"{_ATTENTION}.hybrid_linear_attn_backend",
        releases=_ALL,
        kind=Kind.ABSTRACT,
    ),
    Row(
        class_name="AscendMambaAttnBackendBase",
        module=f"{_NPU}.ascend_hybrid_linear_attn_backend",
        releases=_ALL,
        kind=Kind.ABSTRACT,
    ),
)

# The values of --attention-backend. A name that a release does not register is not offered there.
NAMES: tuple[BackendName, ...] = (
    BackendName(name="triton", class_name="TritonAttnBackend"),
    BackendName(
        name="flashinfer",
        class_name="FlashInferAttnBackend",
        mla=False,
        device="cuda",
        paged_trees=True,
    ),
    BackendName(name="flashinfer", class_name="FlashInferMLAAttnBackend", mla=True, device="cuda"),
    BackendName(
        name="fa3",
        class_name="FlashAttentionBackend",
        device="cuda",
        remark="sm_80 to sm_90; sm_90 for MLA",
    ),
    BackendName(name="fa3", class_name="MusaFlashAttentionBackend", device="musa"),
    BackendName(name="fa4", class_name="FlashAttentionBackend", device="cuda"),
    BackendName(name="flashmla", class_name="FlashMLABackend", mla=True, device="cuda"),
    BackendName(name="cutlass_mla", class_name="CutlassMLABackend", mla=True, device="cuda"),
    BackendName(name="trtllm_mla", class_name="TRTLLMMLABackend", mla=True, device="cuda"),
    BackendName(name="tokenspeed_mla", class_name="TokenspeedMLABackend", mla=True, device="cuda"),
    BackendName(name="trtllm_mha", class_name="TRTLLMHAAttnBackend", mla=False, device="cuda"),
    BackendName(name="nsa", class_name="NativeSparseAttnBackend", device="cuda"),
    BackendName(name="dsv4", class_name="DeepseekV4AttnBackend", device="cuda"),
    BackendName(name="aiter", class_name="AiterAttnBackend", device="cuda", remark="ROCm"),
    BackendName(name="wave", class_name="WaveAttnBackend", device="cuda", remark="ROCm"),
    BackendName(name="ascend", class_name="AscendAttnBackend", device="npu"),
    BackendName(name="torch_native", class_name="TorchNativeAttnBackend"),
    BackendName(name="flex_attention", class_name="TorchFlexAttnBackend", device="cuda"),
    BackendName(name="intel_amx", class_name="IntelAMXAttnBackend", device="cpu"),
    BackendName(
        name="dual_chunk_flash_attn", class_name="DualChunkFlashAttentionBackend", device="cuda"
    ),
    BackendName(name="intel_xpu", class_name="XPUAttentionBackend", device="xpu"),
)


def rows_of(release: str) -> dict[str, Row]:
    """Return the rows of one release, by class name."""
    return {row.class_name: row for row in ROWS if release in row.releases}


@functools.cache
def newest_rows() -> Mapping[str, Row]:
    """Return the newest row of every class.

    Good for every release at run time: where a class differs between releases, the newer row adds
    cases whose conditions no older object can meet.
    """
    rows: dict[str, Row] = {}
    for release in RELEASES:
        rows.update(rows_of(release))
    return MappingProxyType(rows)


def row_for(cls: type) -> Row | None:
    """Return the row that matches ``cls`` exactly, by module and name, or None."""
    row = newest_rows().get(cls.__name__)
    return row if row is not None and row.module == cls.__module__ else None
