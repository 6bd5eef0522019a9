"""What building DFLASH's custom mask costs per step, and what not building it saves.

Runs SGLang's own `DFlashVerifyInput.prepare_for_verify` of the pinned release, real pools and real
allocator, with ``build_custom_mask`` as stock decides for FlashMLA (True) and as the overlay does
(False), side by side. Only the batch is a stand-in: it holds the fields that the method reads. The
site with SGLang is on PYTHONPATH.

usage: python benchmarks/mask_building.py OUT.json OUT.md [--device cuda|cpu]
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

BLOCK = 16
SHAPES = [(bs, context) for bs in (1, 8, 32) for context in (4_096, 32_768, 131_072)]
REPEATS = 15


def batch_of(bs: int, context: int, device: str) -> Any:
    """Return a stand-in batch of ``bs`` requests with ``context`` tokens each, on real pools."""
    from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

    pool = ReqToTokenPool(
        size=bs, max_context_len=context + BLOCK, device=device, enable_memory_saver=False
    )
    slots = bs * (context + BLOCK)
    allocator = TokenToKVPoolAllocator(
        slots, dtype=torch.bfloat16, device=device, kvcache=None, need_sort=False
    )
    lengths = torch.full((bs,), context, dtype=torch.int64)
    return SimpleNamespace(
        forward_mode=SimpleNamespace(is_idle=lambda: False),
        seq_lens=lengths.to(device),
        seq_lens_cpu=lengths,
        req_pool_indices=torch.arange(bs, device=device),
        req_to_token_pool=pool,
        tree_cache=SimpleNamespace(
            token_to_kv_pool_allocator=allocator, is_chunk_cache=lambda: True
        ),
        device=device,
        batch_size=lambda: bs,
        out_cache_loc=None,
        input_ids=None,
    )


def step(batch: Any, *, build: bool, device: str) -> int:
    """Run the method once; return the mask's elements."""
    from sglang.srt.speculative.dflash_info import DFlashVerifyInput

    bs = batch.batch_size()
    tokens = torch.zeros(bs * BLOCK, dtype=torch.int64, device=device)
    verify = DFlashVerifyInput(draft_token=tokens, positions=tokens, draft_token_num=BLOCK)
    verify.prepare_for_verify(batch, 1, build_custom_mask=build)
    batch.tree_cache.token_to_kv_pool_allocator.free(batch.out_cache_loc)
    return 0 if verify.custom_mask is None else verify.custom_mask.numel()


def measure(bs: int, context: int, device: str) -> dict[str, Any]:
    """Return times in milliseconds and peak new memory in bytes, for both choices."""
    batch = batch_of(bs, context, device)
    row: dict[str, Any] = {"bs": bs, "context": context, "block": BLOCK}
    times: dict[bool, list[float]] = {True: [], False: []}
    for number in range(REPEATS + 3):
        for build in (True, False):
            synchronize(device)
            started = time.perf_counter()
            elements = step(batch, build=build, device=device)
            synchronize(device)
            if number >= 3:
                times[build].append((time.perf_counter() - started) * 1e3)
            if build:
                row["mask_elements"] = elements
    for name, build in (("stock", True), ("overlay", False)):
        row[f"{name}_ms"] = statistics.median(times[build])
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            step(batch, build=build, device=device)
            row[f"{name}_peak_bytes"] = torch.cuda.max_memory_allocated() - before
    return row


def processor() -> str:
    """Return the processor's name."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if "model name" in line), "CPU")


def synchronize(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    """Measure every shape and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("json", type=Path)
    parser.add_argument("markdown", type=Path)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    options = parser.parse_args()
    device = options.device
    machine = torch.cuda.get_device_name() if device == "cuda" else processor()
    with torch.inference_mode():
        rows = [measure(bs, context, device) for bs, context in SHAPES]
    import sglang

    result = {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "machine": machine,
        "torch": torch.__version__,
        "sglang": sglang.__version__,
        "repeats": REPEATS,
        "rows": rows,
    }
    options.json.write_text(json.dumps(result, indent=1) + "\n")
    options.markdown.write_text(page(result))
    print(page(result))


def page(result: dict[str, Any]) -> str:
    """Return the result as a table."""
    lines = [f"# Building DFLASH's custom mask, {result['date']}", ""]
    lines += [
        f"{result['machine']}, torch {result['torch']}, sglang {result['sglang']}; medians of"
    ]
    lines += [
        f"{result['repeats']} steps, block {BLOCK}. The mask is what FlashMLA never reads.",
        "",
    ]
    if not torch.cuda.is_available():
        lines += ["On a CPU: both columns hold the slot assignment, a Triton kernel that the"]
        lines += ["interpreter runs here; the mask alone is their difference.", ""]
    lines += ["| bs | context | stock, ms | overlay, ms | mask alone, ms | mask, bytes | overlay |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for row in result["rows"]:
        alone = row["stock_ms"] - row["overlay_ms"]
        lines.append(
            f"| {row['bs']} | {row['context']} | {row['stock_ms']:.1f} | {row['overlay_ms']:.1f} "
            f"| {alone:.1f} | {row['mask_elements']:,} | 0 |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
