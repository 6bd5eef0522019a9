"""What an installed SGLang is right now: pristine, patched, or which of the states in between.

Every judgement is by sha256 against the release's manifest and the receipt. No file is ever
tried with a reverse dry run, and nothing is written here.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path

from patcher import bytecode, files, record
from patcher import receipt as receipts
from patcher.manifest import Manifest
from patcher.receipt import Receipt
from patcher.site import Site, unfinished
from patcher.source import Source
from patcher.states import FileReport, FileState, TreeState, classify, identify
from patcher.value import Value


class Survey(Value):
    """An installed SGLang, as it was found.

    ``manifest`` is that of the release it was identified as (for a foreign tree, the nearest one;
    None if nothing is near). ``files`` are SGLang's own, touched ones and witnesses; ``overlay``
    are ours. ``interrupted`` means that an earlier run left work behind; the rest is then as the
    tree stands, half way.
    """

    site: Site
    source: Source
    manifest: Manifest | None
    receipt: Receipt | None
    files: tuple[FileReport, ...]
    overlay: tuple[FileReport, ...]
    interrupted: bool

    @cached_property
    def state(self) -> TreeState:
        """The one word for the tree."""
        if self.interrupted:
            return TreeState.INTERRUPTED
        if not self.site.installed:
            return TreeState.ABSENT
        if self.manifest is None or any(f.state in _STRANGE for f in self.files):
            return TreeState.FOREIGN
        touched = {f.state for f in self.files if f.path in self.manifest.files}
        if self.receipt is None:
            clean = touched == {FileState.PRISTINE} and not self.overlay
            return TreeState.PRISTINE if clean else TreeState.MIXED
        return self._by_receipt(touched)

    def _by_receipt(self, touched: set[FileState]) -> TreeState:
        assert self.receipt is not None
        if self._is_as_applied(self.receipt):
            own = receipts.version_key(self.source.version)
            if self.receipt.version_key() > own:
                return TreeState.NEWER
            if self.receipt.fingerprint == self.source.fingerprint:
                whole = not (self.stale_bytecode or self.record_gaps)
                return TreeState.PATCHED if whole else TreeState.MIXED
            return TreeState.OUTDATED
        return TreeState.MIXED

    def _is_as_applied(self, receipt: Receipt) -> bool:
        ours = {f.path: f.digest for f in self.overlay}
        return (
            self.manifest is not None
            and receipt.release == self.manifest.release
            and all(self.digests.get(path) == kept.after for path, kept in receipt.files.items())
            and ours == dict(receipt.overlay)
        )

    @cached_property
    def digests(self) -> Mapping[str, str | None]:
        """Path → digest for SGLang's own files."""
        return {f.path: f.digest for f in self.files}

    @cached_property
    def stale_bytecode(self) -> tuple[Path, ...]:
        """Pycs that Python would run in place of a patched file or of an overlay module."""
        placed = [(self.site.package_root, report) for report in self.files]
        placed += [(self.site.root, report) for report in self.overlay]
        return tuple(
            pyc
            for folder, report in placed
            if report.state in (FileState.PATCHED, FileState.OUTDATED)
            and report.path.endswith(".py")
            for pyc in _stale(f"{folder}/{report.path}")
        )

    @cached_property
    def record_gaps(self) -> tuple[str, ...]:
        """What RECORD says wrongly, or not at all, of the files that the overlay put here."""
        if self.receipt is None or self.site.record is None:
            return ()
        digests = {report.path: report.digest for report in self.overlay}
        if not self.site.editable:
            digests |= {path: self.digests.get(path) for path in self.receipt.files}
        digests |= self.receipt.originals()
        wanted = {record.bare_row(receipts.PATH): receipts.PATH}
        for path, digest in digests.items():
            size = _size(f"{self.site.root}/{path}")
            if digest is not None and size is not None:
                wanted[record.row_of(path, digest, size)] = path
        return tuple(wanted[row] for row in record.gaps(self.site.record.read_bytes(), wanted))

    def strangers(self) -> list[FileReport]:
        """SGLang's files that are neither as released nor as patched."""
        return [f for f in self.files if f.state in _STRANGE]


_STRANGE = (FileState.FOREIGN, FileState.MISSING)


def survey(site: Site, source: Source) -> Survey:
    """Look at ``site`` and say what it is.

    Raises:
        Refused: the receipt or a manifest cannot be read.
    """
    receipt = receipts.load(site.root)
    manifests = source.manifests
    paths = {path for m in manifests for path in (*m.files, *m.witnesses)}
    paths.update(receipt.files if receipt else ())
    digests = {path: files.digest_content(f"{site.package_root}/{path}") for path in sorted(paths)}
    manifest = identify(manifests, receipt, digests, version=site.version)
    # What was done to another release says nothing about this one's files.
    applies = receipt is not None and manifest is not None and receipt.release == manifest.release
    applied = receipt if applies or manifest is None else None
    return Survey(
        site=site,
        source=source,
        manifest=manifest,
        receipt=receipt,
        files=tuple(_reports(site.package_root, digests, manifest, applied)),
        overlay=tuple(_overlay_reports(site.root, source, receipt)),
        interrupted=unfinished(site.bases),
    )


def _reports(
    folder: Path,
    digests: Mapping[str, str | None],
    manifest: Manifest | None,
    applied: Receipt | None,
) -> Iterable[FileReport]:
    relevant = {*(manifest.files if manifest else ()), *(manifest.witnesses if manifest else ())}
    relevant.update(applied.files if applied else ())
    for path in sorted(relevant):
        yield FileReport(
            path=path,
            state=classify(path, digests[path], manifest, applied),
            digest=digests[path],
            links=_links(f"{folder}/{path}"),
        )


def _overlay_reports(root: Path, source: Source, receipt: Receipt | None) -> Iterable[FileReport]:
    """Report the files of ours that are there, and those that the receipt says should be."""
    wanted = receipt.overlay if receipt else {}
    for path in sorted({*source.overlay, *wanted}):
        digest = files.digest_path(f"{root}/{path}")
        if digest is None and path not in wanted:
            continue
        if digest is None:
            state = FileState.MISSING
        elif digest == source.digests.get(path):
            state = FileState.PATCHED
        else:
            state = FileState.OUTDATED if digest == wanted.get(path) else FileState.FOREIGN
        yield FileReport(path=path, state=state, digest=digest, links=_links(f"{root}/{path}"))


def _stale(source: str) -> list[Path]:
    pycs = [*bytecode.beside(source), *bytecode.in_prefix(source)]
    if not pycs:
        return []
    content = files.read(source)
    return [pyc for pyc in pycs if bytecode.outvotes(pyc, content)]


def _size(path: str) -> int | None:
    """Return the size of the file at ``path``, None where there is none."""
    try:
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def _links(path: str) -> int:
    try:
        return os.lstat(path).st_nlink
    except (FileNotFoundError, NotADirectoryError):
        return 0
