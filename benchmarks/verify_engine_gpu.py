"""The verify engine in the real SGLang on a GPU: exactness under teacher forcing, and throughput.

Servers of one model, each a `Stepper` in a process of its own, with CUDA graphs. ``MODES`` names
them, ``SUITES`` says which are compared:

- ``flashmla``  the overlay over FlashMLA, against FlashMLA's causal chain and stock Triton
- ``triton``    the overlay on ``--attention-backend triton``, against the same two; and a model
  with grouped-query attention against stock Triton, with no second stock backend at hand

All servers of a model verify the same tokens at the same contexts, whatever their logits say, so
the logits can be compared position by position: chains on all, random trees where a mask is
honoured. How far the two stock backends are apart is the measure. With one rank each then decodes
alone on the GPU, for its throughput.

``python benchmarks/verify_engine_gpu.py OUT [SUITE] [--kv fp8_e4m3] [--ranks 2]`` on a host with
SGLang, the overlay applied to it, and a Hopper GPU per rank; writes OUT/verify-engine-SUITE….json
and .md.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.installed import versions  # noqa: E402
from tests.support.engine import weights  # noqa: E402
from tests.support.engine.stepper import Stepper  # noqa: E402

NODES, VOCABULARY, FIRST_TOKEN = 16, 4096, 17
CONTEXT = 33_000
CHAIN_STEPS, TREE_STEPS, TIMED_STEPS = 16, 16, 24
STOCK = {"SGLANG_OVERLAY_DISABLE": "1"}


@dataclass(frozen=True, kw_only=True)
class Mode:
    """One server: whether its model has MLA, its verify backend, and the overlay's switches."""

    flashmla: bool = False
    grouped: bool = False
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_stock(self) -> bool:
        """Whether SGLang verifies by itself."""
        return self.variables == STOCK

    @property
    def honours_trees(self) -> bool:
        """Whether a tree's mask is applied."""
        return not (self.is_stock and self.flashmla)


MODES = {
    "adapter": Mode(flashmla=True, variables={"SGLANG_OVERLAY_FORCE_TREE": "1"}),
    "flashmla": Mode(flashmla=True, variables=STOCK),
    "triton": Mode(variables=STOCK),
    "portable": Mode(),
    "grouped": Mode(grouped=True),
    "grouped-triton": Mode(grouped=True, variables=STOCK),
}


@dataclass(frozen=True, kw_only=True)
class Suite:
    """What is compared: ``pairs`` of the overlay's server and stock's; batch sizes to time.

    The first of ``pairs`` has ``other``, a second stock backend, to measure it by.
    """

    pairs: tuple[tuple[str, str], ...]
    other: str
    batches: tuple[int, ...]

    @property
    def modes(self) -> list[str]:
        """Every server of the suite."""
        return [*(mode for pair in self.pairs for mode in pair), self.other]


SUITES = {
    "flashmla": Suite(pairs=(("adapter", "triton"),), other="flashmla", batches=(1, 4)),
    "triton": Suite(
        pairs=(("portable", "triton"), ("grouped", "grouped-triton")),
        other="flashmla",
        batches=(1, 8),
    ),
}

# SGLang's layers whose weights are a part of the whole on each tensor-parallel rank.
SHARDED = {
    "ColumnParallelLinear",
    "MergedColumnParallelLinear",
    "QKVParallelLinear",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "ParallelLMHead",
}

_ROPE = {
    "type": "yarn",
    "factor": 16.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
_COMMON = {
    "torch_dtype": "bfloat16",
    "vocab_size": VOCABULARY,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "max_position_embeddings": 65536,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
TARGET = {
    **_COMMON,
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "kv_lora_rank": 512,
    "q_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "moe_intermediate_size": 256,
    "n_shared_experts": 1,
    "n_routed_experts": 8,
    "routed_scaling_factor": 1.0,
    "topk_method": "noaux_tc",
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_layer_freq": 1,
    "first_k_dense_replace": 6,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "initializer_range": 0.02,
    "use_cache": True,
    "rope_scaling": _ROPE,
    "attention_dropout": 0.0,
    "num_nextn_predict_layers": 0,
    "pretraining_tp": 1,
}
GROUPED_TARGET = {
    **_COMMON,
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "mlp_bias": False,
}
DRAFTER = {
    **_COMMON,
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "block_size": NODES,
    "num_target_layers": 6,
    "dflash_config": {"mask_token_id": VOCABULARY - 1, "target_layer_ids": [1, 3]},
}


@dataclass(frozen=True, kw_only=True)
class Variant:
    """``kv`` is a value of --kv-cache-dtype; ``ranks`` of tensor parallelism, one GPU each."""

    suite: str = "flashmla"
    kv: str = "auto"
    ranks: int = 1

    @property
    def name(self) -> str:
        """Return the stem of the result's files."""
        parts = [self.kv.partition("_")[0]] * (self.kv != "auto") + ["tp2"] * (self.ranks == 2)
        return "-".join(["verify-engine", self.suite, *parts])


ONE_GPU = Variant()


def server_arguments(
    mode: Mode,
    batches: tuple[int, ...],
    folder: Path,
    variant: Variant = ONE_GPU,
    port: int | None = None,
) -> dict[str, Any]:
    """Return keyword arguments for ``ServerArgs``; writes the model folders below ``folder``.

    Several ranks need the same free ``port``.
    """
    target = GROUPED_TARGET if mode.grouped else TARGET
    for name, config in (("target", target), ("drafter", DRAFTER)):
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(config))
    arguments: dict[str, Any] = {
        "model_path": str(folder / "target"),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "grammar_backend": "none",
        "context_length": 65536,
        "random_seed": 1,
        "dtype": "bfloat16",
        "max_running_requests": 8,
        "chunked_prefill_size": 8192,
        "max_total_tokens": 300_000,
        # Of what is free when a server starts beside the others; the pool's size is given above.
        "mem_fraction_static": 0.4,
        "cuda_graph_bs": sorted({2, *batches}),
        "cuda_graph_max_bs": max(batches),
        "disable_piecewise_cuda_graph": True,
        "disable_overlap_schedule": True,
        "speculative_algorithm": "DFLASH",
        "speculative_draft_model_path": str(folder / "drafter"),
        "speculative_draft_attention_backend": "triton",
        "sampling_backend": "pytorch",
        # A server waits here for the others without running a batch.
        "watchdog_timeout": 1200,
        "log_level": "info",
        "kv_cache_dtype": variant.kv,
    }
    if variant.ranks > 1:
        arguments |= {"tp_size": variant.ranks, "nccl_port": port}
        # Its kernels are apart from verify; NCCL serves all servers alike.
        arguments |= {"disable_custom_all_reduce": True}
    if not mode.flashmla:
        return arguments | {"attention_backend": "triton"}
    # FlashMLA's own prefill is FlashInfer's, which is compiled at its first use for over a minute.
    return arguments | {
        "prefill_attention_backend": "triton",
        "decode_attention_backend": "flashmla",
        "speculative_attention_mode": "decode",
    }


def fill_rank(model: torch.nn.Module, *, rank: int) -> None:
    """Fill ``model``; what is sharded gets other values on every rank, as a real shard has."""
    weights.fill(model)
    if rank == 0:
        return
    generator = torch.Generator().manual_seed(rank)
    for module in model.modules():
        if type(module).__name__ in SHARDED and module.tp_size != 1:
            weight = module.weight.data
            drawn = torch.randn(weight.shape, generator=generator) * float(weight.float().std())
            weight.copy_(drawn)


class Teacher:
    """Decides every token of a `Stepper`: what is drafted, what is committed.

    ``seen`` keeps the logits of each verify, [requests × nodes, vocabulary] float32 on the CPU.
    While ``trees`` is set, drafts are random trees of random tokens and one token is committed a
    step; else they are the known continuation, and all of it is committed.
    """

    def __init__(self, *, seed: int = 0) -> None:
        self.trees = False
        self.keeps = True
        self.seen: list[torch.Tensor] = []
        self.steps = 0
        self.verify_ms: list[tuple[Any, Any]] = []
        self._random = torch.Generator().manual_seed(seed)
        self._texts: dict[str, list[int]] = {}

    @contextmanager
    def teaching(self, runner: Any) -> Iterator[None]:
        """Take over the target's prefill tokens and DFLASH's verify."""
        from sglang.srt.speculative.dflash_info import DFlashVerifyInput as Input

        with (
            mock.patch.object(runner, "forward", self._forward(runner.forward)),
            mock.patch.object(Input, "prepare_for_verify", self._prepare(Input.prepare_for_verify)),
            mock.patch.object(Input, "verify", self._verify(Input.verify)),
        ):
            yield

    def text(self, request: Any) -> list[int]:
        """Return the output tokens that ``request`` shall have, by its name alone."""
        if request.rid not in self._texts:
            generator = random.Random(request.rid)
            tail = [generator.randrange(2, VOCABULARY - 2) for _ in range(4096)]
            self._texts[request.rid] = [FIRST_TOKEN, *tail]
        return self._texts[request.rid]

    def _forward(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        def forward(forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
            if forward_batch.forward_mode.is_target_verify():
                if not torch.cuda.is_available():
                    return stock(forward_batch, *args, **kwargs)
                began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                began.record()
                output = stock(forward_batch, *args, **kwargs)
                ended.record()
                self.verify_ms.append((began, ended))
                return output
            output = stock(forward_batch, *args, **kwargs)
            logits = output.logits_output.next_token_logits
            if logits is not None:
                logits.zero_()[:, FIRST_TOKEN] = 1.0
            return output

        return forward

    def _prepare(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        def prepare(info: Any, batch: Any, page_size: int, **kwargs: Any) -> Any:
            nodes = info.draft_token_num
            tokens = info.draft_token.view(-1, nodes).cpu()
            known = [self.text(request)[len(request.output_ids) :] for request in batch.reqs]
            if not self.trees:
                tokens[:, 1:] = torch.tensor([each[: nodes - 1] for each in known])
                info.draft_token = tokens.view(-1).to(batch.device)
                return stock(info, batch, page_size, **kwargs)
            shape = (len(known), nodes)
            parents = (torch.rand(shape, generator=self._random) * torch.arange(nodes)).long()
            parents[:, 0] = -1
            sees = ancestors(parents)
            tokens[:, 1:] = torch.randint(2, VOCABULARY - 2, shape, generator=self._random)[:, 1:]
            # Stock accepts by chain order: the token behind the root must not be the committed one.
            for row, each in enumerate(known):
                tokens[row, 1] += int(tokens[row, 1] == each[0])
            depth = (sees.sum(-1) - 1).to(batch.device)
            info.draft_token = tokens.view(-1).to(batch.device)
            info.positions = (batch.seq_lens[:, None] + depth).view(-1)
            info.parents = parents.to(batch.device)
            stock(info, batch, page_size, **kwargs)
            if info.custom_mask is not None:
                info.custom_mask = full_mask(sees, batch.seq_lens_cpu.tolist()).to(batch.device)
            return None

        return prepare

    def _verify(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        def verify(info: Any, *, batch: Any, logits_output: Any, **kwargs: Any) -> Any:
            self.steps += 1
            logits = logits_output.next_token_logits
            if self.keeps:
                self.seen.append(logits.float().cpu())
            nodes = info.draft_token_num
            wanted: list[int] = []
            for request in batch.reqs:
                tail = self.text(request)[len(request.output_ids) :][:nodes]
                wanted += tail[:1] * nodes if self.trees else tail
            choice = torch.tensor(wanted, device=logits.device)[:, None]
            logits_output.next_token_logits = torch.zeros_like(logits).scatter_(1, choice, 1.0)
            return stock(info, batch=batch, logits_output=logits_output, **kwargs)

        return verify


def ancestors(parents: torch.Tensor) -> torch.Tensor:
    """Return [requests, nodes, nodes] bool from [requests, nodes] parents before children."""
    requests, nodes = parents.shape
    sees = torch.eye(nodes, dtype=torch.bool).repeat(requests, 1, 1)
    for row in range(requests):
        for node in range(1, nodes):
            sees[row, node] |= sees[row, int(parents[row, node])]
    return sees


def full_mask(sees: torch.Tensor, contexts: list[int]) -> torch.Tensor:
    """Return SGLang's flat FULL_MASK of trees [requests, nodes, nodes] behind their contexts."""
    rows = [
        torch.cat([torch.ones(own.shape[0], context, dtype=torch.bool), own], dim=1).flatten()
        for own, context in zip(sees, contexts, strict=True)
    ]
    return torch.cat(rows)


def decode(bed: Any, teacher: Teacher, *, requests: int, steps: int, context: int) -> None:
    """Prefill ``requests`` prompts of ``context`` tokens and run ``steps`` verify steps each."""
    # No prompt occurs twice: what the prefix cache holds differs with the page size.
    random_tokens = random.Random(f"{teacher.trees} {requests}")
    per_step = 1 if teacher.trees else NODES
    for _ in range(requests):
        prompt = [random_tokens.randrange(2, VOCABULARY - 2) for _ in range(context)]
        bed.submit(prompt, tokens=1 + steps * per_step)
    bed.run()


def timed(bed: Any, teacher: Teacher, *, requests: int) -> dict[str, float]:
    """Return tokens per second and the verify's GPU time per step, over full batches alone."""
    teacher.keeps = teacher.trees = False
    random_tokens = random.Random(requests)
    for _ in range(requests):
        prompt = [random_tokens.randrange(2, VOCABULARY - 2) for _ in range(CONTEXT)]
        bed.submit(prompt, tokens=1 + (TIMED_STEPS + 8) * NODES)
    while bed.step() == "EXTEND":
        pass
    for _ in range(3):
        bed.step()
    teacher.verify_ms.clear()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(TIMED_STEPS):
        bed.step()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    verify = sorted(first.elapsed_time(last) for first, last in teacher.verify_ms)
    assert len(verify) == TIMED_STEPS, f"{len(verify)} verify steps, needed {TIMED_STEPS}"
    bed.run()
    return {
        "tokens_per_second": requests * NODES * TIMED_STEPS / seconds,
        "step_ms": 1e3 * seconds / TIMED_STEPS,
        "verify_ms": verify[len(verify) // 2],
    }


def run(name: str, out: Path, variant: Variant, rank: int, port: int) -> None:
    """Be one rank of a server: exactness at once, throughput when the others have come to an end.

    All ranks step by themselves: the teacher gives them the same tokens, so they schedule alike.
    """
    import sglang.srt.model_loader.loader as loader

    mode = MODES[name]
    loader.initialize_dummy_weights = partial(fill_rank, rank=rank)
    models = out / "models" / f"{name}-{rank}"
    batches = SUITES[variant.suite].batches
    bed = Stepper(server_arguments(mode, batches, models, variant, port), rank=rank)
    runner = bed.scheduler.tp_worker.model_runner
    verify = getattr(runner, "overlay_tree_verify", None)
    captured = verify.steps if verify else 0
    teacher = Teacher()
    with teacher.teaching(runner):
        decode(bed, teacher, requests=1, steps=CHAIN_STEPS, context=CONTEXT)
        decode(bed, teacher, requests=2, steps=CHAIN_STEPS, context=CONTEXT)
        chain, teacher.seen = teacher.seen, []
        if mode.honours_trees:
            teacher.trees = True
            decode(bed, teacher, requests=1, steps=TREE_STEPS, context=CONTEXT)
            decode(bed, teacher, requests=2, steps=TREE_STEPS, context=CONTEXT)
        torch.save({"chain": chain, "tree": teacher.seen}, out / f"{name}-{rank}.pt")
        suite = SUITES[variant.suite]
        throughput = measure(bed, teacher, name, suite, out) if variant.ranks == 1 else {}
    identity = getattr(runner, "overlay_identity", None)
    found = {
        "throughput": throughput,
        "verify_steps": teacher.steps,
        "tree_steps": verify.steps - captured if verify else 0,
        "graphs": runner.graph_runner is not None,
        "verify_path": identity.verify_path if identity else "stock",
    }
    (out / f"{name}-{rank}.json").write_text(json.dumps(found))


def measure(bed: Any, teacher: Teacher, name: str, suite: Suite, out: Path) -> dict[str, Any]:
    """Return the throughput at every batch size, alone on the GPU."""
    (out / f"{name}.done").touch()
    while len(list(out.glob("*.done"))) < len(suite.modes):
        time.sleep(0.2)
    with (out / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return {f"bs {each}": timed(bed, teacher, requests=each) for each in suite.batches}


def distance(one: list[torch.Tensor], other: list[torch.Tensor]) -> dict[str, float]:
    """Return the largest and the root mean square difference of two runs' logits."""
    delta = torch.cat(one) - torch.cat(other)
    return {"max": float(delta.abs().max()), "rms": float(delta.square().mean().sqrt())}


def divergences(
    ours: list[torch.Tensor], stock: list[torch.Tensor], spread: float
) -> dict[str, float]:
    """Count the positions whose best token differs, and those that ``spread`` does not explain."""
    mine, theirs = torch.cat(ours), torch.cat(stock)
    top = theirs.topk(2, dim=-1)
    margin = top.values[:, 0] - top.values[:, 1]
    differs = mine.argmax(-1) != top.indices[:, 0]
    return {
        "positions": mine.shape[0],
        "other_token": int(differs.sum()),
        "unexplained": int((differs & (margin > spread)).sum()),
        "largest_margin": float(margin[differs].max()) if bool(differs.any()) else 0.0,
    }


def compare(out: Path, variant: Variant) -> dict[str, Any]:
    """Return the whole result, from what the servers left in ``out``."""
    suite = SUITES[variant.suite]
    logits, *others = (
        {mode: torch.load(out / f"{mode}-{rank}.pt") for mode in suite.modes}
        for rank in range(variant.ranks)
    )
    apart = [
        distance(kept[kind], other[mode][kind])["max"]
        for other in others
        for mode, kept in logits.items()
        for kind in ("chain", "tree")
        if kept[kind]
    ]
    _, stock = suite.pairs[0]
    one, other = logits[suite.other]["chain"], logits[stock]["chain"]
    spread = distance(one, other)
    pairs = {}
    for mine, theirs in suite.pairs:
        # No second stock backend ran the grouped model: its differences are given, not judged.
        judged = spread["max"] if not MODES[mine].grouped else float("inf")
        for kind in ("chain", "tree"):
            ours, stocks = logits[mine][kind], logits[theirs][kind]
            pairs[f"{mine} to {theirs}, {kind}s"] = {
                "distance": distance(ours, stocks),
                "logits_std": float(torch.cat(stocks).std()),
                "judged": not MODES[mine].grouped,
                **divergences(ours, stocks, judged),
            }
    return {
        "machine": torch.cuda.get_device_name(),
        "versions": versions(),
        "date": time.strftime("%Y-%m-%d"),
        "kv_cache_dtype": variant.kv,
        "ranks": variant.ranks,
        "ranks_apart": max(apart, default=0.0),
        "context": CONTEXT,
        "nodes": NODES,
        "stock_spread": spread,
        "stock_divergences": divergences(one, other, spread["max"]),
        "stock_pair": f"{suite.other} to {stock}, chains",
        "pairs": pairs,
        "servers": {mode: json.loads((out / f"{mode}-0.json").read_text()) for mode in suite.modes},
    }


def page(found: dict[str, Any]) -> str:
    """Return the result as a page for people."""
    stock = {
        "distance": found["stock_spread"],
        "judged": True,
        **found["stock_divergences"],
    }
    rows = {f"stock: {found['stock_pair']}": stock, **found["pairs"]}
    builds = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    lines = [
        f"# The verify engine in the real engine, on {found['ranks']} × {found['machine']}",
        "",
        f"{found['date']}; {builds}. Context {found['context']}, {found['nodes']} nodes, CUDA "
        f"graphs, bf16 with a KV cache of type {found['kv_cache_dtype']}, {found['ranks']} "
        "tensor-parallel ranks, teacher-forced; logits of two ranks differ by "
        f"{found['ranks_apart']:.4f} at most.",
        "",
        "| pair | max | rms | positions | other best token | not explained by the stock spread |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {name} | {row['distance']['max']:.4f} | {row['distance']['rms']:.5f} | "
        f"{row['positions']} | {row['other_token']} | "
        f"{row['unexplained'] if row['judged'] else 'not judged'} |"
        for name, row in rows.items()
    ]
    lines += [
        "",
        "| server | verify path | batch | tokens/s | step, ms | verify on the GPU, ms |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {mode} | {server['verify_path']} | {batch} | {figures['tokens_per_second']:.0f} | "
        f"{figures['step_ms']:.2f} | {figures['verify_ms']:.3f} |"
        for mode, server in found["servers"].items()
        for batch, figures in server["throughput"].items()
    ]
    counted = [
        f"{mode}: {server['tree_steps']} of {server['verify_steps']}"
        for mode, server in found["servers"].items()
    ]
    lines += ["", f"Steps that the overlay verified: {'; '.join(counted)}."]
    return "\n".join(lines) + "\n"


def free_port() -> int:
    """Return a port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(scratch: Path, out: Path, variant: Variant) -> dict[str, subprocess.Popen[bytes]]:
    """Start every rank of every server, each with a log in ``out``."""
    processes = {}
    for mode in SUITES[variant.suite].modes:
        command = [sys.executable, __file__, str(scratch), variant.suite, "--server", mode]
        command += ["--kv", variant.kv, "--ranks", str(variant.ranks), "--port", str(free_port())]
        for rank in range(variant.ranks):
            with (out / f"{variant.name}-{mode}-{rank}.log").open("w") as log:
                processes[f"{mode}-{rank}"] = subprocess.Popen(
                    [*command, "--rank", str(rank)],
                    env={**os.environ, **MODES[mode].variables},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
    return processes


def main(out: Path, variant: Variant) -> int:
    """Run the servers side by side, compare, write; return 1 when one of them failed."""
    out.mkdir(parents=True, exist_ok=True)
    scratch = Path(os.environ.get("TMPDIR", "/tmp")) / f"verify-engine-{os.getpid()}"
    scratch.mkdir()
    processes = start(scratch, out, variant)
    while any(each.poll() is None for each in processes.values()):
        failed = [mode for mode, each in processes.items() if each.poll() not in (None, 0)]
        if failed:
            for each in processes.values():
                each.kill()
            print(f"failed: {failed}; see the logs in {out}")
            return 1
        time.sleep(0.5)
    found = compare(scratch, variant)
    (out / f"{variant.name}.json").write_text(json.dumps(found, indent=1) + "\n")
    (out / f"{variant.name}.md").write_text(page(found))
    print(page(found))
    return 0


def read_options() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("suite", nargs="?", default="flashmla", choices=tuple(SUITES))
    parser.add_argument("--kv", default="auto", choices=("auto", "fp8_e4m3"))
    parser.add_argument("--ranks", type=int, default=1, choices=(1, 2))
    # What the program starts itself with.
    parser.add_argument("--server", choices=tuple(MODES))
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--port", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    options = read_options()
    chosen = Variant(suite=options.suite, kv=options.kv, ranks=options.ranks)
    if options.server is None:
        sys.exit(main(options.out, chosen))
    run(options.server, options.out, chosen, options.rank, options.port)
    sys.stdout.flush()
    os._exit(0)  # the scheduler leaves threads behind, and NCCL waits for its peers
