"""What the trees of a server came to, counted on the device without a synchronisation."""

from __future__ import annotations

import torch

from sglang_overlay.srt.ddtree.commit import Path


class Tally:
    """Counts since the start of a worker.

    ``steps`` counts verify steps. On the device: requests verified, tokens committed (drafts that
    were accepted, and a bonus token each), and paths that hold a token that no chain had drafted.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.steps = 0
        self._counts = torch.zeros(3, dtype=torch.int64, device=device)

    def count(self, path: Path, spine: torch.Tensor) -> None:
        """Count one step; ``spine`` [requests, depth + 1] int64 is what a chain had drafted."""
        branched = ((path.tokens != spine) & path.held).any(dim=1)
        self._counts[0] += path.held.shape[0]
        self._counts[1] += path.held.sum()
        self._counts[2] += branched.sum()
        self.steps += 1

    def as_dict(self) -> dict[str, int]:
        """Return the counts, for server info; this one waits for the device."""
        requests, tokens, branched = self._counts.tolist()
        return {
            "steps": self.steps,
            "requests": requests,
            "committed_tokens": tokens,
            "branched_paths": branched,
        }
