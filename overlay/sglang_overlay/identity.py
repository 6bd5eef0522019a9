"""What a running process says about the overlay that it loaded: version, fingerprint, verdict.

The fingerprint is the SHA-256 over the package's own Python files, in the order of their paths
relative to the package (``/`` between the parts, sorted as text): for each file the UTF-8 path, a
NUL byte, the SHA-256 of its bytes as 32 raw bytes. Whoever wants to compare a live process with a
tree on disk computes the same from the tree.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path

import sglang_overlay
from sglang_overlay import switches, upstream
from sglang_overlay.mask_policy import Verdict


@dataclass(frozen=True, kw_only=True)
class Identity:
    """The overlay as one process runs it. The field names are those of server info and the metric.

    ``tree_size`` is the number of tokens that the verify of one tree takes; None without trees.
    """

    overlay: str
    fingerprint: str
    release: str
    verify_backend: str
    mask_policy: str
    verify_path: str
    tree_size: int | None = None
    allow_dropped_mask: bool = False

    def as_dict(self) -> dict[str, str | int | bool | None]:
        """Return the fields as plain values, ready for JSON."""
        return asdict(self)

    def as_labels(self) -> dict[str, str]:
        """Return the fields as the texts of metric labels."""
        return {
            name: "none" if value is None else str(value) for name, value in asdict(self).items()
        }

    def line(self) -> str:
        """Return the start-up log line."""
        return (
            f"DDTree overlay {self.overlay} (fingerprint {self.fingerprint[:12]}) on SGLang "
            f"{self.release}: verify backend {self.verify_backend or 'none'}, "
            f"mask policy '{self.mask_policy}', verify path {self.verify_path}, "
            f"tree size {'none' if self.tree_size is None else self.tree_size}"
            f"{', dropped masks allowed' if self.allow_dropped_mask else ''}"
        )


def fingerprint(package: Path) -> str:
    """Return the fingerprint of the overlay package in the folder ``package``, as hex digits."""
    total = hashlib.sha256()
    files = {path.relative_to(package).as_posix(): path for path in package.rglob("*.py")}
    for name in sorted(files):
        total.update(name.encode() + b"\0" + hashlib.sha256(files[name].read_bytes()).digest())
    return total.hexdigest()


@functools.cache
def loaded_fingerprint() -> str:
    """Return the fingerprint of the package that this process loaded, as of the first call."""
    assert sglang_overlay.__file__ is not None, "the overlay is a package with an __init__.py"
    return fingerprint(Path(sglang_overlay.__file__).parent)


def identify(verdict: Verdict) -> Identity:
    """Return this process's identity, given the verdict on its server."""
    return Identity(
        overlay=sglang_overlay.__version__,
        fingerprint=loaded_fingerprint(),
        release=upstream.release(),
        verify_backend=verdict.backend,
        mask_policy=verdict.summary,
        verify_path=verdict.verify_path,
        allow_dropped_mask=switches.ACTIVE.allow_dropped_mask,
    )
