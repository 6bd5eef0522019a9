"""Runs of the command line, whole or with a system call made to fail or to be the last.

The faults are injected by strace: a call fails with an error without being carried out, or the
process is killed (SIGKILL) as it enters it. Nothing in the program knows of either.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KILLED = -9

# Every call by which a program changes a filesystem. Only reads are not in it.
WRITING = (
    *("openat", "creat", "write", "pwrite64", "writev", "sendfile", "copy_file_range"),
    *("ftruncate", "truncate", "fallocate", "rename", "renameat", "renameat2", "link", "linkat"),
    *("unlink", "unlinkat", "symlink", "symlinkat", "mkdir", "mkdirat", "rmdir", "fsync"),
    *("fdatasync", "sync", "syncfs", "utime", "utimes", "utimensat", "chmod", "fchmod"),
    *("fchmodat", "chown", "fchown", "lchown", "fchownat", "setxattr", "lsetxattr", "fsetxattr"),
    *("removexattr", "fremovexattr"),
)
# Those that change which name leads to which file.
NAMING = {"rename", "renameat", "renameat2", "link", "linkat", "unlink", "unlinkat"}
NAMING |= {"symlink", "symlinkat", "mkdir", "mkdirat", "rmdir"}

_LINE = re.compile(r"(?:\d+ +)?(\w+)\((.*)")
_UNFINISHED = " <unfinished ...>"
_RESUMED = re.compile(r"\d+ +<\.\.\. \w+ resumed>(.*)")
_QUOTED = re.compile(r'"((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, kw_only=True)
class Call:
    """One system call that writes: the ``nth`` of its name (of its name and path, if opening)."""

    name: str
    nth: int
    path: str = ""

    def __str__(self) -> str:
        return f"{self.name}#{self.nth}{f' {self.path}' if self.path else ''}"

    def fault(self, effect: str, *, onwards: bool = False) -> Fault:
        """Return the fault with ``effect`` at this call, and at all later ones if ``onwards``."""
        return Fault(call=self, effect=effect, onwards=onwards)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A call and what becomes of it, in strace's words: ``signal=KILL``, ``error=ENOSPC``."""

    call: Call
    effect: str
    onwards: bool = False

    def __str__(self) -> str:
        return f"{self.effect} at {self.call}{' and all after it' if self.onwards else ''}"

    def options(self) -> list[str]:
        """Return strace's options for it."""
        plus = "+" if self.onwards else ""
        inject = f"inject={self.call.name}:{self.effect}:when={self.call.nth}{plus}"
        # How often files are opened for reading depends on the machine's other processes.
        return ["-e", inject, *(["-P", self.call.path] if self.call.path else [])]


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a run ended: exit code (minus the signal if killed), output, writing calls if traced."""

    code: int
    stdout: str
    stderr: str
    calls: tuple[Call, ...] = ()
    trace: str = ""

    @property
    def told(self) -> str:
        """All it said, for the message of a failed assertion."""
        return f"exit code {self.code}\n{self.stdout}{self.stderr}"


class CommandLine:
    """The program of one checkout, ready to be run many times. Make it with `serve`."""

    def __init__(self, server: subprocess.Popen[str], scratch: Path) -> None:
        self._server = server
        self._scratch = scratch

    def run(
        self,
        *arguments: str | Path,
        faults: Sequence[Fault] = (),
        trace: bool = False,
        environment: Mapping[str, str] | None = None,
        kill_after: float | None = None,
        at_once: int | None = None,
    ) -> Ended:
        """Run to the end.

        Args:
            arguments: those of the command line.
            faults: what goes wrong; no two may be at calls of the same name.
            trace: take down the writing calls that are made.
            environment: variables to set for this run.
            kill_after: send SIGKILL when so many seconds have passed.
            at_once: how many syncs the program has running at a time. If not given that is as
                shipped, but 1 in a traced run: strace counts the calls of each thread apart.
        """
        out, err = self._scratch / "stdout", self._scratch / "stderr"
        traced = trace or bool(faults)
        order = {
            "arguments": [str(one) for one in arguments],
            "environment": dict(environment or {}),
            "stdout": str(out),
            "stderr": str(err),
            "at_once": at_once or (1 if traced else None),
            "traced": traced,
        }
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps(order) + "\n")
        self._server.stdin.flush()
        pid = self._read()
        log = self._trace(pid, faults, take_down=trace) if traced else None
        if kill_after is not None:
            time.sleep(kill_after)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        code = self._read()
        text = log() if log else ""
        return Ended(
            code=code,
            stdout=out.read_text(),
            stderr=err.read_text(),
            calls=tuple(self._own(_calls(text))) if trace else (),
            trace=text,
        )

    def _own(self, calls: Iterator[Call]) -> Iterator[Call]:
        """Leave out what the fork server did before the tracer or after, as it happened."""
        return (call for call in calls if not call.path.startswith(str(self._scratch)))

    def _read(self) -> int:
        assert self._server.stdout is not None
        line = self._server.stdout.readline()
        assert line, "the server of runs is gone"
        return int(line)

    def _trace(self, pid: int, faults: Sequence[Fault], *, take_down: bool) -> Callable[[], str]:
        log = self._scratch / "trace"
        names = ",".join(WRITING if take_down else {fault.call.name for fault in faults})
        options = [option for fault in faults for option in fault.options()]
        options += ["-y"] if take_down else []  # which file a descriptor is
        strace = subprocess.Popen(
            ["strace", "-f", "-qq", "-s", "4096", "-o", str(log), "-e", f"trace={names}"]
            + [*options, "-p", str(pid)],
            stderr=subprocess.PIPE,
            text=True,
        )

        def finish() -> str:
            _, told = strace.communicate(timeout=60)
            assert log.exists(), f"strace did not start: {told}"
            return _returned(log.read_text(errors="replace"))

        return finish


@contextmanager
def serve(checkout: Path = ROOT) -> Iterator[CommandLine]:
    """Start the command line of ``checkout``, a folder with ``apply.py`` in it."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPYCACHEPREFIX"}
    with (
        tempfile.TemporaryDirectory() as scratch,
        subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("forkserver.py")), str(checkout)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**environment, "PYTHONDONTWRITEBYTECODE": "1"},
            cwd=scratch,
        ) as server,
    ):
        yield CommandLine(server, Path(scratch))
        assert server.stdin is not None
        server.stdin.close()
        server.wait(timeout=30)


def _returned(log: str) -> str:
    """Return the log with each call whole, at the line where it returned."""
    lines: list[str] = []
    begun: dict[str, str] = {}
    for line in log.splitlines():
        thread = line.partition(" ")[0]
        resumed = _RESUMED.match(line)
        if line.endswith(_UNFINISHED):
            begun[thread] = line.removesuffix(_UNFINISHED)
        elif resumed and thread in begun:
            lines.append(begun.pop(thread) + resumed[1])
        else:
            lines.append(line)
    # A call that killed the process never returns.
    return "\n".join([*lines, *begun.values()])


def _calls(log: str) -> Iterator[Call]:
    seen: Counter[tuple[str, str]] = Counter()
    for line in log.splitlines():
        match = _LINE.match(line)
        if not match:
            continue
        name, arguments = match.groups()
        path = ""
        if name == "openat":
            if "O_WRONLY" not in arguments and "O_RDWR" not in arguments:
                continue
            quoted = _QUOTED.search(arguments)
            path = quoted[1] if quoted else ""
        seen[name, path] += 1
        yield Call(name=name, nth=seen[name, path], path=path)
