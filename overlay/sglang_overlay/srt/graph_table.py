"""The page table that SGLang's FlashMLA backend fills for captured graphs, wide enough for drafts.

SGLang makes it (context + 64) // 64 pages wide, whatever the drafts need behind a full context. Its
kernel then writes the last pages of a request into the row of the next one, and those of the last
request behind the table.
"""

from __future__ import annotations

from typing import Any

import torch

from sglang_overlay.verify_engine import PAGE_SIZE


def wide_enough(backend: Any, max_requests: int) -> torch.Tensor | None:
    """Return a table [max_requests, pages] int32 for ``backend``; None where its own would do.

    A row of ``req_to_token`` holds a request's context and its drafts: no length is longer.
    """
    table = backend.req_to_token
    needed = -(-table.shape[1] // PAGE_SIZE)
    if needed <= (backend.max_context_len + PAGE_SIZE) // PAGE_SIZE:
        return None
    # Page 1, as in SGLang's own: a valid one for rows that only pad a batch.
    return torch.ones(max_requests, needed, dtype=torch.int32, device=table.device)
