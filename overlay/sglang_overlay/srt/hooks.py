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
from sglang_overlay.srt.ddtree import attention, registration, requests

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

    return unless_disabled(stock, resolve)


def speculative_arguments(stock: Function) -> Function:
    """Decorate ``ServerArgs._handle_speculative_decoding``: refuse by name."""

    @functools.wraps(stock)
    def handle(server_args: Any) -> None:
        registration.require_registry(server_args)
        stock(server_args)
        admission.admit_arguments(server_args)

    return unless_disabled(stock, handle)


def register_algorithms(algorithms: Any) -> None:
    """Register DDTREE with ``SpeculativeAlgorithm``; called where SGLang defines that."""
    if not switches.ACTIVE.disabled:
        registration.register(algorithms)


def default_attention_backend(stock: Function) -> Function:
    """Decorate ``ServerArgs._get_default_attn_backend``: one that honours trees, for DDTREE."""

    @functools.wraps(stock)
    def choose(server_args: Any, use_mla_backend: bool, model_config: Any) -> str:
        name = str(stock(server_args, use_mla_backend, model_config))
        if not registration.is_asked_for(server_args):
            return name
        return attention.default_backend(server_args, name, mla=use_mla_backend)

    return unless_disabled(stock, choose)


def dflash_request(stock: Function) -> Function:
    """Decorate ``scheduler.validate_dflash_request``: refuse what DDTREE cannot serve."""

    @functools.wraps(stock)
    def validate(request: Any) -> str | None:
        message: str | None = stock(request)
        return requests.admit(request, message) if registration.is_running() else message

    return unless_disabled(stock, validate)


def attention_backend(stock: Function) -> Function:
    """Decorate ``ModelRunner.init_attention_backend``: refuse by object, and say what is live."""

    @functools.wraps(stock)
    def init(model_runner: Any) -> None:
        stock(model_runner)
        if not model_runner.is_draft_worker:
            admission.admit_runner(model_runner)

    return unless_disabled(stock, init)


def model_worker(stock: Function) -> Function:
    """Decorate ``Scheduler.init_model_worker``: export the identity as a metric."""

    @functools.wraps(stock)
    def init(scheduler: Any) -> None:
        stock(scheduler)
        server_info.export_metric(scheduler)

    return unless_disabled(stock, init)


def internal_state(stock: Function) -> Function:
    """Decorate ``Scheduler.get_internal_state``: add the identity."""

    @functools.wraps(stock)
    def state(scheduler: Any, recv_req: Any) -> Any:
        output = stock(scheduler, recv_req)
        server_info.add_to_internal_state(scheduler, output)
        return output

    return unless_disabled(stock, state)


@functools.cache  # DFLASH asks in every step; saying it once is enough
def _report_unresolved(backend: str, error: str) -> None:
    logger.error("the overlay cannot resolve %s (%s); SGLang's rule is used", backend, error)


def unless_disabled(stock: Function, hooked: Callable[..., Any]) -> Function:
    """Return ``hooked``, or with the overlay switched off ``stock`` itself."""
    return stock if switches.ACTIVE.disabled else cast("Function", hooked)
