"""What a prefix engine is: it attends every tree node to the whole prefix of its request, unmasked.

An engine plans once per step and runs once per layer. It brings its lse to natural log. Kernels
differ most about empty rows (FlashMLA writes +inf as their lse, and its fp8 kernel reads the page
before the first), so no engine is asked for one: an empty prefix is planned as one slot long, and
the merge, which knows the true length, never reads the result. That costs no launch, where
rewriting an lse would cost one per layer.

Scales of a quantised cache: a stored unit times ``cache_scale`` is the true value, for keys and
values alike. What the pool really does when it stores is what counts, not the checkpoint's
``k_scale``: a pool that casts without dividing is read with ``cache_scale`` 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

LATENT_DIM = 512
ROPE_DIM = 64
KEY_DIM = LATENT_DIM + ROPE_DIM


@dataclass(frozen=True, kw_only=True)
class PrefixResult:
    """Attention over the prefixes alone.

    ``out`` is [tokens, heads, 512], any strides but the last contiguous; ``lse`` is [tokens, heads]
    float32, natural log, any strides. Both are undefined where the prefix is empty.
    """

    out: torch.Tensor
    lse: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class PrefixParts:
    """Attention over disjoint parts of the prefixes, which the tree kernel combines.

    ``out`` is [parts, nodes, heads, 512], each part's own softmax; ``lse`` [parts, nodes, heads]
    float32, natural log. ``first`` [requests + 1] int32: request r owns parts first[r] to
    first[r + 1]. What belongs to no request, and the parts of an empty prefix, are undefined. Last
    dimensions of ``out`` are contiguous.
    """

    out: torch.Tensor
    lse: torch.Tensor
    first: torch.Tensor


class PrefixEngine(Protocol):
    """Dense attention over paged MLA rows of 576: 512 latent, also the values, and 64 rope."""

    @property
    def page_size(self) -> int:
        """Slots per page of the cache that the page table indexes."""

    def plan(self, lengths: torch.Tensor, page_table: torch.Tensor, rows: int) -> None:
        """Prepare for one step; must be safe to capture and must not synchronise.

        ``lengths`` [requests] int32 counts prefix slots, without the tree, at least 1.
        ``page_table`` [requests, width] int32 must cover them. ``rows`` is nodes × heads. The
        engine keeps references: the tensors are static buffers that later steps refill.
        """

    def run(
        self, query: torch.Tensor, cache: torch.Tensor, softmax_scale: float, cache_scale: float
    ) -> PrefixResult | PrefixParts:
        """Attend ``query`` [tokens, heads, 576] to the prefixes in ``cache`` [slots, 1, 576]."""
