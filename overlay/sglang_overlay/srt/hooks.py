"""The decorators that the patches put on SGLang's functions; one per function, no behaviour here.

SGLang imports this module from files that every process loads, some of them before torch is set up,
so nothing here may import torch or SGLang at module level.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def verify_mask_policy(stock: Function) -> Function:
    """Decorate ``dflash_utils.resolve_dflash_verify_mask_policy``."""
    return stock


def speculative_arguments(stock: Function) -> Function:
    """Decorate ``ServerArgs._handle_speculative_decoding``."""
    return stock


def attention_backend(stock: Function) -> Function:
    """Decorate ``ModelRunner.init_attention_backend``."""
    return stock


def model_worker(stock: Function) -> Function:
    """Decorate ``Scheduler.init_model_worker``."""
    return stock


def internal_state(stock: Function) -> Function:
    """Decorate ``Scheduler.get_internal_state``."""
    return stock
