"""The names that SGLang gives to things, where the overlay depends on them; nowhere else.

Nothing here is imported from SGLang at module level: hooks load this module while SGLang itself is
still being imported.
"""

from __future__ import annotations

from typing import Any

# Algorithms whose drafts branch when speculative_eagle_topk > 1. SGLang writes NGRAM's breadth into
# the same argument before the overlay looks at it.
TREE_ALGORITHMS = frozenset({"EAGLE", "EAGLE3", "STANDALONE", "FROZEN_KV_MTP", "NGRAM"})

# The wrappers, and the attributes that lead from each to the backends that it runs in verify.
HYBRID = "HybridAttnBackend"
WRAPPED = {
    "HybridLinearAttnBackend": ("full_attn_backend", "linear_attn_backend"),
    "AscendHybridLinearAttnBackend": ("full_attn_backend", "linear_attn_backend"),
    "TboAttnBackend": ("primary",),
}


def release() -> str:
    """Return SGLang's version, to name it. Behaviour never depends on it."""
    from sglang.version import __version__

    return str(__version__)


def draft_width(server_args: Any) -> int:
    """Return how wide the drafts of the resolved ``server_args`` can branch; 1 is a chain."""
    if server_args.speculative_algorithm not in TREE_ALGORITHMS:
        return 1
    return int(server_args.speculative_eagle_topk or 1)


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


def verify_backend_of_hybrid(backend: Any) -> Any:
    """Return the backend that a ``HybridAttnBackend`` runs in target verify, by asking it."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    return backend._select_backend(ForwardMode.TARGET_VERIFY)


def registered_backends() -> frozenset[str]:
    """Return the ``--attention-backend`` values that this SGLang knows."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    return frozenset(ATTENTION_BACKENDS)
