"""The target's own token after each node of a tree: what the walk follows.

Which child the target would go on to is decided on the logits that plain decoding decides on: after
custom logit processors and logit bias.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.sampler import apply_custom_logit_processor


def choose(batch: Any, logits: torch.Tensor, nodes: int) -> torch.Tensor:
    """Return the target's choice after each node, [requests, nodes] int64.

    ``logits`` [requests × nodes, vocabulary] are adjusted in place. Greedy: requests that are not
    were refused when they came in (`requests`).
    """
    adjust(logits, batch.sampling_info, nodes)
    return logits.argmax(dim=-1).view(-1, nodes)


def adjust(logits: torch.Tensor, sampling_info: Any, nodes: int) -> None:
    """Apply each request's custom logit processors and bias to the logits of all its nodes."""
    if sampling_info is None:
        return
    if sampling_info.has_custom_logit_processor:
        apply_custom_logit_processor(logits, sampling_info, num_tokens_in_batch=nodes)
    if sampling_info.logit_bias is not None:
        logits.view(-1, nodes, logits.shape[-1]).add_(sampling_info.logit_bias[:, None, :])
