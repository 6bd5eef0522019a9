"""The driver of `kv_throughput.py`, with processes that only pretend to be servers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

PRETENDED = Path(__file__).with_name("pretended_servers.py")
PATIENCE = 60.0


def begin(out: Path, apart: dict[str, Any]) -> subprocess.Popen[str]:
    """Start a run of ten minutes, in which the levels are ``apart``."""
    return subprocess.Popen(
        [sys.executable, str(PRETENDED), str(out), "--ways", "slots", "--seconds", "600"],
        env=os.environ | {"PRETENDED": json.dumps(apart), "TMPDIR": str(out.parent)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def servers_of(out: Path) -> list[int]:
    """Return the processes that have the run's scratch folder in their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"--server" in words and any(word.startswith(bytes(out.parent)) for word in words):
            found.append(int(path.parent.name))
    return found


def test_what_was_measured_survives_the_end_and_the_servers_do_not(tmp_path: Path) -> None:
    """A step of a benchmark host has a limit of seconds, which ends it by this signal."""
    out = tmp_path / "out"
    run = begin(out, {"placement": {"more": 20_000}})
    result, deadline = out / "kv-throughput.json", time.monotonic() + PATIENCE
    while not result.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(servers_of(out)) == 3
    run.send_signal(signal.SIGTERM)
    assert run.communicate(timeout=PATIENCE)[1] == ""
    assert run.returncode == 128 + signal.SIGTERM
    assert servers_of(out) == []

    found = json.loads(result.read_text())["ways"]["slots"]
    # Half as many loops again.
    assert found["levels"]["placement"]["gain"] == pytest.approx([1 / 1.5 - 1] * 3)
    assert found["levels"]["idle"]["gain"] == pytest.approx([0.0] * 3)
    assert found["watched"] == {}
    rounds = (out / "kv-throughput-slots.jsonl").read_text().splitlines()
    assert len(rounds) == found["rounds"]
    assert set(json.loads(rounds[0])["seconds"]) == {"off", "placement", "idle"}
    if found["conversations"]:
        assert found["rests"]["idle"]["passes"] == 66 * found["conversations"]
        assert found["rests"]["idle"]["moved"] == 3 * 66 * found["conversations"]
    assert "| slots | placement | -" in (out / "kv-throughput.md").read_text()


def test_a_server_that_does_something_else_ends_the_run(tmp_path: Path) -> None:
    out = tmp_path / "out"
    run = begin(out, {"idle": {"diverges": True}})
    errors = run.communicate(timeout=PATIENCE)[1]
    assert run.returncode == 1
    assert errors.startswith("slots: round ")
    assert ": idle did {'mode': " in errors
    assert "only be compared if they do the same" in errors
    assert servers_of(out) == []
