"""Verify: prove what an installed SGLang is, and that it works here. Reads only, writes nothing.

The checks are data: a check is a function from the `Scene` to a `Check`, and is added to one of the
two lists below. Those on the tree run under the lock, so that no concurrent run is seen half way;
the slower ones on the host do not hold it.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from patcher import checks, lock, source, state
from patcher import site as sites
from patcher.checks import Check, Expect, Scene, Status
from patcher.errors import Fault, Refused, failed, told
from patcher.site import Site
from patcher.source import Source
from patcher.state import Survey
from patcher.states import TreeState
from patcher.value import Value, plain, replace

SCHEMA = 1
SWITCH = "SGLANG_OVERLAY_DISABLE"
SELF_TEST = "self-test"


def _check_import(scene: Scene) -> Check:
    from patcher import trial  # starts processes, and is often left out

    return trial.check_import(scene)


def _check_self_test(scene: Scene) -> Check:
    from patcher import self_test  # seldom asked for

    return self_test.check_self_test(scene)


_TREE: Mapping[str, Callable[[Scene], Check]] = {
    "files": checks.check_files,
    "record": checks.check_record,
    "bytecode": checks.check_bytecode,
    "leftovers": checks.check_leftovers,
    "pins": checks.check_pins,
}
_HOST: Mapping[str, Callable[[Scene], Check]] = {
    "import": _check_import,
    "gpu": checks.check_gpu,
    "processes": checks.check_processes,
    SELF_TEST: _check_self_test,
}
# The checks that depend on the machine: they may be left out, or insisted on.
OPTIONAL = ("import", "gpu", "pins", "processes", SELF_TEST)


class Request(Value):
    """What is to be verified.

    ``target`` is what `patcher.site.resolve` takes; ``expect`` what it is meant to be. A check in
    ``require`` fails where it would be skipped; one in ``skip`` is not run. Both hold names of
    `OPTIONAL` and have none in common. The self-test runs where ``self_test`` asks for it, or
    ``require``. ``server`` is the address of a running server to compare with the tree. ``wait`` is
    the seconds to wait for a run that changes the target.
    """

    target: str | None = None
    expect: Expect = Expect.PATCHED
    require: frozenset[str] = frozenset()
    skip: frozenset[str] = frozenset()
    self_test: bool = False
    server: str | None = None
    wait: float = 30.0


class Verdict(Value):
    """What was found. ``errors`` say why nothing could be judged; then there are no checks."""

    target: str
    overlay_version: str
    expect: Expect
    release: str | None = None
    state: TreeState | None = None
    checks: tuple[Check, ...] = ()
    errors: tuple[Fault, ...] = ()
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """0: nothing failed; 1: a check failed, or nothing could be judged."""
        failed = any(check.status is Status.FAILED for check in self.checks)
        return 1 if failed or self.errors else 0


def verify(request: Request) -> Verdict:
    """Check the target. Never raises `Refused`: see ``errors``."""
    assert not request.require & request.skip, "a check cannot be both required and skipped"
    assert request.require | request.skip <= set(OPTIONAL), "only an optional check can be either"
    ours = source.locate()
    site = None
    try:
        site = sites.resolve(request.target)
        with lock.hold(site.root, exclusive=False, wait=request.wait):
            scene = Scene(survey=state.survey(site, ours), expect=request.expect)
            tree_state = scene.survey.state
            found = [_run(name, check, scene, request) for name, check in _TREE.items()]
        asked = request.self_test or SELF_TEST in request.require
        found += [
            _run(name, check, scene, request)
            for name, check in _HOST.items()
            if asked or name != SELF_TEST
        ]
        if request.server is not None:
            from patcher import live  # costs more to import than all other checks to run

            found.append(live.check_server(scene, request.server))
    except Refused as refusal:
        return _no_verdict(request, ours, site, refusal.faults)
    except PermissionError as error:
        return _no_verdict(request, ours, site, [_unreadable(error)])
    except OSError as error:
        return _no_verdict(request, ours, site, failed(error, "could not be looked at").faults)
    return Verdict(
        target=str(site.root),
        overlay_version=ours.version,
        expect=request.expect,
        release=_release(scene.survey),
        state=tree_state,
        checks=tuple(found),
        warnings=switched_off(os.environ),
        notes=site.notes,
    )


def bug(message: str) -> Verdict:
    """Return the verdict of a run that ended in a fault of this program."""
    fault = Fault(code="bug", message=message, hint="Please report it with the lines on stderr.")
    return Verdict(target="", overlay_version="", expect=Expect.PATCHED, errors=(fault,))


def switched_off(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return a warning if ``environment`` switches the overlay off at run time."""
    value = environment.get(SWITCH, "")
    if value in ("", "0"):
        return ()
    if value == "1":
        effect = "a server started from this environment runs SGLang as released"
    else:
        effect = "a server started from this environment ends at once: only 0 and 1 are understood"
    return (f"{SWITCH}={value} is set: {effect}",)


def to_json(verdict: Verdict) -> str:
    """Return the verdict as one JSON object."""
    document = {
        "schema": SCHEMA,
        "command": "verify",
        "target": verdict.target,
        "release": verdict.release,
        "overlay_version": verdict.overlay_version,
        "expect": verdict.expect,
        "state": verdict.state,
        "checks": [_document(check) for check in verdict.checks],
        "errors": [plain(fault) for fault in verdict.errors],
        "warnings": list(verdict.warnings),
    }
    return json.dumps(document, indent=2)


def _document(check: Check) -> dict[str, Any]:
    document: dict[str, Any] = plain(check)
    if not check.rows:  # only the self-test has any
        del document["rows"]
    return document


def to_text(verdict: Verdict) -> str:
    """Return the verdict for people to read."""
    lines = told(verdict.notes, verdict.warnings, verdict.errors)
    for check in verdict.checks:
        lines.append(f"  {_word(check.status):8} {check.name:10} {check.message}")
        lines += [f"  {'':8} {'':10} → {check.hint}"] if check.hint else []
        if check.rows:
            from patcher import self_test

            lines += [f"    {line}" for line in self_test.table(check.rows)]
    return "\n".join([*lines, _summary(verdict)])


def _word(status: Status) -> str:
    # The one that ends in exit code 1 must catch the eye.
    word = str(status.value)
    return word.upper() if status is Status.FAILED else word


def _summary(verdict: Verdict) -> str:
    if verdict.errors:
        return f"nothing could be verified in {verdict.target}"
    counts = Counter(check.status.value for check in verdict.checks)
    told = ", ".join(f"{counts[status.value]} {status.value}" for status in Status)
    release = f"sglang {verdict.release}" if verdict.release else "sglang"
    state_now = verdict.state.value if verdict.state else "unknown"
    return (
        f"{release} in {verdict.target} is {state_now}, expected {verdict.expect.value} "
        f"(overlay {verdict.overlay_version}): {told}"
    )


def _run(name: str, check: Callable[[Scene], Check], scene: Scene, request: Request) -> Check:
    if name in request.skip:
        return Check(name=name, status=Status.SKIPPED, message="left out as asked (--skip)")
    found = check(scene)
    if name in request.require and found.status is Status.SKIPPED:
        message = f"{found.message}, but it is required (--require {name})"
        return replace(found, status=Status.FAILED, message=message)
    return found


def _unreadable(error: PermissionError) -> Fault:
    return Fault(
        code="unreadable",
        message=f"cannot be read by this user: {error.strerror}",
        path=str(error.filename or ""),
        hint="Run this as the user that the server runs as.",
    )


def _no_verdict(
    request: Request, ours: Source, site: Site | None, faults: tuple[Fault, ...] | list[Fault]
) -> Verdict:
    return Verdict(
        target=str(site.root) if site else (request.target or ""),
        overlay_version=ours.version,
        expect=request.expect,
        errors=tuple(faults),
        notes=site.notes if site else (),
    )


def _release(survey: Survey) -> str | None:
    return survey.manifest.release if survey.manifest else None
