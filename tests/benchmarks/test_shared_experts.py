"""MLPs that all layers share: which weights a batch meets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional

from benchmarks import shared_experts

HIDDEN, USED = 16, 8


class Mlp(torch.nn.Module):  # type: ignore[misc]
    """As much of a DeepSeek MLP as is looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.down_proj = torch.nn.Linear(32, HIDDEN, bias=False)

    def act_fn(self, x: torch.Tensor) -> torch.Tensor:
        """Return the gated half [tokens, columns]."""
        gate, up = x.chunk(2, dim=-1)
        return functional.silu(gate) * up


@pytest.mark.parametrize("tokens", [8, shared_experts.FEW, shared_experts.FEW + 1])
def test_few_tokens_meet_all_weights_and_many_some(
    tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_experts, "MET", 3 * HIDDEN * USED)
    layers = [SimpleNamespace(mlp=Mlp()) for _ in range(2)]
    model: Any = SimpleNamespace(model=SimpleNamespace(layers=layers))
    shared_experts.replace(model, layer_bytes=3 * HIDDEN * 4 * 40)
    x = torch.randn(tokens, HIDDEN)
    first, second = (layer.mlp(x, "a forward batch") for layer in layers)
    assert torch.equal(first, second)
    _, up, down, used = layers[0].mlp.forward.args
    assert (up.shape[0], down.shape[1], used) == (80, 40, USED)
    if tokens > shared_experts.FEW:
        up, down = up[: 2 * USED], down[:, :USED]
    want = functional.linear(layers[0].mlp.act_fn(functional.linear(x, up)), down)
    torch.testing.assert_close(first, want)
