"""The tensor-parallel ranks of a server must all run the same overlay; compared once, at start."""

from __future__ import annotations

import datetime
from typing import Any

from sglang_overlay import switches
from sglang_overlay.identity import Identity

# The ranks have waited for one another after loading their weights. What parts them since is the
# making of their backends, which can compile kernels for minutes. A rank without the overlay never
# arrives.
_PATIENCE = datetime.timedelta(minutes=10)
_BYTES = 256

Member = tuple[str, str, str]  # overlay version, fingerprint, SGLang release


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


def _gather(group: Any, mine: Member) -> list[Member]:
    import torch
    import torch.distributed as dist

    # A barrier with a timeout would be simpler, but holds ranks other than 0 for as long as the
    # group's own timeout when it is rank 0 that is missing.
    text = "\n".join(mine).encode()
    assert len(text) <= _BYTES, "versions are short"
    sent = torch.frombuffer(bytearray(text.ljust(_BYTES)), dtype=torch.uint8)
    received = [torch.empty_like(sent) for _ in range(group.world_size)]
    try:
        work = dist.all_gather(received, sent, group=group.cpu_group, async_op=True)
        work.wait(_PATIENCE)
    except RuntimeError as error:
        raise MixedOverlayError(
            f"not every tensor-parallel rank compared its overlay within {_PATIENCE}: a node runs "
            f"SGLang without the overlay, or with {switches.DISABLE}=1. Apply the same overlay on "
            f"every node and restart. ({error})"
        ) from error
    return [_read(one) for one in received]


def _read(received: Any) -> Member:
    overlay, fingerprint, release = bytes(received.tolist()).decode().rstrip().split("\n")
    return overlay, fingerprint, release
