#!/usr/bin/env python3
"""Verify the DDTree overlay on an installed SGLang. Reads only."""

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
from patcher import verify  # noqa: E402
from patcher.checks import Expect  # noqa: E402
from patcher.verify import OPTIONAL, Request  # noqa: E402


def names(
    context: click.Context, parameter: click.Parameter, value: tuple[str, ...]
) -> frozenset[str]:
    """Take the names of checks apart: repeated, or separated by commas."""
    chosen = frozenset(name for text in value for name in text.split(",") if name)
    for name in sorted(chosen.difference(OPTIONAL)):
        raise click.BadParameter(
            f"{name!r} is not one of {', '.join(OPTIONAL)}", ctx=context, param=parameter
        )
    return chosen


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 96})
@commandline.target_option
@click.option(
    "--expect",
    type=click.Choice([one.value for one in Expect]),
    default=Expect.PATCHED.value,
    show_default=True,
    help="What the target is meant to be.",
)
@click.option(
    "--require",
    multiple=True,
    callback=names,
    metavar="CHECKS",
    help=f"Fail where one of these would be skipped: {', '.join(OPTIONAL)} (comma-separated).",
)
@click.option(
    "--skip",
    multiple=True,
    callback=names,
    metavar="CHECKS",
    help="Do not run these; the same names. The import check takes seconds, the rest does not.",
)
@click.option(
    "--self-test",
    is_flag=True,
    help="Also compute and time the verify paths of this host, on its GPU: a minute or two.",
)
@click.option(
    "--server",
    metavar="URL",
    help="Also ask a running server which overlay it loaded, and compare that with the target.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
@commandline.version_option
def main(
    *,
    target: str | None,
    expect: str,
    require: frozenset[str],
    skip: frozenset[str],
    self_test: bool,
    server: str | None,
    as_json: bool,
) -> int:
    """Prove what an installed SGLang is and that it works here; change nothing.

    Exit codes: 0 nothing failed; 1 a check failed, or the target cannot be judged; 2 wrong
    usage; 3 a bug of this program; 130 interrupted.
    """
    if require & skip:
        raise click.UsageError(f"both required and skipped: {', '.join(sorted(require & skip))}")
    verdict = verify.verify(
        Request(
            target=target,
            expect=Expect(expect),
            require=require,
            skip=skip,
            self_test=self_test,
            server=server,
        )
    )
    text = verify.to_json(verdict) if as_json else verify.to_text(verdict)
    try:
        click.echo(text, err=bool(verdict.errors) and not as_json)
    except OSError as error:
        return commandline.untold(verify.to_text(verdict), error)
    return verdict.exit_code


def run() -> int:
    """Run the command line; return the exit code."""
    return commandline.run(
        main,
        interrupted="interrupted; nothing was changed",
        bug=lambda message: verify.to_json(verify.bug(message)),
    )


if __name__ == "__main__":
    commandline.leave(run())
