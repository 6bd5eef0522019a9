"""The lock: one writer or many readers, gone with the process that held it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from patcher import lock
from patcher.errors import Refused

ROOT = Path(__file__).resolve().parents[2]
HOLDER = """
import sys, time
from pathlib import Path
from patcher import lock
with lock.hold(Path(sys.argv[1]), exclusive=sys.argv[2] == "x", wait=0):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    kind = request.param
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path), kind],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def take(folder: Path, *, exclusive: bool, wait: float = 0) -> None:
    with lock.hold(folder, exclusive=exclusive, wait=wait):
        pass


@pytest.mark.parametrize("holder", ["x"], indirect=True)
def test_a_writer_keeps_all_out_until_it_dies(
    tmp_path: Path, holder: subprocess.Popen[str]
) -> None:
    for exclusive in (True, False):
        with pytest.raises(Refused) as refusal:
            take(tmp_path, exclusive=exclusive)
        assert refusal.value.faults[0].code == "locked"
    started = time.monotonic()
    with pytest.raises(Refused, match=r"waited 0\.3 s"):
        take(tmp_path, exclusive=True, wait=0.3)
    assert time.monotonic() - started >= 0.3
    holder.kill()
    take(tmp_path, exclusive=True, wait=10)


@pytest.mark.parametrize("holder", ["s"], indirect=True)
def test_readers_share(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    assert holder.poll() is None
    take(tmp_path, exclusive=False)
    with pytest.raises(Refused):
        take(tmp_path, exclusive=True)


def test_nothing_is_left_in_the_folder(tmp_path: Path) -> None:
    before = tmp_path.stat().st_mtime_ns
    take(tmp_path, exclusive=True)
    assert list(tmp_path.iterdir()) == []
    assert tmp_path.stat().st_mtime_ns == before
