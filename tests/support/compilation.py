"""Compiling kernels for GPUs that are not there, each time in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
# Bytes of shared memory that a block may have, by compute capability.
SHARED_LIMIT = {80: 166_912, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}


def compiled(program: str, capability: int, cases: list[dict[str, Any]], folder: Path) -> list[Any]:
    """Return what each of ``cases`` needs, as the module ``tests.support.<program>`` tells it.

    This process runs the interpreter, so another one compiles; Triton's cache is in ``folder``.
    """
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(folder)
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "overlay")])
    done = subprocess.run(
        [sys.executable, "-m", f"tests.support.{program}", str(capability), json.dumps(cases)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    needs: list[Any] = json.loads(done.stdout)
    assert len(needs) == len(cases)
    return needs
