"""Bytecode: which pycs Python would run though their code is not the source's."""

from __future__ import annotations

import py_compile
import sys
from pathlib import Path

import pytest

from patcher import bytecode

Mode = py_compile.PycInvalidationMode


def compiled(source: Path, mode: Mode, *, optimize: int = -1) -> Path:
    return Path(str(py_compile.compile(str(source), invalidation_mode=mode, optimize=optimize)))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "module.py"
    path.write_text("ANSWER = 'old'\n")
    return path


def test_every_version_and_level_is_found(source: Path) -> None:
    cache = source.parent / "__pycache__"
    cache.mkdir()
    names = ["module.cpython-310.pyc", "module.cpython-312.opt-2.pyc", "module.pypy310.pyc"]
    for name in [*names, "module_two.cpython-310.pyc", "other.cpython-310.pyc"]:
        (cache / name).touch()
    assert [path.name for path in bytecode.beside(source)] == names
    assert all(bytecode.belongs(cache / name, source) for name in names)
    assert not bytecode.belongs(cache / "module_two.cpython-310.pyc", source)


@pytest.mark.parametrize("optimize", [0, 2])
def test_an_unchecked_pyc_of_other_text_wins_and_is_told(source: Path, optimize: int) -> None:
    pyc = compiled(source, Mode.UNCHECKED_HASH, optimize=optimize)
    assert not bytecode.outvotes(pyc, source.read_bytes()), "compiled from this very text"
    assert bytecode.outvotes(pyc, b"ANSWER = 'new'\n")


def test_a_checked_pyc_never_wins(source: Path) -> None:
    pyc = compiled(source, Mode.CHECKED_HASH)
    assert not bytecode.outvotes(pyc, b"ANSWER = 'new'\n")


@pytest.mark.parametrize("content", [b"", b"\x00" * 7])
def test_what_is_no_pyc_never_wins(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.pyc").write_bytes(content)
    assert not bytecode.outvotes(tmp_path / "x.pyc", b"")
    assert not bytecode.outvotes(tmp_path / "missing.pyc", b"")


def test_pycs_below_the_prefix_are_found(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert bytecode.in_prefix(source) == []
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path / "prefix"))
    pyc = compiled(source, Mode.TIMESTAMP)
    assert pyc.is_relative_to(tmp_path / "prefix")
    assert bytecode.in_prefix(source) == [pyc]
