"""STAND-IN for the GPU under the overlay's verify adapter: the bed's reference kernels, in float32.

The overlay verifies nothing without a GPU. Here it is told that there is a Hopper one, that its
engines take the bed's float32, and FlashMLA runs on `reference`. Everything else is the
product: hooks, selection, plan, adapter, the portable engine, and their Triton kernels in the
interpreter.
"""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch


def install() -> None:
    """Put the stand-in in place; nothing to do in a tree without the overlay."""
    if importlib.util.find_spec("sglang_overlay") is None:
        return
    from sglang_overlay import verify_engine
    from sglang_overlay.srt import selection

    for dtypes in (verify_engine.CACHE_DTYPES, verify_engine.MODEL_DTYPES):
        for name, known in dtypes.items():
            dtypes[name] = known | {"float32"}
    selection.capability_of = lambda device: (9, 0)
    _install_engine()


def _install_engine() -> None:
    from sglang_overlay import verify_engine
    from sglang_overlay.attention.flashmla import FlashMlaEngine
    from sglang_overlay.srt import tree_verify

    class ReferenceFlashMla(FlashMlaEngine):
        """The product's engine on the reference kernels; it also watches over its plans."""

        def __init__(self, *, max_requests: int) -> None:
            processors = SimpleNamespace(multi_processor_count=8)
            with mock.patch.object(torch.cuda, "get_device_properties", return_value=processors):
                super().__init__(
                    max_requests=max_requests, cache_dtype=torch.bfloat16, device="cpu"
                )

        def plan(self, lengths: torch.Tensor, page_table: torch.Tensor, rows: int) -> None:
            super().plan(lengths, page_table, rows)
            self._planned = lengths.clone()

        def run(self, *args: Any) -> Any:
            # The reference kernel ignores the schedule; the CUDA kernel would read wrong blocks.
            if not torch.equal(self._planned, self._lengths):
                raise RuntimeError(
                    f"planned for lengths {self._planned.tolist()}, run with "
                    f"{self._lengths.tolist()}: the plan is of another step"
                )
            return super().run(*args)

    stock = tree_verify.prefix_engine

    def prefix_engine(engine: str, sizes: Any, *args: Any) -> Any:
        if engine == verify_engine.FLASHMLA:
            return ReferenceFlashMla(max_requests=sizes.max_requests)
        return stock(engine, sizes, *args)

    tree_verify.prefix_engine = prefix_engine  # type: ignore[assignment]
