"""What a prefix engine is: it attends every tree node to the whole prefix of its request, unmasked.

An engine plans once per step and runs once per layer. Its raw lse is described by an `LseForm`; the
merge kernel's ``binary_lse`` and `natural_lse` are the two readers, and nothing else interprets it.
Declaring the form instead of rewriting the tensor saves one kernel launch per layer.

Scales of a quantised cache: a stored unit times ``cache_scale`` is the true value, for keys and values
alike. What the pool really does when it stores is what counts, not the checkpoint's ``k_scale``: a
pool that casts without dividing is read with ``cache_scale`` 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

LATENT_DIM = 512
ROPE_DIM = 64
KEY_DIM = LATENT_DIM + ROPE_DIM


@dataclass(frozen=True, kw_only=True)
class LseForm:
    """How an engine writes its log-sum-exp: base, and the value of a row without any key."""

    binary: bool = False
    empty_is_plus_inf: bool = False


@dataclass(frozen=True, kw_only=True)
class PrefixResult:
    """Attention over the prefixes alone.

    ``out`` is [tokens, heads, 512], any strides but the last contiguous; rows of an empty prefix are
    undefined. ``lse`` is [tokens, heads] float32, any strides, in the engine's `LseForm`.
    """

    out: torch.Tensor
    lse: torch.Tensor


class PrefixEngine(Protocol):
    """Dense attention over paged MLA rows of 576 (512 latent, which are also the values, + 64 rope)."""

    @property
    def lse_form(self) -> LseForm:
        """The form of every lse that `run` returns."""

    @property
    def page_size(self) -> int:
        """Slots per page of the cache that the page table indexes."""

    def plan(self, lengths: torch.Tensor, page_table: torch.Tensor, rows: int) -> None:
        """Prepare for one step; must be safe to capture and must not synchronise.

        ``lengths`` [requests] int32 counts prefix slots, without the tree. ``page_table`` [requests,
        width] int32 must cover them. ``rows`` is nodes × heads. The engine keeps references: the
        tensors are static buffers that later steps refill.
        """

    def run(
        self, query: torch.Tensor, cache: torch.Tensor, softmax_scale: float, cache_scale: float
    ) -> PrefixResult:
        """Attend ``query`` [tokens, heads, 576] to the planned prefixes in ``cache`` [slots, 1, 576]."""


def natural_lse(lse: torch.Tensor, form: LseForm) -> torch.Tensor:
    """Return ``lse`` in natural log with −inf for empty rows, a new tensor of the same shape."""
    natural = lse * 0.6931471805599453 if form.binary else lse.clone()
    if form.empty_is_plus_inf:
        natural.masked_fill_(natural == float("inf"), float("-inf"))
    return natural
