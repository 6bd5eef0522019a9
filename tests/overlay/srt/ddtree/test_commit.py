"""The commit of a path: what is gathered, kept, moved and freed, and what SGLang's verify gets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang_overlay.kvcache.rows import RowBuffers

TREE = 6
# Two trees of six nodes, paths 0-2-5 and 0: a draft off the first branch, and nothing accepted.
TOKENS = torch.tensor([[10, 11, 12, 13, 14, 15], [20, 21, 22, 23, 24, 25]])
CHOSEN = torch.tensor([[12, 1, 15, 3, 4, 77], [88, 1, 2, 3, 4, 5]])
PATHS = torch.tensor([[0, 2, 5, -1], [0, -1, -1, -1]])
LENGTHS = torch.tensor([3, 1], dtype=torch.int32)


def path_of(ddtree: Any) -> Any:
    return ddtree.commit.Path.of(TOKENS, CHOSEN, PATHS, LENGTHS)


class Allocator:
    """Keeps what is freed, and how often: SGLang's waits for the device each time."""

    def __init__(self) -> None:
        self.freed: list[int] = []
        self.releases = 0
        self.group: list[torch.Tensor] | None = None

    def free(self, slots: torch.Tensor) -> None:
        if self.group is not None:
            self.group.append(slots)
            return
        self.freed += slots.tolist()
        self.releases += 1

    @property
    def is_not_in_free_group(self) -> bool:
        return self.group is None

    def free_group_begin(self) -> None:
        self.group = []

    def free_group_end(self) -> None:
        group, self.group = self.group, None
        if group:
            self.free(torch.cat(group))


def batch(slots: list[int], seq_lens: tuple[int, int] = (60, 5)) -> Any:
    sampling = SimpleNamespace(
        is_all_greedy=False,
        has_custom_logit_processor=True,
        logit_bias=torch.ones(2, 100),
        penalizer_orchestrator=SimpleNamespace(is_required=True),
    )
    return SimpleNamespace(
        out_cache_loc=torch.tensor(slots),
        seq_lens=torch.tensor(seq_lens),
        seq_lens_cpu=torch.tensor(seq_lens),
        token_to_kv_pool_allocator=Allocator(),
        sampling_info=sampling,
        result=("bonus", "lengths", "hidden", [2, 0]),
    )


def test_a_path_holds_tokens_choices_and_rows_up_to_its_end(ddtree: Any) -> None:
    path = path_of(ddtree)
    assert path.nodes.tolist() == [[0, 2, 5, 0], [0, 0, 0, 0]]
    # No choice of the target equals −1, so that nothing behind the end is accepted.
    assert path.tokens.tolist() == [[10, 12, 15, -1], [20, -1, -1, -1]]
    assert path.choices.tolist() == [[12, 15, 77, 12], [88, 88, 88, 88]]
    assert path.rows.tolist() == [0, 2, 5, 0, 6, 6, 6, 6]


def test_logits_stand_for_the_choices(ddtree: Any) -> None:
    logits = ddtree.commit.as_logits(torch.tensor([[3, 0], [7, 7]]), 9)
    assert (logits.shape, logits.dtype) == ((4, 9), torch.int8)
    assert logits.argmax(dim=1).tolist() == [3, 0, 7, 7]


def test_where_a_page_is_a_slot_the_paths_slots_come_first(ddtree: Any) -> None:
    own = batch([*range(100, 106), *range(200, 206)])
    ddtree.commit.keep_slots(path_of(ddtree), own)
    kept = own.out_cache_loc.view(2, 4).tolist()
    assert kept[0][:3] == [100, 102, 105]
    assert kept[1][0] == 200
    # Every slot is kept or freed once.
    both = sorted([*kept[0], *kept[1], *own.token_to_kv_pool_allocator.freed])
    assert both == [*range(100, 106), *range(200, 206)]


def test_a_path_as_long_as_its_tree_frees_nothing(ddtree: Any) -> None:
    chain = torch.arange(4).expand(2, -1)
    path = ddtree.commit.Path.of(
        TOKENS[:, :4], CHOSEN[:, :4], chain, torch.tensor([4, 4], dtype=torch.int32)
    )
    own = batch(list(range(8)))
    ddtree.commit.keep_slots(path, own)
    assert own.out_cache_loc.tolist() == list(range(8))
    assert own.token_to_kv_pool_allocator.freed == []


def test_on_pages_rows_move_and_whole_pages_behind_the_width_go(ddtree: Any) -> None:
    """Prefix 60 and width 4 fill their page at 64; prefix 5 ends in its page, which stays."""
    slots = [*range(124, 130), *range(5, 11)]
    layers = [torch.arange(256, dtype=torch.float32)[:, None].expand(-1, 4).clone() for _ in "ab"]
    own = batch(slots)
    ddtree.commit.move_to_front(path_of(ddtree), own, 64, RowBuffers.of(layers))
    for layer in layers:
        assert layer[[124, 125, 126], 0].tolist() == [124, 126, 129]
        rest = torch.ones(256, dtype=torch.bool)
        rest[[125, 126]] = False
        assert torch.equal(layer[rest], torch.arange(256.0)[rest][:, None].expand(-1, 4))
    # Order on pages stays: SGLang reads every 64th slot.
    assert own.out_cache_loc.tolist() == [124, 125, 126, 127, 5, 6, 7, 8]
    assert own.token_to_kv_pool_allocator.freed == [128, 129]


@pytest.mark.parametrize("page", [4, 64])
@pytest.mark.parametrize("width", [1, 4, 8])
def test_what_is_behind_is_in_no_page_of_the_width(ddtree: Any, page: int, width: int) -> None:
    prefixes = list(range(1, 2 * page + 1))
    behind = ddtree.commit.behind_pages(torch.tensor(prefixes), width, 9, page)
    assert behind.dtype is torch.int64
    expected = [
        row * 9 + place
        for row, prefix in enumerate(prefixes)
        for place in range(9)
        if (prefix + place) // page > (prefix + width - 1) // page
    ]
    assert behind.tolist() == expected


@pytest.mark.parametrize("page_size", [1, 64])
def test_sglangs_verify_gets_a_chain_that_is_decided(ddtree: Any, page_size: int) -> None:
    own = batch([*range(124, 130), *range(5, 11)])
    stock = own.sampling_info
    hidden = torch.arange(12.0)[:, None]
    output = SimpleNamespace(next_token_logits=torch.zeros(12, 100), hidden_states=hidden)
    rows = None if page_size == 1 else RowBuffers.of([torch.zeros(256, 4)])
    assert ddtree.commit.commit(path_of(ddtree), own, output, page_size, rows) is own.result
    seen = own.verified
    assert seen.page_size == page_size
    assert seen.chain.draft_token_num == 4
    assert seen.chain.draft_token.tolist() == [10, 12, 15, -1, 20, -1, -1, -1]
    assert seen.output.next_token_logits.argmax(dim=1).view(2, 4)[0].tolist() == [12, 15, 77, 12]
    assert seen.output.hidden_states[:, 0].tolist() == [0, 2, 5, 0, 6, 6, 6, 6]
    # Bias and processors were applied before the walk, and are no second time.
    assert seen.sampling.is_all_greedy
    assert not seen.sampling.has_custom_logit_processor
    assert seen.sampling.logit_bias is None
    assert not seen.sampling.penalizer_orchestrator.is_required
    assert own.sampling_info is stock
    assert stock.logit_bias is not None
    assert output.hidden_states is None


def test_the_commit_releases_slots_once(ddtree: Any) -> None:
    """On pages a release waits for the device: the tree's pages waited beside the chain's."""
    own = batch([*range(124, 130), *range(5, 11)])
    allocator = own.token_to_kv_pool_allocator
    # What SGLang's verify of the chain frees besides.
    own.frees = torch.tensor([126, 127])
    output = SimpleNamespace(
        next_token_logits=torch.zeros(12, 100), hidden_states=torch.zeros(12, 1)
    )
    ddtree.commit.commit(path_of(ddtree), own, output, 64, RowBuffers.of([torch.zeros(256, 4)]))
    assert allocator.freed == [128, 129, 126, 127]
    assert allocator.releases == 1


def test_all_is_put_back_where_verify_fails(ddtree: Any) -> None:
    own = batch([*range(12)])
    stock = own.sampling_info
    del own.result
    output = SimpleNamespace(
        next_token_logits=torch.zeros(12, 100), hidden_states=torch.zeros(12, 1)
    )
    with pytest.raises(AttributeError, match="result"):
        ddtree.commit.commit(path_of(ddtree), own, output, 1, None)
    assert own.sampling_info is stock
    # Nor does the allocator go on collecting.
    assert own.token_to_kv_pool_allocator.group is None
