"""What a test asks of the harness in the engine's processes, carried by one variable."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

_VARIABLE = "ENGINE_BED_ORDERS"
FAULTS = ("short-verify", "wrong-drafts", "lost-slot", "restless-slots", "broken-harness")

Known = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
"""Pairs of (prompt ids, the tokens that plain decoding gives for it)."""


@dataclass(frozen=True, kw_only=True)
class Orders:
    """``record``: folder for activity and step files. ``known``: source of known-good drafts.

    ``fault`` plants one of `FAULTS`, to show that a comparison can fail; empty plants none.
    """

    record: Path
    known: Known = field(default=())
    fault: str = ""

    def environment(self) -> dict[str, str]:
        """Return the variable for a child process; known-good tokens go through a file."""
        if self.fault and self.fault not in FAULTS:
            raise ValueError(f"no such planted fault: {self.fault!r}; there are {FAULTS}")
        path = self.record / "orders.json"
        path.write_text(json.dumps({**asdict(self), "record": str(self.record)}))
        return {_VARIABLE: str(path)}

    @staticmethod
    def read(environment: Mapping[str, str] = os.environ) -> Orders:
        """Read back what `environment` wrote. A process without orders is a `KeyError`."""
        raw = json.loads(Path(environment[_VARIABLE]).read_text())
        known = tuple((tuple(prompt), tuple(tokens)) for prompt, tokens in raw["known"])
        return Orders(record=Path(raw["record"]), known=known, fault=raw["fault"])
