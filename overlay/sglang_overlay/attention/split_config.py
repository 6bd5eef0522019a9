"""Tiles and work shares of the portable prefix engine: pure functions of sizes and hardware."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MAX_WAVES = 4
# What a part costs beside its tiles (query in, partial result out and in again), in tiles.
_PART_OVERHEAD = 3
# Rows, tile and warps of the kernels that have them built in.
_BUILT_IN = {"wgmma": (64, 64, 16), "mma": (64, 16, 8)}


@dataclass(frozen=True, kw_only=True)
class SplitConfig:
    """Launch shape of the split kernel.

    ``rows`` (node, head) pairs and ``tile`` cache rows per step of a program; ``warps`` per
    program, ``stages`` tiles in flight; ``least_tiles`` in a part, so that short prefixes are not
    split to dust; ``resident`` programs per multiprocessor. ``kernel`` is Triton's, for any
    tiles, or one of Gluon, with its tiles built in: ``wgmma`` for sm_90, ``mma`` for sm_80 on.
    """

    rows: int
    tile: int
    warps: int
    stages: int
    least_tiles: int = 2
    resident: int = 1
    kernel: Literal["triton", "wgmma", "mma"] = "triton"

    def __post_init__(self) -> None:
        """Refuse tiles that the kernel has not.

        Raises:
            ValueError: rows, tile or warps are not those of a kernel that has them built in.

        """
        tiles = (self.rows, self.tile, self.warps)
        needed = _BUILT_IN.get(self.kernel, tiles)
        if tiles != needed:
            raise ValueError(
                f"rows, tile, warps: got {tiles}, needed {needed} for kernel {self.kernel}; "
                "take these, or the triton kernel"
            )


WGMMA = SplitConfig(rows=64, tile=64, warps=16, stages=2, kernel="wgmma")
MMA = SplitConfig(rows=64, tile=16, warps=8, stages=4, least_tiles=8, kernel="mma")
# Triton's, for the interpreter: it runs no Gluon. On a GPU they are only timed beside the others.
# Both fit 101,376 B of shared memory; with more rows, the tile of cache rows would have to be so
# low that the whole is slower.
SAFE = SplitConfig(rows=32, tile=32, warps=4, stages=2)
# Converting from fp8 takes registers, and loads two tiles ahead would spill.
SAFE_FP8 = SplitConfig(rows=64, tile=16, warps=8, stages=1)


def choose_config(capability: int, *, fp8: bool) -> SplitConfig:
    """Return the tiles for a GPU of ``capability`` (major × 10 + minor).

    sm_90 has a kernel of its own. From sm_80 on, others get the kernel of mma.sync, which
    needs no more than sm_89 and sm_120 have: 101,376 B of shared memory, and no spills. On an H200
    it takes 1.1 to 2.0 times as long as what sm_90 has; those GPUs themselves were not at hand.
    """
    if capability == 90:
        return WGMMA
    if capability >= 80:
        return MMA
    return SAFE_FP8 if fp8 else SAFE


def count_workers(
    requests: int, rows: int, max_context: int, processors: int, config: SplitConfig
) -> int:
    """Return into how many parts the prefixes of a batch may be cut, at least one per request.

    A graph fixes this number at capture, while lengths change: the parts are dealt out on the
    device by true length. ``rows`` is nodes × heads, ``max_context`` the longest prefix possible,
    ``processors`` the GPU's multiprocessors. Every part runs ceil(rows / config.rows) programs, and
    the number is the one of up to four full waves of programs that serves a batch of equal, longest
    prefixes soonest: one wave costs least per part, more waves waste less of the last one.
    """
    blocks = -(-rows // config.rows)
    tiles = -(-max_context // config.tile)
    useful = requests * -(-tiles // config.least_tiles)
    slots = processors * config.resident
    best, least = requests, float("inf")
    for waves in range(1, MAX_WAVES + 1):
        workers = max(requests, min(useful, slots * waves // blocks))
        each = workers // requests
        passes = -(-requests * each * blocks // slots)
        time = passes * (-(-tiles // each) + _PART_OVERHEAD)
        if time < least:
            best, least = workers, time
    return best
