"""Launch each split kernel of the portable engine once more after a warm-up, for Nsight Compute.

    ncu --kernel-name regex:split_prefix --launch-skip 4 --launch-count 4 --section ... \
        python benchmarks/profile_split.py

At (8, 32768, 8, 16), pages of 64: sm_90's kernel with bf16 and fp8, then ``mma`` with both.
Needs what ``verify_portable.py`` needs.
"""

from __future__ import annotations

import torch
from sglang_overlay.attention.split_config import MMA

from benchmarks.verify_portable import BF16, FP8, Ways

SHAPE = (8, 32768, 8, 16)


def main() -> None:
    """Run all four twice; the second time is the one to look at."""
    calls = [
        Ways(SHAPE, dtype).portable(config)[0] for config in (None, MMA) for dtype in (BF16, FP8)
    ]
    for _ in range(2):
        for call in calls:
            call()
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
