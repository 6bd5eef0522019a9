"""The refusals: a server whose verify backend would fail its draft tree does not start.

Twice, because each time something else is known: the resolved arguments name the backend before any
weight is loaded, and the made objects show what a name cannot.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from sglang_overlay import mask_table, switches, upstream, verify_engine
from sglang_overlay.identity import identify
from sglang_overlay.mask_policy import (
    Drafts,
    DroppedMaskError,
    Judgement,
    Traits,
    Verdict,
    able_names,
    refusal_message,
)
from sglang_overlay.srt import ranks, selection
from sglang_overlay.srt.ddtree import memory, registration, validation
from sglang_overlay.srt.verify_backend import expect_trees, judge_name, judge_object, leaves
from sglang_overlay.verify_engine import Choice, Facts

logger = logging.getLogger(__name__)


_ONLY_PREFILLS = Choice(engine=switches.STOCK, reason="a prefill server verifies nothing")


class UnkeptTreeError(ValueError):
    """SGLang cannot keep the accepted path of a draft tree in this server's KV pool."""


def admit_arguments(server_args: Any) -> None:
    """Judge the resolved ``server_args`` by backend name.

    Raises:
        DroppedMaskError: the drafts branch and the verify backend does not honour their mask.
        ImpossibleVerifyError: a switch asks for a verify engine that this server cannot have.
    """
    drafts = _drafts_of(server_args)
    asked = switches.ACTIVE.force_tree or switches.ACTIVE.verify_engine
    if drafts is None or not (drafts.branches or asked) or upstream.only_prefills(server_args):
        return
    name, chosen_by = upstream.verify_backend_name(server_args)
    traits = _traits_of(server_args, mla=server_args.use_mla_backend())
    class_name = judge_name(name, traits).class_name
    choice = choose(drafts, selection.facts_by_name(server_args, drafts, class_name))
    traits = replace(traits, tree_adapter=choice.runs_adapter)
    judgement = _explained(judge_name(name, traits), choice)
    verdict = Verdict(drafts=drafts, judgements=(judgement,))
    _enforce(verdict, chosen_by=chosen_by, traits=traits, device=server_args.device)


def admit_runner(model_runner: Any) -> None:
    """Judge the attention backend objects of the target's ``model_runner`` and say what is live.

    Where the overlay verifies, its adapter is attached here, before warm-up and graph capture. The
    identity is kept on the runner as ``overlay_identity``, for server info and the metric. A server
    that only prefills is not judged.

    Raises:
        DroppedMaskError: the drafts branch and a verify backend does not honour their mask.
        ImpossibleVerifyError: a switch asks for a verify engine that this server cannot have.
        UnkeptTreeError: the commit of an accepted path would fail, whoever verifies.
        MixedOverlayError: another tensor-parallel rank runs another overlay, or none.
    """
    server_args = model_runner.server_args
    drafts = _drafts_of(server_args)
    if drafts is not None and upstream.only_prefills(server_args):
        _report(model_runner, Verdict(drafts=drafts, only_prefills=True), _ONLY_PREFILLS)
        return
    facts = selection.facts_by_object(model_runner, drafts)
    choice = choose(drafts, facts)
    traits = replace(
        _traits_of(server_args, mla=model_runner.use_mla_backend),
        tree_adapter=choice.runs_adapter,
        counts_rows=drafts is not None and selection.counts_rows(model_runner),
        window=upstream.has_window(model_runner),
    )
    verdict = judge_runner(model_runner.attn_backend, drafts, traits, choice)
    _report(model_runner, verdict, choice)
    _, chosen_by = upstream.verify_backend_name(server_args)
    _enforce(verdict, chosen_by=chosen_by, traits=traits, device=server_args.device)
    if not facts.commits_trees:
        raise UnkeptTreeError(
            f"{drafts} was asked for with --page-size {server_args.page_size}, but SGLang cannot "
            "keep an accepted path there: it would have to move KV rows, which the server's "
            f"{type(model_runner.token_to_kv_pool).__name__} cannot. Set --page-size 1 or another "
            "--kv-cache-dtype, or make the drafts a chain"
        )
    if drafts is not None and choice.runs_adapter:
        selection.attach(model_runner, drafts, choice.engine)
    if registration.is_asked_for(server_args):
        _admit_draft_trees(model_runner, choice)


def _report(model_runner: Any, verdict: Verdict, choice: Choice) -> None:
    """Keep and log the identity of ``model_runner``; hold it to those of the other ranks."""
    identity = identify(verdict, tree_size=_tree_size(model_runner.server_args, choice))
    model_runner.overlay_identity = identity
    if model_runner.tp_rank == 0:
        logger.info("%s", identity.line())
        logger.info("%s", choice.line())
    if not upstream.joins_serving_ranks(model_runner.server_args):
        # Ranks that serve already would not answer.
        ranks.compare(model_runner.tp_group, identity)


def _admit_draft_trees(model_runner: Any, choice: Choice) -> None:
    """Check what DDTREE asks of the target's objects beyond its mask; have that mask built."""
    validation.check_runner(model_runner)
    memory.check_runner(model_runner)
    if not choice.runs_adapter:
        expect_trees(model_runner.attn_backend)


def judge_runner(
    backend: Any, drafts: Drafts | None, traits: Traits, choice: Choice | None = None
) -> Verdict:
    """Return the verdict on the target's ``backend`` object for ``drafts``."""
    if drafts is None:
        return Verdict(drafts=None)
    judgements = tuple(_explained(judge_object(leaf, traits), choice) for leaf in leaves(backend))
    engine = choice.engine if choice is not None and choice.runs_adapter else None
    return Verdict(drafts=drafts, judgements=judgements, tree_engine=engine)


def choose(drafts: Drafts | None, facts: Facts) -> Choice:
    """Choose the verify engine under this process's switches."""
    return verify_engine.choose(drafts, facts, switches.ACTIVE)


def _explained(judgement: Judgement, choice: Choice | None) -> Judgement:
    """Return ``judgement`` with the reasons why the overlay cannot mend it, if it could ever."""
    if choice is None or judgement.class_name != verify_engine.FLASHMLA_BACKEND:
        return judgement
    if choice.could_run_adapter:
        return judgement
    because = f"{judgement.because}; the overlay's tree adapter cannot run: "
    return replace(judgement, because=because + "; ".join(choice.obstacles))


def _tree_size(server_args: Any, choice: Choice) -> int | None:
    if choice.runs_adapter or registration.is_asked_for(server_args):
        return int(server_args.speculative_num_draft_tokens)
    return None


def _drafts_of(server_args: Any) -> Drafts | None:
    if server_args.speculative_algorithm is None:
        return None
    width = upstream.draft_width(server_args)
    if registration.is_asked_for(server_args):
        # As wide as the root alone can branch, whatever the drafts turn out to be.
        width = int(server_args.speculative_num_draft_tokens) - 1
    return Drafts(algorithm=server_args.speculative_algorithm, width=width)


def _traits_of(server_args: Any, *, mla: bool) -> Traits:
    return Traits(
        topk=int(server_args.speculative_eagle_topk or 0),
        mla=mla,
        page_size=server_args.page_size,
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
