"""What was done, for people and for machines.

The JSON form is stable: schema 1, documented in docs/operations.md.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping

from patcher.change import Action, Verb
from patcher.errors import LEFT_OPEN, Fault, told
from patcher.states import TreeState
from patcher.value import Value, plain

SCHEMA = 1


class Outcome(Value):
    """The result of one run of the engine.

    With ``command`` ``check``, ``changed`` says whether an apply (or revert) would change
    anything, and ``state_after`` what the tree would be.
    """

    command: str
    target: str
    release: str | None
    overlay_version: str | None
    state_before: TreeState | None
    state_after: TreeState | None
    changed: bool = False
    actions: tuple[Action, ...] = ()
    errors: tuple[Fault, ...] = ()
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    texts: Mapping[str, tuple[bytes, bytes]] | None = None

    @property
    def exit_code(self) -> int:
        """0: done, changed or not; 1: refused, or failed with nothing left half done."""
        return 1 if self.errors else 0


def bug(command: str, what: str) -> Outcome:
    """Return the outcome of a run that ended in a fault of this program."""
    return Outcome(
        command=command,
        target="",
        release=None,
        overlay_version=None,
        state_before=None,
        state_after=None,
        errors=(
            Fault(
                code="bug",
                message=what,
                hint="Please report it with the lines on stderr. Whatever was begun is finished "
                "or undone by the next run.",
            ),
        ),
    )


def to_json(outcome: Outcome, *, with_diff: bool = False) -> str:
    """Return the outcome as one JSON object."""
    document = {
        "schema": SCHEMA,
        "command": outcome.command,
        "target": outcome.target,
        "release": outcome.release,
        "overlay_version": outcome.overlay_version,
        "state_before": outcome.state_before,
        "state_after": outcome.state_after,
        "changed": outcome.changed,
        "files": [plain(action) for action in outcome.actions],
        "errors": [plain(fault) for fault in outcome.errors],
        "warnings": list(outcome.warnings),
    }
    if with_diff:
        document["diff"] = to_diff(outcome)
    return json.dumps(document, indent=2)


def to_diff(outcome: Outcome) -> str:
    """Return the changed files as a unified diff."""
    from patcher import diff

    return "".join(
        diff.unified(before, after, path=path)
        for path, (before, after) in sorted((outcome.texts or {}).items())
    )


def to_text(outcome: Outcome) -> str:
    """Return the outcome for people to read."""
    lines = told(outcome.notes, outcome.warnings, outcome.errors)
    if outcome.errors:
        whole = LEFT_OPEN not in {fault.code for fault in outcome.errors}
        end = "nothing was changed" if whole else "half done, to be finished by the next run"
        lines.append(f"{outcome.command} refused: {end}, in {outcome.target}")
        return "\n".join(lines)
    lines += [
        f"  {action.action.value:8} {action.path}"
        for action in outcome.actions
        if action.action not in (Verb.KEEP, Verb.ADD, Verb.REMOVE)
    ]
    counts = Counter(action.action for action in outcome.actions)
    for verb in (Verb.ADD, Verb.REMOVE):
        if counts[verb]:
            lines.append(f"  {verb.value:8} {counts[verb]} overlay modules")
    lines.append(_summary(outcome))
    return "\n".join(lines)


def _summary(outcome: Outcome) -> str:
    release = f"sglang {outcome.release}" if outcome.release else "sglang"
    where = f"{release} in {outcome.target}"
    before = outcome.state_before.value if outcome.state_before else "unknown"
    after = outcome.state_after.value if outcome.state_after else "unknown"
    if outcome.command == "status":
        return f"{where} is {after} (this overlay: {outcome.overlay_version})"
    if not outcome.changed:
        return f"{where} is {after}; nothing to do"
    verb = "would go" if outcome.command == "check" else "went"
    return f"{where} {verb} from {before} to {after} (overlay {outcome.overlay_version})"
