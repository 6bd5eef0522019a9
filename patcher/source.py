"""The product's own files: patches, manifests and overlay modules, from a folder or a zip."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from patcher import files, manifest, product
from patcher.errors import refuse
from patcher.manifest import Manifest
from patcher.receipt import PACKAGE

if TYPE_CHECKING:
    import zipfile

    from patcher.series import Series


class Source:
    """The overlay that this copy of the product installs.

    ``root`` is the folder, or the place in a zip archive, that holds ``patches/`` and ``overlay/``.
    """

    def __init__(self, root: Path | zipfile.Path) -> None:
        self.root = root

    @property
    def archive(self) -> str | None:
        """The one-file bundle that this is, None for a folder."""
        return None if isinstance(self.root, Path) else str(self.root.root.filename)

    @cached_property
    def overlay(self) -> Mapping[str, bytes]:
        """The overlay's modules: path relative to site-packages → content."""
        if isinstance(self.root, Path):
            return product.overlay(str(self.root))
        return dict(sorted(_walk(self.root / "overlay" / PACKAGE, PACKAGE)))

    @cached_property
    def digests(self) -> Mapping[str, str]:
        """The sha256 of each module in `overlay`, in hex."""
        return {path: files.digest(content) for path, content in self.overlay.items()}

    @cached_property
    def version(self) -> str:
        """The overlay's version, read from its text: nothing of it is ever imported here."""
        found = manifest.overlay_version(self.overlay.get(f"{PACKAGE}/__init__.py", b""))
        if found is None:
            raise refuse(
                "source-damaged",
                f"overlay/{PACKAGE}/__init__.py does not name a __version__",
                path=str(self.root),
                hint="This copy of the overlay is incomplete: get it again.",
            )
        return found

    @cached_property
    def manifests(self) -> tuple[Manifest, ...]:
        """One manifest for each supported release."""
        if isinstance(self.root, Path):
            return product.manifests(str(self.root))
        return tuple(
            manifest.parse(
                entry.read_bytes(), origin=f"patches/{family.name}/manifests/{entry.name}"
            )
            for family in _entries(self.root / "patches")
            if (family / "manifests").is_dir()
            for entry in _entries(family / "manifests")
            if entry.name.endswith(".json")
        )

    def series(self, family: str) -> Series:
        """Return the patches of one family of releases."""
        from patcher import series  # the patch reader is not needed to tell a tree's state

        return series.load(self.root / "patches" / family, family=family)

    @cached_property
    def fingerprint(self) -> str:
        """A sha256 over all that is installed: what the files become, and the overlay's modules."""
        return manifest.fingerprint(self.manifests, self.digests)


def locate() -> Source:
    """Return the `Source` that this engine was shipped with."""
    here = Path(__file__)
    root = here.parents[1]
    if root.is_dir():
        return Source(root)
    import zipfile  # only a bundle needs it

    return Source(zipfile.Path(str(root)))


def _entries(folder: zipfile.Path) -> list[zipfile.Path]:
    return sorted(folder.iterdir(), key=lambda entry: entry.name)


def _walk(folder: zipfile.Path, prefix: str) -> Iterator[tuple[str, bytes]]:
    for entry in _entries(folder):
        path = f"{prefix}/{entry.name}"
        if entry.is_dir():
            if entry.name != "__pycache__":
                yield from _walk(entry, path)
        elif not entry.name.endswith((".pyc", ".pyo")):
            yield path, entry.read_bytes()
