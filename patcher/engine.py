"""The engine's verbs: each looks, plans, acts and looks again, and tells what happened.

What only a change needs is imported where it is needed: a run that finds nothing to do costs
little more than starting Python.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

from patcher import lock, plan, source, state
from patcher import site as sites
from patcher.change import Verb, note
from patcher.errors import Fault, Refused, failed
from patcher.plan import Plan
from patcher.report import Outcome
from patcher.site import Site
from patcher.source import Source
from patcher.state import Survey
from patcher.states import FileState, TreeState
from patcher.value import Value

# Changing has error handling of its own, in `patcher.transaction`; this is about looking.
_UNSEEN = "could not be looked at"


class Request(Value):
    """What is asked of the engine.

    ``target`` is what `patcher.site.resolve` takes; ``wait`` the seconds to wait for another run;
    ``check`` plans and writes nothing; ``while_running`` goes on although live processes use the
    tree.
    """

    target: str | None = None
    check: bool = False
    allow_downgrade: bool = False
    while_running: bool = False
    wait: float = 30.0


def apply(request: Request) -> Outcome:
    """Bring the target to *patched* by this overlay. Never raises `Refused`: see ``errors``."""

    def planner(survey: Survey) -> Plan:
        if survey.state is TreeState.PATCHED and survey.site.dist_info is not None:
            return plan.nothing(survey)
        from patcher.application import plan_apply

        return plan_apply(survey, allow_downgrade=request.allow_downgrade)

    return _change(request, "apply", planner)


def revert(request: Request) -> Outcome:
    """Take the overlay off the target, byte for byte. Never raises `Refused`."""

    def planner(survey: Survey) -> Plan:
        from patcher.reversal import plan_revert

        return plan_revert(survey)

    return _change(request, "revert", planner)


def status(request: Request) -> Outcome:
    """Say what the target is. Writes nothing. Never raises `Refused`."""
    ours = source.locate()
    site = None
    try:
        site = sites.resolve(request.target)
        with lock.hold(site.root, exclusive=False, wait=request.wait):
            survey = state.survey(site, ours)
    except Refused as refusal:
        return _refused(request, "status", ours, site, None, refusal)
    except OSError as error:
        return _refused(request, "status", ours, site, None, failed(error, _UNSEEN))
    reports = (*survey.files, *survey.overlay)
    return Outcome(
        command="status",
        target=str(site.root),
        release=_release(survey),
        overlay_version=ours.version,
        state_before=survey.state,
        state_after=survey.state,
        actions=tuple(note(r, Verb.KEEP, r.digest) for r in reports),
        notes=site.notes,
        warnings=_status_warnings(survey),
        texts=_applied_texts(survey),
    )


def _change(request: Request, command: str, planner: Callable[[Survey], Plan]) -> Outcome:
    ours = source.locate()
    site, survey = None, None
    try:
        site = sites.resolve(request.target)
        with lock.hold(site.root, exclusive=not request.check, wait=request.wait):
            survey = state.survey(site, ours)
            before = survey.state
            warnings: list[str] = []
            if before is TreeState.INTERRUPTED:
                if request.check:
                    return _unfinished(survey, command)
                warnings += _recover(site)
                survey = state.survey(site, ours)
            planned = planner(survey)
            warnings += planned.warnings
            changed = planned.changes_something
            if changed:
                warnings += _live(request, command, site, planned)
            if changed and not request.check:
                warnings += _carry_out(site, planned, purpose=f"{command} {ours.version}")
                after = state.survey(site, ours).state
            else:
                after = _expected(command, survey) if changed else survey.state
    except Refused as refusal:
        return _refused(request, command, ours, site, survey, refusal)
    except OSError as error:
        return _refused(request, command, ours, site, survey, failed(error, _UNSEEN))
    return Outcome(
        command="check" if request.check else command,
        target=str(site.root),
        release=_release(survey),
        overlay_version=ours.version,
        state_before=before,
        state_after=after,
        changed=changed or before is TreeState.INTERRUPTED,
        actions=planned.actions,
        warnings=tuple(warnings),
        notes=site.notes,
        texts=planned.texts,
    )


def _recover(site: Site) -> list[str]:
    from patcher import transaction

    recovery = transaction.recover(site.bases)
    if recovery is None:
        return ["an earlier run was interrupted before it changed anything; its files were removed"]
    done = "finished" if recovery.finished else "undone"
    told = [f"an earlier run ({recovery.purpose}) was interrupted; it was {done} first"]
    return told + [
        f"{path} was replaced since; it is left as it is" for path in recovery.left_alone
    ]


def _carry_out(site: Site, planned: Plan, *, purpose: str) -> list[str]:
    from patcher import transaction

    # First, since this cannot be taken back, need not be (Python compiles again), and would be
    # forgotten by the run that finishes an interrupted one.
    for pyc in planned.discard:
        try:
            pyc.unlink(missing_ok=True)
        except OSError as error:
            raise failed(error, "is bytecode of other text and cannot be removed") from error
    left = transaction.execute(
        planned.changes, bases=site.bases, purpose=purpose, prune=planned.prune
    )
    for folder, was in planned.folders.items():
        # Only where it holds what it held: Python trusts a folder's time for its listing.
        with contextlib.suppress(OSError):
            if plan.names(folder) == was.names:
                os.utime(folder, ns=(folder.stat().st_atime_ns, was.mtime_ns))
    return [f"could not be cleaned up, the next run will: {what}" for what in left]


def _live(request: Request, command: str, site: Site, planned: Plan) -> list[str]:
    """Warn of live processes; refuse where code that they may still load would go."""
    from patcher import processes

    found = processes.find(site)
    if not found:
        return []
    certain = [process for process in found if process.certain]
    if certain and planned.takes_code_away and not request.while_running and not request.check:
        raise Refused(
            Fault(
                code="in-use",
                message=f"process {process} runs SGLang from this tree and may load more of it",
                path=str(site.root),
                hint="Stop the server first, or add --while-running if it will be restarted "
                "right after.",
            )
            for process in certain
        )
    return [
        f"process {process} started before this {command}: it keeps the code it has loaded "
        "until it is restarted"
        for process in found
    ]


def _unfinished(survey: Survey, command: str) -> Outcome:
    return Outcome(
        command="check",
        target=str(survey.site.root),
        release=_release(survey),
        overlay_version=survey.source.version,
        state_before=TreeState.INTERRUPTED,
        state_after=_expected(command, survey),
        changed=True,
        warnings=("an earlier run was interrupted; it would be finished or undone first",),
        notes=survey.site.notes,
    )


def _expected(command: str, survey: Survey) -> TreeState:
    if command == "apply":
        return TreeState.PATCHED
    return TreeState.PRISTINE if survey.site.installed else TreeState.ABSENT


def _status_warnings(survey: Survey) -> tuple[str, ...]:
    if survey.interrupted:
        return ("an earlier run was interrupted; run apply or --revert to finish or undo it",)
    return tuple(
        f"{report.path} is {report.state.value}"
        for report in (*survey.files, *survey.overlay)
        if report.state in (FileState.FOREIGN, FileState.MISSING)
    )


def _applied_texts(survey: Survey) -> dict[str, tuple[bytes, bytes]]:
    receipt, texts = survey.receipt, {}
    for path, kept in receipt.files.items() if receipt else ():
        original, target = survey.site.root / kept.original, survey.site.package_root / path
        if original.is_file() and target.is_file():
            texts[path] = (original.read_bytes(), target.read_bytes())
    return texts


def _release(survey: Survey) -> str | None:
    return survey.manifest.release if survey.manifest else None


def _refused(
    request: Request,
    command: str,
    ours: Source,
    site: Site | None,
    survey: Survey | None,
    refusal: Refused,
) -> Outcome:
    before = survey.state if survey else None
    return Outcome(
        command="check" if request.check else command,
        target=str(site.root) if site else (request.target or ""),
        release=_release(survey) if survey else None,
        overlay_version=ours.version,
        state_before=before,
        state_after=before,
        errors=refusal.faults,
        notes=site.notes if site else (),
    )
