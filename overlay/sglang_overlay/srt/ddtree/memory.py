"""The memory that SGLang's graph capture takes because a verify has a tree's size, known before.

Capture would run out of it after minutes of loading, with an error that does not name the tree. The
largest part is of no use: the split logits of Triton's decode kernel, sized for every draft token
and read in no verify. Where the overlay verifies, it has them made for one token a request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sglang_overlay.srt.verify_backend import leaves

TRITON_BACKEND = "TritonAttnBackend"
_GIB = float(1 << 30)


class TreeMemoryError(ValueError):
    """Graph capture would need more memory for the trees than the GPU has left."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What the buffers are sized by.

    ``requests`` is the largest captured batch, ``tree`` the tokens of one verify, ``vocabulary``
    that of the logits. ``heads``, ``splits`` and ``width`` are the query heads per rank, the
    KV splits and the value width of Triton's decode kernel; zeros without that backend, whose
    buffers are made for ``tokens`` in all.
    """

    requests: int
    tree: int
    vocabulary: int
    tokens: int = 0
    context: int = 0
    heads: int = 0
    splits: int = 0
    width: int = 0


def parts(sizes: Sizes) -> dict[str, int]:
    """Return the bytes of each buffer, by a name that says what it is."""
    nodes, tokens = sizes.requests * sizes.tree, sizes.tokens
    found = {"logits of every node": nodes * sizes.vocabulary * 4}
    if sizes.splits:
        found |= {
            "Triton's split logits": tokens * sizes.heads * sizes.splits * (sizes.width + 1) * 4,
            "Triton's KV indices": tokens * sizes.context * 8,
            "Triton's mask": tokens * (sizes.context + sizes.tree),
        }
    return found


def refusal(sizes: Sizes, free: int) -> str | None:
    """Return why capture cannot hold trees of these ``sizes`` in ``free`` bytes, or None."""
    needed = parts(sizes)
    total = sum(needed.values())
    if total <= free:
        return None
    listed = ", ".join(f"{name} {count / _GIB:.1f} GiB" for name, count in needed.items())
    return (
        f"DDTREE: graph capture of {sizes.requests} requests × {sizes.tree} tree tokens needs "
        f"{total / _GIB:.1f} GiB ({listed}), and {free / _GIB:.1f} GiB are free behind weights and "
        "KV cache. Lower --cuda-graph-max-bs, --speculative-num-draft-tokens or "
        "--mem-fraction-static, or verify on flashmla."
    )


def check_runner(model_runner: Any) -> None:
    """Refuse a target whose graph capture would run out of memory because of its trees.

    Raises:
        TreeMemoryError: with the numbers.
    """
    if model_runner.server_args.disable_cuda_graph or model_runner.device != "cuda":
        return
    import torch

    free, _ = torch.cuda.mem_get_info()
    message = refusal(sizes_of(model_runner), free)
    if message is not None:
        raise TreeMemoryError(message)


def sizes_of(model_runner: Any) -> Sizes:
    """Return the sizes of the target's ``model_runner``."""
    from sglang.srt.model_executor.cuda_graph_runner import get_batch_sizes_to_capture

    from sglang_overlay.srt.tree_verify import graph_tokens

    tree = int(model_runner.server_args.speculative_num_draft_tokens)
    captured, _ = get_batch_sizes_to_capture(model_runner, tree)
    triton = [
        leaf for leaf in leaves(model_runner.attn_backend) if type(leaf).__name__ == TRITON_BACKEND
    ]
    requests = max(captured)
    return Sizes(
        requests=requests,
        tree=tree,
        vocabulary=model_runner.model_config.vocab_size,
        tokens=max(
            (graph_tokens(backend, requests, requests * tree) for backend in triton), default=0
        ),
        context=max((backend.max_context_len for backend in triton), default=0),
        heads=max((backend.num_head for backend in triton), default=0),
        splits=max((backend.max_kv_splits for backend in triton), default=0),
        width=max((backend.v_head_dim for backend in triton), default=0),
    )
