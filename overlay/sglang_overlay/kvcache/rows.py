"""The buffers of a KV pool, as rows that can be moved: one row per slot, in every buffer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

VECTOR_BYTES = 16


@dataclass(frozen=True, kw_only=True)
class RowBuffers:
    """Buffers that share slot ids, such as the layers of a pool, or their keys and values.

    ``tensors``: each [slots, …], contiguous. ``pointers`` [buffers] uint64 and ``row_bytes``
    [buffers] int64 are their addresses and row sizes on the device. ``widest`` is the largest row
    in bytes.
    """

    tensors: tuple[torch.Tensor, ...]
    pointers: torch.Tensor
    row_bytes: torch.Tensor
    widest: int

    @classmethod
    def of(
        cls, tensors: Sequence[torch.Tensor], pointers: torch.Tensor | None = None
    ) -> RowBuffers:
        """Return the buffers of ``tensors``; ``pointers``: an array of their addresses to reuse.

        Raises:
            ValueError: a buffer is not contiguous, or on a GPU not made of 16-byte vectors.

        """
        if not tensors:
            raise ValueError("tensors: got none, needed at least one buffer; pass a pool's layers")
        device = tensors[0].device
        sizes = [tensor[0].numel() * tensor.element_size() for tensor in tensors]
        for at, (tensor, size) in enumerate(zip(tensors, sizes, strict=True)):
            if not tensor.is_contiguous() or tensor.device != device:
                raise ValueError(
                    f"tensors[{at}]: got strides {tensor.stride()} on {tensor.device}, needed a "
                    f"contiguous buffer on {device}; pass the pool's own buffers, not views"
                )
            if device.type != "cpu" and (size % VECTOR_BYTES or tensor.data_ptr() % VECTOR_BYTES):
                raise ValueError(
                    f"tensors[{at}]: got rows of {size} bytes at {tensor.data_ptr():#x}, needed "
                    f"multiples of {VECTOR_BYTES}; such a pool cannot be moved by the kernel"
                )
        if pointers is None:
            addresses = [tensor.data_ptr() for tensor in tensors]
            pointers = torch.tensor(addresses, dtype=torch.uint64, device=device)
        return cls(
            tensors=tuple(tensors),
            pointers=pointers,
            row_bytes=torch.tensor(sizes, dtype=torch.int64, device=device),
            widest=max(sizes),
        )
