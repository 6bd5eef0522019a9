"""Show the whole path on the real pinned wheel: apply, verify, re-apply, diff, revert, compare."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from devtools import wheels  # noqa: E402

RELEASE = "0.5.12.post1"
STEPS = 8


class Demo:
    """Numbered steps on one scratch site."""

    def __init__(self, site: Path) -> None:
        self.site = site
        self.started = time.monotonic()
        self.number = 0

    def step(self, title: str) -> None:
        """Announce the next step with its number and the time so far."""
        self.number += 1
        elapsed = time.monotonic() - self.started
        print(f"\n[{self.number}/{STEPS}] {title}  ({elapsed:.1f} s)", flush=True)

    def run(self, script: str, *options: str) -> str:
        """Run one of the two command lines on the site, show it and what it says."""
        command = [script, "--target", self.site.name, *options]
        print(f"$ python {' '.join(command)}", flush=True)
        done = subprocess.run(
            [sys.executable, str(ROOT / script), *command[1:]],
            cwd=self.site.parent,
            capture_output=True,
            text=True,
            check=False,
        )
        print(done.stderr + done.stdout, end="")
        if done.returncode:
            raise SystemExit(f"{script} ended with {done.returncode}")
        return done.stdout


def install(folder: Path) -> Path:
    """Install the real wheel, and nothing else, into a scratch site-packages folder."""
    site = folder / "site-packages"
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile"]
        + ["--disable-pip-version-check", "--target", str(site), str(wheels.wheel(RELEASE))],
        check=True,
    )
    return site


def main() -> None:
    """Run the demonstration; any step that does not hold ends it with an error."""
    with tempfile.TemporaryDirectory(prefix="overlay-demo-") as scratch:
        folder = Path(scratch)
        demo = Demo(folder / "site-packages")
        demo.step(f"Install sglang {RELEASE} from the package registry into a scratch folder")
        site = install(folder)
        pristine = folder / "pristine"
        shutil.copytree(site, pristine, symlinks=True)
        count = sum(path.is_file() for path in site.rglob("*"))
        print(f"{count} files")
        demo.step("Apply the overlay")
        demo.run("apply.py")
        demo.step("Verify what is on the disk")
        demo.run("verify_install.py")
        demo.step("Apply again: nothing changes")
        demo.run("apply.py")
        demo.step("Ask for the state")
        demo.run("apply.py", "--status")
        demo.step("Show the hooks as a diff")
        demo.run("apply.py", "--status", "--diff")
        demo.step("Revert")
        demo.run("apply.py", "--revert")
        demo.step("Compare with a copy from before, file by file")
        compare(pristine, site)
        print(f"identical: {count} files, byte for byte, with their modes and times")
    print(f"\ndone in {time.monotonic() - demo.started:.1f} s")


def compare(before: Path, after: Path) -> None:
    """End with an error unless both folders hold the same files."""

    def listing(folder: Path) -> dict[str, tuple[int, int, bytes]]:
        files = (path for path in folder.rglob("*") if path.is_file())
        return {
            path.relative_to(folder).as_posix(): (
                path.stat().st_mode,
                path.stat().st_mtime_ns,
                path.read_bytes(),
            )
            for path in files
        }

    first, second = listing(before), listing(after)
    differing = sorted(p for p in first.keys() | second.keys() if first.get(p) != second.get(p))
    if differing:
        raise SystemExit(f"not identical: {', '.join(differing)}")


if __name__ == "__main__":
    main()
