"""One site that is taken from state to state, over and over, and must always be exactly in one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from tests.support import used_sites
from tests.support.runs import ROOT, CommandLine, Ended, serve
from tests.support.snapshots import Snapshot, assert_identical, snapshot

RELEASE = "0.5.12.post1"


class State(Enum):
    """The states between which the command line takes a site."""

    PRISTINE = "pristine"
    EARLIER = "patched by an earlier overlay"
    PATCHED = "patched"


@dataclass(frozen=True, kw_only=True)
class Task:
    """A run to be disturbed: where it begins and should end, and where its opposite should end."""

    name: str
    start: State
    goal: State
    revert: bool
    opposite_goal: State


APPLY = Task(
    name="apply",
    start=State.PRISTINE,
    goal=State.PATCHED,
    revert=False,
    opposite_goal=State.PRISTINE,
)
REVERT = Task(
    name="revert",
    start=State.PATCHED,
    goal=State.PRISTINE,
    revert=True,
    opposite_goal=State.PATCHED,
)
UPGRADE = Task(
    name="upgrade",
    start=State.EARLIER,
    goal=State.PATCHED,
    revert=False,
    opposite_goal=State.PRISTINE,
)
TASKS = (APPLY, REVERT, UPGRADE)


class Bench:
    """A site, today's command line and an earlier one, and what each state must look like."""

    def __init__(
        self, site: Path, now: CommandLine, earlier: CommandLine, checkouts: tuple[Path, Path]
    ) -> None:
        self.site = site
        self.now = now
        self._earlier = earlier
        self._checkouts = checkouts  # the earlier one, and the one of now
        self._known: dict[State, Snapshot] = {State.PRISTINE: snapshot(site)}
        for state in (State.EARLIER, State.PATCHED, State.PRISTINE):
            self.bring(state)
            self._known.setdefault(state, self._look(state))
        self.assert_is(State.PRISTINE)

    def run(self, task: Task, *, opposite: bool = False, **how: object) -> Ended:
        """Run what ``task`` is about, or its opposite; ``how`` is what `CommandLine.run` takes."""
        verb = ["--revert"] if task.revert is not opposite else []
        return self.now.run("--target", self.site, *verb, **how)  # type: ignore[arg-type]

    def bring(self, state: State) -> None:
        """Take the site to ``state``, undisturbed."""
        if state is not State.PATCHED:
            self._do(self.now, "--revert")
        if state is not State.PRISTINE:
            self._do(self._earlier if state is State.EARLIER else self.now)

    def assert_is(self, state: State, after: object = "") -> None:
        """Fail unless the site is in ``state`` to the byte, and nothing is left over around it."""
        assert used_sites.leftovers(self.site) == [], f"left over after {after}"
        assert_identical(self._known[state], self._look(state), f"the {state.value} site {after}")

    def assert_importable(self, after: object = "") -> None:
        """Fail if a file is hooked and the overlay that it imports is not whole."""
        wrong = used_sites.hooks_without_modules(self.site, self._checkouts, RELEASE)
        assert wrong == [], f"after {after}: {wrong}"

    def _look(self, state: State) -> Snapshot:
        seen = snapshot(self.site)
        return seen if state is State.PRISTINE else used_sites.patched_view(seen, self.site)

    def _do(self, program: CommandLine, *verb: str) -> None:
        ended = program.run("--target", self.site, *verb)
        assert ended.code == 0, ended.told


@contextmanager
def set_up(folder: Path, *, small: bool = False) -> Iterator[Bench]:
    """Set up a bench in ``folder``, of this product or of a ``small`` one with the same engine."""
    product = used_sites.small_checkout(folder / "now", RELEASE) if small else ROOT
    checkout = used_sites.earlier_checkout(folder / "earlier", RELEASE, of=product)
    site = used_sites.lived_in_site(RELEASE, folder / "site-packages")
    with serve(product) as now, serve(checkout) as earlier:
        yield Bench(site, now, earlier, (checkout, product))
