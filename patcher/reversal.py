"""Planning a revert: taking back exactly what the receipt says was done, and nothing else.

What somebody has replaced since (pip, an editor) is left alone and listed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from patcher import bytecode, files, plan, record
from patcher import receipt as receipts
from patcher.change import Action, Change, Verb, note
from patcher.errors import Fault, Refused
from patcher.plan import Plan
from patcher.receipt import PACKAGE, Kept, Receipt
from patcher.site import Site
from patcher.state import Survey
from patcher.states import FileState


def plan_revert(survey: Survey) -> Plan:
    """Plan to take the overlay off the site; an unpatched site needs nothing.

    Raises:
        Refused: with every reason why it cannot be done.
    """
    if survey.receipt is not None:
        planned = _Reversal(survey, survey.receipt).plan()
        plan.check_access(survey.site, planned)
        return planned
    faults = [
        Fault(
            code="receipt-missing",
            message="is patched, but there is no receipt and no original to put back",
            path=report.path,
            hint=survey.site.reinstall,
        )
        for report in survey.files
        if report.state is not FileState.MISSING
        and _has_hook(survey.site.package_root / report.path)
    ]
    if faults:
        raise Refused(faults)
    return Plan(actions=tuple(note(r, Verb.KEEP, r.digest) for r in survey.files))


def damaged(site: Site, path: str, original: Path | None) -> Fault:
    """Return the fault that the original of ``path`` is not there to be put back."""
    return Fault(
        code="original-missing",
        message="is patched, but its original was not kept or is damaged",
        path=str(original or path),
        hint=site.reinstall,
    )


def restore_bytecode(site: Site, receipt: Receipt, source: Path) -> list[Change]:
    """Drop what was compiled from the patched ``source``; put back what the release had."""
    originals = {
        plan.place(site, pyc): kept
        for pyc, kept in receipt.bytecode.items()
        if bytecode.belongs(plan.place(site, pyc), source) and _is_whole(site, kept)
    }
    return [
        *(plan.removal(pyc) for pyc in bytecode.beside(source) if pyc not in originals),
        *(
            plan.restoration(pyc, site.root / kept.original, digest=kept.before)
            for pyc, kept in originals.items()
        ),
    ]


def record_without_us(survey: Survey, name: str, now: bytes) -> tuple[bytes, Path | None]:
    """Return RECORD as it would be without the overlay, and the kept file if that is the same.

    Where something else has written to RECORD since, only our rows are taken out and only the
    rows that we replaced are put back.
    """
    receipt, site = survey.receipt, survey.site
    if receipt is None:
        return now, None
    current = record.rows(now)
    if receipts.PATH not in current:
        return now, None
    before: Mapping[str, str] = {}
    kept = receipt.record.get(name)
    if kept is not None and _is_whole(site, kept):
        original = site.root / kept.original
        text = original.read_bytes()
        if files.digest(now) == kept.after:
            return text, original
        before = record.rows(text)
    put = {
        path: before[path]
        for path, row in receipt.files.items()
        if path in before and row.after and record.lists(current.get(path, ""), row.after)
    }
    put.update((p, before[p]) for p in receipt.bytecode if p in before and p not in current)
    ours = (*receipt.overlay, *receipt.originals(), receipts.PATH)
    return record.edit(now, put=put, drop=ours), None


class _Reversal:
    """Works out the changes that take back what a receipt says was done. Used once."""

    def __init__(self, survey: Survey, receipt: Receipt) -> None:
        self.survey, self.receipt, self.site = survey, receipt, survey.site
        self.actions: list[Action] = []
        self.faults: list[Fault] = []
        self.warnings: list[str] = []

    def plan(self) -> Plan:
        hooks, texts = self._hooks()
        compiled: list[Change] = []
        for change in hooks:
            compiled += restore_bytecode(self.site, self.receipt, change.target)
        changes = (*hooks, *compiled, *self._record(), *self._overlay(), *self._state())
        if self.faults:
            raise Refused(self.faults)
        package = self.site.root / PACKAGE
        gone = {change.target for change in changes if change.clone is None}
        theirs = [p for p in package.rglob("*") if not p.is_dir() and p not in gone]
        if theirs:
            listed = ", ".join(plan.relative(self.site, path) for path in sorted(theirs))
            self.warnings.append(f"not the overlay's and left where they are: {listed}")
        return Plan(
            actions=tuple(self.actions),
            changes=changes,
            discard=plan.outvoting(hooks),
            prune=(package, *(path for path in package.rglob("*") if path.is_dir())),
            folders={plan.place(self.site, p): row for p, row in self.receipt.folders.items()},
            texts=texts,
            warnings=tuple(self.warnings),
        )

    def _hooks(self) -> tuple[list[Change], dict[str, tuple[bytes, bytes]]]:
        changes, texts = [], {}
        for path, kept in self.receipt.files.items():
            target, original = self.site.package_root / path, self.site.root / kept.original
            digest = files.digest_content(target)
            if digest == kept.after:
                if not _is_whole(self.site, kept):
                    self.faults.append(damaged(self.site, path, original))
                    continue
                self._note(path, FileState.PATCHED, Verb.RESTORE, digest, kept.before)
                changes.append(plan.restoration(target, original, digest=kept.before))
                texts[path] = (target.read_bytes(), original.read_bytes())
            elif digest == kept.before:
                self._note(path, FileState.PRISTINE, Verb.KEEP, digest, digest)
            elif digest is None:
                self._note(path, FileState.MISSING, Verb.LEAVE, None, None)
            elif _has_hook(target):
                self.faults.append(_edited(path))
            else:
                self.warnings.append(f"{path} was replaced since; it is left as it is")
                self._note(path, FileState.FOREIGN, Verb.LEAVE, digest, digest)
        return changes, texts

    def _record(self) -> list[Change]:
        listing = self.site.record
        if listing is None:
            return []
        now = listing.read_bytes()
        clean, original = record_without_us(self.survey, plan.relative(self.site, listing), now)
        if original is not None:
            return [plan.restoration(listing, original)]
        return [] if clean == now else [plan.writing(listing, clean, like=listing)]

    def _overlay(self) -> list[Change]:
        changes = []
        for path, sha in self.receipt.overlay.items():
            target = self.site.root / path
            digest = files.digest_path(target)
            if digest is not None and digest != sha:
                self.warnings.append(f"{path} was edited since; it is left as it is")
                self._note(path, FileState.FOREIGN, Verb.LEAVE, digest, digest)
                continue
            if digest is not None:
                self._note(path, FileState.PATCHED, Verb.REMOVE, digest, None)
                changes.append(plan.removal(target, found=digest))
            changes += [plan.removal(pyc) for pyc in bytecode.beside(target)]
        return changes

    def _state(self) -> list[Change]:
        kept = [self.site.root / name for name in (*self.receipt.originals(), receipts.PATH)]
        return [plan.removal(path) for path in kept if os.path.lexists(path)]

    def _note(
        self, path: str, state: FileState, verb: Verb, before: str | None, after: str | None
    ) -> None:
        where = plan.place(self.site, path)
        self.actions.append(
            Action(
                path=path,
                state=state.value,
                action=verb,
                sha256_before=before,
                sha256_after=after,
                links=where.lstat().st_nlink if os.path.lexists(where) else 0,
            )
        )


def _is_whole(site: Site, kept: Kept) -> bool:
    return files.digest_content(site.root / kept.original) == kept.before


def _has_hook(path: Path) -> bool:
    return path.is_file() and PACKAGE.encode() in path.read_bytes()


def _edited(path: str) -> Fault:
    return Fault(
        code="hooked-file-modified",
        message="was changed after it was patched and still has the hooks: taking the overlay "
        "away would break `import sglang`",
        path=path,
        hint="Keep your change as a patch, run `pip install --force-reinstall --no-deps "
        "sglang==RELEASE` (that removes the overlay too), and redo it.",
    )
