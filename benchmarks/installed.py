"""The versions that a result depends on."""

from __future__ import annotations

import importlib.metadata

NAMES = ("torch", "triton", "sglang", "sglang-kernel")


def versions() -> dict[str, str]:
    """Return the installed version of each of `NAMES`, or "none"."""
    found = {}
    for name in NAMES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "none"
    return found
