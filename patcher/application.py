"""Planning an apply: from pristine, outdated or mixed to patched, in one step.

Overlay modules come before the hooks that import them, so that a process that starts half way
through finds what it imports.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from patcher import bytecode, files, plan, record, refusal, reversal
from patcher import receipt as receipts
from patcher.change import Action, Change, Verb, note
from patcher.errors import Fault, Refused
from patcher.manifest import Manifest
from patcher.plan import Plan
from patcher.receipt import Folder, Kept, Receipt
from patcher.series import render
from patcher.state import Survey
from patcher.states import FileReport, FileState, TreeState
from patcher.value import replace


def plan_apply(survey: Survey, *, allow_downgrade: bool = False) -> Plan:
    """Plan to bring the site to *patched* by this overlay; a patched site needs nothing.

    Raises:
        Refused: with every reason why it cannot be done.
    """
    faults = refusal.find(survey, allow_downgrade=allow_downgrade)
    if faults:
        raise Refused(faults)
    assert survey.manifest is not None, "a tree of no known release was refused above"
    if survey.state is TreeState.PATCHED:
        return plan.nothing(survey)
    planned = _Application(survey, survey.manifest).plan()
    plan.check_access(survey.site, planned)
    return planned


class _Application:
    """Works out the changes that bring a site to *patched*. Used once."""

    def __init__(self, survey: Survey, manifest: Manifest) -> None:
        self.survey, self.manifest, self.site = survey, manifest, survey.site
        applied = survey.receipt
        self.earlier = applied if applied and applied.release == manifest.release else None
        self.actions: list[Action] = []
        self.kept: dict[str, Change] = {}  # originals to keep, by recorded path
        self.listed: dict[str, str] = {}  # RECORD rows to put, by path
        self.unlisted: list[str] = []  # RECORD rows to drop
        self.like = self.site.package_root / "sglang" / "__init__.py"

    def plan(self) -> Plan:
        originals = self._originals()
        texts = {path: files.read(original) for path, original in originals.items()}
        rendered = self._render(texts)
        modules, retired_modules = self._overlay()
        hooks, kept_files = self._hooks(originals, rendered)
        compiled, kept_bytecode = self._bytecode(hooks)
        retired_hooks = self._retired()
        receipt = Receipt(
            overlay_version=self.survey.source.version,
            fingerprint=self.survey.source.fingerprint,
            release=self.manifest.release,
            family=self.manifest.family,
            applied_at=time.time(),
            files=kept_files,
            bytecode=kept_bytecode,
            overlay=self.survey.source.digests,
            record={},
            folders=self._folders(),
        )
        listing, receipt = self._record(receipt)
        written = plan.writing(
            self.site.root / receipts.PATH, receipts.render(receipt), like=self.like
        )
        return Plan(
            actions=tuple(self.actions),
            changes=(
                *modules,
                *self.kept.values(),
                written,
                *hooks,
                *retired_hooks,
                *retired_modules,
                *compiled,
                *listing,
                *self._forgotten(receipt),
            ),
            discard=(
                *plan.outvoting((*modules, *hooks, *retired_hooks)),
                *(pyc for pyc in self.survey.stale_bytecode if not self._is_inside(pyc)),
            ),
            texts={path: (texts[path], text) for path, text in rendered.items()},
            warnings=tuple(self._warnings()),
        )

    def _warnings(self) -> Iterable[str]:
        touched = [f for f in self.survey.files if f.path in self.manifest.files]
        shared = sum(f.links > 1 for f in touched)
        if shared:
            yield (
                f"{shared} files are shared with another place by hard link; they get files of "
                "their own here and the other place stays as it is"
            )
        linked = sum(plan.place(self.site, f.path).is_symlink() for f in touched)
        if linked:
            yield f"{linked} symbolic links are replaced by files; a revert restores the links"
        if self.site.editable:
            yield (
                f"editable install: the hooks go into {self.site.package_root}, which pip does not "
                "keep account of. Revert before you uninstall or reinstall sglang"
            )
        if self.site.record is None:
            yield "sglang has no RECORD here: pip will not know of the overlay's files"

    def _originals(self) -> dict[str, Path]:
        """Find the released text of each file: in place, or kept by an earlier apply."""
        found, faults = {}, []
        for report in self.survey.files:
            if report.path not in self.manifest.files:
                continue
            if report.state is FileState.PRISTINE:
                found[report.path] = self.site.package_root / report.path
                continue
            kept = self.earlier.files.get(report.path) if self.earlier else None
            original = self.site.root / kept.original if kept else None
            before = self.manifest.files[report.path].before
            if original is None or files.digest_content(original) != before:
                faults.append(reversal.damaged(self.site, report.path, original))
            else:
                found[report.path] = original
        if faults:
            raise Refused(faults)
        return found

    def _render(self, originals: Mapping[str, bytes]) -> dict[str, bytes]:
        series = self.survey.source.series(self.manifest.family)
        rendered = render(series, originals.__getitem__)
        faults = [
            Fault(
                code="source-damaged",
                message="does not come out as the manifest says once patched",
                path=path,
                hint="This copy of the overlay is damaged: get it again.",
            )
            for path, row in self.manifest.files.items()
            if path not in rendered or files.digest(rendered[path]) != row.after
        ]
        if faults:
            raise Refused(faults)
        return rendered

    def _overlay(self) -> tuple[list[Change], list[Change]]:
        """Return the modules to write, and those of an earlier overlay to remove."""
        reports = {report.path: report for report in self.survey.overlay}
        put: list[Change] = []
        for path, content in self.survey.source.overlay.items():
            after = self.survey.source.digests[path]
            self.listed[path] = record.row_of(path, after, len(content))
            report = reports.pop(path, None) or FileReport(
                path=path, state=FileState.MISSING, digest=None, links=0
            )
            if report.digest == after:
                self.actions.append(note(report, Verb.KEEP, after))
                continue
            verb = Verb.ADD if report.digest is None else Verb.REPLACE
            self.actions.append(note(report, verb, after))
            target = self.site.root / path
            put.append(plan.writing(target, content, like=self.like, digest=after))
            put += self._drop_compiled(path)
        gone: list[Change] = []
        for path, report in reports.items():
            self.unlisted.append(path)
            if report.digest is not None:
                self.actions.append(note(report, Verb.REMOVE, None))
                gone.append(plan.removal(self.site.root / path))
                gone += self._drop_compiled(path)
        return put, gone

    def _drop_compiled(self, path: str) -> list[Change]:
        return [plan.removal(pyc) for pyc in bytecode.beside(f"{self.site.root}/{path}")]

    def _hooks(
        self, originals: Mapping[str, Path], rendered: Mapping[str, bytes]
    ) -> tuple[list[Change], dict[str, Kept]]:
        changes, kept = [], {}
        for report in self.survey.files:
            path = report.path
            if path not in rendered:
                continue
            row = self.manifest.files[path]
            kept[path] = self._keep(path, originals[path], before=row.before, after=row.after)
            if not self.site.editable:
                self.listed[path] = record.row_of(path, row.after, len(rendered[path]))
            if report.digest == row.after:
                self.actions.append(note(report, Verb.KEEP, row.after))
                continue
            verb = Verb.PATCH if report.state is FileState.PRISTINE else Verb.REPLACE
            self.actions.append(note(report, verb, row.after))
            target = self.site.package_root / path
            changes.append(
                plan.writing(
                    target,
                    rendered[path],
                    like=originals[path],
                    digest=row.after,
                    found=report.digest,
                )
            )
        return changes, kept

    def _keep(self, path: str, original: Path, *, before: str, after: str | None) -> Kept:
        """Keep ``original`` in the state folder, where it is not there yet."""
        name = receipts.original_name(path)
        self.listed[name] = record.row_of(name, before, original.stat().st_size)
        if original != self.site.root / name:
            self.kept[path] = plan.restoration(self.site.root / name, original, digest=before)
        return Kept(before=before, after=after, original=name)

    def _bytecode(self, hooks: list[Change]) -> tuple[list[Change], dict[str, Kept]]:
        """Drop the pycs of every file that changes; keep those that are the release's own."""
        kept: dict[str, Kept] = {}
        for name, row in self.earlier.bytecode.items() if self.earlier else ():
            original = self.site.root / row.original
            if files.digest_content(original) == row.before:
                kept[name] = self._keep(name, original, before=row.before, after=None)
        pristine = {f.path for f in self.survey.files if f.state is FileState.PRISTINE}
        dropped: dict[Path, str | None] = {
            pyc: None for pyc in self.survey.stale_bytecode if self._is_inside(pyc)
        }
        for change in hooks:
            as_released = plan.relative(self.site, change.target) in pristine
            for pyc in bytecode.beside(change.target):
                dropped[pyc] = None
                if as_released:
                    name = plan.relative(self.site, pyc)
                    dropped[pyc] = before = files.digest(files.read(pyc))
                    kept[name] = self._keep(name, pyc, before=before, after=None)
        # Those that an earlier apply dropped are listed again in the RECORD it kept.
        self.unlisted += [*kept, *(plan.relative(self.site, pyc) for pyc in dropped)]
        removals = [plan.removal(pyc, found=found) for pyc, found in dropped.items()]
        return removals, dict(sorted(kept.items()))

    def _is_inside(self, path: Path) -> bool:
        return any(path.is_relative_to(base) for base in self.site.bases)

    def _retired(self) -> list[Change]:
        """Restore the files that an older overlay had changed and this one does not."""
        changes: list[Change] = []
        for path, kept in self.survey.receipt.files.items() if self.survey.receipt else ():
            target, original = self.site.package_root / path, self.site.root / kept.original
            if path in self.manifest.files or files.digest_content(target) != kept.after:
                continue
            assert self.survey.receipt is not None
            if files.digest_content(original) != kept.before:
                raise Refused([reversal.damaged(self.site, path, original)])
            changes.append(plan.restoration(target, original))
            changes += reversal.restore_bytecode(self.site, self.survey.receipt, target)
            self.listed[path] = record.row(path, original.read_bytes())
        return changes

    def _forgotten(self, receipt: Receipt) -> list[Change]:
        """Remove the originals that an earlier receipt kept and the new one does not name."""
        earlier = self.survey.receipt.originals() if self.survey.receipt else []
        gone = [self.site.root / name for name in {*earlier} - {*receipt.originals()}]
        return [plan.removal(path) for path in sorted(gone) if path.is_file()]

    def _folders(self) -> Mapping[str, Folder]:
        parents = {(self.site.package_root / path).parent for path in self.manifest.files}
        folders = {self.site.root, *parents, *(parent / "__pycache__" for parent in parents)}
        if self.site.dist_info:
            folders.add(self.site.dist_info)
        found = {
            plan.relative(self.site, folder): Folder(
                mtime_ns=folder.stat().st_mtime_ns, names=plan.names(folder)
            )
            for folder in sorted(folders)
            if folder.is_dir()
        }
        # What an earlier apply has seen is older; a folder that it left alone is as it was.
        return {**found, **(self.earlier.folders if self.earlier else {})}

    def _record(self, receipt: Receipt) -> tuple[list[Change], Receipt]:
        """List what is put and unlist what is removed in sglang's RECORD."""
        listing = self.site.record
        if listing is None:
            return [], receipt
        now = listing.read_bytes()
        name = plan.relative(self.site, listing)
        clean, original = reversal.record_without_us(self.survey, name, now)
        kept_name = receipts.original_name(name)
        target = self.site.root / kept_name
        found = files.digest(now)
        before = found if clean == now else files.digest(clean)
        if original is None and clean == now:
            self.kept[name] = plan.restoration(target, listing, digest=before)
        elif original is None:
            self.kept[name] = plan.writing(target, clean, like=listing, digest=before)
        rows = {
            **dict(sorted(self.listed.items())),
            kept_name: record.row_of(kept_name, before, len(clean)),
            receipts.PATH: record.bare_row(receipts.PATH),
        }
        after = record.edit(clean, put=rows, drop=self.unlisted)
        kept = Kept(before=before, after=files.digest(after), original=kept_name)
        put = plan.writing(listing, after, like=listing, digest=kept.after, found=found)
        changes = [] if after == now else [put]
        return changes, replace(receipt, record={name: kept})
