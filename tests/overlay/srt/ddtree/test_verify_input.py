"""A tree in the shape of SGLang's verify input."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang_overlay.tree.layout import DraftTree

TREE = DraftTree(
    tokens=torch.tensor([[7, 8, 9, 9], [1, 2, 3, 1]]),
    parents=torch.tensor([[-1, 0, 0, 1], [-1, 0, 1, -1]], dtype=torch.int32),
    depths=torch.tensor([[0, 1, 1, 2], [0, 1, 2, 0]], dtype=torch.int32),
    max_depth=2,
)
PREFIX = torch.tensor([5, 2])


def verify_input(ddtree: Any, **more: Any) -> Any:
    given = {"spine": TREE.tokens[:, :3], "rows": None, "tally": ddtree.tally.Tally("cpu")} | more
    return ddtree.verify_input.TreeVerifyInput.of(TREE, PREFIX, **given)


def batch(*, idle: bool = False, **more: Any) -> Any:
    return SimpleNamespace(
        forward_mode=SimpleNamespace(is_idle=lambda: idle),
        reqs=["a", "b"],
        seq_lens=PREFIX.clone(),
        seq_lens_cpu=PREFIX.clone(),
        device="cpu",
        sampling_info=None,
        **more,
    )


def test_tokens_positions_and_topology(ddtree: Any) -> None:
    info = verify_input(ddtree)
    assert info.draft_token.tolist() == [7, 8, 9, 9, 1, 2, 3, 1]
    # Siblings share a position; a node that is no child stands where the root does.
    assert info.positions.tolist() == [5, 6, 6, 7, 2, 3, 4, 2]
    assert info.draft_token_num == 4
    assert info.parents is TREE.parents


@pytest.mark.parametrize(("wanted", "idle"), [(False, False), (True, True)])
def test_no_mask_where_nobody_reads_one(ddtree: Any, wanted: bool, idle: bool) -> None:
    info, own = verify_input(ddtree), batch(idle=idle)
    info.prepare_for_verify(own, 64, build_custom_mask=wanted)
    # SGLang's own mask is a chain's: it is never asked for.
    assert own.prepared == (64, False)
    assert info.custom_mask is None


def test_the_mask_is_the_trees(ddtree: Any) -> None:
    info = verify_input(ddtree)
    info.prepare_for_verify(batch(), 1, build_custom_mask=True)
    first, second = info.custom_mask.split([4 * 9, 4 * 6])
    assert first.view(4, 9)[:, :5].all()
    assert second.view(4, 6)[:, :2].all()
    assert first.view(4, 9)[:, 5:].int().tolist() == [
        [1, 0, 0, 0],
        [1, 1, 0, 0],
        [1, 0, 1, 0],
        [1, 1, 0, 1],
    ]
    assert second.view(4, 6)[:, 2:].int().tolist() == [
        [1, 0, 0, 0],
        [1, 1, 0, 0],
        [1, 1, 1, 0],
        [0, 0, 0, 1],
    ]


def test_verify_walks_counts_and_commits(ddtree: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    info = verify_input(ddtree, rows="rows")
    logits = torch.zeros(8, 10)
    # The first goes 7 → 8 → 9 and ends; the second's root chooses what is no child of it.
    for row, token in enumerate([8, 9, 0, 4, 3, 0, 0, 0]):
        logits[row, token] = 1.0
    seen: list[Any] = []

    def commit(*given: Any) -> str:
        seen.append(given)
        return "done"

    monkeypatch.setattr(ddtree.commit, "commit", commit)
    own, output = batch(), SimpleNamespace(next_token_logits=logits)
    assert info.verify(batch=own, logits_output=output, page_size=64) == "done"
    ((path, *others),) = seen
    assert others == [own, output, 64, "rows"]
    assert path.tokens.tolist() == [[7, 8, 9], [1, -1, -1]]
    assert path.nodes.tolist() == [[0, 1, 3], [0, 0, 0]]
    assert path.choices[0].tolist() == [8, 9, 4]
    assert path.choices[1, 0] == 3
    assert info.tally.as_dict()["committed_tokens"] == 4
    assert info.tally.as_dict()["branched_paths"] == 0


def test_an_idle_batch_is_sglangs(ddtree: Any) -> None:
    info, own = verify_input(ddtree), batch(idle=True, result="nothing")
    assert info.verify(batch=own, logits_output="none", page_size=1) == "nothing"
    assert own.verified.chain is info
    assert info.tally.steps == 0
