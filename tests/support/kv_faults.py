"""Faults in placement and compaction, each of which the random histories must notice.

A fault is a piece of a method's source and what it is replaced by, so that one that no longer fits
the source is an error.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sglang_overlay.kvcache.free_map import FreeMap
from sglang_overlay.srt.kv_allocators import _Placement
from sglang_overlay.srt.kv_compaction import Compactor

_COPY = """    for mover in self._movers:
            mover(destination, source)
        self._rebind(nodes, destination.split([len(value) for value in values]))
"""

FAULTS: dict[str, tuple[type, str, str, str]] = {
    "a node is skipped": (
        Compactor,
        "_rebind",
        "zip(nodes, parts, strict=True)",
        "list(zip(nodes, parts, strict=True))[1:]",
    ),
    "the rows of running requests are skipped": (
        Compactor,
        "_some_nodes",
        "unlocked=True",
        "unlocked=False",
    ),
    "the drafter's pool is skipped": (
        Compactor,
        "_carry_out",
        "self._movers:",
        "self._movers[:1]:",
    ),
    "page 0 is moved to": (
        Compactor,
        "_carry_out",
        "np.concatenate(destinations)",
        "np.concatenate([destinations[0] * (destinations[0] != destinations[0].min()), "
        "*destinations[1:]])",
    ),
    "page 0 is free": (
        FreeMap,
        "__init__",
        "self._flags[0] = self._flags[-1] = 0",
        "self._flags[-1] = 0",
    ),
    "nodes are rebound before the copy": (
        Compactor,
        "_carry_out",
        _COPY,
        """    self._rebind(nodes, destination.split([len(value) for value in values]))
        for mover in self._movers:
            mover(destination, torch.cat([node.value for node in nodes]))
""",
    ),
    "values are changed in place": (
        Compactor,
        "_rebind",
        "node.value = part.clone()",
        "node.value.copy_(part)",
    ),
    "nodes are not put back": (Compactor, "_carry_out", "node.value = value", "pass"),
    "free units are not put back": (
        Compactor,
        "_carry_out",
        "allocator.free_map = before",
        "pass",
    ),
    "what is moved is not released": (Compactor, "_carry_out", "allocator.free(source)", "pass"),
    "what is moved to stays free": (
        Compactor,
        "_carry_out",
        "allocator.free_map.take(units)",
        "allocator.free_map.count -= len(units)",
    ),
    "a pass goes on in an open window": (
        _Placement,
        "quiet",
        "not self._borrowing and",
        "True and",
    ),
    "a pass goes on in an open group": (
        _Placement,
        "quiet",
        "self.is_not_in_free_group",
        "True",
    ),
    "a window keeps what it was given": (
        _Placement,
        "restore_state",
        "self.free_map = state",
        "pass",
    ),
    "what a window had ahead is lost": (
        _Placement,
        "_drop_ahead",
        "self.free_map.release(self._ahead.units)",
        "pass",
    ),
    "what a window had ahead is not counted": (
        _Placement,
        "_available_units",
        "free += self._ahead.units.numel()",
        "pass",
    ),
    "what a window has ahead stays in the map": (
        _Placement,
        "_step",
        "units = self._take(demand, prompt=False) if demand.total else self._nowhere[:0]",
        "units = place(self.free_map.copy(), demand, longest_runs(self.free_map), headroom=0)",
    ),
    "a flush frees nothing": (
        _Placement,
        "clear",
        "self.free_map = FreeMap(",
        "self.free_map = self.__dict__.get('free_map') or FreeMap(",
    ),
}


@contextmanager
def planted(fault: str) -> Iterator[None]:
    """Give one of `FAULTS` to the overlay while it holds."""
    owner, name, old, new = FAULTS[fault]
    stock = getattr(owner, name)
    source = textwrap.dedent(inspect.getsource(stock))
    if old not in source:
        raise LookupError(f"{fault}: {owner.__name__}.{name} has no {old!r}")
    # Methods that call `super()` need the class around them.
    names: dict[str, Any] = dict(vars(sys.modules[owner.__module__]))
    exec("from __future__ import annotations\n" + source.replace(old, new), names)
    setattr(owner, name, names[name])
    try:
        yield
    finally:
        setattr(owner, name, stock)
