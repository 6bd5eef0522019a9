"""What DDTREE refuses at start, and what it fills in."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
from sglang_overlay.srt.ddtree import validation
from sglang_overlay.srt.ddtree.validation import UnsupportedServerError


@pytest.fixture(autouse=True)
def _sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in for the one question that is asked of SGLang's model configurations."""
    module = SimpleNamespace(is_deepseek_nsa=lambda config: config.nsa)
    monkeypatch.setitem(sys.modules, "sglang", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "sglang.srt", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "sglang.srt.configs", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "sglang.srt.configs.model_config", module)


def arguments(*, nsa: bool = False, swa: bool = False, **changes: Any) -> Any:
    fields: dict[str, Any] = {
        "speculative_draft_model_path": "drafter",
        "speculative_num_draft_tokens": None,
        "speculative_dflash_block_size": 16,
        "speculative_draft_window_size": None,
        "speculative_num_steps": None,
        "speculative_eagle_topk": None,
        "speculative_attention_mode": "prefill",
        "attention_backend": "triton",
        "enable_dp_attention": False,
        "pp_size": 1,
        "enable_deterministic_inference": False,
        "enable_two_batch_overlap": False,
        "enable_pdmux": False,
        "disaggregation_mode": "null",
        "enable_return_routed_experts": False,
        "max_running_requests": None,
        "disable_overlap_schedule": False,
        "enable_mixed_chunk": True,
    } | changes
    args = SimpleNamespace(**fields)
    args.get_attention_backends = lambda: (args.attention_backend, args.attention_backend)
    config = SimpleNamespace(hf_config=SimpleNamespace(nsa=nsa), is_hybrid_swa=swa)
    args.get_model_config = lambda: config
    return args


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"speculative_draft_model_path": None}, "set --speculative-draft-model-path"),
    ({"enable_dp_attention": True}, "drop --enable-dp-attention"),
    ({"pp_size": 2}, "--pp-size is 2: set it to 1"),
    ({"enable_deterministic_inference": True}, "drop --enable-deterministic-inference"),
    ({"enable_two_batch_overlap": True}, "drop --enable-two-batch-overlap"),
    ({"enable_pdmux": True}, "drop --enable-pdmux"),
    ({"disaggregation_mode": "decode"}, "--disaggregation-mode decode"),
    ({"enable_return_routed_experts": True}, "drop --enable-return-routed-experts"),
    ({"attention_backend": "fa3"}, r"run on fa3 \(--attention-backend fa3\): choose triton or"),
    ({"nsa": True}, "sparse attention"),
    ({"swa": True}, "sliding-window layers"),
    ({"speculative_dflash_block_size": 1}, "block-size: got 1, needed at least 2"),
    ({"speculative_num_draft_tokens": 8}, "got 8, needed at least the drafter's block of 16"),
    ({"speculative_num_draft_tokens": 257}, "got 257, needed at most 256"),
    ({"speculative_draft_window_size": 8}, "window-size: got 8, needed at least"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_what_ddtree_cannot_do_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedServerError, match=message):
        validation.complete(arguments(**changes))


def test_every_reason_comes_in_one_message() -> None:
    args = arguments(pp_size=2, enable_dp_attention=True, nsa=True)
    with pytest.raises(UnsupportedServerError) as refusal:
        validation.complete(args)
    assert str(refusal.value).count("; ") == 2
    # Nothing was changed on the way.
    assert args.speculative_num_draft_tokens is None


@pytest.mark.parametrize(("block", "asked", "tree"), [(16, None, 32), (40, None, 40), (8, 64, 64)])
def test_the_sizes_that_are_filled_in(block: int, asked: int | None, tree: int) -> None:
    args = arguments(speculative_dflash_block_size=block, speculative_num_draft_tokens=asked)
    validation.complete(args)
    assert (args.speculative_dflash_block_size, args.speculative_num_draft_tokens) == (block, tree)
    assert (args.speculative_num_steps, args.speculative_eagle_topk) == (1, 1)
    assert args.max_running_requests == validation.DEFAULT_RUNNING_REQUESTS
    assert args.disable_overlap_schedule
    assert not args.enable_mixed_chunk


def test_what_only_objects_show() -> None:
    able = SimpleNamespace(sliding_window_size=None, mambaish_config=None)
    validation.check_runner(able)
    with pytest.raises(UnsupportedServerError, match="within a window of 128 tokens"):
        validation.check_runner(SimpleNamespace(sliding_window_size=128, mambaish_config=None))
    with pytest.raises(UnsupportedServerError, match="recurrent layers"):
        validation.check_runner(SimpleNamespace(sliding_window_size=None, mambaish_config=1))
