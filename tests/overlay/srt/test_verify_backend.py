"""The walk to the verify backend, on the real classes of every release."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sglang_overlay import mask_table

from tests.support import trees

pytestmark = pytest.mark.engine

REPOSITORY = Path(__file__).parents[3]
STUBS = REPOSITORY / "tests" / "support" / "engine" / "stubs"

# What a CPU must be able to import, or the assertions below would say nothing.
IMPORTABLE = {
    "AiterAttnBackend",
    "CutlassMLABackend",
    "FlashInferAttnBackend",
    "FlashInferMLAAttnBackend",
    "FlashMLABackend",
    "HybridAttnBackend",
    "HybridLinearAttnBackend",
    "Mamba2AttnBackend",
    "TRTLLMHAAttnBackend",
    "TRTLLMMLABackend",
    "TboAttnBackend",
    "TritonAttnBackend",
}


@pytest.fixture(scope="module", params=mask_table.RELEASES)
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What the overlay makes of the real classes of one release (a process of its own)."""
    release = request.param
    target = tmp_path_factory.mktemp("probe") / "found.json"
    paths = (trees.tree(release), STUBS, REPOSITORY / "overlay", REPOSITORY)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SGLANG_")}
    environment = kept | {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "TRITON_INTERPRET": "1",
        "SGLANG_USE_CPU_ENGINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    probe = Path(__file__).with_name("probe_backends.py")
    subprocess.run(
        [sys.executable, str(probe), release, str(target)],
        env=environment,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    answers = json.loads(target.read_text())
    assert answers["release"] == release
    return answers


def test_a_cpu_imports_what_the_other_tests_speak_of(found: Any) -> None:
    assert set(found["matched"]) >= IMPORTABLE, found["failures"]


def test_every_real_class_matches_its_row(found: Any) -> None:
    assert [name for name, matched in found["matched"].items() if not matched] == []


def test_a_chain_gets_a_mask_only_where_causal_is_not_enough(found: Any) -> None:
    builds = {name for name, (_, builds) in found["chains"].items() if builds}
    without_verify = {
        "DualChunkFlashAttentionBackend",
        "IntelAMXAttnBackend",
        "KDAAttnBackend",
        "TorchFlexAttnBackend",
        "TorchNativeAttnBackend",
        "WaveAttnBackend",
    }
    assert builds - without_verify == {"AiterAttnBackend"}


def test_wrappers_are_judged_by_what_verify_runs(found: Any) -> None:
    assert found["nested"] == {
        "hybrid, mode prefill": ["FlashMLABackend", False],
        "hybrid, mode decode": ["TritonAttnBackend", False],
        "hybrid-linear": ["FlashInferAttnBackend", False],
        "hybrid-linear over lightning": ["FlashInferAttnBackend", False],
        "tbo": ["FlashMLABackend", False],
        "tbo over hybrid, mode decode": ["FlashMLABackend", False],
        "hybrid over hybrid-linear, mode decode": ["TritonAttnBackend", False],
        "flashmla in a subclass": ["Mine", True],
        "aiter, unified verify": ["AiterAttnBackend", False],
    }


def test_stock_misjudges_the_wrappers(found: Any) -> None:
    # The fault that the hook is there for. Where this fails, SGLang has mended it: see the patch.
    assert found["stock"]["hybrid, mode prefill"] == ["HybridAttnBackend", True]
    assert found["stock"]["tbo"] == ["TboAttnBackend", True]


def test_a_tree_finds_the_backend_that_would_fail_it(found: Any) -> None:
    assert found["unable"] == {
        "hybrid, mode prefill": "FlashMLABackend",
        "hybrid, mode decode": None,
        "hybrid-linear": None,
        "hybrid-linear over lightning": "LightningAttentionBackend",
        "tbo": "FlashMLABackend",
        "tbo over hybrid, mode decode": "FlashMLABackend",
        "hybrid over hybrid-linear, mode decode": None,
        "flashmla in a subclass": "Mine",
        "aiter, unified verify": "AiterAttnBackend",
    }


def test_arguments_and_objects_name_the_same_verify_backend(found: Any) -> None:
    class_of = {"flashmla": "FlashMLABackend", "triton": "TritonAttnBackend"}
    for mode, name in found["by name"].items():
        assert class_of[name] == found["nested"][f"hybrid, mode {mode}"][0]


def test_every_backend_name_of_the_release_is_known(found: Any) -> None:
    known = {
        name.name
        for name in mask_table.NAMES
        if name.class_name in mask_table.rows_of(found["release"])
    }
    assert set(found["registered"]) == known
