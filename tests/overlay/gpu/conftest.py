"""These tests need an sm_90 GPU, sgl_kernel's FlashMLA and a process without TRITON_INTERPRET.

Run by hand: ``pytest -m gpu tests/overlay/gpu``.
"""

import os

import pytest


@pytest.fixture(autouse=True)
def _real_kernels() -> None:
    assert os.environ.get("TRITON_INTERPRET") != "1", "unset TRITON_INTERPRET: it replaces the GPU"
