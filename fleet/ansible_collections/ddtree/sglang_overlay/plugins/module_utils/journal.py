"""The journal of a host that is being changed: who does it, until when, and what was there before.

It is there from before the first change until the host serves again. A run that finds one knows
that the host was lost half way, or, before its lease ends, that another run is at work. All access
is under a lock on the folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class JournalFault(Exception):
    """Another run is at work on this host, or has taken it over."""


@dataclass(frozen=True)
class Journal:
    """The journal for one target, kept in ``folder``."""

    folder: Path
    target: str

    @property
    def path(self) -> Path:
        """The file: there may be several targets on one host."""
        return self.folder / f"{hashlib.sha256(self.target.encode()).hexdigest()[:16]}.json"

    def read(self) -> Mapping[str, Any] | None:
        """Return what the journal holds, None if there is none.

        Raises:
            JournalFault: there is something that cannot be read.
        """
        try:
            found: Mapping[str, Any] = json.loads(self.path.read_text())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise JournalFault(f"the journal {self.path} cannot be read: {error}") from error
        return found

    def check_free(self, run: str, *, take_over: bool) -> Mapping[str, Any] | None:
        """Return the journal that an earlier run left, None if there is none.

        Raises:
            JournalFault: its run is another and still has time.
        """
        found = self.read()
        if found and found["run"] != run and not take_over and found["lease"] > time.time():
            left = found["lease"] - time.time()
            raise JournalFault(
                f"the rollout {found['run']} is at work here (phase {found['phase']}, lease for "
                f"another {left:.0f} s). Let it end; if it is dead, wait, or take over on purpose"
            )
        return found

    def open(
        self,
        run: str,
        before: Mapping[str, Any],
        *,
        lease: float,
        take_over: bool,
        same: Callable[[], bool] = lambda: True,
    ) -> Mapping[str, Any]:
        """Begin, or go on with what an earlier run left: then what it noted as ``before`` stays.

        ``same`` tells whether the host still is what ``before`` says: from here on no other run
        can change it, but one may have since it was looked at.

        Raises:
            JournalFault: another run is at work here, or was since, or nothing can be written.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise JournalFault(f"{self.folder} cannot be made: {error}") from error
        try:
            with self._locked():
                found = self.check_free(run, take_over=take_over)
                if not found and not same():
                    raise JournalFault(
                        "the overlay here was changed after it was looked at, by another rollout "
                        "or by hand: run again"
                    )
                kept = found["before"] if found else dict(before)
                return self._write(run, kept, "begun", lease)
        except JournalFault:
            self._drop_folder()
            raise

    def note(self, run: str, phase: str, *, lease: float, **known: Any) -> Mapping[str, Any]:
        """Take down the phase, what is newly ``known`` of before, and renew the lease.

        What is known already is not overwritten: only the first run saw the host untouched.

        Raises:
            JournalFault: the journal is not this run's any more.
        """
        with self._locked():
            found = self._own(run)
            return self._write(run, {**known, **found["before"]}, phase, lease)

    def own(self, run: str, phase: str, *, lease: float) -> Mapping[str, Any]:
        """See that the journal is still this run's; take down the phase and renew the lease.

        For a rollback: it goes on where the renewal cannot be written, as on a full disk.

        Raises:
            JournalFault: the journal is not this run's any more.
        """
        with self._locked():
            found = self._own(run)
            try:
                return self._write(run, found["before"], phase, lease)
            except JournalFault:
                return found

    def close(self, run: str) -> None:
        """End: the host is whole again. An empty folder goes too.

        Raises:
            JournalFault: the journal is not this run's any more.
        """
        with self._locked():
            self._own(run)
            self.path.unlink()
        self._drop_folder()

    def _drop_folder(self) -> None:
        """Remove the folder, unless it holds something."""
        with contextlib.suppress(OSError):
            self.folder.rmdir()

    def _own(self, run: str) -> Mapping[str, Any]:
        found = self.read()
        if not found or found["run"] != run:
            raise JournalFault(f"the journal {self.path} was taken over by another rollout")
        return found

    def _write(
        self, run: str, before: Mapping[str, Any], phase: str, lease: float
    ) -> Mapping[str, Any]:
        document = {
            "schema": 1,
            "run": run,
            "target": self.target,
            "phase": phase,
            "lease": time.time() + lease,
            "before": dict(before),
        }
        staged = self.path.with_suffix(".new")
        try:
            with staged.open("w") as stream:
                stream.write(json.dumps(document, indent=1) + "\n")
                stream.flush()
                # A journal that is empty after a power loss would hide what was there before.
                os.fsync(stream.fileno())
            staged.replace(self.path)
        except OSError as error:
            with contextlib.suppress(OSError):
                staged.unlink()
            raise JournalFault(f"the journal {self.path} cannot be written: {error}") from error
        return document

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            descriptor = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise JournalFault(f"{self.folder} cannot be locked: {error}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)
