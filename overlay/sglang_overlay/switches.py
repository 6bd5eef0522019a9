"""Every environment variable that the overlay reads, in one place; read once, at import.

=====================================  ============================================================
``SGLANG_OVERLAY_DISABLE``             ``1``: every hook returns SGLang's own function, unchanged
``SGLANG_OVERLAY_ALLOW_DROPPED_MASK``  ``1``: a server whose verify would drop a draft tree's mask
                                       starts all the same, with a warning in the log
=====================================  ============================================================

A value other than ``0``, ``1`` or nothing is an error: a switch that is misspelt must not pass for
off.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

DISABLE = "SGLANG_OVERLAY_DISABLE"
ALLOW_DROPPED_MASK = "SGLANG_OVERLAY_ALLOW_DROPPED_MASK"

_VALUES = {"": False, "0": False, "1": True}


@dataclass(frozen=True, kw_only=True)
class Switches:
    """The overlay's switches as this process was started with them."""

    disabled: bool = False
    allow_dropped_mask: bool = False


def read_switches(environment: Mapping[str, str]) -> Switches:
    """Return the switches that ``environment`` sets.

    Raises:
        ValueError: a switch has a value other than ``0``, ``1`` or the empty string.
    """
    return Switches(
        disabled=_read(environment, DISABLE),
        allow_dropped_mask=_read(environment, ALLOW_DROPPED_MASK),
    )


def _read(environment: Mapping[str, str], name: str) -> bool:
    value = environment.get(name, "")
    if value not in _VALUES:
        raise ValueError(f"{name}={value!r} is not understood: set it to 1, or to 0, or unset it")
    return _VALUES[value]


ACTIVE = read_switches(os.environ)
