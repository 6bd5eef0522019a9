"""Time the split kernels for sm_90 beside FlashMLA's chain, each in a process of its own.

Per shape and kernel: the time of the portable engine and the tree kernel with pages of 64 and of 1,
each over that of FlashMLA's causal chain in the same rounds, and the distance to the float64
oracle. A kernel that fails, or hangs, is named and does not end the others. All processes import
and compile at once; then one after another measures.

usage: python benchmarks/verify_hopper.py [OUT.json] [--only NAME ...] [--seconds N]
Needs what ``verify_portable.py`` needs.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SHAPES = [(1, 32768, 8, 16), (8, 32768, 8, 16), (8, 32768, 8, 64), (1, 131072, 8, 64)]
ROUNDS = 6
# The bf16 results of the kernels are off by 0.003; a wrong row moves them by much more.
LIMIT = 0.01
READY = "ready"


def candidates() -> dict[str, tuple[Any, Any]]:
    """Return (config, cache dtype) by name; imported late, the parent needs no torch."""
    import torch
    from sglang_overlay.attention.split_config import MMA, ROLES, choose_config

    bf16, fp8 = torch.bfloat16, torch.float8_e4m3fn
    return {
        "now-bf16": (choose_config(90, fp8=False), bf16),
        "roles-bf16": (ROLES, bf16),
        "now-fp8": (choose_config(90, fp8=True), fp8),
        "roles-fp8": (ROLES, fp8),
        "mma-fp8": (MMA, fp8),
    }


NAMES = ["now-bf16", "roles-bf16", "now-fp8", "roles-fp8", "mma-fp8"]


def measure(name: str) -> Iterator[dict[str, Any]]:
    """Compile all that ``name`` needs, wait to be told, then yield one row per shape."""
    import torch
    from sglang_overlay.self_test.timing import captured, replay_time

    from benchmarks.verify_adapter import kernel_times
    from benchmarks.verify_portable import Ways, ratio

    config, dtype = candidates()[name]
    for requests, _, heads, nodes in SHAPES:
        ways = Ways((requests, 256, heads, nodes), dtype)
        for scattered in (False, True):
            ways.portable(config, scattered=scattered)[0]()
        torch.cuda.synchronize()
    print(READY, flush=True)
    sys.stdin.readline()
    for shape in SHAPES:
        ways = Ways(shape, dtype)
        calls = {
            "page64": ways.portable(config),
            "slots": ways.portable(config, scattered=True),
            "chain": ways.case.chain_calls(),
        }
        errors = ways.errors(calls)
        graphs = {way: captured(each) for way, each in calls.items()}
        repeats = max(1, round(4 / replay_time(graphs["chain"], 2)))
        rounds: dict[str, list[float]] = {way: [] for way in graphs}
        for _ in range(ROUNDS):
            for way, graph in graphs.items():
                rounds[way].append(replay_time(graph, repeats) / ways.case.layers)
        row: dict[str, Any] = {"name": name, "shape": shape, "error": errors}
        row |= {way: statistics.median(times) for way, times in rounds.items()}
        for way in ("page64", "slots"):
            row[f"{way}_over_chain"] = ratio(rounds[way], rounds["chain"])
        row["kernels_us"] = kernel_times(calls["page64"][0])
        yield row
        del ways, calls, graphs
        torch.cuda.empty_cache()


def text_of(row: dict[str, Any]) -> str:
    """Return one result as a line."""
    cells = [f"{row['name']:11}", f"{row['shape']!s:20}", f"chain {row['chain']:.4f} ms"]
    for way in ("page64", "slots"):
        error = row["error"][way]
        wrong = "" if error <= LIMIT else " WRONG"
        ratio = row[f"{way}_over_chain"]
        cells.append(f"{way} {row[way]:.4f} ms, {ratio:.2f} of chain, off by {error:.1e}{wrong}")
    return " | ".join(cells)


@dataclass
class Child:
    """The process of one candidate."""

    name: str
    process: subprocess.Popen[str]
    errors: Path

    def line(self, until: float) -> str:
        """Return the next line of the process, or an empty one if it ends or is too late."""
        assert self.process.stdout is not None
        while time.monotonic() < until:
            if select.select([self.process.stdout], [], [], 0.2)[0]:
                return self.process.stdout.readline()
        return ""

    def end(self) -> None:
        """Kill the process; a kernel that hangs goes with it."""
        self.process.kill()
        self.process.wait()


def start(name: str, folder: Path) -> Child:
    """Start the process of one candidate."""
    errors = folder / f"{name}.txt"
    with errors.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-u", __file__, "--child", name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
            bufsize=1,
            env=os.environ,
        )
    return Child(name, process, errors)


def run(names: list[str], seconds: float, folder: Path) -> list[dict[str, Any]]:
    """Measure ``names`` one after another and print what comes."""
    began = time.monotonic()
    children = [start(name, folder) for name in names]
    rows: list[dict[str, Any]] = []
    ready = []
    for child in children:
        line = child.line(began + seconds * 0.55)
        while line and line.strip() != READY:
            line = child.line(began + seconds * 0.55)
        if line:
            ready.append(child)
        else:
            child.end()
            print(f"{child.name}: not ready. {last_words(child)}", flush=True)
    print(f"{len(ready)} ready after {time.monotonic() - began:.0f} s", flush=True)
    for child in ready:
        assert child.process.stdin is not None
        child.process.stdin.write("go\n")
        child.process.stdin.flush()
        count = 0
        while line := child.line(min(time.monotonic() + 25, began + seconds)):
            if not line.startswith("{"):
                continue
            row = json.loads(line)
            row["shape"] = tuple(row["shape"])
            print(text_of(row), flush=True)
            rows.append(row)
            count += 1
            if count == len(SHAPES):
                break
        child.end()
        if count < len(SHAPES):
            print(f"{child.name}: {count} of {len(SHAPES)} shapes. {last_words(child)}", flush=True)
    print(f"took {time.monotonic() - began:.0f} s", flush=True)
    return rows


def last_words(child: Child) -> str:
    """Return the end of what a process wrote to its standard error."""
    return " / ".join(child.errors.read_text(errors="replace").strip().splitlines()[-4:])


def main() -> None:
    """Measure every candidate, or be the process of one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("json", type=Path, nargs="?")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--seconds", type=float, default=100, help="end after these")
    parser.add_argument("--child", choices=NAMES)
    options = parser.parse_args()
    if options.child:
        for row in measure(options.child):
            print(json.dumps(row), flush=True)
        return
    with tempfile.TemporaryDirectory() as folder:
        rows = run(options.only, options.seconds, Path(folder))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
