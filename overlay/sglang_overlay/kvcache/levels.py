"""How far the overlay goes with KV slots on a server, decided once at start.

Each level includes those before it: ``placement`` chooses slots for new tokens and moves nothing,
``idle`` also brings cached tokens together while the server has nothing to do, ``live`` also
between batches, those that no running request uses.
"""

from __future__ import annotations

from collections.abc import Sequence

from sglang_overlay import switches
from sglang_overlay.switches import KV_LEVELS, OFF

DEFAULT = OFF


class ImpossibleLevelError(ValueError):
    """The level that the operator set cannot be had on this server."""


def wanted(asked: str) -> str:
    """Return the level to go for, where the operator ``asked`` for one or left it empty."""
    return asked or DEFAULT


def includes(level: str, other: str) -> bool:
    """Say whether ``level`` does what ``other`` does."""
    return KV_LEVELS.index(level) >= KV_LEVELS.index(other)


def refuse(level: str, obstacles: Sequence[str]) -> None:
    """Refuse ``level`` if there are ``obstacles``.

    Raises:
        ImpossibleLevelError: there are.
    """
    if obstacles:
        raise ImpossibleLevelError(
            f"{switches.KV_SLOTS}={level} cannot be had on this server: {'; '.join(obstacles)}. "
            f"Set a lower level ({', '.join(KV_LEVELS[: KV_LEVELS.index(level)])}), or start the "
            "server otherwise."
        )
