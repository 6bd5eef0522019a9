"""The tree's kernels on the GPU, against the same on a CPU, bit for bit; marginals; capture."""

from __future__ import annotations

import pytest
import torch
from sglang_overlay.tree.accept import launch_walk, walk
from sglang_overlay.tree.build import build_tree
from sglang_overlay.tree.layout import DraftTree
from sglang_overlay.tree.marginals import Segment, VocabParallelHead, top_log_probs
from sglang_overlay.tree.top_tokens import find_tokens, finish_tokens

from tests.support.gpu import no_synchronisation

pytestmark = pytest.mark.gpu
Marginals = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
SIZES = [(16, 7, 15), (64, 15, 63), (256, 31, 255), (33, 31, 4), (2, 1, 1), (200, 3, 255)]


def inputs(requests: int, depth: int, width: int, values: str) -> Marginals:
    noise = torch.randn(requests, depth, width)
    if values == "tied":
        noise = noise.round()
    if values == "odd":
        odd = torch.tensor([float("nan"), float("inf"), float("-inf"), 1.0])
        spots = torch.rand_like(noise) < 0.2
        noise = torch.where(spots, odd[torch.randint(0, 4, noise.shape)], noise)
    log_probs = -noise.abs().sort(dim=2).values if values != "odd" else noise
    return log_probs, torch.randint(0, 1 << 40, log_probs.shape), torch.arange(requests)


def on_gpu(marginals: Marginals) -> Marginals:
    log_probs, candidates, root = marginals
    return log_probs.cuda(), candidates.cuda(), root.cuda()


def assert_same(got: DraftTree, want: DraftTree) -> None:
    for name in ("tokens", "parents", "depths"):
        assert torch.equal(getattr(got, name).cpu(), getattr(want, name)), name


@pytest.mark.parametrize("values", ["smooth", "tied", "odd"])
@pytest.mark.parametrize(("n", "depth", "width"), SIZES)
def test_the_kernel_builds_the_cpus_tree(n: int, depth: int, width: int, values: str) -> None:
    torch.manual_seed(n)
    for requests in (1, 33):
        marginals = inputs(requests, depth, width, values)
        assert_same(build_tree(*on_gpu(marginals), n), build_tree(*marginals, n))


@pytest.mark.parametrize(("n", "depth", "width"), SIZES)
def test_the_kernel_walks_the_cpus_path(n: int, depth: int, width: int) -> None:
    torch.manual_seed(n)
    tree = build_tree(*inputs(40, depth, width, "smooth"), n)
    # Each node's choice is one of its children, where it has any, or nothing.
    child_of = tree.parents[:, None, :] == torch.arange(n)[:, None]
    pick = (torch.rand(40, n, n) * child_of).argmax(dim=2)
    missed = ~child_of.any(dim=2) | (torch.rand(40, n) < 0.1)
    predicted = torch.where(missed, -1, tree.tokens.gather(1, pick))
    want = walk(tree, predicted)
    there = DraftTree(
        tokens=tree.tokens.cuda(),
        parents=tree.parents.cuda(),
        depths=tree.depths.cuda(),
        max_depth=tree.max_depth,
    )
    got = launch_walk(there, predicted.cuda())
    assert torch.equal(got[0].cpu(), want[0])
    assert torch.equal(got[1].cpu(), want[1])
    assert want[1].max() > 1


def test_one_capture_serves_changing_marginals_without_waiting() -> None:
    first = on_gpu(inputs(8, 15, 63, "smooth"))
    out = DraftTree.empty(8, 64, 15, "cuda")
    predicted = torch.zeros(8, 64, dtype=torch.int64, device="cuda")
    build_tree(*first, 64, out=out)
    walk(out, predicted)
    torch.cuda.synchronize()
    with no_synchronisation():
        walk(build_tree(*first, 64, out=out), predicted)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        build_tree(*first, 64, out=out)
        path, lengths = walk(out, predicted)
    for turn in range(20):
        fresh = inputs(8, 15, 63, ("smooth", "tied", "odd")[turn % 3])
        for static, new in zip(first, fresh, strict=True):
            static.copy_(new)
        want = build_tree(*fresh, 64)
        choice = want.tokens.roll(-1, dims=1)
        predicted.copy_(choice)
        graph.replay()
        assert_same(out, want)
        want_path, want_lengths = walk(want, choice)
        assert torch.equal(path.cpu(), want_path)
        assert torch.equal(lengths.cpu(), want_lengths)


def test_marginals_order_ties_by_token_and_do_not_wait() -> None:
    """Logits of bf16 that come out of a product are mostly tied among the first 255."""
    torch.manual_seed(0)
    hidden = torch.randn(33, 256, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(50_000, 256, device="cuda", dtype=torch.bfloat16)
    head = VocabParallelHead(weight=weight, segments=(Segment(row=0, rows=49_990, token=0),))
    top_log_probs(hidden, head, 255)
    with no_synchronisation():
        values, tokens = top_log_probs(hidden, head, 255, max_logits=1 << 20)
    step = (1 << 20) // 49_990
    logits = torch.cat(
        [torch.matmul(part, weight[:49_990].T) for part in hidden.split(step)]
    ).double()
    order = logits.sort(dim=1, descending=True, stable=True)
    assert (order.values[:, :255].diff(dim=1) == 0).sum() > 33
    assert torch.equal(tokens, order.indices[:, :255])
    want = torch.log_softmax(logits, dim=1).gather(1, tokens)
    assert (values.double() - want).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("vocabulary", "rows", "k"), [(19_000, 15, 63), (152_064, 120, 255)])
def test_the_top_tokens_are_those_of_a_stable_sort(
    vocabulary: int, rows: int, k: int, dtype: torch.dtype
) -> None:
    """In two parts, and many values equal; k of both widths that trees ask for."""
    torch.manual_seed(0)
    logits = (torch.randn(rows, vocabulary, device="cuda") * 8).round().to(dtype) / 4
    logits[0, 1000:2000] = float("-inf")
    cut = vocabulary - 100
    parts = [(logits[:, :cut], 0), (logits[:, cut:], cut)]
    values, tokens = finish_tokens(find_tokens(parts, rows, k)[None], k)
    order = logits.double().sort(dim=1, descending=True, stable=True).indices[:, :k]
    assert torch.equal(tokens, order)
    want = torch.log_softmax(logits.double(), dim=1).gather(1, order)
    assert (values.double() - want).abs().max() < 1e-4
