"""Build dist/sglang-overlay.pyz: the whole product in one file that needs only Python 3.10.

The archive holds this project, its licences, and click and unidiff as installed here. The same
inputs give the same bytes: entries are sorted and carry no time.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import io
import subprocess
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUNDLED = ("click", "unidiff")
EPOCH = (1980, 1, 1, 0, 0, 0)
INTERPRETER = b"#!/usr/bin/env python3\n"


def entries() -> Iterator[tuple[str, bytes]]:
    """Yield each file of the archive: name and content."""
    yield "__main__.py", (ROOT / "devtools" / "bundle_main.py").read_bytes()
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        + ["--", "apply.py", "verify_install.py", "commandline.py"]
        + ["patcher", "patches", "overlay", "LICENSE"],
        cwd=ROOT,
        capture_output=True,
        check=True,
        text=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        yield name, (ROOT / name).read_bytes()
    for distribution in BUNDLED:
        for path in importlib.metadata.files(distribution) or ():
            if path.suffix in {".py", ".typed"} or "licenses" in path.parts:
                yield path.as_posix(), path.read_binary()


def build() -> bytes:
    """Return the archive."""
    buffer = io.BytesIO(INTERPRETER)
    buffer.seek(0, io.SEEK_END)
    with zipfile.ZipFile(buffer, "a", zipfile.ZIP_DEFLATED) as archive:
        for name, content in sorted(entries()):
            info = zipfile.ZipInfo(name, EPOCH)
            info.compress_type = zipfile.ZIP_DEFLATED
            info.external_attr = 0o644 << 16
            archive.writestr(info, content)
    return buffer.getvalue()


def main() -> None:
    """Write the archive and its checksum."""
    target = ROOT / "dist" / "sglang-overlay.pyz"
    target.parent.mkdir(exist_ok=True)
    content = build()
    target.write_bytes(content)
    target.chmod(0o755)
    checksum = hashlib.sha256(content).hexdigest()
    target.with_suffix(".pyz.sha256").write_text(f"{checksum}  {target.name}\n")
    print(f"{target.relative_to(ROOT)}: {len(content):,} bytes, sha256 {checksum}")


if __name__ == "__main__":
    main()
