"""Replays a serving trace on SGLang's real allocator and radix cache, and measures the layout.

    python benchmarks/kv_trace.py [--requests N] [--release R] [--maps]

The trace has conversations over a few shared system prompts, speculative steps that commit a
varying number of drafted tokens, evictions (all that is ever cached is several times the pool), and
moments with nothing to do. It is the same for every level; with eight times the slots, in which
nothing is evicted, it is replayed too. Nothing is computed: rows are not kept,
so times are the slot bookkeeping's alone, on a CPU. Results go to ``benchmarks/results``. With
``--maps`` a picture of the pool at the end, for pages of one slot without and with placement, is
all that is made; it goes to ``docs/images``.

Transfer descriptors are counted by the function that SGLang groups a transfer's pages with, against
a receiver whose pages are all in one run.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "overlay")]

from sglang_overlay.switches import IDLE, KV_LEVELS, LIVE, OFF, PLACEMENT  # noqa: E402

from tests.support import trees  # noqa: E402
from tests.support.engine.launch import Launch  # noqa: E402

# Idle moments of the scheduler's in one of the trace.
IDLE_CALLS = 520
SLOTS = 65_536
# A pool that never fills.
ROOMY = 8 * SLOTS
# Slots in a picture: more would only make it large.
MAPPED = 8_192
CONTEXT = 6144
CONCURRENCY = 16
DRAFT = 16
SYSTEM_PROMPTS = (1800, 1200, 700, 300)
IDLE_EVERY = 40
COMMITS = ("first", "scattered")


class Conversation:
    """One user's turns: what was said so far, and what comes next."""

    def __init__(self, random: Random, systems: Sequence[Sequence[int]]) -> None:
        self._random = random
        self._history = list(random.choice(systems))
        self.turns = random.randint(1, 4)

    def next_turn(self) -> tuple[list[int], list[int]]:
        """Return the prompt of the next turn and the tokens that will be generated for it."""
        self.turns -= 1
        said = _tokens(self._random, self._random.randint(40, 400))
        answer = _tokens(self._random, self._random.randint(60, 400))
        prompt = self._history + said
        self._history = prompt + answer
        return prompt, answer


def _tokens(random: Random, count: int) -> list[int]:
    return random.choices(range(100_000), k=count)


class Replay:
    """The trace on one bed: ``page``, ``level``, and which slots a commit keeps."""

    def __init__(
        self, page: int, level: str, commit: str, requests: int, slots: int | None = None
    ) -> None:
        from tests.support.kv_bed import KvBed

        self.random = Random(20261130)
        self.slots = slots or SLOTS
        self.bed = KvBed(page=page, slots=self.slots, placed=level != OFF, context=CONTEXT)
        self.level = level
        self.commit = commit
        self.requests = requests
        self.systems = [_tokens(self.random, length) for length in SYSTEM_PROMPTS]
        self.waiting: list[Conversation] = []
        self.answers: dict[Any, tuple[Conversation, list[int]]] = {}
        self.next: tuple[Conversation, list[int], list[int]] | None = None
        self.compactor = self.bed.compactor() if level in (IDLE, LIVE) else None
        self.generated = self.done = 0
        self.seconds = {"placement": 0.0, "step": 0.0, "idle": 0.0}
        self.samples: list[dict[str, float]] = []
        self.descriptors: list[int] = []
        self.tokens: list[int] = []
        if level != OFF:
            self._time_placement()

    def _time_placement(self) -> None:
        stock = self.bed.allocator._place

        def timed(demand: Any, **more: Any) -> Any:
            started = time.perf_counter()
            units = stock(demand, **more)
            self.seconds["placement"] += time.perf_counter() - started
            return units

        self.bed.allocator._place = timed

    def run(self, keep: int = 0) -> dict[str, Any]:
        """Play until all but ``keep`` requests are done; return what the second half was like."""
        started = 0
        while self.done < self.requests - keep:
            while len(self.bed.running) < CONCURRENCY and started < self.requests:
                if not self._admit():
                    break
                started += 1
                # What is kept to the end must not be drained right before it.
                if started % IDLE_EVERY == 0 and not (keep and started == self.requests):
                    self._drain()
            self._step()
        return self._summary()

    def _admit(self) -> bool:
        if self.next is None:
            if not self.waiting or self.random.random() < 0.3:
                self.waiting.append(Conversation(self.random, self.systems))
            conversation = self.waiting.pop(self.random.randrange(len(self.waiting)))
            self.next = (conversation, *conversation.next_turn())
        conversation, prompt, answer = self.next
        request = self.bed.admit(prompt)
        if request is None:
            return False
        self.answers[request] = (conversation, answer)
        self.next = None
        return True

    def _drain(self) -> None:
        while self.bed.running:
            self._step()
        started = time.perf_counter()
        if self.compactor is not None:
            # Long enough for some passes.
            for _ in range(IDLE_CALLS):
                self.compactor.compact()
        self.seconds["idle"] += time.perf_counter() - started
        if self.done > self.requests // 2:
            self.samples.append(self._sample())

    def _step(self) -> None:
        if not self.bed.running:
            return
        started = time.perf_counter()
        if self.level == LIVE:
            assert self.compactor is not None
            self.compactor.compact_unlocked()
        outputs = []
        for request in self.bed.running:
            _, answer = self.answers[request]
            count = min(1 + int(self.random.expovariate(1 / 3.5)), DRAFT)
            at = len(request.output_ids)
            outputs.append(answer[at : at + count])
            self.generated += len(outputs[-1])
        path = self._scattered if self.commit == "scattered" else None
        assert self.bed.step(DRAFT, outputs, path)
        self.seconds["step"] += time.perf_counter() - started
        for request in list(self.bed.running):
            conversation, answer = self.answers[request]
            if len(request.output_ids) == len(answer):
                self._finish(request, conversation)

    def _scattered(self, count: int) -> list[int]:
        return [0, *sorted(self.random.sample(range(1, DRAFT), count - 1))] if count else []

    def _finish(self, request: Any, conversation: Conversation) -> None:
        from sglang.srt.disaggregation.common.utils import group_concurrent_contiguous
        from sglang.srt.mem_cache.common import kv_to_page_indices

        pages = kv_to_page_indices(self.bed.row(request).numpy(), self.bed.page)
        groups, _ = group_concurrent_contiguous(pages, np.arange(len(pages)))
        if self.done > self.requests // 2:
            self.descriptors.append(len(groups))
            self.tokens.append(int(request.kv_committed_len))
            if self.done % 5 == 0:
                self.samples.append(self._sample())
        self.bed.finish(request)
        del self.answers[request]
        self.done += 1
        if conversation.turns:
            self.waiting.append(conversation)

    def _sample(self) -> dict[str, float]:
        from types import SimpleNamespace

        from sglang_overlay.srt import kv_layout

        view = SimpleNamespace(
            token_to_kv_pool_allocator=self.bed.allocator,
            tree_cache=self.bed.tree,
            running_batch=SimpleNamespace(reqs=self.bed.running),
            req_to_token_pool=self.bed.table,
        )
        return kv_layout.describe(view)

    def _summary(self) -> dict[str, Any]:
        busy = [sample for sample in self.samples if sample["running_tokens_per_run"]]

        def mean(name: str) -> float:
            return sum(sample[name] for sample in busy) / len(busy)

        result: dict[str, Any] = {
            "page": self.bed.page,
            "slots": self.slots,
            "commit": self.commit,
            "level": self.level,
            **{name: round(mean(name), 3) for name in busy[0]},
            "descriptors_per_request": round(sum(self.descriptors) / len(self.descriptors), 2),
            "tokens_per_descriptor": round(sum(self.tokens) / sum(self.descriptors), 2),
            "generated_tokens": self.generated,
            "placement_us_per_token": round(1e6 * self.seconds["placement"] / self.generated, 2),
            "step_us_per_token": round(1e6 * self.seconds["step"] / self.generated, 2),
        }
        if self.compactor is not None:
            tally = self.compactor.tally
            result |= {
                "moved_per_generated_token": round(tally.moved_tokens / self.generated, 3),
                "passes": tally.passes,
                "ms_per_pass": round(1e3 * tally.pass_seconds / max(tally.passes, 1), 2),
                "refused": tally.refused_open + tally.refused_failure,
            }
        return result


def measure(requests: int) -> list[dict[str, Any]]:
    """Return a row per page size, kind of commit and level."""
    cases = [(1, commit, level, SLOTS) for commit in COMMITS for level in KV_LEVELS]
    cases += [(64, "first", level, SLOTS) for level in KV_LEVELS]
    cases += [(page, "first", level, ROOMY) for page in (1, 64) for level in (OFF, PLACEMENT)]
    rows = []
    for page, commit, level, slots in cases:
        rows.append(Replay(page, level, commit, requests, slots).run())
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


def draw_maps(folder: Path, requests: int) -> None:
    """Write pictures of the pool as it is at the end of the trace."""
    from sglang_overlay.kvcache import pool_map
    from sglang_overlay.srt import kv_layout

    for level in (OFF, PLACEMENT):
        replay = Replay(1, level, "first", requests)
        replay.run(keep=CONCURRENCY // 2)
        owners = np.full(SLOTS + 1, pool_map.CACHED)
        owners[kv_layout.free_units(replay.bed.allocator)] = pool_map.FREE
        for number, request in enumerate(replay.bed.running, start=1):
            owners[replay.bed.row(request).numpy()] = number
        folder.mkdir(parents=True, exist_ok=True)
        parts = owners[1:].reshape(-1, MAPPED)
        busiest = parts[(parts > pool_map.CACHED).sum(axis=1).argmax()]
        picture = pool_map.draw(busiest)
        (folder / f"kv-slots-{level}.svg").write_text(picture)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the results as a Markdown table."""
    lines = [
        "| slots | page | commit | level | tokens per run, running | cached | aligned, running "
        "| descriptors a request | largest free run | µs a token, placement | moved a token |",
        "|" + "---|" * 11,
    ]
    for row in rows:
        lines.append(
            f"| {row['slots']} | {row['page']} | {row['commit']} | {row['level']} "
            f"| {row['running_tokens_per_run']:.1f} | {row['cached_tokens_per_run']:.1f} "
            f"| {row['running_aligned_share']:.0%} | {row['descriptors_per_request']:.1f} "
            f"| {row['largest_free_run']:.0f} | {row['placement_us_per_token']:.0f} "
            f"| {row.get('moved_per_generated_token', 0):.2f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Replay in a process that has SGLang; write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--release", default="0.5.12.post1")
    parser.add_argument("--maps", action="store_true")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside and options.maps:
        draw_maps(options.inside, options.requests)
        return
    if options.inside:
        options.inside.write_text(json.dumps(measure(options.requests)))
        return
    date = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    stem = ROOT / "benchmarks" / "results" / f"kv-trace-cpu-{date}"
    inside = stem.with_suffix(".rows")
    environment = Launch(tree=trees.patched(options.release)).environment()
    command = [sys.executable, __file__, "--requests", str(options.requests)]
    if options.maps:
        folder = ROOT / "docs" / "images"
        subprocess.run([*command, "--maps", "--inside", str(folder)], env=environment, check=True)
        return
    subprocess.run([*command, "--inside", str(inside)], env=environment, check=True)
    rows = json.loads(inside.read_text())
    inside.unlink()
    import torch

    about = {
        "date": date,
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, no GPU",
        "sglang": options.release,
        "torch": torch.__version__,
        "requests": options.requests,
        "concurrency": CONCURRENCY,
        "draft": DRAFT,
    }
    stem.with_suffix(".json").write_text(
        json.dumps({"about": about, "rows": rows}, indent=1) + "\n"
    )
    listed = ", ".join(f"{name} {value}" for name, value in about.items())
    stem.with_suffix(".md").write_text(
        "# The replayed serving trace on the real allocator and radix cache\n\n"
        f"{listed}. Script: `benchmarks/kv_trace.py`. Means over the requests' second half. "
        "Times are a CPU's; from a shared machine they say little.\n\n" + table(rows)
    )


if __name__ == "__main__":
    main()
