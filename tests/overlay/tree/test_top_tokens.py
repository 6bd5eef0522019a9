"""The best tokens of rows of logits: kernels, in the interpreter, and what a CPU does instead."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang_overlay.tree import marginals, top_tokens

from tests.support.compilation import compiled

INF, NAN = float("inf"), float("nan")
VALUES = st.sampled_from([-INF, -3.0, -0.0, 0.0, 1e-45, 2.5])
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# What the kernels sort at a time; the interpreter is slow.
CHUNK = 16


def by_kernels(
    parts: list[tuple[torch.Tensor, int]], rows: int, k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    tops = top_tokens.find_tokens(parts, rows, k, chunk=CHUNK, programs=2 * rows)
    return top_tokens.finish_tokens(tops[None], k, chunk=CHUNK)


def by_torch(
    parts: list[tuple[torch.Tensor, int]], rows: int, k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    return marginals._finish(marginals._find(parts, rows, k)[None], k)


def check(
    find: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    parts: list[tuple[torch.Tensor, int]],
    k: int,
) -> None:
    """Compare with Python's sort and float64, row by row."""
    log_probs, candidates = find(parts, parts[0][0].shape[0], k)
    for row in range(parts[0][0].shape[0]):
        known = [
            (-value, first + place)
            for logits, first in parts
            for place, value in enumerate(logits[row].tolist())
        ]
        total = sum(math.exp(-value) for value, _ in known)
        best = [(-value, token) for value, token in sorted(known)[:k] if value != INF]
        best += [(-INF, 0)] * (k - len(best))
        assert candidates[row].tolist() == [token for _, token in best]
        want = [value - math.log(total) if value != -INF else -INF for value, _ in best]
        assert log_probs[row].tolist() == pytest.approx(want, abs=1e-6)


def two_parts(rows: list[list[float]], dtype: torch.dtype) -> list[tuple[torch.Tensor, int]]:
    """Return 37 tokens as a head with added tokens has them: the second part's ids are smaller."""
    logits = torch.tensor(rows).to(dtype)
    return [(logits[:, :30], 500), (logits[:, 30:], 3)]


SOME = st.lists(st.lists(VALUES, min_size=37, max_size=37), min_size=1, max_size=3)
SOME = SOME.filter(lambda rows: all(max(row) > -INF for row in rows))


@settings(max_examples=100, deadline=None)
@given(rows=SOME, k=st.integers(1, 40), dtype=st.sampled_from(DTYPES))
def test_torch_finds_what_a_plain_sort_does(
    rows: list[list[float]], k: int, dtype: torch.dtype
) -> None:
    """Ties over the k-th place, signed zeros, a denormal; more than there are."""
    check(by_torch, two_parts(rows, dtype), k)


@pytest.mark.parametrize(
    ("k", "dtype"),
    [(1, torch.bfloat16), (16, torch.bfloat16), (5, torch.float16), (16, torch.float32)],
)
def test_the_kernels_find_what_a_plain_sort_does(k: int, dtype: torch.dtype) -> None:
    # Not by hypothesis: to look for a smaller case takes the interpreter many minutes.
    chance = random.Random(k)
    rows = [chance.choices([-INF, -3.0, -0.0, 0.0, 1e-45, 2.5], k=37) for _ in range(2)]
    check(by_kernels, two_parts(rows, dtype), k)


# numpy, in the interpreter, warns of what the kernel means: infinity less infinity, the log of 0.
@pytest.mark.filterwarnings("ignore:(invalid value|divide by zero|All-NaN):RuntimeWarning")
def test_the_kernels_find_what_torch_does_among_odd_rows() -> None:
    """NaN, infinities, rows of one value, a part of several chunks a piece; two ranks of them."""
    torch.manual_seed(0)
    logits = torch.randn(6, 150).bfloat16()
    logits[0, 7], logits[1, 140], logits[2] = NAN, INF, -INF
    logits[3], logits[4, :75] = 1.0, -INF
    parts = [(logits, 0)]
    tops = top_tokens.find_tokens(parts, 6, 11, chunk=CHUNK, programs=18)
    want = marginals._find(parts, 6, 11)
    sane = [3, 4, 5]
    assert torch.equal(tops[sane, :11], want[sane, :11])
    both = [torch.stack([each, each - 150]) for each in (tops, want)]
    got = top_tokens.finish_tokens(both[0], 11, chunk=CHUNK)
    expected = marginals._finish(both[1], 11)
    assert torch.equal(got[1], expected[1])
    assert torch.allclose(got[0], expected[0], atol=1e-6)
    assert (got[0][:3] == -INF).all()


def test_refusals() -> None:
    logits = torch.zeros(2, 64)
    with pytest.raises(ValueError, match="got 2000, needed 1 to 1024"):
        top_tokens.find_tokens([(logits, 0)], 2, 2000)
    with pytest.raises(ValueError, match="got stride 2 between tokens, needed 1"):
        top_tokens.find_tokens([(logits[:, ::2], 0)], 2, 3)


@pytest.mark.parametrize(
    "capability", [90, *(pytest.param(other, marks=pytest.mark.full) for other in (80, 120))]
)
def test_they_compile_for_a_gpu(capability: int, tmp_path: Path) -> None:
    cases = [
        {"kernel": "top_tokens", "k": 63, "dtype": "bfloat16"},
        {"kernel": "merge_tokens", "k": 63, "finish": True},
    ]
    for needs in compiled("gpu_compile", capability, cases, tmp_path):
        # One of them has 8 B on sm_90, two registers' worth.
        assert needs["stack"] <= 8, needs
        assert needs["registers"] <= 128, needs
