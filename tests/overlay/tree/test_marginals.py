"""Marginals of a split head against float64 over the whole vocabulary."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang_overlay.tree.marginals import Gather, Segment, VocabParallelHead, top_log_probs

Result = tuple[torch.Tensor, torch.Tensor]


class Ranks:
    """An all-gather between threads, one per rank."""

    def __init__(self, count: int) -> None:
        self.parts: list[torch.Tensor | None] = [None] * count
        self.barrier = threading.Barrier(count, timeout=60)

    def gather(self, rank: int) -> Gather:
        def run(own: torch.Tensor) -> torch.Tensor:
            self.parts[rank] = own
            self.barrier.wait()
            return torch.stack([part for part in self.parts if part is not None])

        return run


def on_ranks(
    weight: torch.Tensor, hidden: torch.Tensor, k: int, split: list[int], **options: int
) -> list[Result]:
    """Run with ``split[r]`` vocabulary rows on rank r, and poisoned padding behind them."""
    ranks = Ranks(len(split))
    results: list[Result | None] = [None] * len(split)

    def run(rank: int) -> None:
        first, rows = sum(split[:rank]), split[rank]
        shard = torch.full((rows + 3, weight.shape[1]), float("nan"), dtype=weight.dtype)
        shard[:rows] = weight[first : first + rows]
        head = VocabParallelHead(
            weight=shard,
            segments=(Segment(row=0, rows=rows, token=first),),
            gather=ranks.gather(rank),
        )
        results[rank] = top_log_probs(hidden, head, k, **options)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(split))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [result for result in results if result is not None]


def whole(weight: torch.Tensor) -> VocabParallelHead:
    return VocabParallelHead(
        weight=weight, segments=(Segment(row=0, rows=weight.shape[0], token=0),)
    )


def expected(logits: torch.Tensor, k: int) -> Result:
    """Return the float64 result, ties by token."""
    log_probs = torch.log_softmax(logits.double(), dim=1)
    order = logits.double().sort(dim=1, descending=True, stable=True).indices[:, :k]
    return log_probs.gather(1, order), order


@st.composite
def cases(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, int, list[int], int]:
    """Logits on a coarse grid, so that most of them are tied, also over the border of two ranks."""
    split = draw(st.lists(st.integers(0, 9), min_size=1, max_size=4).filter(lambda s: sum(s) > 0))
    grid = st.sampled_from([-2.0, -1.0, -0.0, 0.0, 1.0, 1.0, 3.0])
    tokens = draw(st.integers(1, 5))
    # One hidden column per token of a batch: the head's columns are then the logits themselves.
    column = st.lists(grid, min_size=sum(split), max_size=sum(split))
    logits = torch.tensor([draw(column) for _ in range(tokens)])
    return (
        logits,
        torch.eye(tokens),
        draw(st.integers(1, sum(split))),
        split,
        draw(st.sampled_from([1, 7, 1 << 25])),
    )


@settings(max_examples=60, deadline=None)
@given(case=cases())
def test_every_split_gives_the_whole_heads_result(
    case: tuple[torch.Tensor, torch.Tensor, int, list[int], int],
) -> None:
    logits, hidden, k, split, bound = case
    want_values, want_tokens = expected(logits, k)
    for values, tokens in on_ranks(logits.T.contiguous(), hidden, k, split, max_logits=bound):
        assert torch.equal(tokens, want_tokens)
        assert (values.double() - want_values).abs().max() < 1e-5
        assert (values <= 0).all()
        assert (values.diff(dim=1) <= 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_vocabulary_of_usual_shape(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(1001, 32, generator=generator).to(dtype)
    hidden = torch.randn(9, 32, generator=generator)
    want_values, want_tokens = expected(torch.matmul(hidden.to(dtype), weight.T), 63)
    alone = top_log_probs(hidden, whole(weight), 63)
    several = on_ranks(weight, hidden, 63, [400, 400, 201], max_logits=1500)
    for values, tokens in [alone, *several]:
        assert torch.equal(tokens, want_tokens)
        assert (values.double() - want_values).abs().max() < 1e-5
    for values, tokens in several[1:]:
        assert torch.equal(values, several[0][0])
        assert torch.equal(tokens, several[0][1])


def test_added_tokens_are_a_segment_of_their_own() -> None:
    """Rows between the segments are padding; ids go on where the segment says."""
    logits = torch.tensor([[1.0, 5.0, 99.0, 99.0, 5.0, 2.0, 99.0]])
    head = VocabParallelHead(
        weight=logits.T.contiguous(),
        segments=(Segment(row=0, rows=2, token=40), Segment(row=4, rows=2, token=12)),
    )
    values, tokens = top_log_probs(torch.ones(1, 1), head, 4)
    assert tokens.tolist() == [[12, 41, 13, 40]]
    want = torch.log_softmax(torch.tensor([5.0, 5.0, 2.0, 1.0]), dim=0)
    assert torch.allclose(values[0], want)


def test_the_largest_token_id_is_kept() -> None:
    top = (1 << 31) - 2
    head = VocabParallelHead(
        weight=torch.tensor([[-1.0], [2.0]]), segments=(Segment(row=0, rows=2, token=top),)
    )
    assert top_log_probs(torch.ones(1, 1), head, 2)[1].tolist() == [[top + 1, top]]


def test_what_is_not_a_distribution_gives_no_candidate() -> None:
    inf, nan = float("inf"), float("nan")
    logits = torch.tensor([[nan, 1.0, 2.0], [inf, 1.0, 2.0], [-inf, -inf, -inf], [1.0, -inf, 1.0]])
    # One head per row of logits: the identity as hidden states would multiply inf by 0.
    heads = [whole(row[:, None].contiguous()) for row in logits]
    results = [top_log_probs(torch.ones(1, 1), head, 4) for head in heads]
    for values, tokens in results[:3]:
        assert (values == -inf).all()
        assert (tokens == 0).all()
    values, tokens = results[3]
    assert tokens.tolist() == [[0, 2, 0, 0]]
    assert values.isfinite().tolist() == [[True, True, False, False]]


def test_no_more_logits_than_stated_exist_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    matmul: Callable[..., torch.Tensor] = torch.matmul

    def counting(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        product = matmul(left, right)
        sizes.append(product.numel())
        return product

    monkeypatch.setattr(torch, "matmul", counting)
    top_log_probs(torch.randn(50, 4), whole(torch.randn(100, 4)), 3, max_logits=1000)
    assert sizes == [1000] * 5


def test_one_token_fills_a_flat_head_in_order() -> None:
    """All logits equal: the k-th place is tied with everything."""
    head = whole(torch.zeros(4097, 2, dtype=torch.bfloat16))
    values, tokens = top_log_probs(torch.ones(3, 2), head, 255)
    assert tokens.tolist() == [list(range(255))] * 3
    assert (values == values[0, 0]).all()


def test_an_empty_batch_and_refusals() -> None:
    head = whole(torch.randn(5, 4))
    values, tokens = top_log_probs(torch.empty(0, 4), head, 3)
    assert (values.shape, tokens.shape) == ((0, 3), (0, 3))
    with pytest.raises(ValueError, match=r"got \(2, 3\) and 1, needed \[tokens, 4\]"):
        top_log_probs(torch.ones(2, 3), head, 1)
    with pytest.raises(ValueError, match="and 0, needed"):
        top_log_probs(torch.ones(2, 4), head, 0)
