"""What can go wrong, as data: a `Fault` says what, where and what to do; `Refused` has them all.

Everything a caller can provoke ends in `Refused`, after every fault has been collected. Any other
exception that leaves the engine is a bug of the engine.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable

from patcher.value import Value

# The code of the one fault after which a tree is not as it was: also undoing failed.
LEFT_OPEN = "left-open"


class Fault(Value):
    """One reason why something was not done.

    ``code`` is stable and meant for scripts (kebab-case, listed in docs/operations.md), ``message``
    says what was found and what was needed, ``hint`` what the reader can do about it.
    """

    code: str
    message: str
    path: str = ""
    hint: str = ""


class Refused(Exception):
    """The request was refused, or failed and was undone. The tree is as it was before."""

    def __init__(self, faults: Iterable[Fault]) -> None:
        self.faults = tuple(faults)
        assert self.faults, "a refusal needs a reason"
        super().__init__("; ".join(fault.message for fault in self.faults))


def refuse(code: str, message: str, *, path: str = "", hint: str = "") -> Refused:
    """Return a `Refused` with one fault, to be raised by the caller."""
    return Refused([Fault(code=code, message=message, path=path, hint=hint)])


def told(notes: Iterable[str], warnings: Iterable[str], faults: Iterable[Fault]) -> list[str]:
    """Return notes, warnings and faults as lines for people to read."""
    lines = [f"note: {note}" for note in notes]
    lines += [f"warning: {warning}" for warning in warnings]
    for fault in faults:
        where = f"{fault.path}: " if fault.path else ""
        lines.append(f"error [{fault.code}]: {where}{fault.message}")
        lines += [f"  → {fault.hint}"] if fault.hint else []
    return lines


def failed(error: OSError, what: str, *, code: str = "io-error") -> Refused:
    """Return a `Refused` that says ``what`` failed, at which path, and what to do about it."""
    hints = {
        errno.ENOSPC: "Free some space on this filesystem, then run this again.",
        errno.EACCES: "Run this as the owner of the tree.",
        errno.EPERM: "Run this as the owner of the tree.",
        errno.EROFS: "This filesystem is read-only: remount it, or patch when the image is built.",
    }
    hint = hints.get(error.errno or 0, "Look at the filesystem's health, then run this again.")
    message = f"{what}: {error.strerror or error}"
    return refuse(code, message, path=str(error.filename or ""), hint=hint)
