"""The attention backend that DDTREE takes where none was named."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from sglang_overlay import upstream
from sglang_overlay.srt import selection
from sglang_overlay.srt.ddtree import attention


def arguments(**changes: Any) -> Any:
    fields: dict[str, Any] = {
        "speculative_num_draft_tokens": None,
        "dtype": "auto",
        "kv_cache_dtype": "auto",
        "device": "cuda",
        "page_size": None,
        "enable_deterministic_inference": False,
        "enable_two_batch_overlap": False,
        "enable_pdmux": False,
        "rope": 64,
    } | changes
    args = SimpleNamespace(**fields)
    args.use_mla_backend = lambda: True
    args.get_model_config = lambda: SimpleNamespace(kv_lora_rank=512, qk_rope_head_dim=args.rope)
    return args


@pytest.mark.parametrize(
    ("changes", "mla", "capability", "chosen", "reason"),
    [
        ({}, True, (9, 0), "flashmla", "the overlay verifies draft trees on it"),
        ({}, True, (12, 0), "triton", "need sm_90, and this is cuda with sm_120"),
        ({"page_size": 1}, True, (9, 0), "triton", "the page size is 1"),
        ({"rope": 32}, True, (9, 0), "triton", "an MLA row has 544 elements"),
        ({"kv_cache_dtype": "fp8_e5m2"}, True, (9, 0), "triton", "the KV cache is float8_e5m2"),
        ({}, False, (9, 0), "triton", "the target is no MLA model"),
    ],
)
def test_the_choice_and_its_reason(
    changes: dict[str, Any],
    mla: bool,
    capability: tuple[int, int],
    chosen: str,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(selection, "capability_of", lambda device: capability)
    monkeypatch.setattr(upstream, "mla_pool_moves_rows", lambda: False)
    with caplog.at_level(logging.INFO):
        assert attention.default_backend(arguments(**changes), "fa3", mla=mla) == chosen
    (record,) = caplog.records
    assert f"{chosen} is taken instead of fa3" in record.message
    assert reason in record.message
