"""All or nothing: changes to files are carried out whole, also under SIGKILL and power loss.

The order is that of a write-ahead journal:

1. *Stage.* Every new file is written, complete, into a hidden folder of the same filesystem, and
   every file that will go is kept there under a second name, the journal under a draft's. The tree
   is untouched.
2. *Commit.* When all of that is fsynced, the journal is renamed into place. From here on the change
   will happen.
3. *Act.* One `rename(2)` or `unlink(2)` a change; nothing needs new space. A failure is undone.
4. *Clean.* The journal goes first, the staging folder after it.

A run that finds a journal carries the change to its end; one that finds a staging folder without
a journal drops it. What somebody else has put there since (pip, say) is never overwritten.

The lock keeps runs of one kernel apart, but on a network filesystem not those of several hosts. For
these the staging folder is made exclusively and names its owner by the boot id: to the same kernel,
which gave it the lock, an owner is dead; to another one it is when it has not moved for a while.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import stat
import time
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from patcher import bounds, bytecode, files
from patcher.change import Change
from patcher.errors import LEFT_OPEN, Refused, failed, refuse
from patcher.receipt import STAGING as STAGING
from patcher.value import Value, plain, replace

_JOURNAL = "journal.json"
_UNDO = "undo.json"
_OWNER = "owner"
# How long another host's run may be silent before it is taken for dead. A change takes well under a
# second on a local disk; what takes longest on a slow one is a sync of a hundred small files.
_SILENCE = 120.0
_SAME_TIME = "another run began to change this tree at the same time"
_SCHEMA = 1
_PURPOSE = re.compile(r"(apply|revert) [\d.]+\Z")


class _Step(Value):
    """A change as the journal keeps it: where it is, and what stands there before and after."""

    base: int
    path: str
    before: str | None
    after: str | None


class _Journal(Value):
    """What recovery needs: the folders involved (the first is the site), and the steps in order."""

    bases: tuple[Path, ...]
    purpose: str
    steps: tuple[_Step, ...] = ()
    new_folders: tuple[tuple[int, str], ...] = ()
    prune: tuple[tuple[int, str], ...] = ()

    @cached_property
    def staging(self) -> tuple[Path, ...]:
        return tuple(base / STAGING for base in self.bases)

    def target(self, step: _Step) -> str:
        return f"{self.bases[step.base]}/{step.path}"

    def folders(self, places: Sequence[tuple[int, str]]) -> list[str]:
        return [f"{self.bases[base]}/{path}" for base, path in places]

    def new(self, number: int, base: int) -> str:
        return f"{self.staging[base]}/{number:04d}.new"

    def old(self, number: int, base: int) -> str:
        return f"{self.staging[base]}/{number:04d}.old"


class Recovery(Value):
    """What became of an interrupted change: its purpose, whether it was finished, what was left."""

    purpose: str
    finished: bool
    left_alone: tuple[str, ...] = ()


def execute(
    changes: Sequence[Change],
    *,
    bases: Sequence[Path],
    purpose: str,
    prune: Sequence[Path] = (),
) -> tuple[str, ...]:
    """Carry out ``changes`` in order, whole or not at all; return what could not be cleaned up.

    Args:
        changes: what to put, replace or remove.
        bases: the folders that hold every target, the site-packages folder first. Each gets a
            staging folder of its own, since a rename cannot cross filesystems.
        purpose: a word for people, such as ``apply 0.1.0``, shown if a later run must finish it.
        prune: folders to remove once they are empty.

    Raises:
        Refused: nothing is changed (or everything was put back); the reason is in its faults.
        KeyboardInterrupt: Ctrl-C came too late: it is carried out, as the exception says.
    """
    left: tuple[str, ...] | None = None
    try:
        with _signals_deferred():
            left = _execute(changes, tuple(bases), purpose, prune)
    except KeyboardInterrupt as interruption:
        if isinstance(interruption.__context__, Refused):
            raise interruption.__context__ from None
        if left is None:
            raise
        raise KeyboardInterrupt(f"too late to stop: {purpose} was carried out, whole") from None
    return left


def _execute(
    changes: Sequence[Change], bases: tuple[Path, ...], purpose: str, prune: Sequence[Path]
) -> tuple[str, ...]:
    name = _name()
    made: list[Path] = []
    try:
        for base in bases:
            _open(base, name)
            made.append(base / STAGING)
        journal = _stage(changes, bases=bases, purpose=purpose, prune=prune)
        _commit(journal, name)
    except OSError as error:
        _abandon(made, name)
        raise failed(error, "could not be prepared; nothing was changed") from error
    except BaseException:
        _abandon(made, name)
        raise
    try:
        _act(journal)
    except OSError as error:
        raise _put_back(journal, error) from error
    try:
        _drop(journal.staging)
    except OSError as error:
        return (f"{error.filename or journal.staging[0]}: {error.strerror or error}",)
    return ()


def recover(bases: Sequence[Path]) -> Recovery | None:
    """Finish or undo what an earlier run left; return None where it had changed nothing yet.

    Raises:
        Refused: the journal is damaged, the filesystem still refuses, or another host may still be
            at it; all is left as found.
    """
    for base in bases:
        _expect_folder(base / STAGING)
        _take_over(base / STAGING)
    staging = bases[0] / STAGING
    undoing = os.path.lexists(staging / _UNDO)
    found = staging / (_UNDO if undoing else _JOURNAL)
    if not os.path.lexists(found):
        try:
            _drop([base / STAGING for base in bases])
        except OSError as error:
            raise failed(error, "left by an interrupted run and cannot be removed") from error
        return None
    journal = _parse(found, bases)
    replaced = frozenset(
        journal.target(step)
        for step in journal.steps
        if files.digest_path(journal.target(step)) not in (step.before, step.after)
    )
    forward = not undoing and not replaced and _all_staged(journal)
    with _signals_deferred():
        try:
            if forward:
                _act(journal)
            else:
                _undo(journal, keep=replaced)
            _drop(journal.staging)
        except OSError as error:
            what = f"an interrupted run ({journal.purpose}) stays half done"
            raise failed(error, what, code=LEFT_OPEN) from error
    return Recovery(purpose=journal.purpose, finished=forward, left_alone=tuple(sorted(replaced)))


def _expect_folder(staging: Path) -> None:
    if os.path.lexists(staging) and (staging.is_symlink() or not staging.is_dir()):
        raise refuse(
            "overlay-modified",
            "is in the way: the overlay keeps its unfinished work in a folder of this name",
            path=str(staging),
            hint="Move it away, then run this again.",
        )


def _open(base: Path, name: bytes) -> None:
    """Make the staging folder in ``base`` and put this run's ``name`` in it.

    Raises:
        Refused: another run made one since this one looked.
    """
    staging = base / STAGING
    try:
        os.mkdir(staging, 0o700)
        descriptor = os.open(staging / _OWNER, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except (FileExistsError, FileNotFoundError) as error:
        raise _held(staging, _SAME_TIME) from error
    except OSError:
        with contextlib.suppress(OSError):
            os.rmdir(staging)
        raise
    try:
        try:
            os.write(descriptor, name)
        finally:
            os.close(descriptor)
        files.make_directory(staging, like=base)
    except OSError:
        with contextlib.suppress(OSError):
            files.remove_tree(staging)
        raise


def _take_over(staging: Path) -> None:
    """Make sure that who owns ``staging`` is dead, and own it from now on.

    Raises:
        Refused: the owner is a run on another host, and may be alive.
    """
    mark, name = staging / _OWNER, _name()
    try:
        owner = files.read(mark)
        moved = max(os.stat(staging).st_mtime, os.stat(mark).st_mtime)
    except FileNotFoundError:
        return  # it died before it had a name
    # The same of an empty one. A live run of another host that had got no further finds out when it
    # looks for its name, before it changes anything.
    if owner.split()[:1] in ([], name.split()[:1]):
        return
    if abs(time.time() - moved) < _SILENCE:
        raise _held(
            staging,
            "a run on another host is changing this tree, or was killed less than "
            f"{_SILENCE:.0f} s ago",
        )
    with contextlib.suppress(OSError):  # a full disk must not keep anybody from recovery
        draft = staging / f"{_OWNER}.draft"
        draft.write_bytes(name)
        draft.rename(mark)


def _name() -> bytes:
    """Return what no other run is called, the kernel's boot id first: its containers share that."""
    try:
        kernel = files.read("/proc/sys/kernel/random/boot_id").strip()
    except OSError:
        kernel = b"unknown"
    return b"%s %d %d\n" % (kernel, os.getpid(), time.monotonic_ns())


def _is_own(staging: Path, name: bytes) -> bool:
    try:
        return files.read(staging / _OWNER) == name
    except OSError:
        return False


def _held(staging: Path, message: str) -> Refused:
    return refuse(
        "locked",
        message,
        path=str(staging.parent),
        hint="Let it finish, and run this again: what a killed run left is finished or undone "
        f"after {_SILENCE:.0f} s. Change a folder that several hosts share from one at a time.",
    )


def _all_staged(journal: _Journal) -> bool:
    """Tell whether each step is done already or still has its new file, whole."""
    return all(
        step.after is None
        or files.digest_path(journal.target(step)) == step.after
        or files.digest_path(journal.new(number, step.base)) == step.after
        for number, step in enumerate(journal.steps)
    )


def _stage(
    changes: Sequence[Change], *, bases: tuple[Path, ...], purpose: str, prune: Sequence[Path]
) -> _Journal:
    journal = _Journal(bases=bases, purpose=purpose)
    looks: dict[Path, files.Traits] = {}  # most new files take after the same one
    steps: list[_Step] = []
    for number, change in enumerate(changes):
        target = str(change.target)
        base, path = _locate(target, bases)
        before = files.digest_path(target)
        if before != change.expect:
            raise refuse(
                "changed-underneath",
                f"changed while it was being worked on (sha256 {before}, was {change.expect})",
                path=target,
                hint="Another program is writing to this tree. Let it finish, then run this again.",
            )
        if before is not None:
            files.clone(target, journal.old(number, base))
        new = journal.new(number, base)
        if change.content is not None:
            assert change.like is not None, "new content needs a file to take after"
            if change.like not in looks:
                looks[change.like] = files.traits(change.like)
            stamp = _fresh_mtime(target)
            files.write(new, change.content, like=looks[change.like], mtime_ns=stamp)
        elif change.clone is not None:
            files.clone(change.clone, new)
        # That the new file is as planned shows at the end of `_act`.
        steps.append(_Step(base=base, path=path, before=before, after=change.after))
    folders: list[str] = []
    for folder in dict.fromkeys(os.path.dirname(c.target) for c in changes if c.after is not None):
        _missing_folders(folder, folders)
    return replace(
        journal,
        steps=tuple(steps),
        new_folders=tuple(_locate(folder, bases) for folder in folders),
        prune=tuple(_locate(str(folder), bases) for folder in prune),
    )


def _locate(target: str, bases: tuple[Path, ...]) -> tuple[int, str]:
    for number, base in enumerate(bases):
        if target.startswith(f"{base}/"):
            return number, target[len(f"{base}/") :]
    raise AssertionError(f"{target} is outside of {bases}")


def _fresh_mtime(target: str) -> int:
    """Return a time in another second than the file's own: bytecode is matched by the second."""
    now = time.time_ns()
    try:
        second = os.lstat(target).st_mtime_ns // 10**9
    except (FileNotFoundError, NotADirectoryError):
        return now
    return now if now // 10**9 != second else now + 10**9


def _missing_folders(folder: str, known: list[str]) -> None:
    """Add ``folder`` and its missing parents to ``known``, outermost first."""
    if folder not in known and not os.path.isdir(folder):
        _missing_folders(os.path.dirname(folder), known)
        known.append(folder)


def _commit(journal: _Journal, name: bytes) -> None:
    record = {
        "schema": _SCHEMA,
        "purpose": journal.purpose,
        "bases": [str(base) for base in journal.bases],
        "steps": [plain(step) for step in journal.steps],
        "new_folders": journal.new_folders,
        "prune": journal.prune,
    }
    staging = journal.staging[0]
    draft = staging / "journal.draft"
    text = json.dumps(record).encode()
    files.write(draft, text, like=files.traits(staging), mtime_ns=time.time_ns())
    files.sync_all([*_staged(journal), *journal.staging])
    for folder in journal.staging:
        if not _is_own(folder, name):  # another host took it for a dead run's, before it had a name
            raise _held(folder, _SAME_TIME)
    draft.rename(staging / _JOURNAL)
    files.sync_all([*journal.staging, *journal.bases])


def _staged(journal: _Journal) -> Iterator[str]:
    """Yield the staged files that were not there before under another name."""
    for staging in journal.staging:
        for entry in os.scandir(staging):
            status = entry.stat(follow_symlinks=False)
            if stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
                yield entry.path


def _parse(path: Path, bases: Sequence[Path]) -> _Journal:
    try:
        if not path.is_file():
            raise ValueError("it is not a file")
        record = json.loads(path.read_bytes())
        if record["schema"] != _SCHEMA:
            raise ValueError(f"schema {record['schema']}, known is {_SCHEMA}")
        if len(record["bases"]) > len(bases):
            raise ValueError(f"{record['bases'][1:]} is no part of this install now")
        journal = _Journal(
            bases=tuple(bases),
            purpose=record["purpose"],
            steps=tuple(
                _Step(
                    base=_place(row["base"], row["path"], bases)[0],
                    path=row["path"],
                    before=row["before"],
                    after=row["after"],
                )
                for row in record["steps"]
            ),
            new_folders=tuple(_place(base, path, bases) for base, path in record["new_folders"]),
            prune=tuple(_place(base, path, bases) for base, path in record["prune"]),
        )
        if not _PURPOSE.match(journal.purpose):
            raise ValueError(f"{journal.purpose!r} is no purpose")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise refuse(
            "journal-unreadable",
            f"the journal of an interrupted run cannot be used: {error}",
            path=str(bases[0] / STAGING),
            hint="Finish with the overlay version that wrote it, or reinstall sglang with pip "
            "and delete this folder.",
        ) from error
    return journal


def _place(base: Any, path: Any, bases: Sequence[Path]) -> tuple[int, str]:
    """Return a place that the journal names, once it is known to lie in the tree."""
    if base not in range(len(bases)):
        raise ValueError(f"there is no folder number {base!r}")
    hindrance = bounds.obstacle(bases[base] / bounds.plain(path))
    if hindrance:
        raise ValueError(hindrance)
    return int(base), str(path)


def _act(journal: _Journal) -> None:
    """Bring every target to its final state. Safe to repeat from any point."""
    for folder in journal.folders(journal.new_folders):
        # Also where it stands already: a run may have died before it gave the folder its mode.
        files.make_directory(folder, like=os.path.dirname(folder))
    for number, step in enumerate(journal.steps):
        target, new = journal.target(step), journal.new(number, step.base)
        if step.after is None:
            _remove(target)
        elif os.path.lexists(new):
            os.replace(new, target)
    for folder in sorted(journal.folders(journal.prune), reverse=True):
        files.remove_empty(folder)
    for step in journal.steps:
        found = files.digest_path(journal.target(step))
        if found != step.after:
            raise OSError(f"{journal.target(step)} reads {found} after the change to {step.after}")
    _sync(journal)


def _undo(journal: _Journal, *, keep: frozenset[str] = frozenset()) -> None:
    """Bring every target back to its first state, those in ``keep`` excepted. Safe to repeat."""
    staging = journal.staging[0]
    if (staging / _UNDO).exists():
        # The run that began this may have died before it gave a folder its mode.
        for folder in sorted(journal.folders(journal.prune)):
            if os.path.isdir(folder):
                files.make_directory(folder, like=os.path.dirname(folder))
    else:
        # From here on the staged new files may be lost, so no later run may go forward.
        (staging / _JOURNAL).rename(staging / _UNDO)
        files.sync(staging)
    for number, step in reversed(list(enumerate(journal.steps))):
        target = journal.target(step)
        # Bytecode of a source that was replaced or uninstalled since belongs to nothing any more.
        if target in keep or any(bytecode.belongs(Path(target), Path(one)) for one in keep):
            continue
        old = journal.old(number, step.base)
        if step.before is None:
            if os.path.isdir(os.path.dirname(target)):
                _remove(target)
        elif os.path.lexists(old):
            files.make_parents(target)
            os.replace(old, target)
    for folder in reversed(journal.folders(journal.new_folders)):
        files.remove_empty(folder)
    _sync(journal)


def _sync(journal: _Journal) -> None:
    touched = [journal.target(step) for step in journal.steps]
    touched += journal.folders((*journal.new_folders, *journal.prune))
    folders = {os.path.dirname(path) for path in touched} | {str(base) for base in journal.bases}
    files.sync_all([folder for folder in sorted(folders) if os.path.isdir(folder)])


def _remove(target: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(target)


def _put_back(journal: _Journal, error: OSError) -> Refused:
    try:
        _undo(journal)
        _drop(journal.staging)
    except OSError as second:
        return Refused(
            [
                *failed(error, "could not be changed").faults,
                *failed(second, "stays half done until the next run", code=LEFT_OPEN).faults,
            ]
        )
    return failed(error, "could not be changed; everything was put back")


def _drop(stagings: Sequence[Path]) -> None:
    """Delete the staging folders, journal first: without one, the rest is rubbish to any run."""
    first = stagings[0]
    if first.is_dir():
        for name in (_JOURNAL, _UNDO):
            (first / name).unlink(missing_ok=True)
        files.sync(first)
    for staging in stagings:
        files.remove_tree(staging)


def _abandon(made: Sequence[Path], name: bytes) -> None:
    own = [staging for staging in made if _is_own(staging, name)]
    with contextlib.suppress(OSError):  # the next run drops what this one could not
        if own:
            _drop(own)


@contextlib.contextmanager
def _signals_deferred() -> Iterator[None]:
    """Hold back SIGINT, SIGTERM and SIGHUP for the fraction of a second that a change takes."""
    held = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, held)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)
