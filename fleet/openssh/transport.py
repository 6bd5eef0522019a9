"""One order to one host: a call of ssh, the agent and the bundle on its standard input."""

from __future__ import annotations

import io
import json
import secrets
import shlex
import subprocess
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openssh.hosts import Host

_BASE = Path(__file__).resolve().parents[1]
_MODULES = "ansible_collections/ddtree/sglang_overlay/plugins/module_utils"
_SECONDS = 3600
# Python 3.12 warns of an archive without a filter, 3.10 knows none; what comes is what we sent.
_BOOT = """
import runpy, sys, tarfile, tempfile
if sys.version_info < (3, 10):
    sys.exit("Python 3.10 or newer is needed, this is " + sys.version.split()[0])
sys.dont_write_bytecode = True
with tempfile.TemporaryDirectory() as folder:
    with tarfile.open(fileobj=sys.stdin.buffer, mode="r|") as archive:
        archive.extractall(folder)
    sys.path.insert(0, folder)
    sys.argv = ["agent", folder]
    runpy.run_path(folder + "/agent.py", run_name="__main__")
"""


class Lost(Exception):
    """The host did not answer, or the connection broke: what it did is not known."""


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """The verified bytes of a bundle and their SHA-256."""

    content: bytes
    sha256: str


def send(
    host: Host, order: Mapping[str, Any], bundle: Bundle, ssh: tuple[str, ...]
) -> Mapping[str, Any]:
    """Have ``host`` carry out ``order`` and return its answer: ``ok``, and a ``message`` if not.

    Raises:
        Lost: there was no answer.
    """
    # A login shell may greet before, and say goodbye after: the answer is the line behind this one.
    marker = f"answer {secrets.token_hex(8)}"
    command = f"{shlex.quote(host.python)} -W ignore -c {shlex.quote(_BOOT)}"
    try:
        done = subprocess.run(
            ["ssh", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=15", *ssh, "--", host.name]
            + [command],
            input=_archive({**order, "sha256": bundle.sha256, "marker": marker}, bundle.content),
            capture_output=True,
            timeout=_SECONDS,
            # Ctrl-C is for the rollout, which lets the phase end; it must not cut connections.
            start_new_session=True,
            check=False,
        )
        answer: Mapping[str, Any] = json.loads(_behind(marker, done.stdout))
    except subprocess.TimeoutExpired as error:
        raise Lost(f"no answer within {_SECONDS} s") from error
    except ValueError as error:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise Lost(f"ssh ended with code {done.returncode}: {' '.join(said[-2:])}") from error
    return answer


def _behind(marker: str, said: bytes) -> bytes:
    _, _, rest = said.partition(b"\n" + marker.encode() + b"\n")
    return rest.partition(b"\n")[0]


def _archive(order: Mapping[str, Any], bundle: bytes) -> bytes:
    files = {"order.json": json.dumps(order).encode(), "bundle": bundle}
    for path in (_BASE / "openssh" / "agent.py", *sorted((_BASE / _MODULES).glob("*.py"))):
        name = path.name if path.name == "agent.py" else f"{_MODULES}/{path.name}"
        files[name] = path.read_bytes()
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o600
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()
