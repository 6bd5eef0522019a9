"""Many syncs at a time: nothing is left out, nothing goes on behind the caller's back."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path

import pytest

from patcher import files


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    made = [tmp_path / f"{number:02d}" for number in range(21)]
    for path in made:
        path.write_text(path.name)
    return [str(path) for path in made]


def name_of(descriptor: int) -> str:
    return str(Path(f"/proc/self/fd/{descriptor}").readlink())


def test_every_path_is_synced_once(paths: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(name_of(descriptor)))
    files.sync_all(paths)
    assert sorted(synced) == paths
    files.sync_all([])


@pytest.mark.parametrize("failing", [*range(9), 20])
def test_an_error_in_any_thread_is_raised_when_all_have_ended(
    failing: int, paths: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    running: list[str] = []

    def fsync(descriptor: int) -> None:
        name = name_of(descriptor)
        running.append(name)
        time.sleep(0.002)
        running.remove(name)
        if name == paths[failing]:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match="Input/output error"):
        files.sync_all(paths)
    assert running == []


def test_where_no_thread_can_be_started_all_is_synced(
    paths: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(name_of(descriptor)))

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    files.sync_all(paths)
    assert sorted(synced) == paths


@pytest.mark.parametrize("size", [0, 1, 70_000])
def test_a_file_is_read_whole(size: int, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(size))
    assert files.read(path) == path.read_bytes()


def test_a_file_without_a_size_is_read_whole() -> None:
    assert files.read("/proc/self/cmdline") == Path("/proc/self/cmdline").read_bytes()


@pytest.mark.parametrize("code", [errno.ENOTSUP, errno.ENOSYS])
def test_a_filesystem_without_xattrs_has_none(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> list[str]:
        raise OSError(code, os.strerror(code))

    path = tmp_path / "file"
    path.touch(0o640)
    os.setxattr(path, "user.note", b"kept")
    noted = files.traits(path)
    monkeypatch.setattr(os, "listxattr", refuse)
    monkeypatch.setattr(os, "setxattr", refuse)
    assert files.traits(path).xattrs == ()
    # As from a source folder that has xattrs to a site-packages folder that has none.
    files.write(tmp_path / "new", b"text", like=noted, mtime_ns=0)
    assert (tmp_path / "new").read_bytes() == b"text"


def test_xattrs_that_cannot_be_read_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> list[str]:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "listxattr", fail)
    with pytest.raises(OSError, match="Input/output error"):
        files.traits(tmp_path)
