"""The best tokens of rows of logits on a GPU: three launches, whatever the vocabulary.

Pieces of the vocabulary are sorted by a program each, then merged by one program per row. torch's
top-k over a vocabulary takes several passes, and more to decide between equal logits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton

from sglang_overlay.tree.kernels.top_tokens import merge_tokens_kernel, top_tokens_kernel

MAX_K = 1024
CHUNK = 2048
# About as many programs as keep the multiprocessors of a large GPU busy.
PROGRAMS = 1024
WARPS = 4


def find_tokens(
    parts: Sequence[tuple[torch.Tensor, int]],
    rows: int,
    k: int,
    *,
    chunk: int = CHUNK,
    programs: int = PROGRAMS,
) -> torch.Tensor:
    """Return [rows, k + 1] int64: keys of the top k of all ``parts``, and their log-sum-exp.

    A part has logits [rows, its tokens], bf16, float16 or float32, and its first token. See
    `kernels.top_tokens` for keys. ``chunk`` tokens are sorted at a time, at least 2 ** ⌈log₂ k⌉, by
    about ``programs`` programs.

    Raises:
        ValueError: ``k`` is too large, or a part's logits are not contiguous along the tokens.

    """
    _check(k)
    chunks = [triton.cdiv(logits.shape[1], chunk) for logits, _ in parts]
    each = max(1, sum(chunks) * rows // programs)
    pieces = [triton.cdiv(count, each) for count in chunks]
    found = torch.empty(sum(pieces), rows, k + 1, dtype=torch.int64, device=parts[0][0].device)
    done = 0
    for (logits, token), count in zip(parts, pieces, strict=True):
        if logits.stride(1) != 1:
            raise ValueError(
                f"logits: got stride {logits.stride(1)} between tokens, needed 1; pass "
                ".contiguous()"
            )
        top_tokens_kernel[(rows, count)](
            logits,
            found,
            logits.stride(0),
            logits.shape[1],
            token,
            each,
            rows,
            done,
            k,
            K=width(k),
            CHUNK=chunk,
            num_warps=WARPS,
        )
        done += count
    merged = found.new_empty(rows, k + 1)
    _merge(found, k, merged, None, None, chunk)
    return merged


def finish_tokens(
    tops: torch.Tensor, k: int, *, chunk: int = CHUNK
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (log_probs [rows, k] float32, candidates [rows, k] int64) of ``tops`` together.

    ``tops`` [ranks, rows, k + 1] int64 contiguous are what `find_tokens` gives on every rank.

    Raises:
        ValueError: ``k`` is too large.

    """
    _check(k)
    rows = tops.shape[1]
    log_probs = torch.empty(rows, k, dtype=torch.float32, device=tops.device)
    candidates = torch.empty(rows, k, dtype=torch.int64, device=tops.device)
    _merge(tops, k, None, log_probs, candidates, chunk)
    return log_probs, candidates


def _merge(
    tops: torch.Tensor,
    k: int,
    top: torch.Tensor | None,
    log_probs: torch.Tensor | None,
    candidates: torch.Tensor | None,
    chunk: int,
) -> None:
    pieces, rows, _ = tops.shape
    merge_tokens_kernel[(rows,)](
        tops,
        top,
        log_probs,
        candidates,
        pieces,
        rows,
        k,
        K=width(k),
        BLOCK=block(k, chunk),
        FINISH=top is None,
        num_warps=WARPS,
    )


def width(k: int) -> int:
    """Return how many keys a program keeps for the top ``k``: a power of two."""
    return max(16, int(triton.next_power_of_2(k)))


def block(k: int, chunk: int) -> int:
    """Return how many keys are merged at a time."""
    return max(chunk // 2, 2 * width(k))


def _check(k: int) -> None:
    if not 1 <= k <= MAX_K:
        raise ValueError(f"k: got {k}, needed 1 to {MAX_K}; ask for fewer tokens")
