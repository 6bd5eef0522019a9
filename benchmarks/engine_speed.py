"""How long the command lines take, side by side with the start of Python and its two packages.

Every figure is the median of whole processes, interleaved in one run so that load falls on all of
them alike. The sites are what pip installs of the real wheel. There are several, in the cache: to
make a file, an ext4 without a journal passes over all that was deleted near it in the last minutes,
up to 0.25 ms a file in a busy /tmp, in a site that is patched and reverted over and over, or where
this script ran just before. What a new file costs here is on the page. The growth is measured with
synthetic series over 10, 100 and 1,000 files.

Writes benchmarks/results/engine-speed-DATE.{json,md}.

Where others keep the processors busy, run it with `chrt --rr 5`: the wall times are then those of a
machine with a processor to spare, and the page says so.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from devtools.wheels import CACHE  # noqa: E402
from patcher import diff, files, manifest, source  # noqa: E402
from patcher.manifest import Digests, Manifest  # noqa: E402
from tests.support.sites import pip_site  # noqa: E402

RELEASE = "0.5.12.post1"
REPEATS = 41
SITES = 6
GROWTH_REPEATS = 7
LIMITS = {"no-op apply": 1.3, "verify": 2.0, "full apply": 2.5}
HEADER = (
    "Synthetic\n\nWhy: Measuring.\n\nHow: One line.\n\nUpstream: None.\n\nRemove when: Never.\n\n"
)


def seconds(*command: str) -> tuple[float, float]:
    """Return the wall time of one process that must succeed, and its user and system time."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    started = time.perf_counter()
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    wall = time.perf_counter() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, command
    return wall, used.ru_utime + used.ru_stime


def side_by_side(*sites: Path) -> tuple[dict[str, float], dict[str, float]]:
    """Return the median wall and CPU time in seconds of each command, over interleaved rounds."""
    apply = [sys.executable, str(ROOT / "apply.py"), "--target"]
    verify = [sys.executable, str(ROOT / "verify_install.py"), "--skip", "import", "--target"]
    base = [sys.executable, "-c", "import click, unidiff"]
    times: dict[str, list[tuple[float, float]]] = {}
    for number in range(-len(sites), REPEATS):
        site = str(sites[number % len(sites)])
        for name, command in (
            ("import click, unidiff", base),
            ("full apply", [*apply, site]),
            ("no-op apply", [*apply, site]),
            ("verify", [*verify, site]),
            ("revert", [*apply, site, "--revert"]),
        ):
            elapsed = seconds(*command)
            if number >= 0:  # the rounds before compile and fill the caches
                times.setdefault(name, []).append(elapsed)
    wall = {name: statistics.median(w for w, _ in taken) for name, taken in times.items()}
    return wall, {name: statistics.median(c for _, c in taken) for name, taken in times.items()}


def microseconds_to_make_a_file(folder: Path) -> float:
    """Return the CPU time that a new, empty file in a new folder in ``folder`` takes."""
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        before = time.process_time()
        for number in range(100):
            (Path(scratch) / str(number)).touch()
        return (time.process_time() - before) * 1e4


def synthetic(folder: Path, count: int) -> tuple[Path, Path]:
    """Make a product whose series changes ``count`` files, and a site that it fits."""
    product, site = folder / "product", folder / "site-packages"
    family = product / "patches" / "synthetic"
    shutil.copytree(ROOT / "patcher", product / "patcher")
    shutil.copytree(ROOT / "overlay", product / "overlay")
    for script in ("apply.py", "commandline.py"):
        shutil.copy(ROOT / script, product)
    package = site / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (family / "manifests").mkdir(parents=True)
    hunks, digests, rows = [HEADER], {}, ["sglang/__init__.py,,"]
    for number in range(count):
        path = f"sglang/module_{number:04d}.py"
        lines = [f"def function_{line}():\n    return {line}\n" for line in range(200)]
        before = "".join(lines).encode()
        after = "".join([*lines[:100], "# Modified\n", *lines[100:]]).encode()
        (site / path).write_bytes(before)
        rows.append(f"{path},,")
        hunks.append(diff.unified(before, after, path=path))
        digests[path] = Digests(before=files.digest(before), after=files.digest(after))
    (family / "series").write_text("0001-synthetic.patch\n")
    (family / "0001-synthetic.patch").write_text("".join(hunks))
    made = Manifest(release="1.0", family="synthetic", requires={}, files=digests, witnesses={})
    (family / "manifests" / "1.0.json").write_bytes(manifest.render(made))
    info = site / "sglang-1.0.dist-info"
    info.mkdir()
    (info / "RECORD").write_text("\n".join([*rows, f"{info.name}/RECORD,,"]) + "\n")
    return product, site


def growth(count: int) -> dict[str, float]:
    """Return the median times for a series over ``count`` files."""
    with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
        product, site = synthetic(Path(scratch), count)
        command = [sys.executable, str(product / "apply.py"), "--target", str(site)]
        times: dict[str, list[float]] = {"full apply": [], "no-op apply": [], "revert": []}
        for number in range(GROWTH_REPEATS + 1):
            for name, options in (
                ("full apply", []),
                ("no-op apply", []),
                ("revert", ["--revert"]),
            ):
                elapsed, _ = seconds(*command, *options)
                if number:
                    times[name].append(elapsed)
        return {name: statistics.median(values) for name, values in times.items()}


def table(result: dict[str, object]) -> str:
    """Return the result as a page."""
    times, used, grown = result["seconds"], result["cpu_seconds"], result["growth"]
    assert isinstance(times, dict)
    assert isinstance(used, dict)
    assert isinstance(grown, dict)
    base, base_used = times["import click, unidiff"], used["import click, unidiff"]
    lines = [f"# Speed of the command lines, {result['date']}", ""]
    lines += [f"{result['machine']}; Python {result['python']}; overlay {result['overlay']};"]
    lines += [
        f"sglang {RELEASE} as pip installs it; medians of {REPEATS} interleaved runs, under a",
        f"load of {result['load']:.1f} (a disk that others write to makes each sync slower)"
        f"{', with real-time priority' if result['real_time'] else ''}.",
        f"A new file takes {result['file_microseconds']:.0f} µs where the sites are.",
        "",
    ]
    lines += ["| command | ms | ÷ `import click, unidiff` | limit | CPU ms | ÷ |"]
    lines += ["|---|---|---|---|---|---|"]
    for name, value in times.items():
        limit = f"{LIMITS[name]:.1f}" if name in LIMITS else ""
        cpu = f"{used[name] * 1e3:.1f} | {used[name] / base_used:.2f}"
        lines.append(f"| {name} | {value * 1e3:.1f} | {value / base:.2f} | {limit} | {cpu} |")
    lines += ["", f"Growth with the number of patched files (medians of {GROWTH_REPEATS}), ms:", ""]
    lines += ["| files | full apply | no-op apply | revert |", "|---|---|---|---|"]
    for count, row in grown.items():
        cells = " | ".join(f"{row[name] * 1e3:.0f}" for name in row)
        lines.append(f"| {count} | {cells} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, print the page and write it beside this script."""
    with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
        folders = [Path(scratch) / str(number) / "site-packages" for number in range(SITES)]
        sites = [pip_site(RELEASE, folder) for folder in folders]
        making = statistics.median(microseconds_to_make_a_file(site) for site in sites)
        times, used = side_by_side(*sites)
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    result: dict[str, object] = {
        "date": today,
        "machine": f"{os.cpu_count()} × {processor()}, {platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "overlay": source.locate().version,
        "repeats": REPEATS,
        "seconds": times,
        "cpu_seconds": used,
        "load": os.getloadavg()[0],
        "file_microseconds": making,
        "real_time": os.sched_getscheduler(0) != os.SCHED_OTHER,
        "growth": {str(count): growth(count) for count in (10, 100, 1000)},
    }
    folder = ROOT / "benchmarks" / "results"
    folder.mkdir(exist_ok=True)
    (folder / f"engine-speed-{today}.json").write_text(json.dumps(result, indent=1) + "\n")
    page = table(result)
    (folder / f"engine-speed-{today}.md").write_text(page)
    print(page)


def processor() -> str:
    """Return the processor's name."""
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return names[0] if names else platform.processor()


if __name__ == "__main__":
    main()
