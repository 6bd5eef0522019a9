"""Starting and ending the engine's processes, and what is told when one of them fails."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
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


class WarmEngine:
    """The near end of `tests.support.engine.warm`: SGLang imported once, one fork per call."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  lives as long as the process
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.engine.warm"],
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
        )

    def run(self, folder: Path, environment: Mapping[str, str], seconds: float) -> int:
        """Play the call in ``folder`` and return the child's exit code (negative: a signal).

        Raises `EngineFailure` when it takes more than ``seconds``; the child is killed then.
        """
        (folder / "environment.json").write_text(json.dumps(dict(environment)))
        stdin = self._process.stdin
        assert stdin is not None
        try:
            stdin.write(f"{folder}\n".encode())
            stdin.flush()
        except BrokenPipeError:
            raise self._gone() from None
        child = self._answer(seconds)
        assert child is not None, "a fork takes no time"
        try:
            code = self._answer(seconds)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
        if code is None:
            self._answer(seconds)
            log = (folder / "stderr.log").read_text(errors="replace")
            raise EngineFailure(f"still running after {seconds} s", log)
        return code

    def close(self) -> None:
        """End the process and wait for it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()
        self._errors.close()

    def _answer(self, seconds: float) -> int | None:
        """Return the next number that the process writes, or None when it takes too long."""
        stdout = self._process.stdout
        assert stdout is not None
        readable, _, _ = select.select([stdout], [], [], seconds)
        if not readable:
            return None
        line = stdout.readline()
        if not line:
            raise self._gone()
        return int(line)

    def _gone(self) -> EngineFailure:
        self._errors.seek(0)
        log = self._errors.read().decode(errors="replace")
        return EngineFailure("SGLang could not be imported", log)
