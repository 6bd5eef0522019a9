"""Runs the command line many times over at the price of a fork: started as a script by `runs`.

It imports ``apply.py`` of the checkout named in its first argument, then answers one JSON line on
stdin (arguments, environment, output files, syncs at a time, whether to wait for a tracer) with two
on stdout: the child's pid, and how it ended. What runs in the child is the program's own `run`, as
in a shell.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

_PR_SET_PTRACER = 0x59616D61
_ANY = ctypes.c_ulong(-1)


def main() -> None:
    """Serve until stdin ends."""
    sys.path.insert(0, sys.argv[1])
    import apply as program

    # What a changing run loads when it is needed: here once, not in each of thousands of children.
    for name in ("application", "diff", "engine", "processes", "reversal", "transaction"):
        importlib.import_module(f"patcher.{name}")
    importlib.import_module("unidiff")

    requests = sys.stdin
    for line in requests:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _become(order)
            code = 70
            try:
                code = program.run()
                sys.stdout.flush()
            finally:
                os._exit(code)
        _answer(pid)
        _, status = os.waitpid(pid, 0)
        _answer(os.waitstatus_to_exitcode(status))


def _answer(value: int) -> None:
    sys.__stdout__.write(f"{value}\n")  # type: ignore[union-attr]
    sys.__stdout__.flush()  # type: ignore[union-attr]


def _become(order: dict[str, Any]) -> None:
    os.environ.update(order["environment"])
    if order["at_once"]:
        sys.modules["patcher.files"].AT_ONCE = order["at_once"]  # type: ignore[attr-defined]
    # Where the tests run in the background, a shell or nohup has had some of these ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for ended_by in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ended_by, signal.SIG_DFL)
    sys.argv = ["apply.py", *order["arguments"]]
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        opened = os.open(order[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if order["traced"]:
        # Where Yama restricts tracing to parents, the child has to allow it.
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, _ANY, 0, 0, 0)
        while "TracerPid:\t0\n" in Path("/proc/self/status").read_text():
            time.sleep(0.001)


if __name__ == "__main__":
    main()
