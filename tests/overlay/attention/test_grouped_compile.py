"""What the grouped-query kernels need on GPUs, compiled here without one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.compilation import SHARED_LIMIT, compiled

COMMON = [{"query": 32, "kv": 8, "key_dim": 128, "value_dim": 128, "nodes": 16}]
ALL = [
    {"query": 16, "kv": 2, "key_dim": 128, "value_dim": 128, "nodes": 16},
    {"query": 16, "kv": 8, "key_dim": 64, "value_dim": 64, "nodes": 16},
    {"query": 8, "kv": 1, "key_dim": 192, "value_dim": 128, "nodes": 64},
    {"query": 32, "kv": 8, "key_dim": 256, "value_dim": 256, "nodes": 16},
    {"query": 32, "kv": 8, "key_dim": 128, "value_dim": 128, "nodes": 256},
]


def check(capability: int, cases: list[dict[str, int]], folder: Path) -> None:
    for case, kernels in zip(
        cases, compiled("grouped_compile", capability, cases, folder), strict=True
    ):
        for needs in kernels:
            assert needs["shared"] <= SHARED_LIMIT[capability], (case, needs)
            assert needs["stack"] == 0, (case, needs)


def test_the_common_shape_fits_sm_120_without_spilling(tmp_path: Path) -> None:
    check(120, COMMON, tmp_path)


@pytest.mark.full
# Not 89: there 8 bytes are spilled at a key width of 192 with 64 nodes.
@pytest.mark.parametrize("capability", [80, 90, 100, 120])
def test_every_shape_fits_without_spilling(capability: int, tmp_path: Path) -> None:
    check(capability, COMMON + ALL, tmp_path)
