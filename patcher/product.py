"""The product's own files where they lie in a folder: overlay modules, and manifests.

With plain texts for paths, since a glance reads them too and to import pathlib takes longer.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from patcher import manifest
from patcher.files import read
from patcher.manifest import Manifest
from patcher.receipt import PACKAGE


def overlay(root: str) -> dict[str, bytes]:
    """Return path (relative to site-packages) → content of the modules, sorted by path."""
    return dict(sorted(_modules(f"{root}/overlay/{PACKAGE}", PACKAGE)))


def _modules(folder: str, prefix: str) -> Iterator[tuple[str, bytes]]:
    for entry in os.scandir(folder):
        path = f"{prefix}/{entry.name}"
        if entry.is_dir():
            if entry.name != "__pycache__":
                yield from _modules(entry.path, path)
        elif not entry.name.endswith((".pyc", ".pyo")):
            yield path, read(entry.path)


def manifests(root: str) -> tuple[Manifest, ...]:
    """Return one manifest for each supported release."""
    return tuple(
        manifest.parse(read(f"{root}/{place}"), origin=place)
        for family in sorted(os.listdir(f"{root}/patches"))
        for place in _manifests(root, f"patches/{family}/manifests")
    )


def _manifests(root: str, folder: str) -> Iterator[str]:
    for name in sorted(os.listdir(f"{root}/{folder}")) if os.path.isdir(f"{root}/{folder}") else ():
        if name.endswith(".json"):
            yield f"{folder}/{name}"
