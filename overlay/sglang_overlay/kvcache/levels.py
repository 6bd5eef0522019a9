"""How far the overlay goes with KV slots on a server, decided once at start.

Each level includes those before it: ``placement`` chooses slots for new tokens and moves nothing,
``idle`` also brings cached tokens together while the server has nothing to do, ``live`` also
between batches, those that no running request uses.

What the operator asks for is had or refused. The default is had where it can be, and lowered where
it cannot: nobody asked for it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from sglang_overlay import switches
from sglang_overlay.switches import KV_LEVELS, OFF

logger = logging.getLogger(__name__)

# On a GPU; elsewhere it is `OFF`.
DEFAULT = OFF


class ImpossibleLevelError(ValueError):
    """The level that the operator set cannot be had on this server."""


def wanted(asked: str, *, device: str) -> str:
    """Return the level to go for on ``device``, where the operator ``asked`` for one or for none.

    On a CPU, which does the device's work too, placement would cost more than it brings.
    """
    return asked or (OFF if device == "cpu" else DEFAULT)


def includes(level: str, other: str) -> bool:
    """Say whether ``level`` does what ``other`` does."""
    return KV_LEVELS.index(level) >= KV_LEVELS.index(other)


def settle(level: str, obstacles: Sequence[str], *, asked: str, otherwise: str) -> str:
    """Return ``level``, or ``otherwise`` where ``obstacles`` lie in the way of a default.

    Raises:
        ImpossibleLevelError: there are obstacles to a level that the operator ``asked`` for.
    """
    if not obstacles:
        return level
    if asked:
        raise ImpossibleLevelError(
            f"{switches.KV_SLOTS}={level} cannot be had on this server: {'; '.join(obstacles)}. "
            f"Set a lower level ({', '.join(KV_LEVELS[: KV_LEVELS.index(level)])}), or start the "
            "server otherwise."
        )
    logger.info(
        "KV slots: %s, not the default %s, on this server: %s",
        *(otherwise, level, "; ".join(obstacles)),
    )
    return otherwise
