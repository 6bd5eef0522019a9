"""A first look at a target that knows one answer only: *patched*, whole, by this very overlay.

That is what an apply finds at every start of a container, and it should cost little more than the
start of Python. Nothing is imported here that takes long (pathlib for one), and whatever is not
plainly as it should be is left to `patcher.state.survey`, which says the same of every tree that a
glance recognises.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator

from patcher import bytecode, lock, manifest, product, receipt, record, states
from patcher.change import Verb, note
from patcher.errors import Refused
from patcher.files import digest, read
from patcher.manifest import Manifest
from patcher.receipt import PACKAGE, Receipt
from patcher.report import Outcome
from patcher.states import FileReport, FileState, TreeState

_PREFIX, _SUFFIX = "sglang-", ".dist-info"
_PRODUCT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def recognise(target: str | None, *, command: str) -> Outcome | None:
    """Return the outcome of an apply that finds nothing to do, None where a closer look is due.

    ``command`` is what the outcome names: ``apply``, or ``check``.
    """
    if not target or target.startswith("~") or os.path.islink(target):
        return None
    if sys.pycache_prefix is not None or not os.path.isdir(_PRODUCT):
        return None
    root = os.path.realpath(target)
    try:
        with lock.hold(root, exclusive=False, wait=0):
            return _Glance(root).outcome(command)
    except (OSError, ValueError, Refused, _Unsure):
        return None


class _Unsure(Exception):
    """This is not plainly a whole and patched tree."""


class _Glance:
    """What is read of one site-packages folder, ``root``. Used once."""

    def __init__(self, root: str) -> None:
        self.root = root
        _expect(os.path.isfile(f"{root}/{receipt.PATH}"))  # before anything else is read
        self.overlay = product.overlay(_PRODUCT)
        self.manifests = product.manifests(_PRODUCT)
        self.digests = {path: digest(content) for path, content in self.overlay.items()}

    def outcome(self, command: str) -> Outcome:
        """Return the outcome of an apply here.

        Raises:
            _Unsure: the tree has to be looked at closely.
        """
        info = self._dist_info()
        applied = self._receipt()
        release, reports = self._files(applied, version=info[len(_PREFIX) : -len(_SUFFIX)])
        ours = [*self._installed()]
        self._expect_no_unchecked_bytecode([*reports, *ours])
        self._expect_rows(info, applied, [*reports, *ours])
        return Outcome(
            command=command,
            target=self.root,
            release=release.release,
            overlay_version=manifest.overlay_version(self.overlay[f"{PACKAGE}/__init__.py"]),
            state_before=TreeState.PATCHED,
            state_after=TreeState.PATCHED,
            actions=tuple(note(report, Verb.KEEP, report.digest) for report in (*reports, *ours)),
            texts={},
        )

    def _dist_info(self) -> str:
        """Return the name of the one dist-info folder of a plain, whole install."""
        names = os.listdir(self.root)
        found = [name for name in names if name.startswith(_PREFIX) and name.endswith(_SUFFIX)]
        version = found[0][len(_PREFIX) : -len(_SUFFIX)] if len(found) == 1 else ""
        _expect(version and "-" not in version and receipt.STAGING not in names)
        _expect(os.path.isfile(f"{self.root}/sglang/__init__.py"))
        return found[0]

    def _receipt(self) -> Receipt:
        """Return the receipt of this very overlay."""
        place = f"{self.root}/{receipt.PATH}"
        applied = receipt.parse(read(place), origin=place)
        own = manifest.overlay_version(self.overlay.get(f"{PACKAGE}/__init__.py", b""))
        _expect(own is not None and applied.overlay_version == own)
        _expect(applied.fingerprint == manifest.fingerprint(self.manifests, self.digests))
        _expect(applied.overlay == self.digests)
        return applied

    def _files(self, applied: Receipt, *, version: str) -> tuple[Manifest, list[FileReport]]:
        """Return the release and what its files are: the hooked ones patched, the rest as made."""
        paths = {path for one in self.manifests for path in (*one.files, *one.witnesses)}
        digests = {path: self._digest(path) for path in sorted({*paths, *applied.files})}
        release = states.identify(self.manifests, applied, digests, version=version)
        _expect(release is not None and release.release == applied.release)
        assert release is not None
        reports = []
        for path in sorted({*release.files, *release.witnesses, *applied.files}):
            hooked = path in applied.files
            state = states.classify(path, digests[path], release, applied)
            _expect(state is (FileState.PATCHED if hooked else FileState.PRISTINE))
            _expect(not hooked or digests[path] == applied.files[path].after)
            reports.append(self._report(path, state, digests[path]))
        return release, reports

    def _installed(self) -> Iterator[FileReport]:
        """Yield the overlay's modules, which must be those of this product."""
        for path, content in self.overlay.items():
            place = f"{self.root}/{path}"
            _expect(stat.S_ISREG(os.lstat(place).st_mode) and read(place) == content)
            yield self._report(path, FileState.PATCHED, self.digests[path])

    def _expect_no_unchecked_bytecode(self, reports: list[FileReport]) -> None:
        """Leave to a closer look every pyc that Python would run without a look at its source."""
        stems: dict[str, set[str]] = {}
        for report in reports:
            folder, _, name = report.path.rpartition("/")
            if report.state is FileState.PATCHED and name.endswith(".py"):
                stems.setdefault(f"{self.root}/{folder}/__pycache__", set()).add(name[:-3])
        for folder, known in stems.items():
            for name in os.listdir(folder) if os.path.isdir(folder) else ():
                if name.endswith(".pyc") and name.partition(".")[0] in known:
                    with open(f"{folder}/{name}", "rb", buffering=0) as stream:
                        _expect(not bytecode.is_unchecked(stream.read(bytecode.HEADER_LENGTH)))

    def _expect_rows(self, info: str, applied: Receipt, reports: list[FileReport]) -> None:
        """Expect sglang's RECORD to list what the overlay put here."""
        if not os.path.isfile(f"{self.root}/{info}/RECORD"):
            return
        ours = {report.path: report.digest or "" for report in reports}
        listed = (*applied.overlay, *applied.files)
        digests = {path: ours[path] for path in listed} | applied.originals()
        rows = [record.bare_row(receipt.PATH)]
        for path, sha256 in digests.items():
            if os.path.isfile(place := f"{self.root}/{path}"):
                rows.append(record.row_of(path, sha256, os.stat(place).st_size))
        _expect(not record.gaps(read(f"{self.root}/{info}/RECORD"), rows))

    def _digest(self, path: str) -> str | None:
        place = f"{self.root}/{path}"
        return digest(read(place)) if os.path.isfile(place) else None

    def _report(self, path: str, state: FileState, sha256: str | None) -> FileReport:
        links = os.lstat(f"{self.root}/{path}").st_nlink
        return FileReport(path=path, state=state, digest=sha256, links=links)


def _expect(fact: object) -> None:
    if not fact:
        raise _Unsure
