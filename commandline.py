"""How the command lines end: every way out is an exit code."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable
from typing import NoReturn

import click

FAILED = 1
BUG = 3
INTERRUPTED = 130


target_option = click.option(
    "--target",
    metavar="DIR",
    help="A site-packages folder, a virtual environment or a Python executable. "
    "Default: the SGLang of the Python that runs this.",
)


def version_option(command: Callable[..., int]) -> Callable[..., int]:
    """Add ``--version``, which shows the overlay's version."""
    return click.option(
        "--version",
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=_show_version,
        help="Show the overlay's version and exit.",
    )(command)


def _show_version(context: click.Context, _: click.Parameter, asked: bool) -> None:
    if asked:
        from patcher import source

        click.echo(source.locate().version)
        context.exit()


def run(
    command: click.Command, *, interrupted: str, bug: Callable[[str], str] | None = None
) -> int:
    """Run ``command`` and return its exit code.

    Args:
        command: returns an exit code, or None for 0.
        interrupted: what to say after Ctrl-C, where the interruption itself says nothing.
        bug: what to print on stdout for a caller that asked for ``--json``, given the fault's
            message.
    """
    _complete_streams()
    try:
        return int(command.main(standalone_mode=False) or 0)
    except click.exceptions.Exit as end:
        return end.exit_code
    except click.UsageError as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt) as error:
        told = str(error.__cause__ or "") if isinstance(error, click.Abort) else str(error)
        click.echo(f"interrupted: {told}" if told else interrupted, err=True)
        return INTERRUPTED
    except Exception as error:  # noqa: BLE001 - the last resort of the program
        import traceback

        traceback.print_exc()
        click.echo("This is a bug of the overlay: please report the lines above.", err=True)
        if bug is not None and "--json" in sys.argv:
            click.echo(bug(str(error)))
        return BUG


def _complete_streams() -> None:
    """Let every text be printed in some form, and no file take the place of a closed stream."""
    streams = (sys.stdin, sys.stdout, sys.stderr)
    if None in streams:
        while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
            pass
        os.close(descriptor)
    for stream in streams[1:]:
        # An arrow in an encoding that has none must not end a run that went well.
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def leave(code: int) -> NoReturn:
    """End this process with ``code`` at once.

    Python would first take down every module: a fifth of the time of a run that changes nothing.
    """
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except OSError:
            code = code or FAILED
    os._exit(code)


def untold(report: str, error: OSError) -> int:
    """Say that the outcome could not be said: a full disk behind stdout is no bug, but no success.

    A broken pipe never comes here, click takes it for the reader's wish.
    """
    # What is still buffered would fail again when Python ends, with an exit code of its own.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno() if sys.__stdout__ else 1)
    with contextlib.suppress(OSError):
        click.echo(f"the report could not be written: {error.strerror}", err=True)
        click.echo(report, err=True)
    return FAILED
