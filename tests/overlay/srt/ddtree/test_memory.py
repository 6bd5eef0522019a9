"""The memory that trees take in graph capture, in numbers."""

from __future__ import annotations

from dataclasses import replace

from sglang_overlay.srt.ddtree import memory
from sglang_overlay.srt.ddtree.memory import Sizes

# 48 requests × 64 tokens, 8 heads of an MLA model: 12.9 GB (12 GiB) of split logits.
LARGE = Sizes(
    requests=48,
    tree=64,
    vocabulary=129_280,
    tokens=48 * 64,
    context=4096,
    heads=8,
    splits=256,
    width=512,
)


def test_the_split_logits_are_the_known_12_9_gb() -> None:
    parts = memory.parts(LARGE)
    assert parts["Triton's split logits"] == 48 * 64 * 8 * 256 * 513 * 4
    assert round(48 * 64 * 8 * 256 * 512 * 4 / 1e9, 1) == 12.9
    assert parts["logits of every node"] == 48 * 64 * 129_280 * 4


def test_where_the_overlay_verifies_tritons_buffers_are_those_of_plain_decoding() -> None:
    parts = memory.parts(replace(LARGE, tokens=48))
    assert parts["Triton's split logits"] == 48 * 8 * 256 * 513 * 4
    assert parts["logits of every node"] == 48 * 64 * 129_280 * 4


def test_without_triton_only_the_logits_count() -> None:
    assert list(memory.parts(replace(LARGE, splits=0))) == ["logits of every node"]


def test_a_refusal_says_the_numbers_and_the_way_out() -> None:
    total = sum(memory.parts(LARGE).values())
    assert memory.refusal(LARGE, total) is None
    message = memory.refusal(LARGE, total - 1)
    assert message is not None
    assert "48 requests × 64 tree tokens needs 13.6 GiB" in message
    assert "Triton's split logits 12.0 GiB" in message
    assert "Lower --cuda-graph-max-bs" in message
