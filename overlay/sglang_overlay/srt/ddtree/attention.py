"""The attention backend of a server that named none: one that honours a draft tree."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from sglang_overlay import verify_engine
from sglang_overlay.mask_policy import Drafts
from sglang_overlay.srt import selection
from sglang_overlay.srt.ddtree import NAME, validation

logger = logging.getLogger(__name__)

TRITON = "triton"


def default_backend(server_args: Any, stock: str, *, mla: bool) -> str:
    """Return the backend for DDTREE where SGLang would have taken ``stock``.

    FlashMLA where the overlay's adapter can verify trees on it, else Triton, whose kernels take a
    mask on every GPU.
    """
    because = _obstacle(server_args, mla=mla)
    chosen = TRITON if because else verify_engine.FLASHMLA
    logger.info(
        "DDTREE: no attention backend was named; %s is taken instead of %s, because %s",
        chosen,
        stock,
        because or "the overlay verifies draft trees on it",
    )
    return chosen


def _obstacle(server_args: Any, *, mla: bool) -> str:
    if not mla:
        return "it honours a tree's mask and the target is no MLA model"
    size = server_args.speculative_num_draft_tokens
    drafts = Drafts(algorithm=NAME, width=size or validation.DEFAULT_TREE_SIZE)
    facts = selection.facts_by_name(server_args, drafts, verify_engine.FLASHMLA_BACKEND)
    config = server_args.get_model_config()
    facts = replace(facts, row_width=config.kv_lora_rank + config.qk_rope_head_dim)
    return "; ".join(verify_engine.obstacles(facts))
