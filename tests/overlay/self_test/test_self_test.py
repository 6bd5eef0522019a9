"""The self-test tells a right kernel from a wrong one, and a row that did not run from either."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang_overlay import self_test
from sglang_overlay.attention import adapter, mask, plan, tree_merge
from sglang_overlay.attention.memory import BufferMemoryError
from sglang_overlay.attention.plan import PlanSizes
from sglang_overlay.attention.portable import PortableEngine
from sglang_overlay.self_test import distance, paths
from sglang_overlay.self_test.paths import PATHS, Bounds, VerifyPath
from sglang_overlay.self_test.shapes import SHAPES, Shape

from tests.support.prefix_reference import ReferencePrefixEngine

SMALL = (
    Shape(prefixes=(0, 1, 65), nodes=5, heads=2),
    Shape(prefixes=(70,), nodes=66, heads=1),
)
# float32 in the interpreter; a wrong bit or slot moves results by 1e-2 and more.
TIGHT = Bounds(relative=2e-6, absolute=2e-5)


def cpu_path(
    build: Callable[[PlanSizes, int], Any] | None = None, *, page_size: int = 64
) -> VerifyPath:
    """Return a path that runs here: the real plan and tree kernel on the reference engine."""
    return VerifyPath(
        engine="reference",
        cache_dtype="float32",
        page_size=page_size,
        bounds=TIGHT,
        obstacle=lambda: None,
        build=build or (lambda sizes, heads: ReferencePrefixEngine(page_size=page_size)),
        query_dtype="float32",
        device="cpu",
    )


@pytest.mark.parametrize("page_size", [1, 64])
def test_right_kernels_pass(page_size: int) -> None:
    rows = self_test.run([cpu_path(page_size=page_size)], SMALL)
    assert [(row["status"], row["reason"]) for row in rows] == [("passed", "")] * 2
    assert [row["context"] for row in rows] == [65, 70]
    assert all(0 < row["max_error"] < TIGHT.absolute for row in rows)
    # An interpreter's time is no time.
    assert {row["microseconds"] for row in rows} == {None}


def portable(sizes: PlanSizes, heads: int) -> PortableEngine:
    return PortableEngine(
        page_size=sizes.page_size,
        max_requests=sizes.max_requests,
        rows=sizes.nodes * heads,
        max_context=sizes.max_context,
        cache_dtype=torch.float32,
        device="cpu",
    )


def test_the_portable_engine_passes_in_the_interpreter() -> None:
    (row,) = self_test.run([cpu_path(portable, page_size=1)], SMALL[:1])
    assert (row["status"], row["reason"]) == ("passed", "")


def wrong_mask(parents: torch.Tensor, packed: torch.Tensor) -> None:
    mask.pack_parents(parents, packed)
    packed[:, 2:, 0] |= 2  # every node also sees node 1


def wrong_slots(*arguments: Any, **named: Any) -> None:
    query, cache, slots, *more = arguments
    tree_merge.merge_tree(query, cache, slots.roll(1), *more, **named)


def nothing_written(*arguments: Any, **named: Any) -> None:
    del named
    arguments[6].fill_(math.nan)


class LongerPlan(ReferencePrefixEngine):
    """Attends to the tree's first rows as well, as a plan for prefix and tree does."""

    def plan(self, lengths: torch.Tensor, page_table: torch.Tensor, rows: int) -> None:
        super().plan(lengths + 1, page_table, rows)


class OtherLogarithm(ReferencePrefixEngine):
    """Gives its lse to the base 2, as FlashInfer does."""

    def run(self, *arguments: Any) -> Any:
        found = super().run(*arguments)
        return replace(found, lse=found.lse / math.log(2))


FAULTS = {
    "a wrong bit": (plan, "pack_parents", wrong_mask),
    "wrong slots": (adapter, "merge_tree", wrong_slots),
    "no result": (adapter, "merge_tree", nothing_written),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_kernel_fails_every_row(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*FAULTS[fault])
    rows = self_test.run([cpu_path()], SMALL)
    assert [row["status"] for row in rows] == ["failed"] * 2
    assert all("off the oracle by more than" in row["reason"] for row in rows)
    assert all(row["max_error"] > 100 * TIGHT.absolute for row in rows)


@pytest.mark.parametrize("engine", [LongerPlan, OtherLogarithm])
def test_a_wrong_prefix_engine_fails(engine: type[ReferencePrefixEngine]) -> None:
    rows = self_test.run([cpu_path(lambda sizes, heads: engine())], SMALL)
    assert [row["status"] for row in rows] == ["failed"] * 2


def test_an_error_is_a_failed_row_with_its_text_and_the_next_row_runs() -> None:
    calls: list[PlanSizes] = []

    def build(sizes: PlanSizes, heads: int) -> Any:
        calls.append(sizes)
        if len(calls) == 1:
            raise RuntimeError("no kernel image\nmore lines")
        return ReferencePrefixEngine()

    first, second = self_test.run([cpu_path(build)], SMALL)
    assert (first["status"], first["reason"]) == ("failed", "RuntimeError: no kernel image")
    assert second["status"] == "passed"


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), BufferMemoryError("got 1, needed 2")]
)
def test_too_little_memory_is_no_verdict(error: Exception) -> None:
    def build(sizes: PlanSizes, heads: int) -> Any:
        raise error

    rows = self_test.run([cpu_path(build)], SMALL[:1])
    assert [(row["status"], row["max_error"]) for row in rows] == [("skipped", None)]


def test_every_path_of_the_product_is_skipped_here_with_the_reason() -> None:
    rows = self_test.run()
    assert len(rows) == len(PATHS) * len(SHAPES)
    assert {(row["status"], row["reason"]) for row in rows} == {
        ("skipped", "there is no CUDA device here")
    }
    assert {row["cache_dtype"] for row in rows} == {"bfloat16", "float8_e4m3fn"}
    json.dumps(rows)


@pytest.mark.parametrize(
    ("capability", "blocked"),
    [((7, 5), 6), ((8, 0), 4), ((8, 9), 2), ((12, 0), 2)],
)
def test_obstacles_of_a_host_with_another_gpu(
    capability: tuple[int, int], blocked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert {path.obstacle() for path in PATHS} == {paths.gpu_obstacle()}  # TRITON_INTERPRET is set
    monkeypatch.delenv("TRITON_INTERPRET")
    told = [reason for path in PATHS if (reason := path.obstacle())]
    assert len(told) == blocked
    name = "this GPU is sm_{}{}".format(*capability)
    assert all(name in reason for reason in told)


def test_without_torch_there_are_rows_all_the_same() -> None:
    """A process in which torch cannot be found, as on a host that only plans a rollout."""
    code = (
        "import importlib.util as u, json\n"
        "find = u.find_spec\n"
        "u.find_spec = lambda name, *more: None if name == 'torch' else find(name, *more)\n"
        "from sglang_overlay import self_test\n"
        "import sys; assert 'torch' not in sys.modules\n"
        "print(json.dumps(self_test.run()))"
    )
    overlay = Path(paths.__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=overlay, capture_output=True, text=True, check=True
    )
    assert {row["reason"] for row in json.loads(done.stdout)} == {"torch is not installed here"}


def test_a_nan_on_one_side_is_infinitely_far() -> None:
    want = torch.ones(3, dtype=torch.float64)
    found = distance.measure(torch.tensor([1.0, math.nan, 1.0]), want)
    assert (found.absolute, found.relative) == (math.inf, math.inf)
    assert not found.within(Bounds(relative=1e30, absolute=1e30))


def test_both_measures_count() -> None:
    want = torch.zeros(1000, dtype=torch.float64)
    want[0] = 100.0
    spike = want.clone()
    spike[1] = 0.5
    found = distance.measure(spike, want)
    assert found == distance.Distance(absolute=0.5, relative=0.005)
    assert found.within(Bounds(relative=0.006, absolute=0.6))
    assert not found.within(Bounds(relative=0.006, absolute=0.4))
    assert not found.within(Bounds(relative=0.004, absolute=0.6))
