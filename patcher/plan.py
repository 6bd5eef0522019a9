"""What would have to be done to a site, as data. Planning writes nothing.

`patcher.application` and `patcher.reversal` make plans, `patcher.engine` carries them out.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from patcher import bounds, bytecode, files
from patcher.change import Action, Change, Verb, note
from patcher.errors import Fault, Refused
from patcher.receipt import Folder
from patcher.site import Site
from patcher.state import Survey
from patcher.value import Value


class Plan(Value):
    """A change to a site, ready to be carried out.

    ``discard`` are pycs outside of the site (PYTHONPYCACHEPREFIX) that would win over a changed
    file; ``prune`` are folders to remove once empty; ``folders`` get their old time back if they
    hold what they held. ``texts`` has the changed files' text before and after, for a diff.
    """

    actions: tuple[Action, ...] = ()
    changes: tuple[Change, ...] = ()
    discard: tuple[Path, ...] = ()
    prune: tuple[Path, ...] = ()
    folders: Mapping[Path, Folder] = MappingProxyType({})
    texts: Mapping[str, tuple[bytes, bytes]] = MappingProxyType({})
    warnings: tuple[str, ...] = ()

    @property
    def changes_something(self) -> bool:
        """Whether carrying this out writes anything."""
        return bool(self.changes or self.discard)

    @property
    def takes_code_away(self) -> bool:
        """Whether a live process could miss or mix up code that it loads later."""
        return any(a.action in (Verb.RESTORE, Verb.REPLACE, Verb.REMOVE) for a in self.actions)


def nothing(survey: Survey) -> Plan:
    """Return the plan for a site that is as it should be."""
    reports = (*survey.files, *survey.overlay)
    return Plan(actions=tuple(note(report, Verb.KEEP, report.digest) for report in reports))


def removal(path: Path, *, found: str | None = None) -> Change:
    """Return the change that removes what stands at ``path`` now.

    ``found`` is, here and below, what the file at ``path`` hashes to, if that was found out.
    """
    return Change(target=path, expect=files.digest_path(path, content=found), after=None)


def restoration(path: Path, original: Path, *, digest: str | None = None) -> Change:
    """Return the change that puts the kept ``original``, of this ``digest``, back at ``path``."""
    after = files.digest_path(original, content=digest)
    return Change(target=path, expect=files.digest_path(path), after=after, clone=original)


def writing(
    path: Path, content: bytes, *, like: Path, digest: str | None = None, found: str | None = None
) -> Change:
    """Return the change that puts new ``content``, of this ``digest``, at ``path``."""
    return Change(
        target=path,
        expect=files.digest_path(path, content=found),
        after=digest or files.digest(content),
        content=content,
        like=like,
    )


def place(site: Site, path: str) -> Path:
    """Return where a recorded path lies: SGLang's own files, or in site-packages."""
    return (site.package_root if path.startswith("sglang/") else site.root) / path


def relative(site: Site, path: Path) -> str:
    """Return ``path`` as it is recorded: the inverse of `place`."""
    for base in map(str, site.bases):
        if str(path) == base:
            return "."
        if str(path).startswith(f"{base}/"):
            return str(path)[len(base) + 1 :]
    raise AssertionError(f"{path} is outside of {site.bases}")


def names(folder: Path) -> str:
    """Return a digest of the names in ``folder``."""
    listed = "\0".join(sorted(os.listdir(folder)))
    return files.digest(listed.encode("utf-8", "surrogateescape"))


def outvoting(changes: Iterable[Change]) -> tuple[Path, ...]:
    """Return the pycs below PYTHONPYCACHEPREFIX that would win over what ``changes`` put there."""
    found: list[Path] = []
    for change in changes:
        content = change.clone.read_bytes() if change.clone else change.content
        if content is not None:
            caches = bytecode.in_prefix(change.target)
            found += [pyc for pyc in caches if bytecode.outvotes(pyc, content)]
    return tuple(found)


def check_access(site: Site, plan: Plan) -> None:
    """Refuse before anything is written if files cannot be replaced or space is short.

    Raises:
        Refused: with each reason once, and the files and folders that it holds for.
    """
    if not plan.changes:
        return
    sealed = [str(base) for base in site.bases if os.statvfs(base).f_flag & os.ST_RDONLY]
    if sealed:
        raise Refused(
            _one_fault(
                sealed,
                code="not-writable",
                message="is on a read-only filesystem",
                hint="Remount it, or patch the image when it is built.",
            )
        )
    parents = {os.path.dirname(change.target): change.target for change in plan.changes}
    closed = [
        folder
        for folder in sorted({*parents, *map(str, site.bases)})
        if os.path.isdir(folder) and not os.access(folder, os.W_OK | os.X_OK)
    ]
    faults = _one_fault(
        closed,
        code="not-writable",
        message="cannot be written by this user",
        hint="Run this as the owner of the tree; patch a read-only image when it is built.",
    )
    for hindrance in sorted({bounds.obstacle(one) for one in parents.values()} - {""}):
        faults.append(
            Fault(
                code="link-out-of-tree",
                message=hindrance,
                path=str(site.root),
                hint="Put a folder of its own there, or take away what is in the way.",
            )
        )
    there = [str(change.target) for change in plan.changes if change.expect is not None]
    faults += _one_fault(
        [path for path in there if _is_immutable(path)],
        code="not-writable",
        message="is immutable: not even its owner may replace it",
        hint="Take the attribute away (`chattr -i`), then run this again.",
    )
    user = os.geteuid()
    faults += _one_fault(
        [path for path in there if user not in (0, _owner(path, user))],
        code="not-owner",
        message="belongs to another user, who would lose it to this one",
        hint="Run this as the owner of the tree, or as root.",
    )
    needed = sum(len(change.content or b"") + 4096 for change in plan.changes)
    room = os.statvfs(site.root)
    free = room.f_bavail * room.f_frsize
    if needed > free:
        faults.append(
            Fault(
                code="no-space",
                message=f"{needed:,} bytes are needed, {free:,} are free",
                path=str(site.root),
                hint="Free some space on this filesystem, then run this again.",
            )
        )
    if faults:
        raise Refused(faults)


def _one_fault(paths: Sequence[str], *, code: str, message: str, hint: str) -> list[Fault]:
    """Return one fault for all ``paths``, naming the others too; none if there are none.

    A tree of another user would else take a hundred lines to say so.
    """
    if not paths:
        return []
    if len(paths) > 1:
        message += f"; the same holds for {', '.join(paths[1:4])}"
        message += f" and {len(paths) - 4} more" if len(paths) > 4 else ""
    return [Fault(code=code, message=message, path=paths[0], hint=hint)]


def _is_immutable(path: str) -> bool:
    """Tell whether this user may write the file by its owner and mode, and the system says no."""
    if os.path.islink(path) or not os.path.isfile(path) or os.access(path, os.W_OK):
        return False
    user, status = os.geteuid(), os.stat(path)
    return user == 0 or (user == status.st_uid and bool(status.st_mode & 0o200))


def _owner(path: str, default: int) -> int:
    return os.lstat(path).st_uid if os.path.lexists(path) else default
