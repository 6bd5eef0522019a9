"""A process that has imported SGLang once and forks a child per call: imports are most of a run.

``python -m tests.support.engine.warm`` reads folders from standard input, one a line. In each it
finds ``call.json`` and ``environment.json``; it answers with the child's process id, and with the
child's exit code once that has ended. Nothing of SGLang has run before the fork, and the harness is
loaded after it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import NoReturn

from tests.support.engine import child


def main() -> None:
    """Serve until standard input ends, as it does when the test session goes."""
    _import_engine()
    for line in sys.stdin:
        folder = Path(line.strip())
        pid = os.fork()
        if pid == 0:
            _become_child(folder)
        _answer(pid)
        _, status = os.waitpid(pid, 0)
        _answer(os.waitstatus_to_exitcode(status))


def _import_engine() -> None:
    """Import what every run imports; a module that is missing here only costs its run time."""
    import sglang.srt.managers.scheduler
    import sglang.srt.models.deepseek_v2
    import sglang.srt.models.dflash
    import sglang.srt.models.registry
    import sglang.srt.speculative.dflash_worker  # noqa: F401


def _become_child(folder: Path) -> NoReturn:
    os.setsid()
    os.chdir(folder)
    for stream, name in ((sys.stdout, "stdout.log"), (sys.stderr, "stderr.log")):
        log = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, stream.fileno())
    os.dup2(os.open(os.devnull, os.O_RDONLY), sys.stdin.fileno())
    os.environ.clear()
    os.environ.update(json.loads((folder / "environment.json").read_text()))
    child.play_and_exit(folder / "call.json")


def _answer(number: int) -> None:
    sys.stdout.write(f"{number}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
