"""Which pools' rows a commit can move."""

from __future__ import annotations

import pytest
import torch
from sglang_overlay.srt.ddtree.rows import row_buffers
from sglang_overlay.srt.ddtree.validation import UnsupportedServerError


class MLATokenToKVPool:
    def __init__(self) -> None:
        self.kv_buffer = [torch.zeros(8, 1, 576) for _ in range(3)]


class MHATokenToKVPool:
    def __init__(self) -> None:
        self.k_buffer = [torch.zeros(8, 2, 16) for _ in range(3)]
        self.v_buffer = [torch.zeros(8, 2, 8) for _ in range(3)]


class MLATokenToKVPoolFP4(MLATokenToKVPool):
    """A subclass with scales by slot, as SGLang has one."""


def test_every_layer_of_a_known_pool() -> None:
    assert len(row_buffers(MLATokenToKVPool()).tensors) == 3
    assert len(row_buffers(MHATokenToKVPool()).tensors) == 6


def test_a_subclass_is_refused_with_the_way_out() -> None:
    with pytest.raises(
        UnsupportedServerError,
        match=r"cannot in a MLATokenToKVPoolFP4: it knows .* Set --page-size 1, or another",
    ):
        row_buffers(MLATokenToKVPoolFP4())
