"""The kernel of mma.sync as it is compiled: its PTX, run on the CPU, against the oracle."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang_overlay.attention.kernels import split_prefix_mma
from sglang_overlay.attention.split_config import MMA

from tests.support.closeness import assert_close
from tests.support.compilation import compiled
from tests.support.prefix_parts import attend, expected, rising_case
from tests.support.ptx_emulation import Program
from tests.support.verify_case import VerifyCase, make_case

NODES, HEADS = 9, 8


def compile_for(capability: int, page: int, folder: Path, *, fp8: bool = False) -> dict[str, Any]:
    """Return the kernel's PTX and its shared memory, for 9 nodes × 8 heads."""
    case = {
        "kernel": "split_prefix",
        "kind": "mma",
        "nodes": NODES,
        "heads": HEADS,
        "page": page,
        "fp8": fp8,
    }
    names = ("rows", "tile", "warps", "stages")
    tiles = {name: getattr(MMA, name) for name in names}
    needs: dict[str, Any] = compiled(
        "gpu_compile", capability, [case | tiles | {"ptx": True}], folder
    )[0]
    return needs


@pytest.fixture(scope="module")
def on_sm_120(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return compile_for(120, 1, tmp_path_factory.mktemp("cache"))


class Launcher:
    """Stands for the kernel where the engine launches it."""

    def __init__(self, text: str, shared: int) -> None:
        self._program = Program(text, shared)

    def __getitem__(self, grid: tuple[int, int]) -> Any:
        def launch(*arguments: Any, **_: Any) -> None:
            tensors = [a for a in arguments if isinstance(a, torch.Tensor)]
            scalars = [a for a in arguments if not isinstance(a, torch.Tensor)]
            self._program.launch(grid, [_bits(tensor).numpy() for tensor in tensors], scalars)

        return launch


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of what numpy has no type for."""
    size = {torch.bfloat16: torch.int16, torch.float8_e4m3fn: torch.uint8}
    return tensor.view(size.get(tensor.dtype, tensor.dtype))


def check(case: VerifyCase, text: str, shared: int, page: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(split_prefix_mma, "split_prefix_mma_kernel", Launcher(text, shared))
        out, lse, _ = attend(case, MMA, page, processors=4)
    want, want_lse = expected(case)
    assert_close(out, want, absolute=5e-2, relative=4e-3, cosine=1e-5)
    assert_close(lse, want_lse, absolute=2e-5, relative=2e-6, cosine=1e-10)


def ragged(page: int, *, fp8: bool = False) -> VerifyCase:
    return make_case(
        [200, 1, 16, 65],
        ["chain"] * 4,
        NODES,
        HEADS,
        dtype=torch.bfloat16,
        cache_dtype=torch.float8_e4m3fn if fp8 else None,
        page_size=page,
    )


def test_ragged_requests(on_sm_120: dict[str, Any]) -> None:
    check(ragged(1), on_sm_120["ptx"], on_sm_120["shared"], 1)


def test_a_maximum_that_rises(on_sm_120: dict[str, Any]) -> None:
    case = rising_case(NODES, HEADS, torch.bfloat16)
    check(case, on_sm_120["ptx"], on_sm_120["shared"], 1)


def test_fp8(tmp_path: Path) -> None:
    needs = compile_for(120, 64, tmp_path, fp8=True)
    check(ragged(64, fp8=True), needs["ptx"], needs["shared"], 64)


@pytest.mark.full
@pytest.mark.parametrize("page", [1, 64])
@pytest.mark.parametrize("capability", [80, 89, 90, 120])
def test_every_gpus_code(capability: int, page: int, tmp_path: Path) -> None:
    for fp8 in (False, True) if capability >= 89 else (False,):
        needs = compile_for(capability, page, tmp_path, fp8=fp8)
        check(ragged(page, fp8=fp8), needs["ptx"], needs["shared"], page)


FAULTS = [
    (r"bar\.sync \t0;", ""),
    (r"cp\.async\.wait_group \t1;", "cp.async.wait_group 2;"),
    (r"ldmatrix(.*)\.trans", r"ldmatrix\1"),
    (r"shfl\.sync\.bfly\.b32(.*), 2, 31", r"shfl.sync.bfly.b32\1, 1, 31"),
]


@pytest.mark.parametrize(("line", "changed"), FAULTS)
def test_a_fault_in_the_code_is_seen(line: str, changed: str, on_sm_120: dict[str, Any]) -> None:
    check_fault(line, changed, on_sm_120)


def check_fault(line: str, changed: str, needs: dict[str, Any]) -> None:
    """Of many such lines, the first and the last in the loop."""
    text = needs["ptx"]
    places = list(re.finditer(line, text))
    assert places
    case = rising_case(NODES, HEADS, torch.bfloat16)
    for place in (places[0], places[len(places) * 3 // 4]):
        faulty = text[: place.start()] + place.expand(changed) + text[place.end() :]
        with pytest.raises(AssertionError):
            check(case, faulty, needs["shared"], 1)
