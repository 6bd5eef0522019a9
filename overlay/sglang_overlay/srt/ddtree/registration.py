"""The algorithm's name, and how SGLang comes to know it. Imported by every process."""

from __future__ import annotations

from typing import Any

from sglang_overlay import upstream
from sglang_overlay.srt.ddtree import NAME, validation


class UnknownAlgorithmError(ValueError):
    """This release of SGLang cannot be told of another speculative algorithm."""


def register(algorithms: Any) -> None:
    """Register DDTREE with SGLang's ``SpeculativeAlgorithm``, where it takes registrations."""
    if not hasattr(algorithms, "register"):
        return
    from sglang_overlay.srt.ddtree.algorithm import DraftTreeAlgorithm

    algorithms.register(
        NAME,
        supports_overlap=False,
        validate_server_args=validation.complete,
        spec_class=DraftTreeAlgorithm,
    )(worker_class)


def worker_class(server_args: Any) -> type:
    """Return the worker, as SGLang's registry asks for it; imports torch and the worker."""
    from sglang_overlay.srt.ddtree.worker import DraftTreeWorker

    return DraftTreeWorker


def is_asked_for(server_args: Any) -> bool:
    """Return whether ``server_args`` name DDTREE; SGLang makes the name upper case late."""
    return str(server_args.speculative_algorithm or "").upper() == NAME


def is_running() -> bool:
    """Return whether this process serves with DDTREE."""
    from sglang.srt.server_args import get_global_server_args

    return is_asked_for(get_global_server_args())


def require_registry(server_args: Any) -> None:
    """Refuse DDTREE on a release that has no registry.

    Raises:
        UnknownAlgorithmError: DDTREE was asked for, and SGLang cannot be told of it.
    """
    if not is_asked_for(server_args):
        return
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    if not hasattr(SpeculativeAlgorithm, "register"):
        raise UnknownAlgorithmError(
            f"--speculative-algorithm {NAME} was asked for, but SGLang {upstream.release()} has no "
            "registry of speculative algorithms: install a supported release that has one, 0.5.12 "
            "or 0.5.12.post1"
        )
