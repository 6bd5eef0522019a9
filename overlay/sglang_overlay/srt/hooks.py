"""The decorators that the patches put on SGLang's functions: one each, no decisions here.

With ``SGLANG_OVERLAY_DISABLE=1`` every decorator returns SGLang's own function. SGLang imports this
module from files that every process loads, some before torch is set up: nothing under it imports
torch or SGLang at module level. All that it needs is imported with it, and not at the first call,
because the files may be gone or newer by then.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar, cast

from sglang_overlay import switches
from sglang_overlay.srt import admission, server_info, verify_backend

logger = logging.getLogger(__name__)

Function = TypeVar("Function", bound=Callable[..., Any])


def verify_mask_policy(stock: Function) -> Function:
    """Decorate ``dflash_utils.resolve_dflash_verify_mask_policy``: answer from the table."""

    @functools.wraps(stock)
    def resolve(attn_backend: Any) -> tuple[str, bool]:
        try:
            return verify_backend.resolve_chain(attn_backend)
        except Exception as error:  # noqa: BLE001
            # Graph capture asks for the drafter's backend too, where nothing may be refused.
            _report_unresolved(type(attn_backend).__name__, repr(error))
            return cast("tuple[str, bool]", stock(attn_backend))

    return _unless_disabled(stock, resolve)


def speculative_arguments(stock: Function) -> Function:
    """Decorate ``ServerArgs._handle_speculative_decoding``: refuse by name."""

    @functools.wraps(stock)
    def handle(server_args: Any) -> None:
        stock(server_args)
        admission.admit_arguments(server_args)

    return _unless_disabled(stock, handle)


def attention_backend(stock: Function) -> Function:
    """Decorate ``ModelRunner.init_attention_backend``: refuse by object, and say what is live."""

    @functools.wraps(stock)
    def init(model_runner: Any) -> None:
        stock(model_runner)
        if not model_runner.is_draft_worker:
            admission.admit_runner(model_runner)

    return _unless_disabled(stock, init)


def model_worker(stock: Function) -> Function:
    """Decorate ``Scheduler.init_model_worker``: export the identity as a metric."""

    @functools.wraps(stock)
    def init(scheduler: Any) -> None:
        stock(scheduler)
        server_info.export_metric(scheduler)

    return _unless_disabled(stock, init)


def internal_state(stock: Function) -> Function:
    """Decorate ``Scheduler.get_internal_state``: add the identity."""

    @functools.wraps(stock)
    def state(scheduler: Any, recv_req: Any) -> Any:
        output = stock(scheduler, recv_req)
        server_info.add_to_internal_state(scheduler, output)
        return output

    return _unless_disabled(stock, state)


@functools.cache  # DFLASH asks in every step; saying it once is enough
def _report_unresolved(backend: str, error: str) -> None:
    logger.error("the overlay cannot resolve %s (%s); SGLang's rule is used", backend, error)


def _unless_disabled(stock: Function, hooked: Callable[..., Any]) -> Function:
    return stock if switches.ACTIVE.disabled else cast("Function", hooked)
