"""The mask that SGLang's Triton backend replays captured verifies with, long enough for drafts.

SGLang makes it as long as all tokens of a batch times the context. A verify's mask has a column
for each draft behind the context, too: near the end of the context the copy into it failed.
"""

from __future__ import annotations

from typing import Any


def lengthen(backend: Any, max_tokens: int) -> None:
    """Put a mask that holds any verify of ``max_tokens`` tokens in the place of SGLang's own.

    A row of ``req_to_token`` holds a request's context and its drafts: no length is longer.
    """
    mask = getattr(backend, "cuda_graph_custom_mask", None)
    if mask is None or not backend.num_draft_tokens:
        return
    needed = max_tokens * backend.req_to_token.shape[1]
    if mask.numel() < needed:
        backend.cuda_graph_custom_mask = mask.new_zeros(needed)
