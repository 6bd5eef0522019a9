"""Every environment variable that the overlay reads, in one place; read once, at import.

=====================================  ============================================================
``SGLANG_OVERLAY_DISABLE``             ``1``: every hook returns SGLang's own function, unchanged
``SGLANG_OVERLAY_ALLOW_DROPPED_MASK``  ``1``: a server whose verify would drop a draft tree's mask
                                       starts all the same, with a warning in the log
``SGLANG_OVERLAY_VERIFY_ENGINE``       ``stock``: the overlay verifies nothing itself; ``flashmla``,
                                       ``portable``: it verifies with this engine, and a server
                                       where it could not is refused; unset: it chooses
``SGLANG_OVERLAY_FORCE_TREE``          ``1``: the overlay verifies chains as trees too; for tests
``SGLANG_OVERLAY_KV_SLOTS``            ``off``, ``placement``, ``idle`` or ``live``: how far the
                                       overlay goes with KV slots; see ``kvcache/levels.py``
=====================================  ============================================================

Any other value than these, ``0`` or nothing is an error: a switch that is misspelt must not pass
for off.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

DISABLE = "SGLANG_OVERLAY_DISABLE"
ALLOW_DROPPED_MASK = "SGLANG_OVERLAY_ALLOW_DROPPED_MASK"

VERIFY_ENGINE = "SGLANG_OVERLAY_VERIFY_ENGINE"
FORCE_TREE = "SGLANG_OVERLAY_FORCE_TREE"
KV_SLOTS = "SGLANG_OVERLAY_KV_SLOTS"

STOCK = "stock"
ENGINES = ("flashmla", "portable", STOCK)

OFF, PLACEMENT, IDLE, LIVE = "off", "placement", "idle", "live"
KV_LEVELS = (OFF, PLACEMENT, IDLE, LIVE)

_VALUES = {"": False, "0": False, "1": True}


@dataclass(frozen=True, kw_only=True)
class Switches:
    """The overlay's switches as this process was started with them.

    ``verify_engine`` is one of `ENGINES`, ``kv_slots`` one of `KV_LEVELS`; either is empty where
    the operator leaves the choice open.
    """

    disabled: bool = False
    allow_dropped_mask: bool = False
    verify_engine: str = ""
    force_tree: bool = False
    kv_slots: str = ""


def read_switches(environment: Mapping[str, str]) -> Switches:
    """Return the switches that ``environment`` sets.

    Raises:
        ValueError: a switch has a value that is not one of its own.
    """
    return Switches(
        disabled=_read(environment, DISABLE),
        allow_dropped_mask=_read(environment, ALLOW_DROPPED_MASK),
        verify_engine=_read_one_of(environment, VERIFY_ENGINE, ENGINES),
        force_tree=_read(environment, FORCE_TREE),
        kv_slots=_read_one_of(environment, KV_SLOTS, KV_LEVELS),
    )


def _read(environment: Mapping[str, str], name: str) -> bool:
    value = environment.get(name, "")
    if value not in _VALUES:
        raise ValueError(f"{name}={value!r} is not understood: set it to 1, or to 0, or unset it")
    return _VALUES[value]


def _read_one_of(environment: Mapping[str, str], name: str, values: tuple[str, ...]) -> str:
    value = environment.get(name, "")
    if value not in ("", *values):
        raise ValueError(
            f"{name}={value!r} is not understood: set it to {', '.join(values[:-1])} "
            f"or {values[-1]}, or unset it"
        )
    return value


ACTIVE = read_switches(os.environ)
