"""The call that SGLang's DFLASH worker makes where it has drafted: a tree takes the chain's place.

Apart from `worker`, which imports the module that makes this call.
"""

from __future__ import annotations

from typing import Any


def verify_input(worker: Any, batch: Any, chain: Any) -> Any:
    """Return what ``worker`` verifies in place of its drafted ``chain`` (a DFlashVerifyInput).

    Called before slots are allocated for it. A worker of SGLang's own verifies its chain.
    """
    # By class: the worker hands unknown attributes on to the target's worker.
    plant = getattr(type(worker), "plant", None)
    return chain if plant is None else plant(worker, batch, chain)
