"""Run the one-file bundle on a host: check its sha256, ask it for JSON, hand back what it says."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_SECONDS = 900


class BundleFault(Exception):
    """The bundle is not the one that was announced, or it did not answer."""


def ask(
    bundle: Path, sha256: str, words: Sequence[str], *, python: str
) -> tuple[int, Mapping[str, Any]]:
    """Run ``bundle`` with ``words`` and ``--json``; return its exit code and its document.

    Args:
        bundle: the file on this host.
        sha256: what it must hash to, in hex. It is checked before every run.
        words: command and options.
        python: the interpreter, 3.10 or newer.

    Raises:
        BundleFault: the hash differs, or there was no JSON.
    """
    found = hashlib.sha256(bundle.read_bytes()).hexdigest()
    if found != sha256:
        raise BundleFault(
            f"the bundle on this host has sha256 {found}, the verified one has {sha256}: "
            "it was altered on the way, and was not run"
        )
    try:
        # -I: neither the user's environment nor the working directory can add modules.
        done = subprocess.run(
            [python, "-I", str(bundle), *words, "--json"],
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise BundleFault(f"the bundle could not be run with {python}: {error}") from error
    try:
        document = json.loads(done.stdout)
    except ValueError as error:
        raise BundleFault(
            f"the bundle ended with code {done.returncode} and said no JSON: "
            f"{(done.stderr or done.stdout).strip()[-2000:]}"
        ) from error
    return done.returncode, document


def faults(document: Mapping[str, Any]) -> str:
    """Return all that a document says is wrong, in one text."""
    lines = [
        f"[{fault['code']}] {fault['path'] or ''}: {fault['message']} → {fault['hint'] or ''}"
        for fault in document.get("errors", ())
    ]
    lines += [
        f"[{check['name']}] {check['message']} → {check['hint'] or ''}"
        for check in document.get("checks", ())
        if check["status"] == "failed"
    ]
    return "; ".join(lines)


def free_bytes(folder: Path) -> int:
    """Return the bytes that are free where ``folder`` lies."""
    return shutil.disk_usage(folder).free
