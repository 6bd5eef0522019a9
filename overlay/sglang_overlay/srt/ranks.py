"""The tensor-parallel ranks of a server must all run the same overlay; compared once, at start."""

from __future__ import annotations

import datetime
from typing import Any

from sglang_overlay.identity import Identity

# The ranks have just waited for one another after loading their weights, so they arrive together; a
# rank that runs no overlay never does.
_PATIENCE = datetime.timedelta(seconds=120)


class MixedOverlayError(RuntimeError):
    """The ranks of one group run different overlays, or some run none."""


def compare(group: Any, identity: Identity) -> None:
    """Compare ``identity`` over the tensor-parallel ``group`` (SGLang's GroupCoordinator).

    Every rank has to call this. What is compared is the overlay's version and fingerprint and the
    SGLang release under it.

    Raises:
        MixedOverlayError: a rank differs, or did not answer in time.
    """
    if group.world_size == 1:
        return
    mine = (identity.overlay, identity.fingerprint, identity.release)
    found = _gather(group, mine)
    if any(theirs != mine for theirs in found):
        listed = "; ".join(
            f"rank {rank}: overlay {overlay}, fingerprint {fingerprint[:12]}, SGLang {release}"
            for rank, (overlay, fingerprint, release) in enumerate(found)
        )
        raise MixedOverlayError(
            "the tensor-parallel ranks of this server do not run the same overlay, and would not "
            f"compute the same steps: {listed}. Apply the same overlay on every node and restart."
        )


def _gather(group: Any, mine: tuple[str, str, str]) -> list[tuple[str, str, str]]:
    import torch.distributed as dist

    # Mooncake's process group has no monitored barrier; there, a missing rank is waited for.
    if dist.get_backend(group.cpu_group) == "gloo":
        try:
            dist.monitored_barrier(group.cpu_group, timeout=_PATIENCE, wait_all_ranks=True)
        except RuntimeError as error:
            raise MixedOverlayError(
                f"not every tensor-parallel rank compared its overlay within {_PATIENCE}: a node "
                "runs SGLang without the overlay, or with SGLANG_OVERLAY_DISABLE=1. Apply the same "
                f"overlay on every node and restart. ({error})"
            ) from error
    found: list[Any] = [None] * group.world_size
    dist.all_gather_object(found, mine, group=group.cpu_group)
    return found
