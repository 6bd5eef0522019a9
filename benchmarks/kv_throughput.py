"""What placing and compacting KV slots costs the real SGLang: throughput and synchronisations.

    python benchmarks/kv_throughput.py OUT [--turns N] [--layers N] [--ways slots pages]
    python benchmarks/kv_throughput.py OUT --dry     on a CPU, to see that it runs

on a host with SGLang, the overlay applied to it, and a Hopper GPU; writes OUT/kv-throughput.json
and .md. Per way (``slots``: pages of one slot, the portable engine; ``pages``: pages of 64,
FlashMLA) there is a server with DFLASH and CUDA graphs for each of the levels ``off``,
``placement`` and ``idle``, a `Stepper` in a process of its own, all on one GPU. They play the same
conversations, one server at a time. What they give is told in two ways:

- **calls**, which can tell half a percent on a host that does not keep its pace. In turns of their
  own, every call that placement has a part in is timed: of the allocator, and of the hooks around
  SGLang's allocations. The device is idle then, so that a call's time is the host's, with the waits
  that are its own. Per step, a level's calls less those of ``off``, over ``off``'s step in turns
  without timers: the cost where the host is what a step waits for, and more than it elsewhere.
  Of each turn the dearest hundredth of the steps counts no more than the one before it.
- **tokens per second** in short turns, each level once in each, in another order, with the same
  work. A turn's ratio is a level's rate over that of ``off`` in the same turn.

Both are medians over turns, with an interval for 95 %. What the placement kernel takes the device
is the profiler's.

Prompts share heads and evict one another, what is drafted and accepted is decided here (commits
of 1 to 16 tokens), and every turn ends with an idle moment, in which level ``idle`` makes its
passes: their time counts in the rates, not in the calls. Weights are random, and the target has
few layers: a model that is slower per step pays a smaller share.

Afterwards some steps of a full batch run under ``torch.cuda.set_sync_debug_mode`` and under the
profiler: where the host waited for the device, by line of source, and how often it launched.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "overlay")]

from sglang_overlay.switches import IDLE, KV_SLOTS, OFF, PLACEMENT  # noqa: E402

from benchmarks import verify_engine_gpu as engine  # noqa: E402
from benchmarks.installed import versions  # noqa: E402
from tests.support.engine import weights  # noqa: E402
from tests.support.engine.stepper import Stepper  # noqa: E402

LEVELS = (OFF, PLACEMENT, IDLE)
WAYS = ("slots", "pages")
WATCHED_STEPS = 10


class Load:
    """How much is played: the real thing, or next to nothing to see that it runs."""

    def __init__(self, *, dry: bool) -> None:
        self.dry = dry
        self.batch = 2 if dry else 8
        self.requests = 3 if dry else 8
        self.heads = (40, 70) if dry else (1800, 1200, 700, 300)
        self.said = (8, 20) if dry else (200, 1200)
        self.answer = 24 if dry else 300
        self.pool = 2048 if dry else 60_000
        self.timed = 1 if dry else 5


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


def serve(name: str, scratch: Path, layers: int, load: Load) -> None:
    """Be one server: do what each line on standard input asks for."""
    way, _, _ = name.partition("-")
    bed = start(way, scratch / "models" / name, layers, load)
    runner = bed.scheduler.tp_worker.model_runner
    teacher = Drafting()
    (scratch / f"{name}.started").touch()
    with teacher.teaching(runner):
        for number, line in enumerate(sys.stdin):
            kind, _, seed = line.strip().partition(" ")
            found: Any
            if kind == "watch":
                found = watch(bed, load)
            elif kind == "calls":
                with Calls(bed.scheduler.token_to_kv_pool_allocator) as calls_made:
                    play(bed, load, seed=int(seed), calls_made=calls_made)
                found = calls_made.summary()
            else:
                found = play(bed, load, seed=int(seed))
            part = scratch / f"{name}-{number}.part"
            part.write_text(json.dumps(found))
            part.rename(scratch / f"{name}-{number}.json")


def start(way: str, folder: Path, layers: int, load: Load) -> Stepper:
    """Return the scheduler of a new server."""
    if load.dry:
        return start_dry(way, load)
    import sglang.srt.model_loader.loader as loader

    loader.initialize_dummy_weights = weights.fill
    target = {**engine.TARGET, "num_hidden_layers": layers, "first_k_dense_replace": layers}
    with mock.patch.object(engine, "TARGET", target):
        mode = engine.Mode(flashmla=way == "pages")
        arguments = engine.server_arguments(mode, (1, 2, 4, load.batch), folder)
    return Stepper(
        arguments
        | {
            "max_total_tokens": load.pool,
            "context_length": 8192,
            "max_running_requests": load.batch,
            "mem_fraction_static": 0.2,
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


def play(bed: Any, load: Load, *, seed: int, calls_made: Calls | None = None) -> dict[str, Any]:
    """Serve conversations; return the rate, and the steps' number and mean time by mode."""
    words = random.Random(f"kv {seed}")
    heads = [_words(random.Random(length), length) for length in load.heads]
    made, steps = 0, defaultdict(list)
    waiting = [
        words.choice(heads) + _words(words, words.randint(*load.said)) for _ in range(load.requests)
    ]
    running: list[Any] = []
    synchronize()
    began = time.perf_counter()
    while waiting or running:
        while waiting and len(running) < load.batch:
            running.append(bed.submit(waiting.pop(), tokens=load.answer))
        started = time.perf_counter()
        mode = bed.step()
        steps[mode].append(time.perf_counter() - started)
        if calls_made is not None:
            calls_made.end_step(mode)
        done = [request for request in running if request.finished()]
        made += sum(len(request.output_ids) for request in done)
        running = [request for request in running if not request.finished()]
    # Idle, for at least one pass of compaction: they are 64 of these apart.
    for _ in range(66):
        bed.step()
    synchronize()
    seconds = time.perf_counter() - began
    found: dict[str, Any] = {
        "tokens_per_second": made / seconds,
        "step_ms": {mode: 1e3 * clipped_mean(times) for mode, times in steps.items()},
        "steps": {mode: len(times) for mode, times in steps.items()},
        "tokens": made,
        "seconds": seconds,
    }
    compactor = getattr(bed.scheduler, "overlay_compactor", None)
    return found | ({"moved": compactor.tally.moved_tokens} if compactor else {})


class Calls:
    """While open: the time of all calls that placement has a part in, step by step.

    ``off`` is measured by the same: there the hooks find that they have nothing to do.
    """

    NAMES = (
        *("alloc", "alloc_extend", "alloc_decode", "free", "free_group_begin", "free_group_end"),
        *("backup_state", "restore_state", "available_size"),
    )
    HOOKS = ("growing", "extending")

    def __init__(self, allocator: Any) -> None:
        self._allocator, self._within, self._spent = allocator, False, 0.0
        self._steps: dict[str, list[float]] = defaultdict(list)
        self._open = ExitStack()

    def __enter__(self) -> Calls:
        """Put timers around the calls."""
        from sglang_overlay.srt import kv_slots

        for name in self.NAMES:
            setattr(self._allocator, name, self._timed(getattr(self._allocator, name)))
            self._open.callback(delattr, self._allocator, name)
        for name in self.HOOKS:
            hook = self._timed_context(getattr(kv_slots, name))
            self._open.enter_context(mock.patch.object(kv_slots, name, hook))
        return self

    def __exit__(self, *_: object) -> None:
        """Take them away."""
        self._open.close()

    def _timed(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._within:
                return stock(*args, **kwargs)
            synchronize()
            self._within, started = True, time.perf_counter()
            try:
                return stock(*args, **kwargs)
            finally:
                self._spent += time.perf_counter() - started
                self._within = False

        return call

    def _timed_context(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        @contextmanager
        def within(*args: Any) -> Iterator[None]:
            context = self._timed(stock)(*args)
            self._timed(context.__enter__)()
            try:
                yield
            finally:
                self._timed(context.__exit__)(None, None, None)

        return within

    def end_step(self, mode: str) -> None:
        """Book what was spent since the last step to one of ``mode``."""
        self._steps[mode].append(self._spent)
        self._spent = 0.0

    def summary(self) -> dict[str, float]:
        """Return the mean time of a step's calls in µs by mode."""
        return {mode: 1e6 * clipped_mean(times) for mode, times in self._steps.items()}


def clipped_mean(times: list[float]) -> float:
    """Return the mean, where what is above the 99th percentile counts as that."""
    most = sorted(times)[int(0.99 * (len(times) - 1))]
    return statistics.mean(min(each, most) for each in times)


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
    tokens = load.answer if load.dry else 4000
    for _ in range(load.batch):
        bed.submit(_words(words, load.said[1]), tokens=tokens)
    while bed.step() != "DECODE" or len(bed.scheduler.running_batch.reqs) < load.batch:
        pass
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
    placing = sum(e.self_device_time_total for e in events if "place_units" in e.key)
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
    variables = {KV_SLOTS: level}
    if not dry:
        return os.environ | variables
    from tests.support.engine.orders import Orders

    return dict(dry_launch(way).environment() | Orders(record=scratch).environment() | variables)


class Server:
    """A server's process."""

    def __init__(self, name: str, options: argparse.Namespace, scratch: Path) -> None:
        self.name, self._scratch, self._asked = name, scratch, 0
        way, _, level = name.partition("-")
        command = [sys.executable, __file__, str(scratch), "--server", name]
        command += ["--layers", str(options.layers)] + ["--dry"] * options.dry
        with (options.out / f"kv-throughput-{name}.log").open("w") as log:
            self._process = subprocess.Popen(
                command,
                env=environment(way, level, scratch, dry=options.dry),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
            )

    def wait(self, name: str) -> Path:
        """Return the file ``name`` of the server once it is there."""
        path = self._scratch / name
        while not path.exists():
            if self._process.poll() is not None:
                raise SystemExit(f"{self.name} ended with {self._process.returncode}; see its log")
            time.sleep(0.05)
        return path

    def ask(self, what: str) -> Any:
        """Return the answer to ``what``."""
        assert self._process.stdin is not None
        self._process.stdin.write(what + "\n")
        self._process.stdin.flush()
        self._asked += 1
        return json.loads(self.wait(f"{self.name}-{self._asked - 1}.json").read_text())

    def end(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.wait()


def measure(way: str, servers: dict[str, Server], options: argparse.Namespace) -> dict[str, Any]:
    """Return what the levels of ``way`` gave; its servers do nothing more."""
    # The first ones compile what graphs do not hold.
    for server in servers.values():
        server.ask("play 0")
        server.ask("calls 1")

    def turns(kind: str, count: int, first: int) -> list[dict[str, Any]]:
        found = []
        for number in range(count):
            order = LEVELS[number % len(LEVELS) :] + LEVELS[: number % len(LEVELS)]
            found.append({level: servers[level].ask(f"{kind} {first + number}") for level in order})
            print(json.dumps({"way": way, kind: found[-1]}), flush=True)
        return found

    timed = turns("calls", Load(dry=options.dry).timed, 2)
    played = turns("play", options.turns, 2 + len(timed))
    watched = {level: server.ask("watch") for level, server in servers.items()}
    return {
        "turns": played,
        "timed_turns": timed,
        "levels": {level: compared(played, timed, level) for level in LEVELS},
        "watched": watched,
        "waits_more_than_off": {
            level: waits_more(watched[level], watched[OFF]) for level in LEVELS[1:]
        },
    }


def compared(
    played: list[dict[str, Any]], timed: list[dict[str, Any]], level: str
) -> dict[str, Any]:
    """Return a level's rate and calls, and how they compare to ``off``."""
    ratios = [each[level]["tokens_per_second"] / each[OFF]["tokens_per_second"] for each in played]
    modes = [mode for mode in ("DECODE", "EXTEND") if mode in played[0][OFF]["steps"]]
    # A step of `off`, and how many there are of each kind.
    step_us = {m: 1e3 * statistics.median(e[OFF]["step_ms"][m] for e in played) for m in modes}
    steps = {mode: sum(each[OFF]["steps"][mode] for each in played) for mode in modes}
    whole = sum(steps[mode] * step_us[mode] for mode in modes)
    costs = [
        sum(steps[mode] * (each[level][mode] - each[OFF][mode]) for mode in modes) / whole
        for each in timed
    ]
    rates = [each[level]["tokens_per_second"] for each in played]
    return {
        "cost": interval(costs),
        "calls_us": {mode: statistics.median(e[level][mode] for e in timed) for mode in modes},
        "step_us": {
            m: 1e3 * statistics.median(e[level]["step_ms"][m] for e in played) for m in modes
        },
        "tokens_per_second": statistics.median(rates),
        "ratio": interval(ratios),
    }


def interval(values: list[float]) -> list[float]:
    """Return the median, and what it lies between at 95 %: as much as so few values can tell."""
    ranked, count = sorted(values), len(values)
    outside = max(int((count - 1.96 * count**0.5) / 2), 0)
    return [statistics.median(ranked), ranked[outside], ranked[count - 1 - outside]]


def waits_more(watched: dict[str, Any], stock: dict[str, Any]) -> dict[str, float]:
    """Return where a step waits for the device more often than ``stock``, and by how much."""
    mine, other = watched.get("waits", {}), stock.get("waits", {})
    more = {line: count - other.get(line, 0) for line, count in mine.items()}
    return {line: round(count, 2) for line, count in more.items() if count > 0.05}


def page(found: dict[str, Any]) -> str:
    """Return the result as a page for people."""
    builds = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    lines = [
        f"# What placing and compacting KV slots costs, on one {found['machine']}",
        "",
        f"`benchmarks/kv_throughput.py`, {found['date']}; {builds}. DFLASH, a target of "
        f"{found['layers']} layers, 16 heads and random weights; {found['turns']} turns. Cost: the "
        "host's time for the calls that placement has a part in, less that of `off`, over a step "
        "of `off`; at most 0.5 % is wanted. Ratio: tokens per second to those of `off` in the same "
        "turn. In brackets, what the median lies between at 95 %.",
        "",
        "| way | level | cost, % | a decode step's calls, µs | a prefill's | decode step, ms "
        "| tokens/s | ÷ off | placement kernel a step, µs | waits per step | launches per step |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for way, result in found["ways"].items():
        for level, row in result["levels"].items():
            watched, calls_us = result["watched"][level], row["calls_us"]
            waited = sum(watched.get("waits", {}).values())
            launched = sum(n for name, n in watched.get("calls", {}).items() if "Launch" in name)
            cost, low, high = (100 * share for share in row["cost"])
            ratio, least, most = row["ratio"]
            lines.append(
                f"| {way} | {level} | {cost:.2f} ({low:.2f} … {high:.2f}) "
                f"| {calls_us['DECODE']:.1f} | {calls_us.get('EXTEND', 0):.1f} "
                f"| {row['step_us']['DECODE'] / 1e3:.3f} | {row['tokens_per_second']:.1f} "
                f"| {ratio:.4f} ({least:.4f} … {most:.4f}) | {watched.get('placing_us', 0):.1f} "
                f"| {waited:.1f} | {launched:.1f} |"
            )
    lines.append("")
    lines += [
        f"{way}, {level}: waits more often than `off` at {more or 'no line'}."
        for way, result in found["ways"].items()
        for level, more in result["waits_more_than_off"].items()
    ]
    return "\n".join(lines) + "\n"


def main(options: argparse.Namespace) -> None:
    """Run one way after the other; write after each."""
    options.out.mkdir(parents=True, exist_ok=True)
    scratch = Path(os.environ.get("TMPDIR", "/tmp")) / f"kv-throughput-{os.getpid()}"
    scratch.mkdir()
    found: dict[str, Any] = {
        "machine": "CPU, dry run" if options.dry else torch.cuda.get_device_name(),
        "date": time.strftime("%Y-%m-%d"),
        "versions": versions(),
        "layers": options.layers,
        "turns": options.turns,
        "ways": {},
    }
    # All start at once, which is mostly the host's work; one of them at a time then plays.
    servers = {
        way: {level: Server(f"{way}-{level}", options, scratch) for level in LEVELS}
        for way in options.ways
    }
    everyone = [server for each in servers.values() for server in each.values()]
    try:
        for server in everyone:
            server.wait(f"{server.name}.started")
        for way in options.ways:
            found["ways"][way] = measure(way, servers[way], options)
            (options.out / "kv-throughput.json").write_text(json.dumps(found, indent=1) + "\n")
            (options.out / "kv-throughput.md").write_text(page(found))
    finally:
        for server in everyone:
            server.end()
    print(page(found))


def read_options() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--turns", type=int, default=16)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--dry", action="store_true")
    # What the program starts itself with.
    parser.add_argument("--server", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    chosen = read_options()
    if chosen.server is None:
        main(chosen)
    else:
        serve(chosen.server, chosen.out, chosen.layers, Load(dry=chosen.dry))
        sys.stdout.flush()
        os._exit(0)  # the scheduler leaves threads behind
