"""The slots of new tokens on pages of several slots, once it is known which pages are taken."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from sglang_overlay.kvcache.kernels.token_slots import token_slots_kernel
from sglang_overlay.kvcache.ready_kernels import launch

# Earlier requests, and tokens of one, that a program looks at at once.
REQUESTS, TOKENS = 128, 1024
WARPS = 4

Array = npt.NDArray[np.int64]


@dataclass(kw_only=True, slots=True)
class Growth:
    """How the requests of a batch grow, all [requests] int.

    ``before``, ``after``: their tokens, on the device; without ``before`` each gets one more.
    ``last``: the slot of the last token before, on the device. ``before_on_host``,
    ``after_on_host``: the same numbers. ``total``: by how many tokens all of them grow.
    """

    before: torch.Tensor | None
    after: torch.Tensor
    last: torch.Tensor
    before_on_host: Array
    after_on_host: Array
    total: int

    def pages(self, size: int) -> list[int]:
        """Return how many new pages of ``size`` slots each request needs."""
        over = size - 1
        new = (self.after_on_host + over) // size - (self.before_on_host + over) // size
        counts: list[int] = new.tolist()
        return counts


def token_slots(growth: Growth, pages: torch.Tensor, size: int) -> torch.Tensor:
    """Return the slots [tokens] int64 of all new tokens, request after request.

    ``pages`` [n] int64: the new pages of ``size`` slots, request after request, as many as
    `Growth.pages` says. What is left of a request's last page is filled first.
    """
    by = _on_host if pages.is_cpu else launch_token_slots
    return by(growth, pages, size)


def launch_token_slots(growth: Growth, pages: torch.Tensor, size: int) -> torch.Tensor:
    """Launch the kernel."""
    if not growth.total:
        return pages[:0]
    before, after, last = growth.before, growth.after, growth.last
    out = pages.new_empty(growth.total)
    longest = growth.total
    if longest > TOKENS:
        longest = int((growth.after_on_host - growth.before_on_host).max())
    types = None if before is None else before.dtype, after.dtype, last.dtype
    launch(
        token_slots_kernel,
        ("token_slots", pages.device, size, *types),
        (len(growth.after_on_host), -(-longest // TOKENS)),
        WARPS,
        (before, after, last, pages, out),
        (size, REQUESTS, TOKENS),
    )
    return out


def _on_host(growth: Growth, pages: torch.Tensor, size: int) -> torch.Tensor:
    found, used = [np.empty(0, dtype=np.int64)], 0
    rows = zip(growth.before_on_host, growth.after_on_host, growth.last.tolist(), strict=True)
    for before, after, last in rows:
        token = np.arange(before, after)
        full = -(-before // size)
        new = token[token >= full * size]
        found.append(last + 1 + np.arange(len(token) - len(new)))
        found.append(pages.numpy()[used + new // size - full] * size + new % size)
        used += -(-after // size) - full
    return torch.from_numpy(np.concatenate(found))
