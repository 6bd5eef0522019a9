"""What the chosen tiles need on the GPUs they are chosen for, compiled here without one."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from sglang_overlay.attention.tree_merge import choose_tiles

ROOT = Path(__file__).parents[3]
SHARED_LIMIT = 232_448  # bytes a block may have on sm_90
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


def check(sizes: list[tuple[int, int, int]], tmp_path: Path, *, fp8: bool) -> None:
    cases = [
        {"nodes": n, "heads": h, "fp8": fp8, **dataclasses.asdict(choose_tiles(r, n, h))}
        for r, n, h in sizes
    ]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "overlay")])
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.gpu_compile", "90", json.dumps(cases)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    for case, needs in zip(cases, json.loads(done.stdout), strict=True):
        assert needs["shared"] <= SHARED_LIMIT, (case, needs)
        assert needs["stack"] == 0, (case, needs)


def test_the_common_tiles_fit_sm_90_without_spilling(tmp_path: Path) -> None:
    check(FEW, tmp_path, fp8=False)


@pytest.mark.full
@pytest.mark.parametrize("fp8", [False, True])
def test_every_tile_fits_sm_90_without_spilling(fp8: bool, tmp_path: Path) -> None:
    check(FEW + ALL, tmp_path, fp8=fp8)
