"""DDTREE in SGLang's registry: on each release that has one, and never when switched off."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support import trees
from tests.support.engine.launch import Launch

pytestmark = pytest.mark.engine

SCRIPT = """
import sys
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
try:
    found = SpeculativeAlgorithm.from_string("DDTREE")
except ValueError as error:
    print(error)
else:
    light = "sglang_overlay.srt.ddtree.worker" not in sys.modules
    print(found.is_dflash(), found.is_eagle(), found.is_none(), found.supports_spec_v2(), light)
"""


def ask(release: str, **variables: str) -> str:
    launch = Launch(tree=trees.patched(release), variables=tuple(variables.items()))
    answer = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=launch.environment(),
        check=True,
        capture_output=True,
        text=True,
    )
    return answer.stdout.strip()


@pytest.mark.parametrize("registering", ["0.5.12", "0.5.12.post1"])
def test_it_is_dflash_by_another_name(registering: str) -> None:
    assert ask(registering) == "True False False False True"


@pytest.mark.parametrize(
    ("older", "variables"),
    [("0.5.11", {}), ("0.5.12.post1", {"SGLANG_OVERLAY_DISABLE": "1"})],
)
def test_elsewhere_the_name_stays_unknown(older: str, variables: dict[str, str]) -> None:
    assert ask(older, **variables) == "Unknown speculative algorithm name: DDTREE"
