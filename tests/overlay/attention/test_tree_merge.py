"""The merge kernel on its own: tiles, strides, undefined rows, far slots, refusals."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from sglang_overlay.attention.oracle import ancestor_mask, tree_attention
from sglang_overlay.attention.plan import PlanSizes, VerifyPlan
from sglang_overlay.attention.prefix import KEY_DIM, LATENT_DIM, PrefixResult
from sglang_overlay.attention.tree_merge import Tiles, merge_tree

from tests.support.closeness import assert_close
from tests.support.prefix_reference import ReferencePrefixEngine
from tests.support.verify_case import SCALE, VerifyCase, make_case


def planned(case: VerifyCase) -> VerifyPlan:
    requests = len(case.parents)
    sizes = PlanSizes(max_requests=requests, max_context=512, nodes=len(case.parents[0]))
    plan = VerifyPlan(sizes, "cpu")
    plan.fill(case.step)
    return plan


def prefix_of(case: VerifyCase, plan: VerifyPlan) -> PrefixResult:
    engine = ReferencePrefixEngine()
    engine.plan(plan.planned_lengths, plan.page_table, plan.sizes.nodes * case.query.shape[1])
    return engine.run(case.query, case.cache, SCALE, case.cache_scale)


def merge(
    case: VerifyCase,
    plan: VerifyPlan,
    prefix: PrefixResult,
    out: torch.Tensor,
    tiles: Tiles | None = None,
) -> torch.Tensor:
    merge_tree(
        case.query,
        case.cache,
        case.tree_slots,
        plan.ancestors,
        plan.lengths,
        prefix,
        out,
        softmax_scale=SCALE,
        tiles=tiles,
    )
    return out


@pytest.mark.parametrize(
    "tiles",
    [
        Tiles(rows=16, values=512, key_chunk=512, value_chunk=512, warps=4),
        Tiles(rows=16, values=128, key_chunk=512, value_chunk=128, warps=4),
        Tiles(rows=32, values=256, key_chunk=128, value_chunk=64, warps=4),
        Tiles(rows=64, values=64, key_chunk=64, value_chunk=64, warps=4),
    ],
)
def test_tiles_do_not_change_the_result(tiles: Tiles) -> None:
    case = make_case([65, 0], ["random", "random"], nodes=70, heads=1)
    plan = planned(case)
    prefix = prefix_of(case, plan)
    want, _ = case.expected()
    got = merge(case, plan, prefix, torch.full_like(prefix.out, float("nan")), tiles)
    assert_close(got, want, absolute=2e-5, relative=2e-6, cosine=1e-10)


def test_strided_results_and_output_and_nothing_written_beside_it() -> None:
    case = make_case([40, 9], ["binary", "star"], nodes=6, heads=3)
    plan = planned(case)
    dense = prefix_of(case, plan)
    wide = torch.full((12, 5, LATENT_DIM + 4), 7.0)
    wide[:, :3, :LATENT_DIM] = dense.out
    strided = PrefixResult(out=wide[:, :3, :LATENT_DIM], lse=dense.lse.T.contiguous().T)
    canvas = torch.full((12, 4, LATENT_DIM + 8), 3.0)
    got = merge(case, plan, strided, canvas[:, :3, :LATENT_DIM])
    want, _ = case.expected()
    assert_close(got, want, absolute=2e-5, relative=2e-6, cosine=1e-10)
    assert (canvas[:, 3] == 3.0).all()
    assert (canvas[:, :, LATENT_DIM:] == 3.0).all()


@pytest.mark.parametrize("junk", [float("nan"), float("inf"), float("-inf"), 1e30])
def test_rows_of_an_empty_prefix_are_never_read(junk: float) -> None:
    """FlashMLA writes +inf as the lse of an empty row: merged as it is, it would beat the tree."""
    case = make_case([0, 20], ["random", "random"], nodes=5, heads=2)
    plan = planned(case)
    prefix = prefix_of(case, plan)
    prefix.out[:5] = junk
    prefix.lse[:5] = junk
    want, _ = case.expected()
    assert_close(
        merge(case, plan, prefix, torch.empty_like(prefix.out)),
        want,
        absolute=2e-5,
        relative=2e-6,
        cosine=1e-10,
    )


def test_a_node_that_sees_nothing_gives_zeros() -> None:
    case = make_case([0], ["chain"], nodes=3, heads=1)
    plan = planned(case)
    plan.ancestors[0, 1] = 0
    out = merge(case, plan, prefix_of(case, plan), torch.full((3, 1, LATENT_DIM), float("nan")))
    assert (out[1] == 0).all()
    assert torch.isfinite(out).all()


def test_scores_far_apart_do_not_overflow() -> None:
    case = make_case([30], ["random"], nodes=8, heads=2)
    case.query *= 60.0
    plan = planned(case)
    prefix = prefix_of(case, plan)
    want, _ = case.expected()
    got = merge(case, plan, prefix, prefix.out)
    assert_close(got, want, absolute=1e-3, relative=1e-4, cosine=1e-8)


def test_slots_whose_byte_and_element_offsets_pass_int32() -> None:
    """Slot 2^31 / 576 + 100: slot × 576 wraps in 32 bits. Storage before it is never touched."""
    first = (1 << 31) // KEY_DIM + 100
    cache = torch.empty(first + 4, 1, KEY_DIM)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(4, KEY_DIM, generator=generator)
    cache[first:, 0] = rows
    parents = [-1, 0, 0, 1]
    query = torch.randn(4, 1, KEY_DIM, generator=generator)
    slots = torch.arange(first, first + 4, dtype=torch.int32)
    plan = VerifyPlan(PlanSizes(max_requests=1, max_context=64, nodes=4), "cpu")
    plan.ancestors[0, :, 0] = torch.tensor([1, 3, 5, 11])
    nothing = PrefixResult(out=torch.empty(4, 1, LATENT_DIM), lse=torch.empty(4, 1))
    merge_tree(
        query, cache, slots, plan.ancestors, plan.lengths, nothing, nothing.out, softmax_scale=SCALE
    )
    empty = torch.tensor([], dtype=torch.int64)
    want, _ = tree_attention(
        query, rows, [empty], torch.arange(4)[None], [ancestor_mask(parents)], SCALE
    )
    assert_close(nothing.out, want, absolute=2e-5, relative=2e-6, cosine=1e-10)


def test_refusals_name_the_argument() -> None:
    case = make_case([3], ["chain"], nodes=4, heads=2)
    plan = planned(case)
    prefix = prefix_of(case, plan)
    with pytest.raises(ValueError, match=r"out: got \(4, 2, 511\), needed \(4, 2, 512\)"):
        merge(case, plan, prefix, torch.empty(4, 2, 511))
    with pytest.raises(ValueError, match="out: got stride 2 in the last dimension"):
        merge(case, plan, prefix, torch.empty(4, 2, 2 * LATENT_DIM)[..., ::2])
    short = dataclasses.replace(case, tree_slots=case.tree_slots[:3])
    with pytest.raises(ValueError, match=r"slots: got \(3,\), needed \(4,\)"):
        merge(short, plan, prefix, prefix.out)
    thin = dataclasses.replace(case, query=case.query[..., :512])
    with pytest.raises(ValueError, match=r"query: got \(4, 2, 512\), needed \(4, 2, 576\)"):
        merge(thin, plan, prefix, prefix.out)
