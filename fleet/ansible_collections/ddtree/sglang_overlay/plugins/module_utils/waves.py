"""The waves of a rollout: first the canary, then some, then all. Server groups stay whole."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeVar

Group = TypeVar("Group")


def by_group(hosts: Sequence[str], names: Mapping[str, str]) -> list[list[str]]:
    """Return ``hosts`` in groups, in the order in which each group is met first."""
    groups: dict[str, list[str]] = {}
    for host in hosts:
        groups.setdefault(names[host], []).append(host)
    return list(groups.values())


def divide(groups: Sequence[Group], waves: Sequence[str | int]) -> list[list[Group]]:
    """Return ``groups`` in waves.

    Args:
        groups: the server groups, in the order of the rollout.
        waves: the size of each: a number of groups, or a percentage of all of them (rounded up).
            The last size is used until all groups are taken.

    Raises:
        ValueError: a size is none, or takes nothing.
    """
    sizes = [_size(wave, len(groups)) for wave in waves]
    if not sizes:
        raise ValueError("no wave sizes were given; the default is 1, 10%, 100%")
    divided: list[list[Group]] = []
    taken = 0
    while taken < len(groups):
        size = sizes[min(len(divided), len(sizes) - 1)]
        divided.append(list(groups[taken : taken + size]))
        taken += size
    return divided


def _size(wave: str | int, total: int) -> int:
    text = str(wave).strip()
    number = text.removesuffix("%")
    if not number.isdecimal() or int(number) < 1:
        raise ValueError(f"a wave is a number of server groups or a percentage, not {wave!r}")
    return math.ceil(total * int(number) / 100) if text.endswith("%") else int(number)
