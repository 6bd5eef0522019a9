"""What a file and a whole tree can be, and how one release is told from another: by content."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum

from patcher.manifest import Manifest
from patcher.receipt import Receipt
from patcher.value import Value


class FileState(str, Enum):
    """What one file is."""

    PRISTINE = "pristine"
    PATCHED = "patched"
    OUTDATED = "outdated"
    FOREIGN = "foreign"
    MISSING = "missing"


class TreeState(str, Enum):
    """What the whole tree is."""

    ABSENT = "absent"
    PRISTINE = "pristine"
    PATCHED = "patched"
    OUTDATED = "outdated"
    NEWER = "newer"
    MIXED = "mixed"
    FOREIGN = "foreign"
    INTERRUPTED = "interrupted"


class FileReport(Value):
    """One file: its path relative to its folder, its state, its digest now, its link count."""

    path: str
    state: FileState
    digest: str | None
    links: int


def classify(
    path: str, digest: str | None, manifest: Manifest | None, receipt: Receipt | None
) -> FileState:
    """Return what a file of SGLang's with this ``digest`` is, for the release in ``manifest``."""
    if digest is None:
        return FileState.MISSING
    known = manifest.files.get(path) if manifest else None
    kept = receipt.files.get(path) if receipt else None
    if known and digest == known.after:
        return FileState.PATCHED
    if kept and digest == kept.after:
        return FileState.OUTDATED
    pristine = {
        known.before if known else None,
        manifest.witnesses.get(path) if manifest else None,
        kept.before if kept else None,
    }
    return FileState.PRISTINE if digest in pristine else FileState.FOREIGN


def identify(
    manifests: Iterable[Manifest],
    receipt: Receipt | None,
    digests: Mapping[str, str | None],
    *,
    version: str | None,
) -> Manifest | None:
    """Return the release that most files are those of; its ``version`` only ends a draw."""

    def matches(manifest: Manifest) -> int:
        known = [*manifest.files, *manifest.witnesses]
        ok = (FileState.PRISTINE, FileState.PATCHED, FileState.OUTDATED)
        applied = receipt if receipt and receipt.release == manifest.release else None
        return sum(classify(path, digests[path], manifest, applied) in ok for path in known)

    def rank(manifest: Manifest) -> tuple[int, bool]:
        return matches(manifest), manifest.release == version

    best = max(manifests, key=rank, default=None)
    return best if best is not None and matches(best) else None
