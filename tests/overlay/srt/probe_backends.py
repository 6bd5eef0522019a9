"""Write, as JSON, what the overlay makes of the real backend classes; run under a real SGLang tree.

Objects are made without their constructors, which want a GPU; the attributes that a resolution
reads are set by hand.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sglang_overlay import mask_table, upstream
from sglang_overlay.mask_policy import Drafts, Kind, Traits
from sglang_overlay.srt.admission import judge_runner
from sglang_overlay.srt.verify_backend import resolve_chain


def load(release: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Import the classes that have a row; return those that a CPU can, and why not the others."""
    classes, failures = {}, {}
    for row in mask_table.rows_of(release).values():
        try:
            classes[row.class_name] = getattr(importlib.import_module(row.module), row.class_name)
        except ImportError as error:
            failures[row.class_name] = str(error)
    return classes, failures


def bare(cls: Any, **attributes: Any) -> Any:
    made = object.__new__(cls)
    made.__dict__.update(attributes)
    return made


def hybrid(classes: dict[str, Any], prefill: Any, decode: Any, mode: str) -> Any:
    args = SimpleNamespace(speculative_attention_mode=mode)
    return bare(
        classes["HybridAttnBackend"],
        prefill_backend=prefill,
        decode_backend=decode,
        model_runner=SimpleNamespace(server_args=args),
    )


def wrapped(classes: dict[str, Any]) -> dict[str, Any]:
    """Return backends as SGLang nests them, by a name that says what verify has to run."""
    flashmla, triton = bare(classes["FlashMLABackend"]), bare(classes["TritonAttnBackend"])
    flashinfer = bare(classes["FlashInferAttnBackend"])
    mamba = bare(classes["Mamba2AttnBackend"])
    lightning = bare(classes["LightningAttentionBackend"])
    linear, tbo = classes["HybridLinearAttnBackend"], classes["TboAttnBackend"]

    def mixed(full: Any, recurrent: Any = mamba) -> Any:
        return bare(linear, full_attn_backend=full, linear_attn_backend=recurrent)

    return {
        "hybrid, mode prefill": hybrid(classes, flashmla, triton, "prefill"),
        "hybrid, mode decode": hybrid(classes, flashmla, triton, "decode"),
        "hybrid-linear": mixed(flashinfer),
        "hybrid-linear over lightning": mixed(flashinfer, lightning),
        "tbo": bare(tbo, primary=flashmla, children=[triton, triton]),
        "tbo over hybrid, mode decode": bare(
            tbo, primary=hybrid(classes, triton, flashmla, "decode"), children=[]
        ),
        "hybrid over hybrid-linear, mode decode": hybrid(
            classes, mixed(flashinfer), mixed(triton), "decode"
        ),
        "flashmla in a subclass": bare(type("Mine", (classes["FlashMLABackend"],), {})),
        "aiter, unified verify": bare(
            classes["AiterAttnBackend"], use_mla=False, _use_unified_verify=True
        ),
    }


def chosen_by_name(mode: str) -> str:
    """Return what the overlay says, from arguments, of prefill on flashmla, decode on triton."""
    args = SimpleNamespace(
        speculative_attention_mode=mode,
        attention_backend="flashmla",
        get_attention_backends=lambda: ("flashmla", "triton"),
    )
    return upstream.verify_backend_name(args)[0]


def main(release: str, target: Path) -> None:
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.speculative.dflash_utils import resolve_dflash_verify_mask_policy as stock

    classes, failures = load(release)
    rows = mask_table.rows_of(release)
    leaf_kinds = (Kind.ATTENTION, Kind.RECURRENT)
    chains = {
        name: resolve_chain(bare(cls))
        for name, cls in classes.items()
        if rows[name].kind in leaf_kinds
    }
    nested = wrapped(classes)
    tree = Drafts(algorithm="EAGLE", width=4)
    traits = Traits(topk=4, mla=False, page_size=1)
    verdicts = {name: judge_runner(backend, tree, traits) for name, backend in nested.items()}
    found = {
        "release": upstream.release(),
        "failures": failures,
        "matched": {
            name: mask_table.row_for(cls) is not None and mask_table.row_for(cls) == newest
            for name, cls in classes.items()
            for newest in [mask_table.newest_rows()[name]]
        },
        "chains": chains,
        "nested": {name: resolve_chain(backend) for name, backend in nested.items()},
        "stock": {name: stock(backend) for name, backend in nested.items()},
        "unable": {
            name: verdict.unable.class_name if verdict.unable else None
            for name, verdict in verdicts.items()
        },
        "by name": {mode: chosen_by_name(mode) for mode in ("prefill", "decode")},
        "registered": sorted(ATTENTION_BACKENDS),
    }
    target.write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
