"""What SGLang takes DDTREE for: DFLASH in every place that asks, under a name of its own."""

from __future__ import annotations

from sglang.srt.speculative.spec_registry import CustomSpecAlgo


class DraftTreeAlgorithm(CustomSpecAlgo):  # type: ignore[misc]
    """The entry in SGLang's registry.

    Graph capture, pools, hidden states and request checks follow DFLASH; nothing follows EAGLE,
    whose drafts have a state of their own.
    """

    def is_dflash(self) -> bool:
        """Take every branch that SGLang has for DFLASH."""
        return True
