"""The static buffers of one verify step: allocated once, refilled in place, read by every layer.

Everything has a fixed address and a fixed size, so a captured graph sees each step's values. `fill`
launches two kernels and synchronises with nothing; it can itself be captured.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_overlay.attention.kernels.page_table import page_table_kernel
from sglang_overlay.attention.mask import MAX_NODES, pack_full_mask, pack_parents, words_for
from sglang_overlay.attention.memory import require

_TABLE_BLOCK = 512


@dataclass(frozen=True, kw_only=True)
class PlanSizes:
    """Upper bounds that hold for the life of a server.

    ``max_context`` counts slots of a request before the tree; ``nodes`` is the tree's size, root
    included, the same for every request of a batch.
    """

    max_requests: int
    max_context: int
    nodes: int
    page_size: int = 64

    def __post_init__(self) -> None:
        if not 1 <= self.nodes <= MAX_NODES:
            raise ValueError(
                f"nodes: got {self.nodes}, needed 1 to {MAX_NODES}; choose a smaller draft tree"
            )
        for name in ("max_requests", "max_context", "page_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}, needed at least 1")

    @property
    def table_width(self) -> int:
        """Pages of one request: the context and, behind it, the tree."""
        return -(-(self.max_context + self.nodes) // self.page_size)


@dataclass(frozen=True, kw_only=True)
class VerifyStep:
    """The inputs of one step, on the device.

    ``prefix_lens`` [requests] int32/int64 counts slots without the tree. ``request_rows``
    [requests] int are rows of ``req_to_token`` [pool, context] int32. The topology is ``parents``
    [requests, nodes] or SGLang's flat ``full_mask``, exactly one of them.
    """

    prefix_lens: torch.Tensor
    request_rows: torch.Tensor
    req_to_token: torch.Tensor
    parents: torch.Tensor | None = None
    full_mask: torch.Tensor | None = None


class VerifyPlan:
    """The buffers: int32 unless said otherwise.

    ``page_table`` [max_requests, table_width]; ``lengths`` [max_requests] of the prefixes;
    ``planned_lengths`` [max_requests], the same but at least 1, for engines; ``ancestors``
    [max_requests, nodes, words] int64 (see `mask`).
    """

    def __init__(self, sizes: PlanSizes, device: torch.device | str) -> None:
        """Allocate the buffers.

        Raises:
            BufferMemoryError: the GPU has not the memory.
        """
        self.sizes = sizes
        mask = sizes.nodes * words_for(sizes.nodes) * 8
        needed = sizes.max_requests * ((sizes.table_width + 2) * 4 + mask)
        require(f"plan of {sizes.max_requests} requests", needed, device)
        # Zeros: page 0 is the padding page, so an entry that was never written is a valid page id.
        self.page_table = torch.zeros(
            sizes.max_requests, sizes.table_width, dtype=torch.int32, device=device
        )
        self.lengths = torch.zeros(sizes.max_requests, dtype=torch.int32, device=device)
        self.planned_lengths = torch.ones_like(self.lengths)
        self.ancestors = torch.zeros(
            sizes.max_requests,
            sizes.nodes,
            words_for(sizes.nodes),
            dtype=torch.int64,
            device=device,
        )

    def fill(self, step: VerifyStep) -> None:
        """Refill the buffers' first ``requests`` rows from ``step``.

        Raises:
            ValueError: the batch exceeds ``max_requests``, or not exactly one topology was given.

        """
        requests = step.prefix_lens.shape[0]
        if requests > self.sizes.max_requests:
            raise ValueError(
                f"requests: got {requests}, needed at most {self.sizes.max_requests}; "
                "start the server with a larger --max-running-requests"
            )
        if (step.parents is None) == (step.full_mask is None):
            raise ValueError("topology: needed exactly one of parents and full_mask")
        width = self.sizes.table_width
        page_table_kernel[(requests, -(-width // _TABLE_BLOCK))](
            step.req_to_token,
            step.request_rows,
            step.prefix_lens,
            self.page_table,
            self.lengths,
            self.planned_lengths,
            width,
            step.req_to_token.stride(0),
            self.page_table.stride(0),
            PAGE=self.sizes.page_size,
            BLOCK=_TABLE_BLOCK,
            num_warps=4,
        )
        packed = self.ancestors[:requests]
        if step.parents is not None:
            pack_parents(step.parents, packed)
        if step.full_mask is not None:
            pack_full_mask(
                step.full_mask, step.prefix_lens, packed, max_requests=self.sizes.max_requests
            )
