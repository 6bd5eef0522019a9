"""What placing and compacting KV slots costs the real SGLang: its throughput, in lockstep.

    python benchmarks/kv_throughput.py OUT [--seconds N] [--layers N] [--ways slots pages]
    python benchmarks/kv_throughput.py OUT --dry --seconds 5     on a CPU, to see that it runs

on a host with SGLang, the overlay applied to it, and a Hopper GPU; writes OUT/kv-throughput.json
and .md, and each round's times to OUT/kv-throughput-WAY.jsonl. A way (``slots``: pages of one slot,
the portable engine; ``pages``: pages of 64, FlashMLA) has a server with DFLASH and CUDA graphs for
each of the levels ``off``, ``placement`` and ``idle``: a `Stepper` in a process of its own. They
start at once, and share one GPU, of which each takes 20 GB.

They play the same conversations in lockstep (``lockstep.py``): each makes a visit of up to
`Load.visit` decode steps, or of one prefill, while the others wait; then the next one makes the
same. So a visit has a time for every level within a second, and whatever slows the host slows
all of them. Every conversation is on another core of the host, the same for all servers. A server
times its own visits, from an idle device to an idle device. It tells what it did as well: where two
levels did not do the same, the run ends with an error.

Prompts share heads and evict one another; what is drafted and accepted is decided here, by seed
(commits of 1 to 16 tokens). Rounds in which a request ended, and those in which a level looked for
the longest free runs, are kinds of their own. After each conversation there are idle moments, in
which level ``idle`` makes its passes: they count in no rate, since nothing runs then.

Weights are random. The target has as many layers as Kimi K2.x, and 16 heads. A decode step reads 1
GB of weights in each layer, as one of eight GPUs does of that model's experts with 4 bits: 128
tokens choose nine tenths of them. (With 8 bits, and of DeepSeek V3, it is more.) All layers have
the same weights, so that several servers fit on a GPU (``shared_experts.py``). Nothing is there of
what eight GPUs say to one another, which is a part of a real step too. What placing costs is a
matter of µs a step, whatever the step: with ``--layer-gb 0.2`` the steps are short, and with
``--layers 24`` the host takes longer than the device.

``--control US`` adds a server at level ``off`` whose steps take US µs longer: what the method says
of it shows what it can tell on this host. With 0 it shows how far two processes that do the same
are apart, which no interval over rounds has in it.

What was measured is written every 10 s. Only then some steps of a full batch run under
``torch.cuda.set_sync_debug_mode`` and under the profiler: where the host waited for the device, by
line of source, how often it launched, and what placement's kernels take the device.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import random
import select
import signal
import subprocess
import sys
import time
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "overlay")]

from sglang_overlay.switches import IDLE, KV_SLOTS, OFF, PLACEMENT, VERIFY_ENGINE  # noqa: E402

from benchmarks import lockstep, shared_experts  # noqa: E402
from benchmarks import verify_engine_gpu as engine  # noqa: E402
from benchmarks.installed import versions  # noqa: E402
from tests.support.engine import weights  # noqa: E402
from tests.support.engine.stepper import Stepper  # noqa: E402

LEVELS = (OFF, PLACEMENT, IDLE)
CONTROL = "control"
WAYS = ("slots", "pages")
WATCHED_STEPS = 10
# Weights that a decode step reads in a layer: of Kimi K2.x in 4 bits, one of eight GPUs.
LAYER_GB = 1.0
# Conversations that all play before: they compile what graphs do not hold, and fill the cache.
WARM_UP = 3
# Seconds from one result that is written to the next.
WRITTEN = 10.0
# Seconds that a server may take to start, or for what it is asked.
PATIENCE = 240.0
# One more than the idle moments from one pass of compaction to the next.
IDLE_MOMENTS = 66
PLACING = ("list_runs", "pick_runs", "place_units", "token_slots")


class Load:
    """How much is played: the real thing, or next to nothing to see that it runs."""

    def __init__(self, *, dry: bool) -> None:
        self.dry = dry
        # Several servers have one core: the first step of a visit finds another's work in caches.
        self.visit = 8
        self.batch = 2 if dry else 8
        self.requests = 4 if dry else 16
        self.heads = (40, 70) if dry else (1800, 1200, 700, 300)
        self.said = (8, 20) if dry else (200, 1200)
        self.answer = 24 if dry else 300
        self.pool = 2048 if dry else 60_000
        self.warm_up = 1 if dry else WARM_UP


class Drafting(engine.Teacher):
    """A teacher whose drafts are right for a while: each step commits 1 to all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.keeps = False
        self._lengths: dict[str, random.Random] = {}

    def _prepare(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        def prepare(info: Any, batch: Any, page_size: int, **kwargs: Any) -> Any:
            nodes = info.draft_token_num
            drafts = [self._drafts(request, nodes - 1) for request in batch.reqs]
            planted = torch.tensor(drafts, dtype=info.draft_token.dtype)
            info.draft_token.view(-1, nodes)[:, 1:].copy_(planted, non_blocking=True)
            return stock(info, batch, page_size, **kwargs)

        return prepare

    def _drafts(self, request: Any, count: int) -> list[int]:
        lengths = self._lengths.setdefault(request.rid, random.Random(request.rid))
        right = min(int(lengths.expovariate(1 / 3.5)), count)
        known = self.text(request)[len(request.output_ids) :][:count]
        return [token if at < right else token ^ 1 for at, token in enumerate(known)]


# --- one server


def serve(options: argparse.Namespace, load: Load) -> None:
    """Be one server: do what each line on standard input asks for, answer with a line each."""
    # Whatever ends the driver ends this process.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    began = time.perf_counter()
    way, _, label = options.server.partition("-")
    bed = start(way, options.out / "models" / options.server, options, load)
    runner = bed.scheduler.tp_worker.model_runner
    with (
        os.fdopen(options.answers, "w", buffering=1) as answers,
        looks() as looked,
        (teacher := Drafting()).teaching(runner),
    ):
        held_up = 1e-6 * options.control if label == CONTROL else 0.0
        host = Host(bed, load, teacher, looked, held_up)
        answers.write(json.dumps({"seconds": time.perf_counter() - began}) + "\n")
        for line in sys.stdin:
            what, *numbers = line.split()
            found = getattr(host, what)(*map(int, numbers))
            answers.write(json.dumps(found) + "\n")


def start(way: str, folder: Path, options: argparse.Namespace, load: Load) -> Stepper:
    """Return the scheduler of a new server."""
    if load.dry:
        return start_dry(way, load)
    import sglang.srt.model_loader.loader as loader

    def fill(model: Any) -> None:
        weights.fill_on_gpu(model)
        if type(model).__name__ == "DeepseekV3ForCausalLM":
            shared_experts.replace(model, layer_bytes=int(1e9 * options.layer_gb))

    loader.initialize_dummy_weights = fill
    depth = {
        "num_hidden_layers": options.layers,
        "first_k_dense_replace": options.layers,
    }
    target = {**engine.TARGET, **depth}
    with mock.patch.object(engine, "TARGET", target):
        mode = engine.Mode(flashmla=way == "pages")
        arguments = engine.server_arguments(mode, (load.batch,), folder)
    return Stepper(
        arguments
        | {
            # Smaller batches are padded to it: more graphs are a longer start.
            "cuda_graph_bs": [load.batch],
            "max_total_tokens": load.pool,
            "context_length": 8192,
            "max_running_requests": load.batch,
            # Of those that start at once, two would now and then find the same one free.
            "nccl_port": options.port,
            # The others' memory looks as if this one's weights had taken it.
            "mem_fraction_static": 0.95,
        }
    )


def start_dry(way: str, load: Load) -> Stepper:
    """Return a scheduler of the tests' bed."""
    from sglang.srt.plugins import load_plugins

    from tests.support.engine.quick import quicken

    engine.VOCABULARY = 256
    load_plugins()
    bed = Stepper(dry_launch(way).arguments() | {"max_total_tokens": load.pool})
    quicken(bed)
    return bed


@contextmanager
def looks() -> Iterator[Counter[str]]:
    """Count how often placement looks for the longest free runs: some steps do, most do not."""
    from sglang_overlay.srt import kv_allocators

    counted: Counter[str] = Counter()
    names: Any = kv_allocators
    stock = names.longest_runs

    def counting(*args: Any) -> Any:
        counted["looks"] += 1
        return stock(*args)

    with mock.patch.object(names, "longest_runs", counting):
        yield counted


class Host:
    """What a server does when it is asked to. Steps are ``held_up`` by so many seconds each."""

    def __init__(
        self, bed: Any, load: Load, teacher: Drafting, looked: Counter[str], held_up: float
    ) -> None:
        self._bed, self._load, self._teacher = bed, load, teacher
        self._looked, self._held_up = looked, held_up
        self._waiting: list[list[int]] = []
        self._running: list[Any] = []
        self._compactor = getattr(bed.scheduler, "overlay_compactor", None)
        self._passes = 0
        if self._compactor is not None:
            self._compactor._pass = self._counted(self._compactor._pass)

    def _counted(self, stock: Callable[[], int]) -> Callable[[], int]:
        """Count calls of ``stock``: the tally has those passes only that moved something."""

        def counting() -> int:
            self._passes += 1
            return stock()

        return counting

    def begin(self, seed: int, core: int = -1) -> dict[str, Any]:
        """Begin a conversation, on the ``core`` if there is one."""
        if core >= 0:
            with suppress(OSError):
                os.sched_setaffinity(0, {core})
        words, load = random.Random(f"kv {seed}"), self._load
        heads = [_words(random.Random(length), length) for length in load.heads]
        self._waiting = [
            words.choice(heads) + _words(words, words.randint(*load.said))
            for _ in range(load.requests)
        ]
        # Or a collection of everything that there is would fall into somebody's visit.
        gc.collect()
        gc.freeze()
        return {}

    def visit(self) -> dict[str, Any]:
        """Make some steps; return what was done, and the seconds they took."""
        scheduler, running = self._bed.scheduler, self._running
        while self._waiting and len(running) < self._load.batch:
            running.append(self._bed.submit(self._waiting.pop(), tokens=self._load.answer))
            self._teacher.text(running[-1])
        prefills = bool(scheduler.waiting_queue) or scheduler.chunked_req is not None
        before = sum(len(request.output_ids) for request in running)
        looked = self._looked["looks"]
        modes: list[str] = []
        synchronize()
        began = time.perf_counter()
        for _ in range(1 if prefills else self._load.visit):
            modes.append(self._bed.step())
            if self._held_up:
                spin(self._held_up)
            if any(request.finished() for request in running):
                break
        synchronize()
        seconds = time.perf_counter() - began
        self._teacher.verify_ms.clear()
        last = scheduler.last_batch
        lengths = [
            (request.rid, request.cached_tokens, len(request.output_ids)) for request in running
        ]
        self._running = [request for request in running if not request.finished()]
        kind = ["several"] * (prefills and last is not None and len(last.reqs) > 1)
        kind += ["end"] * (len(self._running) < len(running))
        return {
            "mode": "+".join(sorted(set(modes))),
            "kind": " ".join(kind),
            "steps": len(modes),
            "tokens": sum(length for _, _, length in lengths) - before,
            "digest": zlib.crc32(repr((modes, lengths)).encode()),
            "over": not self._running and not self._waiting,
            "own": "look" * (self._looked["looks"] > looked),
            "seconds": seconds,
        }

    def rest(self) -> dict[str, Any]:
        """Be idle for at least one pass of compaction; return the seconds, and what it did."""
        tally = self._compactor.tally if self._compactor else None
        passes, moved = self._passes, tally.moved_tokens if tally else 0
        synchronize()
        began = time.perf_counter()
        for _ in range(IDLE_MOMENTS):
            self._bed.step()
        synchronize()
        return {
            "seconds": time.perf_counter() - began,
            "passes": self._passes - passes,
            "moved": tally.moved_tokens - moved if tally else 0,
        }

    def play(self, seed: int) -> dict[str, Any]:
        """Have a whole conversation; return how it ended."""
        self.begin(seed)
        while not self.visit()["over"]:
            pass
        return self.rest()

    def watch(self) -> dict[str, Any]:
        """Return what the host does in a busy step."""
        return watch(self._bed, self._load)


def spin(seconds: float) -> None:
    """Keep the host busy."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


def _words(source: random.Random, count: int) -> list[int]:
    return [source.randrange(2, engine.VOCABULARY - 2) for _ in range(count)]


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


# --- what the host does in a busy step


def watch(bed: Any, load: Load) -> dict[str, Any]:
    """Return per step of a full batch: waits for the device by line, and calls of the runtime."""
    from sglang.srt.managers.io_struct import AbortReq

    words = random.Random("watched")
    # All of them fit in one prefill: while one is in pieces, SGLang takes in one less.
    for _ in range(load.batch):
        bed.submit(_words(words, load.said[0]), tokens=load.answer)
    while (mode := bed.step()) != "DECODE" or len(bed.scheduler.running_batch.reqs) < load.batch:
        if mode != "EXTEND":
            raise RuntimeError(f"a batch is not full: needed {load.batch} requests")
    bed.step()
    found = {} if load.dry else {"waits": waits(bed), **calls(bed)}
    bed.scheduler.abort_request(AbortReq(abort_all=True))
    bed.run()
    return found


def waits(bed: Any) -> dict[str, float]:
    """Return how often a step waits for the device, by line of source."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(WATCHED_STEPS):
                bed.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    lines = Counter(
        f"{Path(each.filename).parent.name}/{Path(each.filename).name}:{each.lineno}"
        for each in caught
        if "synchronizing" in str(each.message)
    )
    return {line: count / WATCHED_STEPS for line, count in sorted(lines.items())}


def calls(bed: Any) -> dict[str, Any]:
    """Return how often a step calls the runtime, by name, and what placement takes the device."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(WATCHED_STEPS):
            bed.step()
    events = profiler.key_averages()
    placing = sum(
        event.self_device_time_total
        for event in events
        if any(name in event.key for name in PLACING)
    )
    return {
        "calls": {
            event.key: event.count / WATCHED_STEPS
            for event in events
            if event.key.startswith(("cuda", "cu")) and "::" not in event.key
        },
        "placing_us": placing / WATCHED_STEPS,
    }


# --- all of them, from outside


def dry_launch(way: str) -> Any:
    """Return how the tests' bed starts a server of ``way``."""
    from tests.support import trees
    from tests.support.engine.launch import Launch

    tree = trees.patched("0.5.12.post1")
    if way == "pages":
        return Launch(tree=tree)
    return Launch(tree=tree, attention="triton", options=(("page_size", 1),))


def environment(way: str, level: str, scratch: Path, *, dry: bool) -> dict[str, str]:
    """Return the environment of a server."""
    # Sets and dictionaries that lie in memory alike: what else tells two processes apart is little.
    variables = {KV_SLOTS: level, "PYTHONHASHSEED": "0"}
    if not dry:
        return os.environ | variables
    from tests.support.engine.orders import Orders

    # In Triton's interpreter the overlay's own would be most of a step.
    variables[VERIFY_ENGINE] = "stock"
    return dict(dry_launch(way).environment() | Orders(record=scratch).environment() | variables)


class Server:
    """A server's process, as seen from outside."""

    def __init__(self, name: str, options: argparse.Namespace, scratch: Path) -> None:
        self.name = name
        way, _, label = name.partition("-")
        level = OFF if label == CONTROL else label
        answers, written = os.pipe()
        command = [sys.executable, __file__, str(scratch), "--server", name]
        command += ["--layers", str(options.layers), "--layer-gb", str(options.layer_gb)]
        command += ["--answers", str(written), "--port", str(engine.free_port())]
        command += ["--control", str(options.control or 0)] + ["--dry"] * options.dry
        with (options.out / f"kv-throughput-{name}.log").open("w") as log:
            self._process = subprocess.Popen(
                command,
                env=environment(way, level, scratch, dry=options.dry),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
                pass_fds=(written,),
                # A signal to the driver and its group is the driver's to handle.
                start_new_session=True,
            )
        os.close(written)
        self._answers = os.fdopen(answers)

    def tell(self, what: str) -> None:
        """Ask for ``what``."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(what + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self._give_up()

    def answer(self) -> dict[str, Any]:
        """Return the next answer, once it is there."""
        until = time.monotonic() + PATIENCE
        while not select.select([self._answers], [], [], 1.0)[0]:
            # A process that it left behind may keep the pipe open.
            if self._process.poll() is not None:
                self._give_up()
            if time.monotonic() > until:
                raise SystemExit(f"{self.name} did not answer for {PATIENCE:.0f} s; see its log")
        line = self._answers.readline()
        if not line:
            self._give_up()
        found: dict[str, Any] = json.loads(line)
        return found

    def ask(self, what: str) -> dict[str, Any]:
        """Return the answer to ``what``."""
        self.tell(what)
        return self.answer()

    def _give_up(self) -> NoReturn:
        code = self._process.wait()
        raise SystemExit(f"{self.name} ended with {code}; see its log")

    def end(self) -> None:
        """Kill the process, and what it left behind."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def ask_all(servers: dict[str, Server], what: str) -> dict[str, dict[str, Any]]:
    """Return all the answers to ``what``, which is done at once."""
    for server in servers.values():
        server.tell(what)
    return {label: server.answer() for label, server in servers.items()}


class Measuring:
    """One way: its rounds so far, and what they say."""

    def __init__(self, way: str, options: argparse.Namespace, write: Callable[..., None]) -> None:
        self._way, self._options, self._write = way, options, write
        self._labels = (*LEVELS, CONTROL) if options.control is not None else LEVELS
        self._rounds: list[lockstep.Round] = []
        self._rests: list[dict[str, dict[str, Any]]] = []
        self._watched: dict[str, dict[str, Any]] = {}
        self._written = time.monotonic()

    def run(self, scratch: Path) -> None:
        """Start the servers, play, and watch; write on the way."""
        began = time.monotonic()
        servers: dict[str, Server] = {}
        try:
            for label in self._labels:
                servers[label] = Server(f"{self._way}-{label}", self._options, scratch)
            took = {label: server.answer()["seconds"] for label, server in servers.items()}
            started = time.monotonic()
            own = ", ".join(f"{label} {seconds:.1f}" for label, seconds in took.items())
            print(f"{self._way}: start {started - began:.1f} s ({own})", flush=True)
            warm_up = Load(dry=self._options.dry).warm_up
            for seed in range(warm_up):
                ask_all(servers, f"play {seed}")
            print(f"{self._way}: warm-up {time.monotonic() - started:.1f} s", flush=True)
            self._play(servers, warm_up)
            self._tell()
            for label, server in servers.items():
                self._watched[label] = server.ask("watch")
        finally:
            for server in servers.values():
                server.end()
            if self._rounds:
                self._tell()

    def _play(self, servers: dict[str, Server], seed: int) -> None:
        until = time.monotonic() + self._options.seconds
        cores = sorted(os.sched_getaffinity(0))
        self._written = time.monotonic()
        raw = self._options.out / f"kv-throughput-{self._way}.jsonl"
        with raw.open("w") as rounds:
            while time.monotonic() < until:
                # On one core each, one server alone may be slow for seconds: some other program's
                # work lies on its core.
                ask_all(servers, f"begin {seed} {cores[seed % len(cores)]}")
                over = False
                while not over:
                    made, over = lockstep.play_round(servers, len(self._rounds))
                    self._rounds.append(made)
                    rounds.write(json.dumps({"conversation": seed, **vars(made)}) + "\n")
                    if time.monotonic() - self._written > WRITTEN:
                        rounds.flush()
                        self._tell()
                self._rests.append({label: each.ask("rest") for label, each in servers.items()})
                seed += 1

    def _tell(self) -> None:
        found = self._found()
        self._write(self._way, found)
        for label, row in found["levels"].items():
            print(f"{self._way}: {len(self._rounds)} rounds, {label} {percent(row)}", flush=True)
        self._written = time.monotonic()

    def _found(self) -> dict[str, Any]:
        spent = sum(each.seconds[OFF] for each in self._rounds)
        watched = self._watched
        return {
            "rounds": len(self._rounds),
            "tokens_per_second_off": sum(each.tokens for each in self._rounds) / spent,
            "levels": {
                label: lockstep.compare(self._rounds, label, OFF) for label in self._labels[1:]
            },
            "conversations": len(self._rests),
            "rests": {
                label: {
                    name: sum(each[label][name] for each in self._rests)
                    for name in ("seconds", "passes", "moved")
                }
                for label in self._labels
            },
            "watched": watched,
            "waits_more_than_off": {
                label: waits_more(watched[label], watched[OFF]) for label in list(watched)[1:]
            },
        }


def waits_more(watched: dict[str, Any], stock: dict[str, Any]) -> dict[str, float]:
    """Return where a step waits for the device more often than ``stock``, and by how much."""
    mine, other = watched.get("waits", {}), stock.get("waits", {})
    more = {line: count - other.get(line, 0) for line, count in mine.items()}
    return {line: round(count, 2) for line, count in more.items() if count > 0.05}


def percent(row: dict[str, Any]) -> str:
    """Return a throughput's difference to that of `off` in percent."""
    gain, low, high = (100 * share for share in row["gain"])
    return f"{gain:+.2f} ({low:+.2f} … {high:+.2f})"


def page(found: dict[str, Any]) -> str:
    """Return the result as a page for people."""
    builds = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    lines = [
        f"# What placing and compacting KV slots costs, on one {found['machine']}",
        "",
        f"`benchmarks/kv_throughput.py`, {found['date']}; {builds}. DFLASH, a target of "
        f"{found['layers']} layers of {found['layer_gb']:g} GB, 16 heads and random weights. The "
        "levels play the same conversations in lockstep, so that each round has a time of every "
        "level. Throughput: "
        "tokens per second over those of `off`, less 1; not below −0.5 % is wanted. A step's "
        "difference to that of `off`: the trimmed mean over the rounds. In brackets, what it lies "
        "between at 95 %.",
        "",
        "| way | level | throughput, % | a decode step, µs more | a prefill, µs more "
        "| placement's kernels a step, µs | waits per step | launches per step |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for way, result in found["ways"].items():
        for level, row in result["levels"].items():
            lines.append(
                f"| {way} | {level} | {percent(row)} | {_more(row, 'DECODE')} "
                f"| {_more(row, 'EXTEND')} | {_busy(result['watched'].get(level))} |"
            )
    if any(CONTROL in result["levels"] for result in found["ways"].values()):
        lines += [
            "",
            f"`{CONTROL}` is a second server at `off`, whose steps take {found['control']:g} µs "
            "longer on purpose: what the method can tell.",
        ]
    lines.append("")
    for way, result in found["ways"].items():
        lines += _notes(way, result)
    return "\n".join(lines) + "\n"


def _more(row: dict[str, Any], mode: str) -> str:
    if mode not in row["modes"]:
        return "none"
    more, low, high = row["modes"][mode]["more_us"]
    return f"{more:+.0f} ({low:+.0f} … {high:+.0f})"


def _busy(watched: dict[str, Any] | None) -> str:
    if not watched:
        return "not watched | |"
    launched = sum(n for name, n in watched["calls"].items() if "Launch" in name)
    waited = sum(watched["waits"].values())
    return f"{watched['placing_us']:.1f} | {waited:.1f} | {launched:.1f}"


def _notes(way: str, result: dict[str, Any]) -> list[str]:
    some = next(iter(result["levels"].values()))["modes"]
    steps = ", ".join(
        f"{row['steps']} of {mode} at {row['step_us'] / 1e3:.3f} ms" for mode, row in some.items()
    )
    rests = ", ".join(
        f"`{label}` {rest['seconds']:.2f} s, {rest['passes']} passes, {rest['moved']} tokens moved"
        for label, rest in result["rests"].items()
    )
    lines = [
        f"{way}: {result['rounds']} rounds; steps of `off`: {steps}; "
        f"{result['tokens_per_second_off']:.0f} tokens/s. {IDLE_MOMENTS} idle moments after each "
        f"of {result['conversations']} conversations, no part of the above: {rests}.",
    ]
    if not result["rests"][IDLE]["passes"]:
        lines.append(f"{way}: **no pass was made** yet, so that `idle` shows nothing.")
    if result["watched"].get(OFF):
        lines.append(
            f"{way}, off: placement's kernels, waits, launches per step: "
            f"{_busy(result['watched'][OFF])}."
        )
    lines += [
        f"{way}, {level}: waits more often than `off` at {more or 'no line'}."
        for level, more in result["waits_more_than_off"].items()
    ]
    return lines


def main(options: argparse.Namespace) -> None:
    """Run one way after the other."""
    # `timeout` ends a program by this signal; the servers must not outlive it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    options.out.mkdir(parents=True, exist_ok=True)
    scratch = Path(os.environ.get("TMPDIR", "/tmp")) / f"kv-throughput-{os.getpid()}"
    scratch.mkdir()
    found: dict[str, Any] = {
        "machine": "CPU, dry run" if options.dry else torch.cuda.get_device_name(),
        "date": time.strftime("%Y-%m-%d"),
        "versions": versions(),
        "layers": options.layers,
        "layer_gb": options.layer_gb,
        "control": options.control,
        "ways": {},
    }

    def write(way: str, result: dict[str, Any]) -> None:
        found["ways"][way] = result
        for name, text in (("json", json.dumps(found, indent=1) + "\n"), ("md", page(found))):
            part = options.out / f"kv-throughput.{name}.part"
            part.write_text(text)
            part.rename(options.out / f"kv-throughput.{name}")

    for way in options.ways:
        try:
            Measuring(way, options, write).run(scratch)
        except lockstep.DivergedError as error:
            raise SystemExit(f"{way}: {error}") from None
    print(page(found))


def read_options() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=60, help="in lockstep, per way")
    parser.add_argument("--layers", type=int, default=61)
    parser.add_argument("--layer-gb", type=float, default=LAYER_GB, help="a layer's weights")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--control", type=float, metavar="US", help="add a server to test itself")
    parser.add_argument("--dry", action="store_true")
    # What the program starts itself with.
    parser.add_argument("--server", help=argparse.SUPPRESS)
    parser.add_argument("--answers", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    chosen = read_options()
    if chosen.server is None:
        main(chosen)
    else:
        serve(chosen, Load(dry=chosen.dry))
        sys.stdout.flush()
        os._exit(0)  # the scheduler leaves threads behind
