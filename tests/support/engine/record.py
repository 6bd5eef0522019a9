"""What a run leaves behind for its test, written by the engine's own processes into one folder.

Files serve all three drivers alike, and what was written before a crash stays readable: one line of
JSON per verify step in ``steps-<pid>.jsonl``, one empty ``model-<pid>`` per process with a model.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Step:
    """One verify step of one rank.

    ``contexts``: tokens in the cache per request, before the step. ``committed``: tokens that the
    step added to each request's cache (1 .. block). ``mask_elements``: elements of the mask handed
    to attention. ``bool_elements`` and ``allocated_bytes``: what preparing the verify newly
    allocated, in elements and bytes, kept or not.
    """

    contexts: tuple[int, ...]
    committed: tuple[int, ...]
    mask_elements: int
    bool_elements: int
    allocated_bytes: int

    @property
    def batch_size(self) -> int:
        """Return how many requests the step verified."""
        return len(self.contexts)


@dataclass(frozen=True)
class Record:
    """The folder of one run."""

    folder: Path

    def add(self, step: Step) -> None:
        """Append ``step`` to this process's file."""
        with (self.folder / f"steps-{os.getpid()}.jsonl").open("a") as lines:
            lines.write(json.dumps(asdict(step)) + "\n")

    def add_model(self) -> None:
        """Note that the harness gave a model of this process its weights."""
        (self.folder / f"model-{os.getpid()}").touch()

    def steps(self) -> tuple[tuple[Step, ...], ...]:
        """Return the steps of each process that verified anything: one entry per rank."""
        files = sorted(self.folder.glob("steps-*.jsonl"))
        return tuple(tuple(map(_step, path.read_text().splitlines())) for path in files)

    def model_processes(self) -> int:
        """Return in how many processes the harness gave a model its weights."""
        return len(list(self.folder.glob("model-*")))


def _step(line: str) -> Step:
    raw = json.loads(line)
    raw["contexts"], raw["committed"] = tuple(raw["contexts"]), tuple(raw["committed"])
    return Step(**raw)
