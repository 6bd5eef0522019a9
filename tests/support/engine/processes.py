"""Starting and ending the engine's processes, and what is told when one of them fails."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path


class EngineFailure(Exception):
    """The engine did not do what the run needed. ``log`` is its standard error, whole."""

    def __init__(self, what: str, log: str) -> None:
        self.log = log
        tail = "\n".join(log.splitlines()[-40:])
        super().__init__(f"{what}\n--- end of the engine's standard error ---\n{tail}")


@dataclass(frozen=True, kw_only=True)
class EngineProcess:
    """A started process and the folder that its output goes to."""

    process: subprocess.Popen[bytes]
    folder: Path

    def wait(self, seconds: float) -> int:
        """Return the exit code; an `EngineFailure` when there is none after ``seconds``."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise EngineFailure(f"still running after {seconds} s", self.stderr()) from None

    def exit_code(self) -> int | None:
        """Return the exit code, or None while the process runs."""
        return self.process.poll()

    def stderr(self) -> str:
        """Return what has been written to standard error so far."""
        return (self.folder / "stderr.log").read_text(errors="replace")


@contextmanager
def running(
    command: Sequence[str], environment: Mapping[str, str], folder: Path
) -> Iterator[EngineProcess]:
    """Run ``command`` in a process group of its own, which is ended with everything it started."""
    out, err = folder / "stdout.log", folder / "stderr.log"
    with out.open("wb") as stdout, err.open("wb") as stderr:
        process = subprocess.Popen(
            command,
            env=dict(environment),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
    try:
        yield EngineProcess(process=process, folder=folder)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
