"""These tests run the Triton kernels in the interpreter, in float32 (it computes bf16 wrongly)."""

import os
import sys

import pytest

if "triton" not in sys.modules:
    os.environ["TRITON_INTERPRET"] = "1"
elif os.environ.get("TRITON_INTERPRET") != "1":
    raise pytest.UsageError(
        "triton was imported before TRITON_INTERPRET=1 was set; set it in the environment, or run "
        "tests/overlay/attention on its own"
    )
