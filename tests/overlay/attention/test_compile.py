"""What the chosen tiles need on the GPUs they are chosen for, compiled here without one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sglang_overlay.attention.split_config import MMA, SplitConfig, choose_config
from sglang_overlay.attention.tree_merge import choose_tiles

from tests.support.compilation import SHARED_LIMIT, compiled

# (requests, nodes, heads): one of every branch of choose_tiles.
FEW = [(1, 16, 8), (32, 64, 8)]
ALL = [
    (8, 16, 8),
    (48, 16, 8),
    (128, 8, 8),
    (1, 32, 16),
    (4, 32, 8),
    (16, 32, 16),
    (8, 64, 8),
    (1, 128, 8),
    (8, 128, 16),
    (1, 256, 8),
    (8, 256, 8),
]


def needed(
    capability: int, cases: list[dict[str, Any]], folder: Path
) -> Iterator[tuple[dict[str, Any], dict[str, int]]]:
    """Yield every case with what it needs."""
    yield from zip(cases, compiled("gpu_compile", capability, cases, folder), strict=True)


def check(sizes: list[tuple[int, int, int]], tmp_path: Path, *, fp8: bool) -> None:
    cases = [
        {
            "kernel": "tree_merge",
            "nodes": nodes,
            "heads": heads,
            "fp8": fp8,
            **dataclasses.asdict(choose_tiles(requests, nodes, heads)),
        }
        for requests, nodes, heads in sizes
    ]
    for case, needs in needed(90, cases, tmp_path):
        assert needs["shared"] <= SHARED_LIMIT[90], (case, needs)
        assert needs["stack"] == 0, (case, needs)


def test_the_planner_fits_sm_90_without_spilling(tmp_path: Path) -> None:
    cases = [
        {"kernel": "flashmla_schedule", "layout": layout, "block": block}
        for layout, block in [("FLAGS", 128), ("SLOTS", 512), ("FLAGS", 4096)]
    ]
    for case, needs in needed(90, cases, tmp_path):
        assert needs["stack"] == 0, (case, needs)
        # The walk is one instruction a part among the lanes of a warp.
        assert needs["redux"] > 0


def test_a_mask_of_any_size_is_packed_by_one_kernel(tmp_path: Path) -> None:
    """Its size is batch × tree × context, new in every step: a server would compile meanwhile."""
    case = {"kernel": "full_mask", "sizes": [1, 255, 256, 4097, 2**31 - 1, 2**31, 2**31 + 1]}
    ((_, needs),) = needed(90, [case], tmp_path)
    assert (needs["kernels"], needs["stack"]) == (1, 0)


def split_case(
    capability: int, *, page: int, fp8: bool, config: SplitConfig | None = None
) -> dict[str, Any]:
    config = config or choose_config(capability, fp8=fp8)
    tiles = {name: getattr(config, name) for name in ("rows", "tile", "warps", "stages")}
    return {
        "kernel": "split_prefix",
        "kind": config.kernel,
        "nodes": 16,
        "heads": 8,
        "page": page,
        "fp8": fp8,
        **tiles,
    }


def check_split(capability: int, cases: list[dict[str, Any]], tmp_path: Path) -> None:
    for case, needs in needed(capability, cases, tmp_path):
        assert needs["shared"] <= SHARED_LIMIT[capability], (case, needs)
        assert needs["stack"] == 0, (case, needs)


def test_the_common_tiles_fit_sm_90_without_spilling(tmp_path: Path) -> None:
    check(FEW, tmp_path, fp8=False)


@pytest.mark.full
@pytest.mark.parametrize("fp8", [False, True])
def test_every_tile_fits_sm_90_without_spilling(fp8: bool, tmp_path: Path) -> None:
    check(FEW + ALL, tmp_path, fp8=fp8)


def test_the_wgmma_kernel_fits_sm_90_without_spilling(tmp_path: Path) -> None:
    """128 registers a thread at its start; its groups then share them out."""
    cases = [split_case(90, page=64, fp8=fp8) for fp8 in (False, True)]
    for case, needs in needed(90, cases, tmp_path):
        assert needs["shared"] <= SHARED_LIMIT[90], (case, needs)
        assert (needs["registers"], needs["stack"]) == (128, 0), (case, needs)
        # 36 of scores, 4 of each chunk of the outputs.
        assert needs["wgmma"] == 36 + 4 * 4, (case, needs)
        # A piece's two, two of the factors, and one each of queries, weights and those spent. The
        # groups' arguments must not lie where one of them is.
        assert (needs["barriers"], needs["barriers_lost"]) == (2 * 10 + 2 + 3, 0), (case, needs)


def check_mma(capability: int, pages: tuple[int, ...], tmp_path: Path) -> None:
    """See that the kernel fits sm_120 wherever it is compiled for, as its docstring counts."""
    dtypes = (False, True) if capability >= 89 else (False,)
    cases = [
        split_case(capability, page=page, fp8=fp8, config=MMA) for page in pages for fp8 in dtypes
    ]
    for case, needs in needed(capability, cases, tmp_path):
        assert needs["shared"] <= SHARED_LIMIT[120], (case, needs)
        assert needs["stack"] == 0, (case, needs)
        # Products of six tiles' scores, two of them before the loop, and four tiles' outputs, for
        # 68 a tile and warp.
        assert needs["mma"] == 6 * 36 + 4 * 32
        # 17 for a tile: 9 of keys, 4 of values, 4 of weights. The queries are loaded once. In fp8
        # half as many bring the keys, and none the values or the queries.
        assert needs["ldmatrix"] == (6 * 5 + 4 * 4 if case["fp8"] else 6 * 9 + 4 * 8 + 18)


def test_the_mma_kernel_fits_sm_120_without_spilling(tmp_path: Path) -> None:
    check_mma(120, (64,), tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("capability", sorted(SHARED_LIMIT))
def test_the_mma_kernel_fits_every_gpu(capability: int, tmp_path: Path) -> None:
    check_mma(capability, (1, 64), tmp_path)


@pytest.mark.full
def test_every_tile_of_the_tree_fits_sm_120(tmp_path: Path) -> None:
    cases = [
        {
            "kernel": "tree_merge",
            "nodes": nodes,
            "heads": heads,
            "parts": True,
            **dataclasses.asdict(choose_tiles(requests, nodes, heads, parts=True, roomy=False)),
        }
        for requests, nodes, heads in FEW + ALL
    ]
    for case, needs in needed(120, cases, tmp_path):
        assert needs["shared"] <= SHARED_LIMIT[120], (case, needs)


@pytest.mark.full
@pytest.mark.parametrize("capability", sorted(SHARED_LIMIT))
def test_the_split_kernel_fits_every_gpu_at_every_page_size_and_dtype(
    capability: int, tmp_path: Path
) -> None:
    dtypes = (False, True) if capability >= 89 else (False,)
    cases = [split_case(capability, page=page, fp8=fp8) for page in (1, 64) for fp8 in dtypes]
    check_split(capability, cases, tmp_path)
