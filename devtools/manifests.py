"""Generate the release manifests under patches/ from the released wheels.

For each family: the text file ``releases`` lists its releases, ``witnesses`` the files that the
overlay builds on without changing them. With ``--check`` nothing is written, and a manifest that
would come out otherwise is an error.
"""

from __future__ import annotations

import email
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from devtools import wheels  # noqa: E402
from patcher import files, manifest, series  # noqa: E402
from patcher.manifest import Digests, Manifest  # noqa: E402

# The packages whose exact version the overlay's behaviour depends on, as the wheels call them.
PINNED = ("torch", "sglang-kernel", "flashinfer_python")


def names(listing: Path) -> list[str]:
    """Return the lines of a list file, without comments."""
    lines = (line.partition("#")[0].strip() for line in listing.read_text().splitlines())
    return [line for line in lines if line]


def make(folder: Path, release: str) -> Manifest:
    """Return the manifest of one release of the family in ``folder``."""
    tree = wheels.tree(release)

    def read(path: str) -> bytes:
        return (tree / path).read_bytes()

    rendered = series.render(series.load(folder, family=folder.name), read)
    return Manifest(
        release=release,
        family=folder.name,
        requires=pins(tree),
        files={
            path: Digests(before=files.digest(read(path)), after=files.digest(content))
            for path, content in rendered.items()
        },
        witnesses={path: files.digest(read(path)) for path in names(folder / "witnesses")},
    )


def pins(tree: Path) -> dict[str, str]:
    """Return the exact pins of the wheel's own metadata for the packages in `PINNED`."""
    metadata = email.message_from_bytes(next(tree.glob("sglang-*.dist-info/METADATA")).read_bytes())
    found = {}
    for line in metadata.get_all("Requires-Dist", []):
        exact = re.match(r"([\w-]+)(?:\[[^\]]*\])?\s*\(?==\s*([\w.+]+)\)?\s*(;|$)", line)
        if exact and exact[1] in PINNED and "extra ==" not in line:
            found[exact[1].replace("_", "-")] = exact[2]
    if len(found) != len(PINNED):
        raise SystemExit(f"{tree.name}: pins found only for {sorted(found)}, needed {PINNED}")
    return found


def main() -> None:
    """Write every manifest, or with ``--check`` compare them."""
    stale = []
    for folder in sorted(entry for entry in (ROOT / "patches").iterdir() if entry.is_dir()):
        for release in names(folder / "releases"):
            text = manifest.render(make(folder, release))
            path = folder / "manifests" / f"{release}.json"
            if path.is_file() and path.read_bytes() == text:
                continue
            stale.append(path.relative_to(ROOT).as_posix())
            if "--check" not in sys.argv:
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(text)
    print("\n".join(f"changed: {path}" for path in stale) or "every manifest is up to date")
    if stale and "--check" in sys.argv:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
