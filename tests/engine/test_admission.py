"""Refusals that only the made objects can bring about, on the real launch."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.engine.launch import Launch
from tests.support.engine.server import started

pytestmark = pytest.mark.engine

# A plugin as a third party could ship it: its own backend under a name that SGLang has.
PLUGIN = """\
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend


class ThirdPartyBackend(TritonAttnBackend):
    pass


def register():
    ATTENTION_BACKENDS["triton"] = ThirdPartyBackend
"""
ENTRY_POINTS = "[sglang.srt.plugins]\nthird_party = third_party:register\n"


def third_party(folder: Path) -> Path:
    """Write the plugin as an installed distribution into ``folder``."""
    (folder / "third_party.py").write_text(PLUGIN)
    metadata = folder / "third_party-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: third-party\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS)
    return folder


def test_a_backend_behind_a_known_name_ends_the_launch_before_serving(
    overlay: Path, tmp_path: Path
) -> None:
    launch = Launch(
        tree=overlay,
        algorithm="",
        attention="triton",
        options=(
            ("speculative_algorithm", "EAGLE"),
            ("speculative_num_steps", 3),
            ("speculative_eagle_topk", 2),
            ("speculative_num_draft_tokens", 4),
        ),
    )
    path = launch.environment()["PYTHONPATH"] + os.pathsep + str(third_party(tmp_path))
    with started(replace(launch, variables=(("PYTHONPATH", path),))) as server:
        code = server.process.wait(300)
        stderr = server.process.stderr()
        models = server.record.model_processes()
    assert code not in (0, None)
    # The weights were loaded, so it was not the arguments that were refused.
    assert models == 1, stderr
    (message,) = [line for line in stderr.splitlines() if "DroppedMaskError: " in line]
    assert "verify runs on ThirdPartyBackend (--attention-backend triton)" in message
    assert "this overlay does not know the class" in message
    assert "The server is fired up and ready to roll" not in stderr
