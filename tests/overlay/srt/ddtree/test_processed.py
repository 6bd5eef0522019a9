"""Custom logit processors on trees: what they are shown, in which order, and what stays."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang_overlay.srt.ddtree import processed
from sglang_overlay.tree.layout import DraftTree

VOCABULARY = 12
# Per request: 0 is the root; 1 and 2 follow it, 3 follows 1, 4 follows 3. The last one only pads.
TREE = DraftTree(
    tokens=torch.tensor([[7, 1, 2, 3, 4, 0], [7, 5, 6, 8, 9, 0]]),
    parents=torch.tensor([[-1, 0, 0, 1, 3, -1]] * 2, dtype=torch.int32),
    depths=torch.tensor([[0, 1, 1, 2, 3, 0]] * 2, dtype=torch.int32),
    max_depth=3,
)
# The target follows the longest path of both trees, and ends with a bonus token.
CHOICES = torch.tensor([[1, 3, 10, 4, 10, 10], [5, 8, 11, 9, 11, 11]])


class Request:
    """SGLang's request, as far as its end goes: at a token or at a length."""

    def __init__(self, stop: int = -1, most: int = 100) -> None:
        self.origin_input_ids = [0]
        self.output_ids = [7]
        self.finished_reason: str | None = None
        self.to_finish: str | None = None
        self.stop, self.most = stop, most

    def finished(self) -> bool:
        return self.finished_reason is not None

    def check_finished(self) -> None:
        if self.to_finish:
            self.finished_reason, self.to_finish = self.to_finish, None
        elif self.output_ids[-1] == self.stop or len(self.output_ids) >= self.most:
            self.finished_reason = "done"


def sampling(
    *processors: tuple[Any, list[bool]], params: Any = (None, None), bias: Any = None
) -> Any:
    return SimpleNamespace(
        has_custom_logit_processor=bool(processors),
        custom_logit_processor={
            number: (each, torch.tensor(mask)) for number, (each, mask) in enumerate(processors)
        },
        custom_params=list(params),
        logit_bias=bias,
    )


class Watching:
    """A processor that keeps what it is shown, and puts a token of its own at some histories."""

    def __init__(self, changes: dict[tuple[int, ...], int] | None = None) -> None:
        self.calls: list[list[list[int]]] = []
        self.changes = changes or {}

    def __call__(self, logits: torch.Tensor, params: list[Any]) -> torch.Tensor:
        assert logits.shape == (len(params), VOCABULARY)
        self.calls.append([list(each["__req__"].output_ids) for each in params])
        for row, each in enumerate(params):
            # Such state is the request's own; plain decoding hands the same dict to every call.
            each["seen"] = each.get("seen", 0) + 1
            if (token := self.changes.get(tuple(each["__req__"].output_ids))) is not None:
                logits[row, token] = 99.0
        return logits


def play(
    *processors: tuple[Any, list[bool]], requests: tuple[Request, Request] | None = None
) -> tuple[list[list[int]], Any, tuple[Request, Request]]:
    both = requests or (Request(), Request())
    info = sampling(*processors, params=[{"__req__": each} for each in both])
    batch = SimpleNamespace(sampling_info=info, reqs=list(both))
    logits = torch.nn.functional.one_hot(CHOICES.view(-1), VOCABULARY).float()
    chosen = CHOICES.clone()
    processed.choose_on_paths(batch, logits, TREE, chosen)
    return chosen.tolist(), info.custom_params, both


def test_each_call_sees_the_tokens_of_its_path() -> None:
    """A call for all nodes at once saw every one with the root's outputs."""
    watching = Watching()
    chosen, params, requests = play((watching, [True, True]))
    assert chosen == CHOICES.tolist()
    assert watching.calls == [
        [[7], [7]],
        [[7, 1], [7, 5]],
        [[7, 1, 3], [7, 5, 8]],
        [[7, 1, 3, 4], [7, 5, 8, 9]],
    ]
    assert [each["seen"] for each in params] == [4, 4]
    assert [each.output_ids for each in requests] == [[7], [7]]


def test_a_processor_that_indexes_rows_by_parameter_hits_its_own_request() -> None:
    """SGLang's own do; where requests had as many rows as nodes, row 1 was another node's."""
    chosen, _, _ = play((Watching({(7, 5): 10}), [True, True]))
    assert chosen == [CHOICES[0].tolist(), [5, 10, 11, 9, 11, 11]]


def test_a_changed_choice_takes_another_branch_or_ends_the_path() -> None:
    watching = Watching({(7,): 2})
    chosen, _, _ = play((watching, [True, True]))
    # A child of the first root, none of the second.
    assert [row[0] for row in chosen] == [2, 2]
    assert watching.calls == [[[7], [7]], [[7, 2]]]


def test_a_node_that_only_pads_is_no_child() -> None:
    watching = Watching({(7, 1): 0})
    play((watching, [True, False]))
    assert watching.calls == [[[7]], [[7, 1]]]


def test_each_processor_has_its_own_requests() -> None:
    first, second = Watching(), Watching({(7, 5): 2})
    chosen, params, _ = play((first, [True, False]), (second, [False, True]))
    assert first.calls == [[[7]], [[7, 1]], [[7, 1, 3]], [[7, 1, 3, 4]]]
    # Once its request is at the end of its path, it is not called with none.
    assert second.calls == [[[7]], [[7, 5]]]
    assert [each["seen"] for each in params] == [4, 2]
    assert chosen[1][:2] == [5, 2]


def test_requests_without_one_are_left_alone() -> None:
    watching = Watching()
    _, params, _ = play((watching, [False, True]))
    assert "seen" not in params[0]
    assert len(watching.calls) == 4


@pytest.mark.parametrize(
    "ends", [{"stop": 3}, {"most": 3}], ids=["at a stop token", "at its length"]
)
def test_none_is_called_for_a_request_that_has_ended(ends: dict[str, int]) -> None:
    """As in plain decoding; a processor may know no answer for what cannot come."""
    watching = Watching()
    _, _, requests = play((watching, [True, False]), requests=(Request(**ends), Request()))
    assert watching.calls == [[[7]], [[7, 1]]]
    # SGLang's verify ends it, with the reason and the length that it finds itself.
    assert not requests[0].finished()
    assert requests[0].output_ids == [7]


def test_an_aborted_request_stays_to_be_ended() -> None:
    aborted = Request()
    aborted.to_finish = "abort"
    watching = Watching()
    play((watching, [True, False]), requests=(aborted, Request()))
    assert watching.calls == [[[7]]]
    assert (aborted.to_finish, aborted.finished_reason) == ("abort", None)


def test_outputs_are_put_back_where_a_processor_fails() -> None:
    def fail(logits: torch.Tensor, params: list[Any]) -> torch.Tensor:
        if len(params[0]["__req__"].output_ids) > 2:
            raise KeyError("no answer")
        return logits

    requests = Request(), Request()
    with pytest.raises(KeyError, match="no answer"):
        play((fail, [True, True]), requests=requests)
    assert [each.output_ids for each in requests] == [[7], [7]]
