"""Counts, inside the engine, what each verify step of DFLASH does; the run's record keeps it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.engine.record import Record, Step


class _Allocations(TorchDispatchMode):  # type: ignore[misc]
    """Counts the tensors that operators newly make; views and in-place results do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.bool_elements = 0
        self.bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        outputs = result if isinstance(result, tuple | list) else (result,)
        returns = func._schema.returns
        if any(each.alias_info is not None for each in returns):
            return result
        for output in outputs:
            if isinstance(output, torch.Tensor):
                self.bytes += output.numel() * output.element_size()
                self.bool_elements += output.numel() * (output.dtype == torch.bool)
        return result


def install(record: Record) -> None:
    """Wrap the verify input of DFLASH so that each verify adds a `Step` to ``record``."""
    import sglang.srt.speculative.dflash_info as dflash_info

    verify_input = dflash_info.DFlashVerifyInput
    stock_prepare, stock_verify = verify_input.prepare_for_verify, verify_input.verify
    before: dict[str, Any] = {}

    def prepare(self: Any, batch: Any, page_size: int, **kwargs: Any) -> Any:
        contexts = tuple(batch.seq_lens_cpu.tolist())
        with _Allocations() as made:
            result = stock_prepare(self, batch, page_size, **kwargs)
        before.update(
            contexts=contexts, bool_elements=made.bool_elements, allocated_bytes=made.bytes
        )
        return result

    def verify(self: Any, **kwargs: Any) -> Any:
        mask = self.custom_mask
        mask_elements = 0 if mask is None else mask.numel()
        result = stock_verify(self, **kwargs)
        record.add(Step(committed=tuple(result[1].tolist()), mask_elements=mask_elements, **before))
        return result

    verify_input.prepare_for_verify, verify_input.verify = prepare, verify
