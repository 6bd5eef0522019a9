"""The comparison of the tensor-parallel ranks, on real process groups."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sglang_overlay.srt import ranks

REPOSITORY = Path(__file__).parents[3]


def outcomes(folder: Path, *members: tuple[str, str]) -> dict[int, str]:
    """Run one process per (overlay version, conduct); return what each rank that speaks said."""
    paths = os.pathsep.join([str(REPOSITORY / "overlay"), str(REPOSITORY)])
    script = str(Path(__file__).with_name("rank.py"))
    processes = [
        subprocess.Popen(
            [sys.executable, script, str(rank), str(len(members)), str(folder), version, conduct],
            env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        )
        for rank, (version, conduct) in enumerate(members)
    ]
    speakers = [rank for rank, (_, conduct) in enumerate(members) if conduct == "present"]
    files = {rank: folder / f"said-{rank}" for rank in speakers}
    try:
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline and not all(file.exists() for file in files.values()):
            time.sleep(0.05)
        (folder / "over").touch()
        return {rank: file.read_text() for rank, file in files.items()}
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_equal_ranks_pass(tmp_path: Path) -> None:
    assert outcomes(tmp_path, ("1.0", "present"), ("1.0", "present")) == {0: "same", 1: "same"}


def test_a_different_overlay_on_one_rank_is_refused_by_all(tmp_path: Path) -> None:
    for said in outcomes(tmp_path, ("1.0", "present"), ("1.1", "present")).values():
        assert "rank 0: overlay 1.0, fingerprint ffffffffffff, SGLang 0.5.12" in said
        assert "rank 1: overlay 1.1," in said
        assert "Apply the same overlay on every node and restart." in said


@pytest.mark.parametrize("silent", [0, 1])
def test_a_rank_without_the_overlay_is_not_waited_for(tmp_path: Path, silent: int) -> None:
    conducts = [("1.0", "silent" if rank == silent else "present") for rank in range(2)]
    said = outcomes(tmp_path, *conducts)[1 - silent]
    assert "not every tensor-parallel rank compared its overlay" in said
    assert "SGLANG_OVERLAY_DISABLE=1" in said


def test_a_single_rank_talks_to_nobody() -> None:
    identity: Any = None
    ranks.compare(SimpleNamespace(world_size=1), identity)
