"""The canary's rule: look at all, change wave by wave, bring a failed group back, then stop."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ansible_collections.ddtree.sglang_overlay.plugins.module_utils import waves

from openssh.hosts import Fleet, Host
from openssh.transport import Bundle, Lost, send

_AT_ONCE = 16
# After each of these all hosts of a group wait for each other.
PHASES = ("begin", "drain", "stop", "change", "verify", "start", "gate", "route", "finish")
# From here on the group serves as it should: Ctrl-C lets it end.
_SERVING = ("route", "finish")

Answer = Mapping[str, Any]


@dataclass(kw_only=True)
class Course:
    """How one host fared: ``result`` in a word, ``message`` why, ``seen`` what it was found as.

    ``routed``: the router may send requests to it. ``admitted``: it was told to, after the change.
    """

    host: Host
    result: str = "untouched"
    message: str = ""
    seen: dict[str, Any] = field(default_factory=dict)
    before: dict[str, Any] = field(default_factory=dict)
    begun: bool = False
    stopped: bool = False
    routed: bool = True
    admitted: bool = False


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """One run: what is rolled out, to which state, and whom to tell of every step."""

    fleet: Fleet
    bundle: Bundle
    previous: Bundle | None
    goal: str
    run: str
    take_over: bool
    tell: Callable[[Course, str], None]
    golden: Mapping[str, Any] | None = None
    # Set from outside: end after the phase that runs now, with every host whole.
    halt: threading.Event = field(default_factory=threading.Event)

    def look(self, courses: Sequence[Course], *, plan: bool) -> bool:
        """Look at all hosts; return whether a rollout may begin."""
        _each(courses, lambda course: self._look(course, plan=plan))
        if plan:
            self._refuse_doubles(courses)
        return all(course.result == "untouched" for course in courses)

    def carry_out(self, courses: Sequence[Course]) -> bool:
        """Change the hosts, wave by wave; return whether all went well."""
        by_name = {course.host.name: course for course in courses}
        names = waves.by_group(list(by_name), {n: c.host.group for n, c in by_name.items()})
        groups = [[by_name[name] for name in group] for group in names]
        for wave in waves.divide(groups, self.fleet.waves):
            if self.halt.is_set():
                return False
            with ThreadPoolExecutor(_AT_ONCE) as pool:
                went_well = list(pool.map(self._change_group, wave))
            if not all(went_well):
                return False
        return True

    def _look(self, course: Course, *, plan: bool) -> None:
        answer = self._order(course, "look", plan=self.goal if plan else None)
        if answer is None:
            return
        course.seen = dict(answer)
        if plan and self.goal == "patched" and not answer["journal"]:
            state = answer["overlay"]["state_after"]
            if answer.get("ready") is False:
                self._fail(course, "refused", f"{course.host.server_url} is not healthy")
            elif state == "outdated" and not self.previous:
                self._fail(course, "refused", "outdated: set previous_bundle, to be able to undo")
            elif state not in ("pristine", "patched", "interrupted", "outdated"):
                self._fail(course, "refused", f"{state}: revert this host first")

    def _refuse_doubles(self, courses: Sequence[Course]) -> None:
        for course in courses:
            place = course.seen.get("place")
            names = [other.host.name for other in courses if other.seen.get("place") == place]
            if place and len(names) > 1:
                told = f"{' and '.join(names)} are one host with one tree: list it once"
                self._fail(course, "refused", told)

    def _change_group(self, group: Sequence[Course]) -> bool:
        if self.halt.is_set():
            return False
        if not any(_pending(course) for course in group):
            phases: Iterable[str] = ("verify", "gate")
        else:
            phases = PHASES
        for phase in phases:
            went_well = _each(group, partial(self._step, phase))
            if all(went_well) and phase not in _SERVING and self._halted(group):
                for course in group:
                    self._fail(course, "failed", f"interrupted after {phase}")
            elif all(went_well):
                continue
            if phase == "finish":
                self._leave_open(group, went_well)
            else:
                self._roll_back(group)
            return False
        for course in group:
            course.result = "done" if course.begun else "unchanged"
            self.tell(course, "")
        return True

    def _halted(self, group: Sequence[Course]) -> bool:
        # A revert has nothing to go back to: the group ends what it began.
        begun = any(course.begun for course in group)
        return begun and self.goal == "patched" and self.halt.is_set()

    def _step(self, phase: str, course: Course) -> bool:
        self.tell(course, phase)
        if phase == "drain" and not self._take_out(course):
            return False
        if phase == "stop":
            course.stopped = True
        before = {"state": course.seen["overlay"]["state_after"]}
        fingerprint = course.seen["fingerprint"]
        answer = self._order(course, phase, state=self.goal, before=before, fingerprint=fingerprint)
        if answer is None:
            return False
        if "journal" in answer:
            course.begun, course.before = True, answer["journal"]["before"]
        return phase != "route" or self._put_back(course)

    def _leave_open(self, group: Sequence[Course], closed: Sequence[bool]) -> None:
        """Tell of a group that serves as it should, though not every journal could be closed."""
        for course, good in zip(group, closed, strict=True):
            if good:
                course.result = "done"
                self.tell(course, "")
            else:
                told = "it is in the router; the next run goes on from its journal"
                self._fail(course, course.result, f"{course.message}; {told}")

    def _roll_back(self, group: Sequence[Course]) -> None:
        if self.goal != "patched":
            for course in group:
                if course.begun and course.result == "untouched":
                    self._fail(course, "failed", "a peer failed: the next run finishes this host")
            return
        begun = [c for c in group if c.begun and c.result != "lost"]
        held = [c for c, good in zip(begun, _each(begun, self._hold), strict=True) if good]
        reachable = held
        # Together again: a server of several nodes only comes up when all of them start.
        for step in (self._leave, self._restore, self._serve_again):
            went_well = _each(reachable, step)
            reachable = [c for c, good in zip(reachable, went_well, strict=True) if good]
        for course in group:
            if course in reachable:
                self._fail(course, "rolled back", course.message or "a peer failed")
            elif course in held and course.result != "lost" and not course.routed:
                self._fail(course, "out of service", course.message)
            elif course in held and course.result != "lost":
                told = "it was not rolled back, and may be in the router"
                self._fail(course, "failed", f"{course.message}; {told}")

    def _hold(self, course: Course) -> bool:
        # Before all else: what another run has taken over is not touched any more.
        self.tell(course, "rollback")
        return self._order(course, "hold", undo=True) is not None

    def _leave(self, course: Course) -> bool:
        """Bring a server that was put into the router after the change out of it again, idle."""
        if not course.admitted:
            return True
        if course.routed and not self._take_out(course):
            return False
        return self._order(course, "drain", undo=True) is not None

    def _restore(self, course: Course) -> bool:
        if not course.stopped:
            return True
        outdated = course.before["state"] == "outdated"
        state = "patched" if course.before["state"] in ("patched", "outdated") else "pristine"
        interrupted = course.before["state"] == "interrupted"
        answer = self._order(
            course,
            "restore",
            undo=True,
            bundle=self.previous if outdated else self.bundle,
            state=state,
            allow_downgrade=outdated,
            digest=None if interrupted else course.before.get("digest"),
        )
        return answer is not None

    def _serve_again(self, course: Course) -> bool:
        return (
            self._order(course, "gate", undo=True) is not None
            and self._put_back(course)
            and self._order(course, "finish") is not None
        )

    def _take_out(self, course: Course) -> bool:
        """Take the server out of the router."""
        fault = _run(course.host.router_remove, course.host.router_limit)
        if fault:
            self._fail(course, "failed", fault)
        else:
            course.routed = False
        return not fault

    def _put_back(self, course: Course) -> bool:
        """Put the server into the router; where that fails, see that it is out of it."""
        course.admitted = course.routed = True
        fault = _run(course.host.router_add, course.host.router_limit)
        if fault:
            # It may have worked by half. Where it did not, there is nothing to take out.
            _run(course.host.router_remove, course.host.router_limit)
            course.routed = False
            self._fail(course, "failed", fault)
        return not fault

    def _order(
        self, course: Course, phase: str, *, bundle: Bundle | None = None, **more: object
    ) -> Answer | None:
        """Have the host do ``phase``; return its answer, None after noting why there is none."""
        host = course.host
        order = {
            "phase": phase,
            "run": self.run,
            "begun": course.begun,
            "undo": False,
            "take_over": self.take_over,
            "target": host.target,
            "site": course.seen.get("overlay", {}).get("target", host.target),
            "url": host.server_url,
            "golden": self.golden if phase == "gate" else None,
            **{name: getattr(host, name) for name in _COPIED},
            **more,
        }
        try:
            answer = send(host, order, bundle or self.bundle, self.fleet.ssh)
        except Lost as lost:
            self._fail(course, "lost", f"{phase}: {lost}")
            return None
        if not answer["ok"]:
            self._fail(course, "refused" if phase == "look" else "failed", answer["message"])
            return None
        return answer

    def _fail(self, course: Course, result: str, message: str) -> None:
        course.result = result
        course.message = (
            f"{course.message}; {message}" if course.message not in message else message
        )
        self.tell(course, "")


_COPIED = (
    *("api_key", "stop", "start", "drain_limit", "ready_limit", "lease"),
    *("journal_folder", "free_mib", "require", "skip"),
)


def _pending(course: Course) -> bool:
    seen = course.seen
    live = [one["fingerprint"] if one else None for one in seen.get("identities", [])]
    stale = any(one != seen["fingerprint"] for one in live) or seen.get("ready") is False
    return bool(seen["plan"]["changed"] or seen["journal"] or stale)


def _run(command: str, limit: float) -> str:
    """Run a router's shell command; return what went wrong, nothing if it went well."""
    if not command:
        return ""
    with subprocess.Popen(  # noqa: S602
        command,
        shell=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        # Its own group: all that it started ends with it.
        start_new_session=True,
    ) as started:
        try:
            said, _ = started.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(started.pid, signal.SIGKILL)
            return f"{command!r} did not end within {limit:g} s; see router_limit"
    return f"{command!r}: code {started.returncode} {said.strip()}" if started.returncode else ""


def _each(courses: Sequence[Course], step: Callable[[Course], Any]) -> list[Any]:
    if not courses:
        return []
    with ThreadPoolExecutor(min(_AT_ONCE, len(courses))) as pool:
        return list(pool.map(step, courses))
