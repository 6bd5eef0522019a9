"""The target's own token after each node of a tree: what the walk follows.

Which child the target would go on to is decided on the logits that plain decoding decides on: after
logit bias, then custom logit processors.
"""

from __future__ import annotations

from typing import Any

import torch

from sglang_overlay.srt.ddtree import processed
from sglang_overlay.tree.layout import DraftTree


def choose(batch: Any, logits: torch.Tensor, tree: DraftTree) -> torch.Tensor:
    """Return the target's choice after each node of ``tree``, [requests, nodes] int64.

    ``logits`` [requests × nodes, vocabulary] are adjusted in place. Greedy: requests that are not
    were refused when they came in (`requests`). Of a request with a custom logit processor only the
    choices along its path are processed: no walk looks at others.
    """
    nodes = tree.tokens.shape[1]
    sampling_info = batch.sampling_info
    if sampling_info is not None and sampling_info.logit_bias is not None:
        logits.view(-1, nodes, logits.shape[-1]).add_(sampling_info.logit_bias[:, None, :])
    chosen = logits.argmax(dim=-1).view(-1, nodes)
    if sampling_info is not None and sampling_info.has_custom_logit_processor:
        processed.choose_on_paths(batch, logits, tree, chosen)
    return chosen
