"""SGLang's own masked verify kernel, the released one, as a second oracle of the adapter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import RELEASES
from tests.support import trees
from tests.support.engine.launch import REPOSITORY, STUBS

pytestmark = pytest.mark.engine

DEFAULT = "0.5.12.post1"
OTHERS = [pytest.param(each, marks=pytest.mark.full) for each in RELEASES if each != DEFAULT]


@pytest.fixture(scope="module", params=[DEFAULT, *OTHERS])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The distances by case, from a process with the SGLang of one release."""
    target = tmp_path_factory.mktemp("stock") / "found.json"
    paths = (trees.tree(request.param), STUBS, REPOSITORY / "overlay", REPOSITORY)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "TRITON_INTERPRET": "1",
        "SGLANG_USE_CPU_ENGINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    script = Path(__file__).with_name("stock_oracle.py")
    subprocess.run([sys.executable, str(script), str(target)], env=environment, check=True)
    return json.loads(target.read_text())


@pytest.mark.parametrize("pair", ["stock to oracle", "adapter to stock"])
def test_float64_oracle_stock_kernel_and_adapter_agree(found: Any, pair: str) -> None:
    assert len(found) == 4
    assert {name: far[pair] for name, far in found.items() if not far[pair] < 2e-5} == {}


def test_one_wrong_bit_a_node_would_show(found: Any) -> None:
    assert all(far["stock under another mask"] > 1e-2 for far in found.values())
