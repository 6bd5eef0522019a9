"""Weights for ``load_format=dummy`` that make a model's output depend on all of its input.

The engine's own dummy weights lie within 1e-3 of zero: every token gets nearly the same logits, and
a wrong attention would go unseen.
"""

from __future__ import annotations

import torch

_SEED = 7


def fill(model: torch.nn.Module) -> None:
    """Fill ``model`` in place: norms with one, embeddings N(0, 1), matrices N(0, 1 / fan-in)."""
    _fill(model, torch.Generator())


def fill_on_gpu(model: torch.nn.Module) -> None:
    """Do so with numbers that a GPU draws: others, and a thousand times as many per second."""
    _fill(model, torch.Generator("cuda"))


def _fill(model: torch.nn.Module, generator: torch.Generator) -> None:
    generator.manual_seed(_SEED)
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point():
            continue
        if "norm" in name:
            parameter.data.fill_(1.0)
            continue
        wide = "embed" in name or "lm_head" in name
        spread = 1.0 if wide else parameter.shape[-1] ** -0.5
        drawn = torch.randn(parameter.shape, generator=generator, device=generator.device)
        parameter.data.copy_(drawn * spread)
