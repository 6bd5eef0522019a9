"""Measure what a rollout adds, per host, to reaching a host and copying the same file to it.

Run by hand: ``python benchmarks/fleet_speed.py [SIZE …]``. The hosts are sshd instances on this
machine with stub servers, so the share of SGLang's own start is left out on purpose.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "overlay"), str(ROOT / "fleet")]

from tests.support import fleets  # noqa: E402

SIZES = (2, 6, 12)
RESULTS = ROOT / "benchmarks" / "results" / "fleet_speed.json"


def adhoc(fleet: fleets.Fleet, module: str, *words: str) -> float:
    """Return the seconds that one task on all hosts takes."""
    began = time.perf_counter()
    subprocess.run(
        [str(Path(sys.executable).with_name("ansible")), "sglang", "-m", module, *words]
        + ["-i", str(fleet.inventory())],
        env=fleet.environment,
        cwd=fleet.folder,
        check=True,
        capture_output=True,
    )
    return time.perf_counter() - began


def measure(size: int) -> dict[str, object]:
    """Return the seconds for ``size`` hosts, in the default waves of 1, 10 % and all."""
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="fleet") as folder:
        with fleets.fleet(Path(folder), size=size) as fleet:
            copy = f"src={fleet.bundle} dest={{{{ ansible_remote_tmp }}}}/copied mode=0600"
            floor = adhoc(fleet, "ping") + adhoc(fleet, "copy", "-a", copy)
            began = time.perf_counter()
            ended = fleet.play("rollout")
            ansible = time.perf_counter() - began
            assert ended.code == 0, ended.told
        with fleets.fleet(_emptied(Path(folder)), size=size) as fleet:
            began = time.perf_counter()
            ended = fleet.tool("apply")
            ssh = time.perf_counter() - began
            assert ended.code == 0, ended.told
    return {
        "hosts": size,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, load {load:.1f}",
        "python": platform.python_version(),
        "ping_and_copy_s": round(floor, 2),
        "rollout_ansible_s": round(ansible, 2),
        "rollout_openssh_s": round(ssh, 2),
        "added_per_host_ansible_s": round((ansible - floor) / size, 2),
        "added_per_host_openssh_s": round((ssh - floor) / size, 2),
    }


def _emptied(folder: Path) -> Path:
    second = folder / "2"
    second.mkdir()
    return second


def main() -> None:
    """Measure each size and put it into the results, which keep those of other sizes."""
    for size in [int(word) for word in sys.argv[1:]] or SIZES:
        run = measure(size)
        print(json.dumps(run))
        others = [one for one in json.loads(RESULTS.read_text())["runs"] if one["hosts"] != size]
        runs = sorted([*others, run], key=lambda one: int(one["hosts"]))
        RESULTS.write_text(json.dumps({"runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
