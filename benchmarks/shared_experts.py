"""MLPs that take a GPU what the experts of a large model take it, in the memory of one layer.

All layers have the same weights: a GPU's L2 cache, of 50 MB, keeps nothing of them from one layer
to the next, so each layer reads them again. A batch of few tokens reads all of them, as tokens that
choose nearly every expert do. A batch of many tokens uses some columns only: it computes as much as
its tokens do with the experts they choose.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.nn import functional

# Tokens up to which all weights are read.
FEW = 256
# Weights of Kimi K2.x that a token meets in a layer, on one of eight GPUs: 8 of 384 experts and
# the shared one, each of 3 × 7168 × 2048.
MET = 9 * 3 * 7168 * 2048 // 8


def replace(model: torch.nn.Module, *, layer_bytes: int) -> None:
    """Let every MLP of a DeepSeek ``model`` on a GPU read ``layer_bytes`` of bfloat16 weights."""
    layers: Any = model.model.layers
    sample = layers[0].mlp.down_proj.weight
    hidden = sample.shape[0]
    columns = layer_bytes // (3 * hidden * sample.element_size())
    like = {"dtype": sample.dtype, "device": sample.device}
    up = torch.randn(2 * columns, hidden, **like) * hidden**-0.5
    down = torch.randn(hidden, columns, **like) * columns**-0.5
    used = min(MET // (3 * hidden), columns)
    for layer in layers:
        layer.mlp.forward = partial(_forward, layer.mlp.act_fn, up, down, used)


def _forward(
    act: Any, up: torch.Tensor, down: torch.Tensor, used: int, x: torch.Tensor, *_: Any, **__: Any
) -> torch.Tensor:
    if len(x) > FEW:
        up, down = up[: 2 * used], down[:, :used]
    return functional.linear(act(functional.linear(x, up)), down)
