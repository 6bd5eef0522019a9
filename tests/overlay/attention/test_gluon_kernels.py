"""The Gluon split kernels, emulated, against the float64 oracle: no interpreter runs them."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch
from sglang_overlay.attention import kernels
from sglang_overlay.attention.adapter import VerifyAdapter
from sglang_overlay.attention.plan import PlanSizes, VerifyPlan
from sglang_overlay.attention.portable import PortableEngine
from sglang_overlay.attention.split_config import MMA, WGMMA, SplitConfig

from tests.support.closeness import assert_close
from tests.support.gluon_emulation import ORDERS, EmulatedKernel, Emulation, Order
from tests.support.prefix_parts import attend, expected, rising_case
from tests.support.verify_case import SCALE, VerifyCase, make_case

KERNELS = [
    ("split_prefix_hopper", replace(WGMMA, least_tiles=1)),
    ("split_prefix_mma", replace(MMA, least_tiles=1)),
]
FOLDER = Path(str(kernels.__file__)).parent


def emulate(
    monkeypatch: pytest.MonkeyPatch, module: str, order: Order, source: Path | None = None
) -> EmulatedKernel:
    """Let the engine launch the emulated kernel of ``module``, or of its copy in ``source``."""
    name = f"{module}_kernel"
    kernel = Emulation(order).kernel(source or FOLDER / f"{module}.py", name)
    monkeypatch.setattr(import_module(f"{kernels.__name__}.{module}"), name, kernel)
    return kernel


def check(case: VerifyCase, config: SplitConfig, page: int, processors: int = 1) -> torch.Tensor:
    """Compare a step in float32 with the oracle: a wrong row or share moves it by 1e-2 and more."""
    out, lse, parts = attend(case, config, page, processors)
    want, want_lse = expected(case)
    assert_close(out, want, absolute=2e-5, relative=2e-6, cosine=1e-10)
    assert_close(lse, want_lse, absolute=2e-5, relative=2e-6, cosine=1e-10)
    return parts


@pytest.mark.parametrize(("module", "config"), KERNELS)
@pytest.mark.parametrize(("page", "order"), [(1, ORDERS[0]), (64, ORDERS[-1])])
def test_ragged_requests_in_several_parts(
    page: int, module: str, config: SplitConfig, order: Order, monkeypatch: pytest.MonkeyPatch
) -> None:
    """33 nodes × 2 heads are more rows than one program's."""
    kernel = emulate(monkeypatch, module, order)
    case = make_case([1100, 1, 64, 65], ["chain"] * 4, 33, 2, seed=3, page_size=page)
    assert check(case, config, page, processors=16)[0] > 1
    assert kernel.launches == 1


@pytest.mark.parametrize(("module", "config"), KERNELS)
@pytest.mark.parametrize("prefix", [15, 16, 17, 63, 127, 129, 1500])
def test_prefix_edges(
    prefix: int, module: str, config: SplitConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulate(monkeypatch, module, ORDERS[0])
    case = make_case([prefix], ["chain"], nodes=5, heads=2, seed=prefix, page_size=1)
    check(case, config, 1)


@pytest.mark.parametrize(("module", "config"), KERNELS)
@pytest.mark.parametrize(("nodes", "heads"), [(1, 1), (65, 1), (16, 8), (256, 1)])
def test_rows(
    nodes: int, heads: int, module: str, config: SplitConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulate(monkeypatch, module, ORDERS[0])
    case = make_case([130], ["chain"], nodes=nodes, heads=heads, seed=nodes, strided=True)
    check(case, config, 64)


@pytest.mark.parametrize(("module", "config"), KERNELS)
def test_bf16(module: str, config: SplitConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch, module, ORDERS[0])
    case = make_case([300, 70], ["chain"] * 2, 9, 8, dtype=torch.bfloat16, cache_scale=0.5)
    out, lse, _ = attend(case, config, 64)
    want, want_lse = expected(case)
    # The weights are rounded to 8 bits before they meet the values.
    assert_close(out, want, absolute=2e-2, relative=4e-3, cosine=1e-5)
    assert_close(lse, want_lse, absolute=2e-5, relative=2e-6, cosine=1e-10)


@pytest.mark.parametrize(("module", "config"), KERNELS)
def test_fp8(module: str, config: SplitConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries of bf16 and rows of fp8, whose products meet as float16."""
    emulate(monkeypatch, module, ORDERS[0])
    dtypes = {"dtype": torch.bfloat16, "cache_dtype": torch.float8_e4m3fn}
    case = make_case([300, 70], ["chain"] * 2, 9, 8, cache_scale=0.5, **dtypes)
    out, lse, _ = attend(case, config, 64)
    want, want_lse = expected(case)
    assert_close(out, want, absolute=2e-2, relative=4e-3, cosine=1e-5)
    assert_close(lse, want_lse, absolute=2e-5, relative=2e-6, cosine=1e-10)


@pytest.mark.parametrize(("module", "config"), KERNELS)
def test_the_whole_adapter(
    module: str, config: SplitConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the tree kernel in the interpreter, and an empty prefix amid others."""
    kernel = emulate(monkeypatch, module, ORDERS[0])
    case = make_case([70, 0, 129], ["random"] * 3, nodes=5, heads=2)
    engine = PortableEngine(
        page_size=64,
        max_requests=3,
        rows=10,
        max_context=192,
        cache_dtype=torch.float32,
        device="cpu",
        config=config,
    )
    sizes = PlanSizes(max_requests=3, max_context=192, nodes=5)
    adapter = VerifyAdapter(engine, VerifyPlan(sizes, "cpu"))
    adapter.prepare(case.step, 2)
    got = adapter.attend(case.query, case.cache, case.tree_slots, softmax_scale=SCALE)
    assert kernel.launches == 1
    assert_close(got, case.expected()[0], absolute=2e-5, relative=2e-6, cosine=1e-10)


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize(("module", "config"), KERNELS)
def test_a_maximum_that_rises(
    module: str, config: SplitConfig, order: Order, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulate(monkeypatch, module, order)
    check(rising_case(17, 1), config, 1)


# The first three of each run everywhere, the others with the long tests.
FAULTS = {
    "split_prefix_hopper": [
        ("slot * PIECES), phase ^ 1)", "slot * PIECES), phase)"),
        ("mbarrier.arrive(free.index(freed), count=1)", "pass"),
        ("mbarrier.wait(spent, slot ^ 1)", "pass"),
        ("mbarrier.wait(free.index(piece), phase ^ 1)", "pass"),
        ("mbarrier.wait(full.index(here + 1 + chunk), phase)", "pass"),
        ("mbarrier.wait(weighed, slot)", "pass"),
        ("mbarrier.wait(faded.index(slot), phase)", "pass"),
        ("            fence_async_shared()\n            tile", "            tile"),
        (
            "        fence_async_shared()\n        gl.thread_barrier()\n",
            "        gl.thread_barrier()\n",
        ),
        ("        gl.thread_barrier()\n        freed", "        freed"),
        ("low = warpgroup_mma_wait(1,", "low = warpgroup_mma_wait(2,"),
        ("length - 1)", "length)"),
        ("columns < length", "columns <= length"),
        ("if gl.min(fades", "if 2.0 + gl.min(fades"),
        ("total = total * fade +", "total = total +"),
        ("phase = phase ^ slot", "phase = phase"),
        ("slot * CHUNKS + 2 * HALF", "slot * CHUNKS + HALF"),
        ("row // HEADS", "row // (HEADS + 1)"),
    ],
    "split_prefix_mma": [
        (
            "# The tile after the next is there.\n                    async_copy.wait_group(1)",
            "",
        ),
        ("latents[last]", "latents[slot]"),
        ("< ONE", "< 0"),
        ("async_copy.wait_group(2)", "async_copy.wait_group(3)"),
        ("async_copy.wait_group(0)\n        q_low", "q_low"),
        (
            "weight0.store(ahead.to(mixed))\n        async_copy.wait_group(1)",
            "weight0.store(ahead.to(mixed))",
        ),
        ("rows, after < end", "rows, after + TILE < end"),
        ("page = find_pages(table, after + TILE", "page = find_pages(table, after"),
        ("rows = locate(page, start + 3 * TILE", "rows = locate(page2, start + 3 * TILE"),
        ("length - 1)", "length)"),
        ("columns < end", "columns <= end"),
        ("limit = gl.minimum(length, end)", "limit = length + 2 * TILE"),
        ("position + TILE, limit", "position, limit"),
        ("total = total * by[:, None] +", "total = total +"),
        ("weights[slot % 2].load", "weights[(slot + 1) % 2].load"),
        ("(slot + 2) % STAGES", "(slot + 1) % STAGES"),
        ("v.index(1)", "v.index(2)"),
        ("latents.slice(HALF, HALF, 2)", "latents.slice(0, HALF, 2)"),
        ("group[:, None, None] * count", "group[:, None, None] * CHUNK"),
        ("row // HEADS", "row // (HEADS + 1)"),
    ],
}


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        pytest.param(module, *fault, marks=() if number < 3 else pytest.mark.full)
        for module, faults in FAULTS.items()
        for number, fault in enumerate(faults)
    ],
)
def test_a_fault_in_the_source_is_seen(
    module: str, old: str, new: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_fault(module, dict(KERNELS)[module], old, new, tmp_path, monkeypatch)


def check_fault(
    module: str,
    config: SplitConfig,
    old: str,
    new: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In one order at least: a copy too late shows if products are early, too early if late."""
    text = (FOLDER / f"{module}.py").read_text()
    assert old in text
    source = tmp_path / "faulty.py"
    source.write_text(text.replace(old, new))
    case = rising_case(17, 1)

    def seen(order: Order) -> bool:
        emulate(monkeypatch, module, order, source)
        try:
            check(case, config, 1)
        except AssertionError:
            return True
        return False

    assert any(seen(order) for order in ORDERS)
