"""Divide a fleet into the waves of a rollout."""

from __future__ import annotations

from collections.abc import Sequence

from ansible_collections.ddtree.sglang_overlay.plugins.module_utils.waves import by_group, divide


def group_sizes(groups: Sequence[Sequence[str]], waves: Sequence[str | int]) -> list[int]:
    """Return how many hosts each wave takes: the value of a play's ``serial``."""
    return [sum(len(group) for group in wave) for wave in divide(groups, waves)]


class FilterModule:
    """The filters of this collection."""

    def filters(self) -> dict[str, object]:
        """Return them by name."""
        return {"by_group": by_group, "group_sizes": group_sizes}
