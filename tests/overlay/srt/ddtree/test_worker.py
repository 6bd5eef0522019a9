"""The worker: sizes told apart, and a tree in place of the chain that it was handed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang_overlay.tree.oracle import best_first

VOCABULARY, HIDDEN, BLOCK, TREE = 12, 5, 4, 6


class MHATokenToKVPool:
    def __init__(self) -> None:
        self.k_buffer = [torch.zeros(8, 2, 4)]
        self.v_buffer = [torch.zeros(8, 2, 4)]


def make(ddtree: Any, monkeypatch: pytest.MonkeyPatch, page_size: int = 64) -> Any:
    worker = ddtree.worker.DraftTreeWorker
    monkeypatch.setattr(worker, "page_size", page_size)
    server_args = SimpleNamespace(
        speculative_num_draft_tokens=TREE, speculative_dflash_block_size=BLOCK
    )
    runner = SimpleNamespace(
        token_to_kv_pool=MHATokenToKVPool(),
        model_config=SimpleNamespace(vocab_size=VOCABULARY),
    )
    return worker(server_args, runner)


def test_drafter_and_target_are_sized_apart(ddtree: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = make(ddtree, monkeypatch)
    assert worker.drafter_tokens == BLOCK
    assert worker.server_args.speculative_num_draft_tokens == worker.tree_size == TREE
    assert worker.model_runner.overlay_draft_trees.as_dict()["steps"] == 0


@pytest.mark.parametrize(("page_size", "buffers"), [(1, None), (64, 2)])
def test_rows_are_moved_on_pages_alone(
    ddtree: Any, monkeypatch: pytest.MonkeyPatch, page_size: int, buffers: int | None
) -> None:
    rows = make(ddtree, monkeypatch, page_size)._rows
    assert (rows and len(rows.tensors)) == buffers


def head() -> Any:
    shard = SimpleNamespace(
        num_org_elements=VOCABULARY,
        org_vocab_start_index=0,
        num_org_elements_padded=VOCABULARY,
        num_added_elements=0,
        added_vocab_start_index=VOCABULARY,
    )
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator)
    return SimpleNamespace(weight=weight, shard_indices=shard)


def test_it_plants_the_tree_of_its_last_pass(ddtree: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    worker, lm_head = make(ddtree, monkeypatch), head()
    generator = torch.Generator().manual_seed(4)
    hidden = torch.randn(2 * (BLOCK - 1), HIDDEN, generator=generator)
    best = worker._greedy_sample_from_vocab_parallel_head(hidden_states=hidden, lm_head=lm_head)
    log_probs = torch.log_softmax(hidden @ lm_head.weight.T, dim=1)
    assert torch.equal(best, log_probs.argmax(dim=1))

    roots = torch.tensor([[3], [5]])
    chain = SimpleNamespace(draft_token=torch.cat([roots, best.view(2, -1)], dim=1).view(-1))
    batch = SimpleNamespace(reqs=["a", "b"], seq_lens=torch.tensor([9, 40]))
    info = worker.plant(batch, chain)
    assert info.draft_token_num == TREE
    assert info.spine.tolist() == [[3, *best[:3].tolist()], [5, *best[3:].tolist()]]
    assert info.tally is worker.model_runner.overlay_draft_trees
    assert info.rows is worker._rows
    for row, root in enumerate((3, 5)):
        sorted_rows = log_probs.view(2, BLOCK - 1, -1)[row].sort(dim=1, descending=True)
        positions = [
            (values.tolist(), tokens.tolist())
            for values, tokens in zip(sorted_rows.values, sorted_rows.indices, strict=True)
        ]
        expected = best_first(positions, root, TREE)
        assert info.tree.tokens[row].tolist() == [node.token for node in expected]
        assert info.parents[row].tolist() == [node.parent for node in expected]


def test_a_pass_is_planted_once(ddtree: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = make(ddtree, monkeypatch)
    chain = SimpleNamespace(draft_token=torch.zeros(BLOCK, dtype=torch.int64))
    with pytest.raises(AssertionError):
        worker.plant(SimpleNamespace(reqs=["a"]), chain)
