#!/usr/bin/env python3
"""Apply the DDTree overlay to an installed SGLang, or revert it."""

from __future__ import annotations

import gc
import os
import sys

_OWN = os.path.dirname(os.path.realpath(__file__))  # noqa: PTH120 - pathlib is slow to load
if __name__ == "__main__" and sys.path[:1] != [_OWN]:
    sys.path.insert(0, _OWN)  # as `python -I` and `-P` do not

from patcher import prerequisites  # noqa: E402

prerequisites.demand()
if __name__ == "__main__":
    gc.disable()  # a run is over long before a collection would pay

import click  # noqa: E402

import commandline  # noqa: E402
from patcher import glance, report  # noqa: E402
from patcher.report import Outcome  # noqa: E402


def seconds(_: click.Context, parameter: click.Parameter, value: float) -> float:
    """Refuse what is no number: no time would ever be past it."""
    if value != value:
        raise click.BadParameter("it is not a number of seconds", param=parameter)
    return value


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 96})
@commandline.target_option
@click.option("--revert", is_flag=True, help="Take the overlay off, byte for byte.")
@click.option("--status", is_flag=True, help="Say what the target is; writes nothing.")
@click.option("--check", is_flag=True, help="Plan only: say what would change and write nothing.")
@click.option("--diff", "with_diff", is_flag=True, help="Show the change as a unified diff.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
@click.option("--allow-downgrade", is_flag=True, help="Replace a newer overlay by this one.")
@click.option("--while-running", is_flag=True, help="Go on although live processes use the target.")
@click.option(
    "--wait",
    type=click.FloatRange(min=0),
    default=30.0,
    show_default=True,
    callback=seconds,
    metavar="SECONDS",
    help="How long to wait for another run on the same target.",
)
@commandline.version_option
def main(
    *,
    target: str | None,
    revert: bool,
    status: bool,
    check: bool,
    with_diff: bool,
    as_json: bool,
    allow_downgrade: bool,
    while_running: bool,
    wait: float,
) -> int:
    """Apply the DDTree overlay to an installed SGLang (the default), or revert it.

    Exit codes: 0 done (changed or not); 1 refused, or failed with nothing left half done;
    2 wrong usage; 3 a bug of this program; 130 interrupted.
    """
    if status and (revert or check):
        raise click.UsageError("--status goes with neither --revert nor --check")
    outcome = None
    if not (status or revert):
        outcome = glance.recognise(target, command="check" if check else "apply")
    if outcome is None:
        from patcher import engine  # to load it takes longer than a glance

        verb = engine.status if status else engine.revert if revert else engine.apply
        outcome = verb(
            engine.Request(
                target=target,
                check=check,
                allow_downgrade=allow_downgrade,
                while_running=while_running,
                wait=wait,
            )
        )
    try:
        _show(outcome, as_json=as_json, with_diff=with_diff)
    except OSError as error:
        return commandline.untold(report.to_text(outcome), error)
    return outcome.exit_code


def _show(outcome: Outcome, *, as_json: bool, with_diff: bool) -> None:
    if as_json:
        click.echo(report.to_json(outcome, with_diff=with_diff))
        return
    if with_diff:
        click.echo(report.to_diff(outcome), nl=False)
    click.echo(report.to_text(outcome), err=with_diff or bool(outcome.errors))


def run() -> int:
    """Run the command line; return the exit code."""
    return commandline.run(
        main,
        interrupted="interrupted: nothing is left half done",
        bug=lambda message: report.to_json(report.bug("apply", message)),
    )


if __name__ == "__main__":
    commandline.leave(run())
