"""The names that SGLang gives to things, where the overlay depends on them; nowhere else.

Nothing here is imported from SGLang at module level: hooks load this module while SGLang itself is
still being imported.
"""

from __future__ import annotations

from typing import Any

# SGLang's own algorithms whose drafts branch when speculative_eagle_topk > 1; NGRAM's always do.
# SGLang writes NGRAM's breadth into the same argument before the overlay looks at it.
TREE_ALGORITHMS = frozenset({"EAGLE", "EAGLE3", "STANDALONE", "FROZEN_KV_MTP", "NGRAM"})

# The wrappers, and the attributes that lead from each to the backends that it runs in verify.
HYBRID = "HybridAttnBackend"
WRAPPED = {
    "HybridLinearAttnBackend": ("full_attn_backend", "linear_attn_backend"),
    "AscendHybridLinearAttnBackend": ("full_attn_backend", "linear_attn_backend"),
    "TboAttnBackend": ("primary",),
}

# Prefix caches whose nodes are known: each has a tensor of slots, or None if it is on the host.
NODE_CACHES = {
    ("sglang.srt.mem_cache.radix_cache", "RadixCache"),
    ("sglang.srt.mem_cache.hiradix_cache", "HiRadixCache"),
}

# The KV pools whose layout the verify engines read; subclasses and pools of pools have another one.
MLA_POOL = ("sglang.srt.mem_cache.memory_pool", "MLATokenToKVPool")
READ_POOLS = {("sglang.srt.mem_cache.memory_pool", "MHATokenToKVPool"), MLA_POOL}

# Where a backend keeps the number of query heads of its rank.
QUERY_HEADS = {"FlashMLABackend": "num_q_heads", "TritonAttnBackend": "num_head"}

# Values of --kv-cache-dtype, as the names of torch's dtypes; "auto" is known once the model is.
CACHE_DTYPES = {
    "auto": None,
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}
# Values of --dtype, likewise; others are such names already.
MODEL_DTYPES = {"auto": None, "half": "float16", "float": "float32"}


def release() -> str:
    """Return SGLang's version, to name it. Behaviour never depends on it."""
    from sglang.version import __version__

    return str(__version__)


def draft_width(server_args: Any) -> int:
    """Return how wide the drafts of the resolved ``server_args`` can branch; 1 is a chain."""
    if server_args.speculative_algorithm == "DFLASH":
        return 1
    # A registered algorithm that nobody here knows is taken at its word too.
    width = int(server_args.speculative_eagle_topk or 1)
    # The breadth bounds each node of NGRAM's trie. Every suffix of the text that the trie knows
    # goes on from the root of the drafts, and so do the tokens that fill them up.
    return max(width, 2) if server_args.speculative_algorithm == "NGRAM" else width


def verify_backend_name(server_args: Any) -> tuple[str, str]:
    """Return the ``--attention-backend`` value that target verify will run, and what chose it.

    The same rule as ``HybridAttnBackend._select_backend``, for use before any backend exists.
    """
    prefill, decode = server_args.get_attention_backends()
    if prefill == decode:
        return str(server_args.attention_backend), f"--attention-backend {prefill}"
    if server_args.speculative_attention_mode == "decode":
        chosen_by = f"--decode-attention-backend {decode} with --speculative-attention-mode decode"
        return str(decode), chosen_by
    chosen_by = f"the prefill backend, {prefill}, with --speculative-attention-mode prefill"
    return str(prefill), chosen_by


def splits_batches(server_args: Any) -> str | None:
    """Return the option that makes SGLang run verify on further backend objects, or None."""
    if server_args.enable_two_batch_overlap:
        return "--enable-two-batch-overlap"
    if getattr(server_args, "speculative_adaptive", False):
        return "--speculative-adaptive"
    return "--enable-pdmux" if server_args.enable_pdmux else None


def only_prefills(server_args: Any) -> bool:
    """Return whether the server leaves every verify to another one (``--disaggregation-mode``)."""
    return bool(server_args.disaggregation_mode == "prefill")


def largest_graph_batch(server_args: Any, requests: int) -> int:
    """Return the largest batch that SGLang captures a CUDA graph for: ``requests``, rounded up.

    They are rounded to a multiple of the ranks that gather a batch, by ``cuda_graph_runner.py`` in
    ``get_batch_sizes_to_capture``. Call it where the ranks' groups are there.
    """
    from sglang.srt.layers.dp_attention import get_attention_cp_size, get_attention_tp_size
    from sglang.srt.utils import require_gathered_buffer

    multiple = int(get_attention_tp_size()) if require_gathered_buffer(server_args) else 1
    ranks = int(get_attention_cp_size())
    if multiple % ranks:
        multiple *= ranks
    return -(-requests // multiple) * multiple


def joins_serving_ranks(server_args: Any) -> bool:
    """Return whether this process takes the place of a lost rank among ranks that serve already."""
    return bool(getattr(server_args, "elastic_ep_rejoin", False))


def mla_pool_moves_rows() -> bool:
    """Return whether SGLang's MLA pool can move KV rows, as the commit of a paged tree must."""
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

    return hasattr(MLATokenToKVPool, "move_kv_cache")


def moves_rows(pool: Any) -> bool:
    """Return whether the made KV ``pool`` can move rows.

    What the overlay gives the MLA pool refuses its subclasses: see `pool_hooks`.
    """
    owner = next((cls for cls in type(pool).__mro__ if "move_kv_cache" in vars(cls)), None)
    inner = getattr(pool, "full_kv_pool", None)
    if owner is None or (inner is not None and not moves_rows(inner)):
        return False
    return (owner.__module__, owner.__name__) != MLA_POOL or type(pool) is owner


def attention_layers(model: Any) -> list[Any]:
    """Return the attention layers of a made ``model``, in its order; empty: none can be seen."""
    from sglang.srt.layers.radix_attention import RadixAttention

    layers = []
    for module in model.modules():
        # SGLang's frame around Transformers' models keeps its layers in a plain dict.
        hidden = list((getattr(module, "attention_instances", None) or {}).values())
        layers += [one for one in (module, *hidden) if isinstance(one, RadixAttention)]
    return layers


def odd_layer(layers: list[Any]) -> str | None:
    """Return what a layer does beside plain causal attention over its request, or None."""
    for layer in layers:
        name = f"layer {layer.layer_id} has"
        if layer.sliding_window_size > -1:
            return f"{name} a sliding window"
        if layer.use_irope:
            return f"{name} a chunked window"
        if layer.logit_cap > 0:
            return f"{name} a logit cap"
        if layer.xai_temperature_len > 0:
            return f"{name} a temperature by position"
        if layer.is_cross_attention or layer.attn_type.value != "decoder":
            return f"{name} another mask than the causal one"
    return None


def counts_rows(layers: list[Any]) -> bool:
    """Return whether a layer's kernel needs to know where in the request a query stands.

    A window or a temperature by position: SGLang's Triton kernel takes a draft token's row for it.
    Where no layer can be seen, there may be one.
    """
    return not layers or any(
        layer.sliding_window_size > -1 or layer.xai_temperature_len > 0 for layer in layers
    )


def has_window(model_runner: Any) -> bool:
    """Return whether backends of ``model_runner`` make metadata for a sliding window."""
    return model_runner.sliding_window_size is not None


def cache_scale(layers: list[Any]) -> float:
    """Return the first scale of keys or values in ``layers`` that is not 1, or 1."""
    scales = (scale for layer in layers for scale in (layer.k_scale_float, layer.v_scale_float))
    return next((float(scale) for scale in scales if scale not in (None, 1.0)), 1.0)


def head_shapes(layers: list[Any]) -> set[tuple[int, int, int, int]]:
    """Return (query heads, KV heads, key width, value width) of ``layers``, each shape once."""
    return {
        (layer.tp_q_head_num, layer.tp_k_head_num, layer.qk_head_dim, layer.v_head_dim)
        for layer in layers
    }


def odd_pool(pool: Any) -> str | None:
    """Return the class name of a KV ``pool`` that is not one of `READ_POOLS`, or None."""
    cls = type(pool)
    return None if (cls.__module__, cls.__name__) in READ_POOLS else cls.__name__


def row_width(pool: Any) -> int | None:
    """Return how many elements one row of an MLA ``pool`` has, or None for another kind of pool."""
    return getattr(pool, "kv_cache_dim", None)


def verify_backend_of_hybrid(backend: Any) -> Any:
    """Return the backend that a ``HybridAttnBackend`` runs in target verify, by asking it."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    return backend._select_backend(ForwardMode.TARGET_VERIFY)


def registered_backends() -> frozenset[str]:
    """Return the ``--attention-backend`` values that this SGLang knows."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    return frozenset(ATTENTION_BACKENDS)


def has_known_nodes(tree_cache: Any) -> bool:
    """Return whether ``tree_cache`` is exactly one whose nodes are known: see `NODE_CACHES`."""
    cache = type(tree_cache)
    return (cache.__module__, cache.__name__) in NODE_CACHES


def allocating_twice(server_args: Any) -> list[str]:
    """Return what lets two streams allocate slots without waiting for each other."""
    # Prefill and decode allocate on streams of their own; no event lies between them.
    if server_args.enable_pdmux:
        return ["--enable-pdmux allocates on two streams at once"]
    return []


def writes_behind_the_host(server_args: Any) -> bool:
    """Return whether what writes new slots may do so before the forward that last wrote them ends.

    A batch runs while the one before is released; a transfer from another server and a load from
    the host's cache, or from LMCache, do not wait for it.
    """
    runs_ahead = not server_args.disable_overlap_schedule or server_args.pp_size > 1
    loads = server_args.enable_hierarchical_cache or server_args.enable_lmcache
    return bool(runs_ahead and (loads or server_args.disaggregation_mode != "null"))


def slot_holders(scheduler: Any) -> list[str]:
    """Return what on this server may hold KV slots beside the radix cache and running requests.

    Empty where nothing does, so that cached tokens can be moved.
    """
    args, found = scheduler.server_args, []
    cache = type(scheduler.tree_cache)
    if (cache.__module__, cache.__name__) != ("sglang.srt.mem_cache.radix_cache", "RadixCache"):
        found.append(f"its prefix cache is a {cache.__name__}, known is RadixCache")
    held_by = {
        "--disaggregation-mode": args.disaggregation_mode != "null",
        "--pp-size above 1": args.pp_size > 1,
        "--enable-hierarchical-cache": args.enable_hierarchical_cache,
        "--enable-lmcache": args.enable_lmcache,
        "--enable-streaming-session": args.enable_streaming_session,
        "--enable-hisparse": args.enable_hisparse,
        "sliding-window attention": scheduler.is_hybrid_swa,
        "a state-space model": scheduler.is_hybrid_ssm,
        "a diffusion language model": args.dllm_algorithm is not None,
    }
    found += [
        f"{name} holds slots that would not be told" for name, held in held_by.items() if held
    ]
    algorithm = scheduler.spec_algorithm
    if not (algorithm.is_none() or algorithm.is_dflash()):
        found.append(f"the drafter of {args.speculative_algorithm} holds slots of its own")
    return found


def overlapping(scheduler: Any) -> list[str]:
    """Return what lets a batch run while the next one is prepared; empty where nothing does."""
    name = "the overlap scheduler (--disable-overlap-schedule turns it off)"
    return [f"batches overlap under {name}"] if scheduler.enable_overlap else []


def slot_pools(scheduler: Any) -> list[Any]:
    """Return the KV pools that are indexed by the target's slots: its own and the drafter's."""
    pools = [scheduler.token_to_kv_pool_allocator.get_kvcache()]
    if scheduler.draft_worker is not None:
        pools.append(scheduler.draft_worker.draft_model_runner.token_to_kv_pool)
    return pools
