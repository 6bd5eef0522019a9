"""One tensor-parallel rank, as a process: compare the overlay, write what came of it to a file.

Arguments: rank, number of ranks, folder to meet in, overlay version, ``present`` or ``silent``.
"""

from __future__ import annotations

import datetime
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch.distributed as dist
from sglang_overlay.identity import Identity
from sglang_overlay.srt import ranks


def main(rank: int, world_size: int, folder: Path, version: str, conduct: str) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size
    )
    ranks._PATIENCE = datetime.timedelta(seconds=2)
    if conduct == "silent":
        while not (folder / "over").exists():
            time.sleep(0.05)
        return
    identity = Identity(
        overlay=version,
        fingerprint="f" * 64,
        release="0.5.12",
        verify_backend="",
        mask_policy="",
        verify_path="none",
    )
    group = SimpleNamespace(world_size=world_size, cpu_group=dist.group.WORLD)
    try:
        ranks.compare(group, identity)
        said = "same"
    except ranks.MixedOverlayError as error:
        said = str(error)
    (folder / f"draft-{rank}").write_text(said)
    (folder / f"draft-{rank}").rename(folder / f"said-{rank}")
    # A peer that still waits for this rank must get to its own verdict.
    while not (folder / "over").exists():
        time.sleep(0.05)
    os._exit(0)  # past the process group, which may still wait for a silent rank


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4], sys.argv[5])
