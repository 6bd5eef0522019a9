"""What the grouped-query kernels need on GPUs, compiled here without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
# Bytes of shared memory that a block may have.
LIMITS = {80: 166_912, 90: 232_448, 100: 232_448, 120: 101_376}
COMMON = [{"query": 32, "kv": 8, "key_dim": 128, "value_dim": 128, "nodes": 16}]
ALL = [
    {"query": 16, "kv": 2, "key_dim": 128, "value_dim": 128, "nodes": 16},
    {"query": 16, "kv": 8, "key_dim": 64, "value_dim": 64, "nodes": 16},
    {"query": 8, "kv": 1, "key_dim": 192, "value_dim": 128, "nodes": 64},
    {"query": 32, "kv": 8, "key_dim": 256, "value_dim": 256, "nodes": 16},
    {"query": 32, "kv": 8, "key_dim": 128, "value_dim": 128, "nodes": 256},
]


def check(capability: int, cases: list[dict[str, int]], folder: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(folder)
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "overlay")])
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.grouped_compile", str(capability), json.dumps(cases)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    for case, kernels in zip(cases, json.loads(done.stdout), strict=True):
        for needs in kernels:
            assert needs["shared"] <= LIMITS[capability], (case, needs)
            assert needs["stack"] == 0, (case, needs)


def test_the_common_shape_fits_sm_120_without_spilling(tmp_path: Path) -> None:
    check(120, COMMON, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("capability", LIMITS)
def test_every_shape_fits_without_spilling(capability: int, tmp_path: Path) -> None:
    check(capability, COMMON + ALL, tmp_path)
