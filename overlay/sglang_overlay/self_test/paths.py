"""The registry of verify paths: what each is called, needs and is built from.

A path's `VerifyPath.obstacle` is asked before anything of it is imported.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from sglang_overlay import verify_engine

if TYPE_CHECKING:
    from sglang_overlay.attention.plan import PlanSizes
    from sglang_overlay.attention.prefix import PrefixEngine


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """What a result may be off the oracle: ‖got − want‖ / ‖want‖, and any single element.

    A wrong bit of a mask, a wrong slot or a plan of another step breaks them where a tree weighs
    something: at the short shapes. Behind a long prefix it may weigh less than fp8 rounds.
    """

    relative: float
    absolute: float


# One bf16 rounding of the output is 2e-3 relative; fp8 queries, keys and weights have 3 mantissa
# bits.
BF16 = Bounds(relative=5e-3, absolute=4e-2)
FP8 = Bounds(relative=5e-2, absolute=4e-1)


@dataclass(frozen=True, kw_only=True)
class VerifyPath:
    """A prefix engine on one kind of cache, under the overlay's tree kernel.

    ``cache_dtype`` and ``query_dtype`` are names of torch's. ``obstacle`` returns why the path
    cannot run in this process, or None. ``build`` takes the plan's sizes and the number of heads,
    and returns the engine.
    """

    engine: str
    cache_dtype: str
    page_size: int
    bounds: Bounds
    obstacle: Callable[[], str | None]
    build: Callable[[PlanSizes, int], PrefixEngine]
    query_dtype: str = "bfloat16"
    device: str = "cuda"


def gpu_obstacle() -> str | None:
    """Return why no kernel can run on a GPU here, or None."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed here"
    import torch

    if not torch.cuda.is_available():
        return "there is no CUDA device here"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "TRITON_INTERPRET=1 is set, which keeps the kernels off the GPU"
    return None


def _flashmla_obstacle() -> str | None:
    reason = gpu_obstacle()
    if reason is not None:
        return reason
    import torch

    capability = torch.cuda.get_device_capability()
    if capability != verify_engine.FLASHMLA_CAPABILITY:
        return "FlashMLA's kernels need sm_90, and this GPU is sm_{}{}".format(*capability)
    if importlib.util.find_spec("sgl_kernel") is None:
        return "sgl_kernel is not installed here"
    return None


def _build_flashmla(sizes: PlanSizes, heads: int, *, cache_dtype: str) -> PrefixEngine:
    del heads
    import torch

    from sglang_overlay.attention.flashmla import FlashMlaEngine

    dtype = getattr(torch, cache_dtype)
    return FlashMlaEngine(max_requests=sizes.max_requests, cache_dtype=dtype, device="cuda")


def _flashmla(cache_dtype: str, bounds: Bounds) -> VerifyPath:
    return VerifyPath(
        engine=verify_engine.FLASHMLA,
        cache_dtype=cache_dtype,
        page_size=verify_engine.PAGE_SIZE,
        bounds=bounds,
        obstacle=_flashmla_obstacle,
        build=partial(_build_flashmla, cache_dtype=cache_dtype),
    )


def _portable_obstacle(*, needs: tuple[int, int]) -> str | None:
    reason = gpu_obstacle()
    if reason is not None:
        return reason
    import torch

    capability = torch.cuda.get_device_capability()
    if capability < needs:
        names = ("sm_{}{}".format(*each) for each in (needs, capability))
        return "the portable kernels need {} here, and this GPU is {}".format(*names)
    return None


def _build_portable(sizes: PlanSizes, heads: int, *, cache_dtype: str) -> PrefixEngine:
    import torch

    from sglang_overlay.attention.portable import PortableEngine

    return PortableEngine(
        page_size=sizes.page_size,
        max_requests=sizes.max_requests,
        rows=sizes.nodes * heads,
        max_context=sizes.max_context,
        cache_dtype=getattr(torch, cache_dtype),
        device="cuda",
    )


def _portable(
    cache_dtype: str, bounds: Bounds, page_size: int, needs: tuple[int, int]
) -> VerifyPath:
    return VerifyPath(
        engine=verify_engine.PORTABLE,
        cache_dtype=cache_dtype,
        page_size=page_size,
        bounds=bounds,
        obstacle=partial(_portable_obstacle, needs=needs),
        build=partial(_build_portable, cache_dtype=cache_dtype),
    )


PATHS = (
    _flashmla("bfloat16", BF16),
    _flashmla("float8_e4m3fn", FP8),
    _portable("bfloat16", BF16, 1, verify_engine.PORTABLE_CAPABILITY),
    _portable("bfloat16", BF16, 64, verify_engine.PORTABLE_CAPABILITY),
    _portable("float8_e4m3fn", FP8, 1, verify_engine.FP8_CAPABILITY),
    _portable("float8_e4m3fn", FP8, 64, verify_engine.FP8_CAPABILITY),
)
