"""One change at a time: an advisory lock on the site-packages folder itself.

The lock sits on a read-only descriptor of the folder, so it needs no file of its own, works on a
read-only tree and for a user who may not write, and is gone with the process that held it. A
network filesystem may keep it to the host that took it: see `patcher.transaction`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from patcher.errors import refuse

if TYPE_CHECKING:
    from pathlib import Path

_POLL_SECONDS = 0.05


@contextlib.contextmanager
def hold(folder: str | Path, *, exclusive: bool, wait: float) -> Iterator[None]:
    """Hold the lock on ``folder``, waiting up to ``wait`` seconds for another run to end.

    Raises:
        Refused: it was not to be had in that time.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _acquire(descriptor, folder, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH, wait)
        yield
    finally:
        os.close(descriptor)


def _acquire(descriptor: int, folder: str | Path, kind: int, wait: float) -> None:
    deadline = time.monotonic() + wait
    while True:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise refuse(
                    "locked",
                    f"another run of the overlay holds this tree (waited {wait:g} s)",
                    path=str(folder),
                    hint="Let it finish, or wait longer with --wait SECONDS.",
                ) from None
            time.sleep(_POLL_SECONDS)
        else:
            return
