"""The command line: options → one call → table, JSON, HTML → exit code."""

from __future__ import annotations

import json
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import click
from ansible_collections.ddtree.sglang_overlay.plugins.module_utils import server
from ansible_collections.ddtree.sglang_overlay.plugins.plugin_utils import signature

from openssh import hosts, report
from openssh.board import Board
from openssh.hosts import Fleet
from openssh.rollout import Course, Rollout
from openssh.transport import Bundle

# What a shell says of a command that Ctrl-C ended.
_INTERRUPTED = 130
_WENT_WELL = ("done", "unchanged", "would change")
_OUT = click.Path(path_type=Path, dir_okay=False, writable=True)
_HELP = {"help_option_names": ["-h", "--help"], "max_content_width": 96}


@click.group(context_settings=_HELP)
def main() -> None:
    """Look at, change and report a fleet over OpenSSH.

    Exit code 1: something was refused or failed, and where it failed the rollout stopped.

    Ctrl-C ends a rollout after the phase that runs: the server groups in work are brought back
    (a revert ends them), and none is begun. Pressed once more, it leaves at once; the next run
    goes on from the journals. Exit code 130.
    """


@main.command()
@click.argument("bundle", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--key", required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
def sign(bundle: Path, key: Path) -> None:
    """Sign BUNDLE with the private KEY: writes BUNDLE.sig."""
    try:
        click.echo(f"wrote {signature.sign(bundle, key)}")
    except signature.SignatureFault as fault:
        raise click.ClickException(str(fault)) from fault


@main.command()
@click.argument("url")
@click.option("--prompts", required=True, type=click.File(), help="One prompt a line.")
@click.option("--out", required=True, type=click.Path(path_type=Path))
@click.option("--max-new-tokens", default=32, show_default=True)
def record(url: str, prompts: Iterable[str], out: Path, max_new_tokens: int) -> None:
    """Ask the stock server at URL and keep the prompts that it answers alike every time."""
    lines = [line.strip() for line in prompts if line.strip()]
    sampling = {"temperature": 0, "max_new_tokens": max_new_tokens}
    live = server.Server(url.rstrip("/"))
    try:
        if any(live.identities()):
            raise click.ClickException(f"{url} runs the overlay; record from a stock server")
        golden = server.record(live, lines, sampling)
    except server.ServerFault as fault:
        raise click.ClickException(str(fault)) from fault
    told = f"{len(golden['answers'])} of {len(lines)} prompts are answered alike every time"
    if len(golden["answers"]) < server.LEAST:
        raise click.ClickException(f"{told}, {server.LEAST} are needed: give more prompts")
    out.write_text(json.dumps(golden, indent=1) + "\n")
    click.echo(told)


def _in_a_folder(context: click.Context, option: click.Parameter, path: Path | None) -> Path | None:
    # Found out before the rollout, not after it.
    if path and not path.parent.is_dir():
        raise click.BadParameter(f"there is no folder {path.parent}")
    return path


def _common(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that every command on hosts has."""
    for option in (
        click.option("--hosts", "path", required=True, type=click.Path(path_type=Path)),
        click.option("--limit", help="Only these hosts, separated by commas."),
        click.option(
            "--json", "as_json", type=_OUT, callback=_in_a_folder, help="Write the report."
        ),
        click.option(
            "--html", "as_html", type=_OUT, callback=_in_a_folder, help="The same as a page."
        ),
    ):
        command = option(command)
    return command


@main.command()
@_common
def status(path: Path, limit: str | None, as_json: Path | None, as_html: Path | None) -> None:
    """Say what every host is; changes nothing."""
    courses, rollout = _prepare(path, limit, "patched", take_over=False)
    good = rollout.look(courses, plan=False)
    for course in courses:
        course.result = "seen" if course.result == "untouched" else course.result
    _tell("status", rollout.run, courses, as_json, as_html)
    sys.exit(0 if good else 1)


@main.command()
@_common
@click.option("--check", is_flag=True, help="Look and plan only.")
@click.option("--take-over", is_flag=True, help="Go on where a dead run's lease has not ended.")
def apply(
    path: Path,
    limit: str | None,
    as_json: Path | None,
    as_html: Path | None,
    check: bool,
    take_over: bool,
) -> None:
    """Roll the overlay out, wave by wave; a failed server group is rolled back and ends it."""
    _change("apply", "patched", path, limit, as_json, as_html, check, take_over)


@main.command()
@_common
@click.option("--check", is_flag=True, help="Look and plan only.")
@click.option("--take-over", is_flag=True, help="Go on where a dead run's lease has not ended.")
def revert(
    path: Path,
    limit: str | None,
    as_json: Path | None,
    as_html: Path | None,
    check: bool,
    take_over: bool,
) -> None:
    """Take the overlay off, wave by wave."""
    _change("revert", "pristine", path, limit, as_json, as_html, check, take_over)


def _change(
    command: str,
    goal: str,
    path: Path,
    limit: str | None,
    as_json: Path | None,
    as_html: Path | None,
    check: bool,
    take_over: bool,
) -> None:
    courses, rollout = _prepare(path, limit, goal, take_over=take_over)
    if rollout.golden is None:
        raise click.ClickException(f"{path} names no golden answers; see `fleet record`")
    _end_gently(rollout)
    good = _awake(lambda: rollout.look(courses, plan=True))
    if good and check:
        for course in courses:
            course.result = "would change" if course.seen["plan"]["changed"] else "unchanged"
    elif good:
        good = _awake(lambda: rollout.carry_out(courses))
        kept = {id(course): (course.result, course.message) for course in courses}
        rollout.look([course for course in courses if course.result != "lost"], plan=False)
        for course in courses:
            course.result, course.message = kept[id(course)]
    _tell(command, rollout.run, courses, as_json, as_html)
    halted = rollout.halt.is_set() and any(c.result not in _WENT_WELL for c in courses)
    sys.exit(_INTERRUPTED if halted else 0 if good else 1)


def _awake(work: Callable[[], bool]) -> bool:
    """Return what ``work`` does, with the main thread awake for signals.

    Python takes a signal that comes just before the main thread begins to wait only when the wait
    ends: that may be minutes, so it waits in short turns.
    """
    with ThreadPoolExecutor(1, initializer=_leave_signals_to_the_main_thread) as pool:
        future = pool.submit(work)
        while not wait([future], timeout=0.2).done:
            pass
    return future.result()


def _leave_signals_to_the_main_thread() -> None:
    # What it starts inherits this: a Ctrl-C that meets a child at its birth, before it has a
    # session of its own, would end it, and with it the connection to a host.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})


def _end_gently(rollout: Rollout) -> None:
    """Have Ctrl-C, a closed terminal and a kill end the rollout with every host whole."""

    def end(number: int, frame: object) -> None:
        if rollout.halt.is_set():
            os._exit(_INTERRUPTED)  # the phases that run on hosts end, and their journals stay
        rollout.halt.set()
        click.echo(
            "ends after this phase, and brings back what is in work; once more: leave at once",
            err=True,
        )

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup leaves it
            signal.signal(number, end)


def _prepare(
    path: Path, limit: str | None, goal: str, *, take_over: bool
) -> tuple[list[Course], Rollout]:
    try:
        fleet = hosts.read(path)
        chosen = _choose(fleet, limit)
        bundle = _verified(fleet, fleet.bundle)
        previous = _verified(fleet, fleet.previous_bundle) if fleet.previous_bundle else None
        golden = _golden(fleet.golden) if fleet.golden else None
    except (hosts.HostsFault, signature.SignatureFault, server.ServerFault) as fault:
        raise click.ClickException(str(fault)) from fault
    run = f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())}-{secrets.token_hex(3)}"
    rollout = Rollout(
        fleet=fleet,
        bundle=bundle,
        previous=previous,
        goal=goal,
        run=run,
        take_over=take_over,
        tell=Board(chosen, sys.stdout).tell,
        golden=golden,
    )
    return chosen, rollout


def _golden(path: Path) -> Mapping[str, Any]:
    try:
        return server.check_golden(json.loads(path.read_text()))
    except (OSError, ValueError, server.ServerFault) as fault:
        raise server.ServerFault(f"{path}: {fault}") from fault


def _choose(fleet: Fleet, limit: str | None) -> list[Course]:
    names = set(filter(None, (limit or "").replace(",", " ").split()))
    if limit is not None and not names:
        raise hosts.HostsFault("--limit names no host; leave it out for all")
    chosen = [host for host in fleet.hosts if not names or host.name in names]
    if unknown := sorted(names - {host.name for host in fleet.hosts}):
        raise hosts.HostsFault(f"--limit names no host of the list: {', '.join(unknown)}")
    groups = {host.group for host in chosen}
    left_out = [h.name for h in fleet.hosts if h.group in groups and h not in chosen]
    if left_out:
        raise hosts.HostsFault(f"hosts of one group move together; add {', '.join(left_out)}")
    return [Course(host=host) for host in chosen]


def _verified(fleet: Fleet, path: Path) -> Bundle:
    content, sha256 = signature.verified(
        path, allowed_signers=fleet.allowed_signers, signer=fleet.signer
    )
    return Bundle(content=content, sha256=sha256)


def _tell(
    command: str, run: str, courses: Sequence[Course], as_json: Path | None, as_html: Path | None
) -> None:
    told = report.to_json(command, run, courses)
    if as_json:
        as_json.write_text(json.dumps(told, indent=1) + "\n")
    if as_html:
        as_html.write_text(report.to_html(told))
    click.echo(report.to_text(told))
