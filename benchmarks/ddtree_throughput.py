"""Decode throughput of DDTREE on ``--attention-backend triton``, by who verifies the trees.

Servers of one model with CUDA graphs, each a `Stepper` in a process of its own, that decode by
themselves: nothing is taught, so a step is what a user's is. Random weights accept next to no
drafts, the same ones whoever verifies; so the ratio of two servers' steps per second is that of
their tokens per second at any acceptance.

- ``portable-N``  DDTREE with trees of N tokens, verified by the overlay's portable engine
- ``stock-N``     the same, verified by SGLang's masked Triton kernel
- ``flashmla-N``  the same on FlashMLA (pages of 64), the overlay's adapter
- ``chain``, ``chain-stock``  DFLASH's chains of 16, verified by the portable engine and by SGLang

``python benchmarks/ddtree_throughput.py OUT [BATCH …] [--only NAME …]`` on a host with SGLang, the
overlay applied to it, and a Hopper GPU; writes OUT/ddtree-throughput.json and .md.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import verify_engine_gpu as engine  # noqa: E402
from benchmarks.installed import versions  # noqa: E402
from tests.support.engine import weights  # noqa: E402
from tests.support.engine.stepper import Stepper  # noqa: E402

BATCHES = (1, 8)
WARM_STEPS, TIMED_STEPS = 5, 40
BY_SGLANG = {"SGLANG_OVERLAY_VERIFY_ENGINE": "stock"}
BY_PORTABLE = {"SGLANG_OVERLAY_VERIFY_ENGINE": "portable"}


@dataclass(frozen=True, kw_only=True)
class Server:
    """``tree`` tokens of DDTREE with the root, or 0 for DFLASH; ``other`` names the stock one."""

    tree: int = 0
    flashmla: bool = False
    variables: dict[str, str] = field(default_factory=dict)
    other: str = ""


SERVERS = {
    "portable-16": Server(tree=16, variables=BY_PORTABLE, other="stock-16"),
    "stock-16": Server(tree=16, variables=BY_SGLANG),
    "flashmla-16": Server(tree=16, flashmla=True, other="stock-16"),
    "portable-64": Server(tree=64, variables=BY_PORTABLE, other="stock-64"),
    "stock-64": Server(tree=64, variables=BY_SGLANG),
    "flashmla-64": Server(tree=64, flashmla=True, other="stock-64"),
    "chain": Server(variables=BY_PORTABLE, other="chain-stock"),
    "chain-stock": Server(variables=engine.STOCK),
}


def server_arguments(name: str, batches: tuple[int, ...], folder: Path) -> dict[str, Any]:
    """Return keyword arguments for ``ServerArgs``; writes the model folders below ``folder``."""
    server = SERVERS[name]
    arguments = engine.server_arguments(engine.Mode(flashmla=server.flashmla), batches, folder)
    if server.tree:
        arguments |= {
            "speculative_algorithm": "DDTREE",
            "speculative_num_draft_tokens": server.tree,
        }
    return arguments


def timed(bed: Any, events: list[tuple[Any, Any]], batch: int) -> dict[str, float]:
    """Return rates of ``batch`` requests that decode together behind `engine.CONTEXT` tokens."""
    from sglang.srt.managers.io_struct import AbortReq

    words = random.Random(batch)
    requests = []
    for _ in range(batch):
        prompt = [words.randrange(2, engine.VOCABULARY - 2) for _ in range(engine.CONTEXT)]
        requests.append(bed.submit(prompt, tokens=engine.NODES * (WARM_STEPS + TIMED_STEPS)))
    while bed.step() == "EXTEND":
        pass
    for _ in range(WARM_STEPS):
        bed.step()
    torch.cuda.synchronize()
    events.clear()
    had = sum(len(each.output_ids) for each in requests)
    began = time.perf_counter()
    for _ in range(TIMED_STEPS):
        bed.step()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    made = sum(len(each.output_ids) for each in requests) - had
    assert len(events) == TIMED_STEPS, f"{len(events)} verify steps, needed {TIMED_STEPS}"
    assert not any(each.finished() for each in requests), "a request ended while it was timed"
    bed.scheduler.abort_request(AbortReq(abort_all=True))
    bed.run()
    verify = sorted(first.elapsed_time(last) for first, last in events)
    return {
        "step_ms": 1e3 * seconds / TIMED_STEPS,
        "verify_ms": verify[len(verify) // 2],
        "tokens_per_second": made / seconds,
        "tokens_per_step": made / TIMED_STEPS / batch,
    }


def watched(forward: Callable[..., Any], events: list[tuple[Any, Any]]) -> Callable[..., Any]:
    """Return the target's ``forward`` with an event before and behind each verify."""

    def call(batch: Any, *args: Any, **kwargs: Any) -> Any:
        if not batch.forward_mode.is_target_verify():
            return forward(batch, *args, **kwargs)
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        output = forward(batch, *args, **kwargs)
        last.record()
        events.append((first, last))
        return output

    return call


def run(name: str, batches: tuple[int, ...], out: Path, servers: int) -> None:
    """Be one server; time it when all ``servers`` have started and none is being timed."""
    import sglang.srt.model_loader.loader as loader

    loader.initialize_dummy_weights = weights.fill
    bed = Stepper(server_arguments(name, batches, out / "models" / name))
    runner = bed.scheduler.tp_worker.model_runner
    events: list[tuple[Any, Any]] = []
    runner.forward = watched(runner.forward, events)
    (out / f"{name}.started").touch()
    while len(list(out.glob("*.started"))) < servers:
        time.sleep(0.2)
    with (out / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # The first batch compiles what graphs do not hold.
        timed(bed, events, 1)
        rates = {f"bs {batch}": timed(bed, events, batch) for batch in batches}
    identity = getattr(runner, "overlay_identity", None)
    found = {
        "rates": rates,
        "graphs": runner.graph_runner is not None,
        "verify_path": identity.verify_path if identity else "stock",
    }
    (out / f"{name}.json").write_text(json.dumps(found))


def page(found: dict[str, Any]) -> str:
    """Return the result as a page for people."""
    builds = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    lines = [
        f"# Decode throughput of DDTREE, by who verifies, on one {found['machine']}",
        "",
        f"`benchmarks/ddtree_throughput.py`, {found['date']}; {builds}. Context "
        f"{engine.CONTEXT}, CUDA graphs, bf16, a target of 6 layers and 16 heads with random "
        f"weights; {TIMED_STEPS} steps each, one run.",
        "",
        "| server | verify path | batch | step, ms | verify on the GPU, ms | tokens per step "
        "and request | tokens/s | ÷ SGLang's kernel |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, server in found["servers"].items():
        for batch, rate in server["rates"].items():
            base = found["servers"].get(SERVERS[name].other, server)["rates"][batch]
            lines.append(
                f"| {name} | {server['verify_path']} | {batch} | {rate['step_ms']:.2f} | "
                f"{rate['verify_ms']:.3f} | {rate['tokens_per_step']:.2f} | "
                f"{rate['tokens_per_second']:.0f} | {base['step_ms'] / rate['step_ms']:.2f} |"
            )
    return "\n".join(lines) + "\n"


def main(out: Path, batches: tuple[int, ...], names: list[str]) -> int:
    """Run the servers beside each other, one timed at a time; return 1 when one of them failed."""
    out.mkdir(parents=True, exist_ok=True)
    scratch = Path(os.environ.get("TMPDIR", "/tmp")) / f"ddtree-throughput-{os.getpid()}"
    scratch.mkdir()
    processes = {}
    for name in names:
        command = [sys.executable, __file__, str(scratch), *map(str, batches), "--server", name]
        command += ["--only", *names]
        with (out / f"ddtree-throughput-{name}.log").open("w") as log:
            processes[name] = subprocess.Popen(
                command,
                env=os.environ | SERVERS[name].variables,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
    while any(each.poll() is None for each in processes.values()):
        time.sleep(0.5)
        if any(each.poll() not in (None, 0) for each in processes.values()):
            break
    failed = [name for name, each in processes.items() if each.poll() != 0]
    if failed:
        for each in processes.values():
            each.kill()
        print(f"failed or cut short: {failed}; see the logs in {out}")
        return 1
    found = {
        "machine": torch.cuda.get_device_name(),
        "date": time.strftime("%Y-%m-%d"),
        "versions": versions(),
        "context": engine.CONTEXT,
        "servers": {name: json.loads((scratch / f"{name}.json").read_text()) for name in names},
    }
    (out / "ddtree-throughput.json").write_text(json.dumps(found, indent=1) + "\n")
    (out / "ddtree-throughput.md").write_text(page(found))
    print(page(found))
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("batches", nargs="*", type=int, default=list(BATCHES))
    parser.add_argument("--only", nargs="+", choices=tuple(SERVERS), default=list(SERVERS))
    # What the program starts itself with.
    parser.add_argument("--server", choices=tuple(SERVERS))
    options = parser.parse_args()
    if options.server is None:
        sys.exit(main(options.out, tuple(options.batches), options.only))
    run(options.server, tuple(options.batches), options.out, len(options.only))
    # The scheduler leaves threads behind that would keep the process alive.
    os._exit(0)
