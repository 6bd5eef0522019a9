"""The refusals: a server whose verify backend would fail its draft tree does not start.

Twice, because each time something else is known: the resolved arguments name the backend before any
weight is loaded, and the made objects show what a name cannot.
"""

from __future__ import annotations

import logging
from typing import Any

from sglang_overlay import mask_table, switches, upstream
from sglang_overlay.identity import identify
from sglang_overlay.mask_policy import (
    Drafts,
    DroppedMaskError,
    Traits,
    Verdict,
    able_names,
    refusal_message,
)
from sglang_overlay.srt import ranks
from sglang_overlay.srt.verify_backend import judge_name, judge_object, leaves

logger = logging.getLogger(__name__)


def admit_arguments(server_args: Any) -> None:
    """Judge the resolved ``server_args`` by backend name.

    Raises:
        DroppedMaskError: the drafts branch and the verify backend does not honour their mask.
    """
    drafts = _drafts_of(server_args)
    if drafts is None or not drafts.branches:
        return
    name, chosen_by = upstream.verify_backend_name(server_args)
    traits = _traits_of(server_args, mla=server_args.use_mla_backend())
    verdict = Verdict(drafts=drafts, judgements=(judge_name(name, traits),))
    _enforce(verdict, chosen_by=chosen_by, traits=traits, device=server_args.device)


def admit_runner(model_runner: Any) -> None:
    """Judge the attention backend objects of the target's ``model_runner`` and say what is live.

    The identity is kept on the runner as ``overlay_identity``, for server info and the metric.

    Raises:
        DroppedMaskError: the drafts branch and a verify backend does not honour their mask.
        MixedOverlayError: another tensor-parallel rank runs another overlay, or none.
    """
    server_args = model_runner.server_args
    traits = _traits_of(server_args, mla=model_runner.use_mla_backend)
    verdict = judge_runner(model_runner.attn_backend, _drafts_of(server_args), traits)
    identity = identify(verdict)
    model_runner.overlay_identity = identity
    if model_runner.tp_rank == 0:
        logger.info("%s", identity.line())
    ranks.compare(model_runner.tp_group, identity)
    _, chosen_by = upstream.verify_backend_name(server_args)
    _enforce(verdict, chosen_by=chosen_by, traits=traits, device=server_args.device)


def judge_runner(backend: Any, drafts: Drafts | None, traits: Traits) -> Verdict:
    """Return the verdict on the target's ``backend`` object for ``drafts``."""
    if drafts is None:
        return Verdict(drafts=None)
    judgements = tuple(judge_object(leaf, traits) for leaf in leaves(backend))
    return Verdict(drafts=drafts, judgements=judgements)


def _drafts_of(server_args: Any) -> Drafts | None:
    if server_args.speculative_algorithm is None:
        return None
    return Drafts(
        algorithm=server_args.speculative_algorithm, width=upstream.draft_width(server_args)
    )


def _traits_of(server_args: Any, *, mla: bool) -> Traits:
    return Traits(
        topk=int(server_args.speculative_eagle_topk or 0), mla=mla, page_size=server_args.page_size
    )


def _enforce(verdict: Verdict, *, chosen_by: str, traits: Traits, device: str) -> None:
    if verdict.unable is None:
        return
    able = able_names(
        mask_table.NAMES,
        mask_table.newest_rows(),
        traits,
        device=device,
        registered=upstream.registered_backends(),
    )
    message = refusal_message(verdict, chosen_by=chosen_by, able=able)
    if not switches.ACTIVE.allow_dropped_mask:
        raise DroppedMaskError(message)
    logger.warning("Allowed by %s: %s", switches.ALLOW_DROPPED_MASK, message)
