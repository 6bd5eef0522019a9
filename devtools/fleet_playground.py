"""Six hosts on loopback addresses to try a rollout on: real sshd, stub servers (docs/fleet.md)."""

from __future__ import annotations

import shlex
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "overlay"), str(ROOT / "fleet")]

from tests.support import fleets  # noqa: E402

SIZE = 6


def main() -> None:
    """Make the hosts and the commands for them; end them when Enter is pressed."""
    with (
        tempfile.TemporaryDirectory(prefix="fleet-") as scratch,
        fleets.fleet(Path(scratch), size=SIZE) as fleet,
    ):
        inventory, hosts = (shlex.quote(str(p)) for p in (fleet.inventory(), fleet.hosts_file()))
        ours = {k: v for k, v in fleet.environment.items() if k.startswith("ANSIBLE_")}
        settings = " ".join(f"{key}={shlex.quote(value)}" for key, value in ours.items())
        play = shlex.quote(str(Path(sys.executable).with_name("ansible-playbook")))
        tool = shlex.join([sys.executable, str(ROOT / "fleet")])
        faults = """'{"wrong": 2, "patched": true}'"""
        for name, command in {
            "rollout": f'{settings} {play} ddtree.sglang_overlay.rollout -i {inventory} "$@"',
            "rollback": f'{settings} {play} ddtree.sglang_overlay.rollback -i {inventory} "$@"',
            "fleet": f'c=$1; shift; {tool} "$c" --hosts {hosts} "$@"',
            "break": f'echo {faults} >"$1/faults.json"',
            "mend": 'rm -f "$1/faults.json"',
        }.items():
            path = fleet.folder / name
            path.write_text(f"#!/bin/sh\n{command}\n")
            path.chmod(0o755)
        print(f"cd {fleet.folder}   # then ./fleet status, ./rollout, …; Enter here ends it")
        sys.stdin.readline()


if __name__ == "__main__":
    main()
