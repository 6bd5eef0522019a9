"""DDTREE in the real SGLang on a GPU: exactness under teacher forcing, with CUDA graphs.

Servers of one model, each a `Stepper` in a process of its own:

- ``ddtree-flashmla``  trees of 64 tokens, verified by the overlay on FlashMLA (pages of 64)
- ``ddtree-portable``  trees of 32 tokens, verified by the overlay's portable engine (page 1)
- ``ddtree-triton``    trees of 32 tokens, verified by SGLang's masked Triton kernel (page 1)
- ``flashmla``, ``triton``  stock SGLang with DFLASH's chains, the overlay switched off

Each writes the same texts, whatever its logits say. DDTREE finds the text's next tokens among its
drafts at ranks that change with every step, so that accepted paths of every length lead along the
chain and off it. The logits at every committed token are compared position by position: a wrong
mask, position, row or hidden state in any step shows in all that follow. How far the two stock
backends are apart is the measure.

``python benchmarks/ddtree_gpu.py OUT`` on a host with SGLang, the overlay applied to it, and a
Hopper GPU; writes OUT/ddtree.json.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import verify_engine_gpu as engine  # noqa: E402
from tests.support.engine import drafts, weights  # noqa: E402
from tests.support.engine.stepper import Stepper  # noqa: E402

TOKENS = 193
ROUNDS = ((8000,), (6000, 777, 4000, 70))
MODES: dict[str, tuple[str, int, dict[str, str]]] = {
    "ddtree-flashmla": ("hybrid", 64, {}),
    "ddtree-portable": ("triton", 32, {}),
    "ddtree-triton": ("triton", 32, {"SGLANG_OVERLAY_VERIFY_ENGINE": "stock"}),
    "flashmla": ("hybrid", 0, engine.STOCK),
    "triton": ("triton", 0, engine.STOCK),
}

# Per request: the logits [vocabulary] float32 on the CPU that decided each output token.
Rows = dict[str, dict[int, torch.Tensor]]


class Recorder(engine.Teacher):
    """Keeps the logits of every committed token, by request and place in its output."""

    def __init__(self) -> None:
        super().__init__()
        self.keeps = False
        self.rows: Rows = {}
        self.replays = 0
        self.turn = 0
        self._depths: torch.Tensor | None = None

    def keep(self, request: Any, logits: torch.Tensor) -> None:
        """Keep ``logits`` [places, vocabulary] of the coming output tokens of ``request``."""
        rows = self.rows.setdefault(request.rid, {})
        for place, row in enumerate(logits.float().cpu()):
            rows[len(request.output_ids) + place] = row

    def _verify(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        teach = super()._verify(stock)

        def verify(info: Any, *, batch: Any, logits_output: Any, **kwargs: Any) -> Any:
            if not isinstance(logits_output.next_token_logits, torch.Tensor) or self.is_tree():
                return stock(info, batch=batch, logits_output=logits_output, **kwargs)
            logits = logits_output.next_token_logits.view(len(batch.reqs), engine.NODES, -1)
            for request, own in zip(batch.reqs, logits, strict=True):
                self.keep(request, own)
            return teach(info, batch=batch, logits_output=logits_output, **kwargs)

        return verify

    def _prepare(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        teach = super()._prepare(stock)

        def prepare(info: Any, batch: Any, page_size: int, **kwargs: Any) -> Any:
            way = stock if self.is_tree() else teach
            return way(info, batch, page_size, **kwargs)

        return prepare

    def is_tree(self) -> bool:
        """Return whether this server runs DDTREE."""
        return self._depths is not None

    @contextmanager
    def planting(self) -> Iterator[None]:
        """Take over DDTREE: its candidates, the target's choices, and what is committed."""
        from sglang_overlay.srt.ddtree import choice, commit
        from sglang_overlay.srt.ddtree.worker import DraftTreeWorker

        self._depths = torch.empty(0)
        with (
            mock.patch.object(DraftTreeWorker, "plant", self._plant(DraftTreeWorker.plant)),
            mock.patch.object(choice, "choose", self._choose),
            mock.patch.object(commit, "commit", self._commit(commit.commit)),
        ):
            yield

    def _plant(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        def plant(worker: Any, batch: Any, chain: Any) -> Any:
            requests = len(batch.reqs)
            candidates = worker._candidates.view(requests, engine.NODES - 1, -1).cpu()
            for row, request in enumerate(batch.reqs):
                tail = self.text(request)[len(request.output_ids) :]
                drafts.place(candidates[row], tail, self.turn + row)
            self.turn += 1
            worker._candidates.copy_(candidates.view(worker._candidates.shape))
            worker._log_probs.copy_(drafts.marginals(candidates.shape[-1]))
            chain.draft_token.view(requests, -1)[:, 1:] = candidates[:, :, 0]
            info = stock(worker, batch, chain)
            self._depths = info.tree.depths
            return info

        return plant

    def _choose(self, batch: Any, logits: torch.Tensor, nodes: int) -> torch.Tensor:
        assert self._depths is not None
        wanted = [
            [self.text(request)[len(request.output_ids) + depth] for depth in depths]
            for request, depths in zip(batch.reqs, self._depths.tolist(), strict=True)
        ]
        return torch.tensor(wanted, device=logits.device)

    def _commit(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        def commit(path: Any, batch: Any, logits_output: Any, *args: Any) -> Any:
            logits = logits_output.next_token_logits[path.rows]
            logits = logits.view(len(batch.reqs), -1, logits.shape[-1])
            for request, own, held in zip(batch.reqs, logits, path.held, strict=True):
                self.keep(request, own[held])
            return stock(path, batch, logits_output, *args)

        return commit


def server_arguments(mode: str, folder: Path) -> dict[str, Any]:
    """Return keyword arguments for ``ServerArgs``; writes the model folders below ``folder``."""
    way, tree, _ = MODES[mode]
    arguments = engine.server_arguments(engine.Mode(flashmla=way != "triton"), (1, 2, 4), folder)
    if tree:
        arguments |= {"speculative_algorithm": "DDTREE", "speculative_num_draft_tokens": tree}
    return arguments


def run(mode: str, out: Path) -> None:
    """Be one server: write the texts, leave the logits and the counts in ``out``."""
    import sglang.srt.model_loader.loader as loader

    loader.initialize_dummy_weights = weights.fill
    bed = Stepper(server_arguments(mode, out / "models" / mode))
    runner = bed.scheduler.tp_worker.model_runner
    verify = getattr(runner, "overlay_tree_verify", None)
    captured = verify.steps if verify else 0
    teacher = Recorder()
    replay = runner.graph_runner.replay

    def counted(*args: Any, **kwargs: Any) -> Any:
        teacher.replays += 1
        return replay(*args, **kwargs)

    trees = MODES[mode][1] > 0
    free = bed.free_slots()
    with mock.patch.object(runner.graph_runner, "replay", counted), teacher.teaching(runner):
        if trees:
            with teacher.planting():
                write_texts(bed)
        else:
            write_texts(bed)
    torch.cuda.synchronize()
    times = sorted(first.elapsed_time(last) for first, last in teacher.verify_ms)
    identity = getattr(runner, "overlay_identity", None)
    tally = getattr(runner, "overlay_draft_trees", None)
    found = {
        "verify_steps": len(times),
        "graph_replays": teacher.replays,
        "adapter_steps": verify.steps - captured if verify else 0,
        "draft_trees": tally.as_dict() if tally else None,
        "verify_path": identity.verify_path if identity else "stock",
        "tree_size": identity.tree_size if identity else None,
        "slots_lost": free - bed.free_slots(),
        "verify_ms_median": times[len(times) // 2],
    }
    torch.save(teacher.rows, out / f"{mode}.pt")
    (out / f"{mode}.json").write_text(json.dumps(found))


def write_texts(bed: Any) -> None:
    """Run every round: requests of these contexts together, `TOKENS` tokens each."""
    import random

    for number, contexts in enumerate(ROUNDS):
        words = random.Random(number)
        for context in contexts:
            prompt = [words.randrange(2, engine.VOCABULARY - 2) for _ in range(context)]
            bed.submit(prompt, tokens=TOKENS)
        bed.run()


def compare(out: Path) -> dict[str, Any]:
    """Return the whole result, from what the servers left in ``out``."""
    rows: dict[str, Rows] = {mode: torch.load(out / f"{mode}.pt") for mode in MODES}
    places = [
        (rid, place)
        for rid in sorted(rows["triton"])
        for place in range(1, TOKENS)
        if all(place in rows[mode][rid] for mode in MODES)
    ]
    flat = {
        mode: [torch.stack([own[rid][place] for rid, place in places])]
        for mode, own in rows.items()
    }
    spread = engine.distance(flat["flashmla"], flat["triton"])
    pairs = {}
    for mode in (name for name, (_, tree, _) in MODES.items() if tree):
        pairs[mode] = {
            "to_triton": engine.distance(flat[mode], flat["triton"]),
            "to_flashmla": engine.distance(flat[mode], flat["flashmla"]),
            **engine.divergences(flat[mode], flat["triton"], spread["max"]),
        }
    return {
        "machine": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "contexts": ROUNDS,
        "positions": len(places),
        "positions_needed": sum(map(len, ROUNDS)) * (TOKENS - 1),
        "logits_std": float(flat["triton"][0].std()),
        "stock_spread": spread,
        "stock_divergences": engine.divergences(flat["flashmla"], flat["triton"], spread["max"]),
        **pairs,
        "servers": {mode: json.loads((out / f"{mode}.json").read_text()) for mode in MODES},
    }


def main(out: Path) -> int:
    """Run the servers side by side, compare, write; return 1 when one of them failed."""
    out.mkdir(parents=True, exist_ok=True)
    scratch = Path(os.environ.get("TMPDIR", "/tmp")) / f"ddtree-{os.getpid()}"
    scratch.mkdir()
    processes = {}
    for mode, (_, _, variables) in MODES.items():
        with (out / f"{mode}.log").open("w") as log:
            processes[mode] = subprocess.Popen(
                [sys.executable, __file__, "--server", mode, str(scratch)],
                env=os.environ | variables,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
    while any(each.poll() is None for each in processes.values()):
        failed = [mode for mode, each in processes.items() if each.poll() not in (None, 0)]
        if failed:
            for each in processes.values():
                each.kill()
            print(f"failed: {failed}; see the logs in {out}")
            return 1
        time.sleep(0.5)
    if any(each.returncode for each in processes.values()):
        print(f"failed; see the logs in {out}")
        return 1
    found = compare(scratch)
    text = json.dumps(found, indent=1)
    (out / "ddtree.json").write_text(text + "\n")
    print(text)
    return 0


if __name__ == "__main__":
    if sys.argv[1] == "--server":
        run(sys.argv[2], Path(sys.argv[3]))
        # The scheduler leaves threads behind that would keep the process alive.
        os._exit(0)
    sys.exit(main(Path(sys.argv[1])))
