"""The facts that choose the verify engine, from SGLang's arguments and objects; its attachment.

Nothing heavy is imported before it is needed: `hooks` imports this module in every process.
"""

from __future__ import annotations

from typing import Any

from sglang_overlay import mask_table, upstream
from sglang_overlay.mask_policy import Drafts
from sglang_overlay.srt.verify_backend import leaves
from sglang_overlay.verify_engine import BACKENDS, MAX_WIDTH, Facts


def facts_by_name(server_args: Any, drafts: Drafts, class_name: str) -> Facts:
    """Return what the resolved arguments say, where verify will run on ``class_name``."""
    cache = server_args.kv_cache_dtype
    return Facts(
        backends=(class_name,),
        device=server_args.device,
        capability=capability_of(server_args.device),
        page_size=server_args.page_size,
        cache_dtype=upstream.CACHE_DTYPES.get(cache, cache),
        model_dtype=upstream.MODEL_DTYPES.get(server_args.dtype, server_args.dtype),
        mla=server_args.use_mla_backend(),
        **_common(
            server_args,
            drafts,
            moves_rows=not server_args.use_mla_backend() or upstream.mla_pool_moves_rows(),
        ),
    )


def facts_by_object(model_runner: Any, drafts: Drafts | None) -> Facts:
    """Return what the target's made objects say."""
    server_args = model_runner.server_args
    found = tuple(leaves(model_runner.attn_backend)) if drafts is not None else ()
    names = tuple(_name_of(leaf) for leaf in found)
    # The parts of other servers need not look as theirs do.
    ours = len(names) == 1 and names[0] in BACKENDS
    layers = upstream.attention_layers(model_runner.model) if ours else []
    return Facts(
        backends=names,
        device=server_args.device,
        capability=capability_of(server_args.device),
        page_size=server_args.page_size,
        cache_dtype=str(model_runner.kv_cache_dtype).removeprefix("torch."),
        model_dtype=str(model_runner.dtype).removeprefix("torch."),
        mla=bool(model_runner.use_mla_backend),
        row_width=upstream.row_width(model_runner.token_to_kv_pool) if ours else None,
        odd_pool=upstream.odd_pool(model_runner.token_to_kv_pool) if ours else None,
        odd_layer=_odd_layer(model_runner, layers) if layers else None,
        hidden_layers=ours and not layers,
        **_common(
            server_args, drafts, moves_rows=upstream.moves_rows(model_runner.token_to_kv_pool)
        ),
    )


def counts_rows(model_runner: Any) -> bool:
    """Return whether a layer of the target needs to know where in a request a query stands."""
    return upstream.counts_rows(upstream.attention_layers(model_runner.model))


def capability_of(device: str) -> tuple[int, int] | None:
    """Return the compute capability of the current GPU, or None where it is not NVIDIA's.

    An AMD GPU goes by the name of ``cuda`` too, and has numbers that mean something else.
    """
    if device != "cuda":
        return None
    import torch

    if torch.version.hip is not None:
        return None
    major, minor = torch.cuda.get_device_capability()
    return major, minor


def attach(model_runner: Any, drafts: Drafts, engine: str) -> None:
    """Give the target's verify backend an adapter over ``engine``: from now on it verifies with it.

    It is also kept on the runner as ``overlay_tree_verify``, for server info.
    """
    from sglang_overlay.srt import tree_verify

    (backend,) = leaves(model_runner.attn_backend)
    sizes = {
        "page_size": model_runner.server_args.page_size,
        "max_requests": upstream.largest_graph_batch(
            model_runner.server_args, backend.req_to_token.shape[0]
        ),
    }
    if model_runner.use_mla_backend:
        verify = tree_verify.build(
            backend,
            drafts,
            engine=engine,
            cache_dtype=model_runner.kv_cache_dtype,
            **sizes,
        )
    else:
        (shape,) = upstream.head_shapes(upstream.attention_layers(model_runner.model))
        verify = tree_verify.build_grouped(backend, drafts, shape=shape, **sizes)
    tree_verify.attach(backend, verify)
    model_runner.overlay_tree_verify = verify


def _name_of(backend: Any) -> str:
    # A class that only has the name carries no hooks: it would drop the tree in silence.
    cls = type(backend)
    return cls.__name__ if mask_table.row_for(cls) else f"{cls.__module__}.{cls.__name__}"


def _odd_layer(model_runner: Any, layers: list[Any]) -> str | None:
    # TritonAttnBackend divides what it stores by its scale in some releases and not in others,
    # also where it prefills alone.
    scale = upstream.cache_scale(layers)
    if scale != 1.0 and "triton" in model_runner.server_args.get_attention_backends():
        return f"keys or values have a scale of {scale}"
    if not model_runner.use_mla_backend:
        shapes = upstream.head_shapes(layers)
        if len(shapes) > 1:
            return "layers have heads of several shapes"
        if max(max(shape[2:]) for shape in shapes) > MAX_WIDTH:
            return f"heads are wider than {MAX_WIDTH}"
    return upstream.odd_layer(layers)


def _common(server_args: Any, drafts: Drafts | None, *, moves_rows: bool) -> dict[str, Any]:
    # Only SGLang's own trees are committed by SGLang; a chain needs no row moved.
    stock_tree = (
        drafts is not None and drafts.branches and drafts.algorithm in upstream.TREE_ALGORITHMS
    )
    return {
        "tree_size": int(server_args.speculative_num_draft_tokens or 0),
        "deterministic": bool(server_args.enable_deterministic_inference),
        "splits_batches": upstream.splits_batches(server_args),
        "commits_trees": not stock_tree or server_args.page_size == 1 or moves_rows,
    }
