"""What the placement kernels need on the GPUs they run on, compiled here without one."""

from __future__ import annotations

from pathlib import Path

import pytest
from sglang_overlay.kvcache import free_runs, placement, token_slots

from tests.support.compilation import SHARED_LIMIT, compiled


@pytest.mark.full
@pytest.mark.parametrize("capability", [80, 90, 120])
def test_it_compiles_without_spilling(capability: int, tmp_path: Path) -> None:
    cases = [
        {"kernel": "place_units", "from_table": from_table, "equal": equal, "page": 1}
        for from_table in (True, False)
        for equal in (True, False)
    ]
    for needs in compiled("gpu_compile", capability, cases, tmp_path):
        assert needs["stack"] == 0, needs
        # A third of a multiprocessor's register file: it runs beside a model's kernels.
        assert needs["registers"] * 32 * placement.WARPS <= 65_536 // 3, needs
        assert needs["shared"] <= SHARED_LIMIT[capability], needs


@pytest.mark.full
@pytest.mark.parametrize("capability", [80, 90, 120])
def test_the_look_for_the_longest_runs_compiles_without_spilling(
    capability: int, tmp_path: Path
) -> None:
    cases = [{"kernel": "longest_runs", "pick": pick} for pick in (False, True)]
    for needs in compiled("gpu_compile", capability, cases, tmp_path):
        assert needs["stack"] == 0, needs
        # A multiprocessor has room for one, at least.
        assert needs["registers"] * 32 * free_runs.WARPS <= 65_536, needs
        assert needs["shared"] <= SHARED_LIMIT[capability], needs


@pytest.mark.full
def test_a_kernel_that_is_ready_gets_what_tritons_own_launch_gives_it(tmp_path: Path) -> None:
    cases = [
        {"kernel": "place_units_launch", "from_table": from_table, "equal": equal}
        for from_table in (True, False)
        for equal in (True, False)
    ]
    for found in compiled("gpu_compile", 90, cases, tmp_path):
        first, *others = found["launched"]
        assert others == [first, first]


@pytest.mark.full
def test_the_kernels_of_a_look_get_it_too(tmp_path: Path) -> None:
    (found,) = compiled("gpu_compile", 90, [{"kernel": "longest_runs_launch"}], tmp_path)
    listing, picking, *others = found["launched"]
    assert others == [listing, picking] * 2


@pytest.mark.full
@pytest.mark.parametrize("capability", [80, 90, 120])
def test_the_slots_of_tokens_compile_without_spilling(capability: int, tmp_path: Path) -> None:
    cases = [{"kernel": "token_slots", "one_each": one_each} for one_each in (True, False)]
    for needs in compiled("gpu_compile", capability, cases, tmp_path):
        assert needs["stack"] == 0, needs
        assert needs["registers"] * 32 * token_slots.WARPS <= 65_536 // 3, needs


@pytest.mark.full
@pytest.mark.parametrize("one_each", [True, False])
def test_the_slots_of_tokens_get_it_too(one_each: bool, tmp_path: Path) -> None:
    case = {"kernel": "token_slots_launch", "one_each": one_each}
    (found,) = compiled("gpu_compile", 90, [case], tmp_path)
    first, *others = found["launched"]
    assert others == [first, first]
