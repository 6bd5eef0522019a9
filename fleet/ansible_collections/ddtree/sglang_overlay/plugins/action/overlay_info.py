"""The same for the module that only looks."""

from __future__ import annotations

from ansible_collections.ddtree.sglang_overlay.plugins.action.overlay import (
    ActionModule as OverlayAction,
)


class ActionModule(OverlayAction):
    """Run ``overlay_info`` with the verified bundle."""
