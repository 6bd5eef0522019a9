"""The facts that choose the verify engine, from SGLang's arguments and objects; its attachment.

Nothing heavy is imported before it is needed: `hooks` imports this module in every process.
"""

from __future__ import annotations

from typing import Any

from sglang_overlay import mask_table, upstream
from sglang_overlay.mask_policy import Drafts
from sglang_overlay.srt.verify_backend import leaves
from sglang_overlay.verify_engine import FLASHMLA_BACKEND, PAGE_SIZE, Facts


def facts_by_name(server_args: Any, drafts: Drafts, class_name: str) -> Facts:
    """Return what the resolved arguments say, where verify will run on ``class_name``."""
    dtype = server_args.kv_cache_dtype
    return Facts(
        backends=(class_name,),
        device=server_args.device,
        capability=capability_of(server_args.device),
        page_size=server_args.page_size,
        cache_dtype=upstream.CACHE_DTYPES.get(dtype, dtype),
        **_common(server_args, drafts),
    )


def facts_by_object(model_runner: Any, drafts: Drafts | None) -> Facts:
    """Return what the target's made objects say."""
    server_args = model_runner.server_args
    found = tuple(leaves(model_runner.attn_backend)) if drafts is not None else ()
    names = tuple(_name_of(leaf) for leaf in found)
    return Facts(
        backends=names,
        device=server_args.device,
        capability=capability_of(server_args.device),
        page_size=server_args.page_size,
        cache_dtype=str(model_runner.kv_cache_dtype).removeprefix("torch."),
        row_width=found[0].kv_cache_dim if names == (FLASHMLA_BACKEND,) else None,
        **_common(server_args, drafts),
    )


def capability_of(device: str) -> tuple[int, int] | None:
    """Return the compute capability of the current GPU, or None where ``device`` is no CUDA one."""
    if device != "cuda":
        return None
    import torch

    major, minor = torch.cuda.get_device_capability()
    return major, minor


def attach(model_runner: Any) -> None:
    """Give the target's FlashMLA backend an adapter: from now on it verifies trees.

    It is also kept on the runner as ``overlay_tree_verify``, for server info.
    """
    from sglang_overlay.srt import tree_verify

    (backend,) = leaves(model_runner.attn_backend)
    server_args = model_runner.server_args
    verify = tree_verify.build(
        backend,
        nodes=int(server_args.speculative_num_draft_tokens),
        page_size=PAGE_SIZE,
    )
    tree_verify.attach(backend, verify)
    model_runner.overlay_tree_verify = verify


def _name_of(backend: Any) -> str:
    # A class that only has the name carries no hooks: it would drop the tree in silence.
    cls = type(backend)
    return cls.__name__ if mask_table.row_for(cls) else f"{cls.__module__}.{cls.__name__}"


def _common(server_args: Any, drafts: Drafts | None) -> dict[str, Any]:
    # Only SGLang's own trees are committed by SGLang; a chain needs no row moved.
    stock_tree = (
        drafts is not None and drafts.branches and drafts.algorithm in upstream.TREE_ALGORITHMS
    )
    return {
        "tree_size": int(server_args.speculative_num_draft_tokens or 0),
        "deterministic": bool(server_args.enable_deterministic_inference),
        "splits_batches": upstream.splits_batches(server_args),
        "commits_trees": not stock_tree or upstream.mla_pool_moves_rows(),
    }
