"""The glance: what it recognises, the survey says too, word for word; all else it leaves to it."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import py_compile
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from patcher import engine, glance, receipt
from patcher.engine import Request
from patcher.receipt import STAGING
from patcher.report import Outcome
from patcher.states import TreeState
from tests.support.sites import patched_site

RELEASE = "0.5.12.post1"
HOOKED = "sglang/srt/server_args.py"
WITNESS = "sglang/srt/speculative/spec_info.py"
MODULE = "sglang_overlay/switches.py"


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return patched_site(RELEASE, tmp_path_factory.mktemp("glance") / "site-packages")


@pytest.fixture
def site(master: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(master, tmp_path / "site-packages", symlinks=True))


def survey(target: object) -> Outcome:
    return engine.apply(Request(target=str(target), check=True, wait=0))


def look(target: object) -> Outcome | None:
    return glance.recognise(str(target), command="check")


def append(path: Path, text: bytes = b"\n") -> None:
    path.write_bytes(path.read_bytes() + text)


def listing(site: Path) -> Path:
    return next(site.glob("sglang-*.dist-info/RECORD"))


def rewrite(path: Path, change: Callable[[bytes], bytes]) -> None:
    before = path.read_bytes()
    after = change(before)
    assert after != before
    path.write_bytes(after)


def rewrite_receipt(site: Path, **fields: object) -> None:
    path = site / receipt.PATH
    path.write_text(json.dumps({**json.loads(path.read_bytes()), **fields}))


def link_to_copy(path: Path) -> None:
    path.rename(path.parent.parent / "elsewhere")
    path.symlink_to(path.parent.parent / "elsewhere")


def put_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def compile_unchecked(path: Path, text: str) -> None:
    now = path.read_bytes()
    path.write_text(text)
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
    py_compile.compile(str(path), invalidation_mode=mode, doraise=True)
    path.write_bytes(now)


def other_line_ends(text: bytes) -> bytes:
    new = b"\n" if b"\r" in text else b"\r\n"
    return new.join([*text.splitlines(), b""])


def drop_row(text: bytes) -> bytes:
    return b"".join(line for line in text.splitlines(True) if not line.startswith(MODULE.encode()))


def original(site: Path) -> Path:
    return site / receipt.original_name(HOOKED)


# Each makes of a patched tree one that needs work, or a closer look.
SPOILED: dict[str, Callable[[Path], object]] = {
    "hooked file edited": lambda site: append(site / HOOKED),
    "hooked file removed": lambda site: (site / HOOKED).unlink(),
    "hooked file as released": lambda site: shutil.copy(original(site), site / HOOKED),
    "hooked file a pipe": lambda site: put_pipe(site / HOOKED),
    "witness edited": lambda site: append(site / WITNESS),
    "witness removed": lambda site: (site / WITNESS).unlink(),
    "module edited": lambda site: append(site / MODULE),
    "module removed": lambda site: (site / MODULE).unlink(),
    "module behind a link": lambda site: link_to_copy(site / MODULE),
    "package removed": lambda site: shutil.rmtree(site / "sglang_overlay"),
    "receipt removed": lambda site: (site / receipt.PATH).unlink(),
    "receipt damaged": lambda site: rewrite(site / receipt.PATH, lambda text: text[:-20]),
    "receipt of a newer overlay": lambda site: rewrite_receipt(site, overlay_version="99.0"),
    "receipt of another overlay": lambda site: rewrite_receipt(site, fingerprint="0" * 64),
    "receipt of another release": lambda site: rewrite_receipt(site, release="0.5.12"),
    "receipt without modules": lambda site: rewrite_receipt(site, overlay={}),
    "receipt leading out": lambda site: rewrite_receipt(site, overlay={"../x": "0" * 64}),
    "receipt of another schema": lambda site: rewrite_receipt(site, schema=99),
    "original cut short": lambda site: rewrite(original(site), lambda text: text[:-1]),
    "row dropped": lambda site: rewrite(listing(site), drop_row),
    "row of another hash": lambda site: rewrite(
        listing(site),
        lambda text: text.replace(MODULE.encode() + b",sha256=", MODULE.encode() + b",sha256=A"),
    ),
    "row inside of another": lambda site: rewrite(
        listing(site), lambda text: text.replace(MODULE.encode(), b"x" + MODULE.encode())
    ),
    "row with a tail": lambda site: rewrite(
        listing(site),
        lambda text: text.replace(receipt.PATH.encode() + b",,", receipt.PATH.encode() + b",,1"),
    ),
    "run interrupted": lambda site: (site / STAGING).mkdir(),
    "old code for a hook": lambda site: compile_unchecked(site / HOOKED, "old = 1"),
    "old code for a module": lambda site: compile_unchecked(site / MODULE, "old = 1"),
    "second distribution": lambda site: (site / "sglang-0.5.11.dist-info").mkdir(),
    "sglang uninstalled": lambda site: (site / "sglang/__init__.py").unlink(),
}
# Each leaves it patched, though not as it was.
HARMLESS: dict[str, Callable[[Path], object]] = {
    "nothing": lambda site: None,
    "hooked file behind a link": lambda site: link_to_copy(site / HOOKED),
    "hooked file with a second name": lambda site: os.link(site / HOOKED, site / "second"),
    "RECORD with other line ends": lambda site: rewrite(listing(site), other_line_ends),
    "RECORD removed": lambda site: listing(site).unlink(),
    "original removed": lambda site: original(site).unlink(),
    "stranger in the package": lambda site: (site / "sglang_overlay/mine.py").touch(),
    "module compiled": lambda site: py_compile.compile(str(site / MODULE), doraise=True),
    "distribution of another name": lambda site: (site / "sglang_kernel-1.dist-info").mkdir(),
}


@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED.keys())
def test_what_is_not_patched_is_not_recognised(spoil: Callable[[Path], object], site: Path) -> None:
    spoil(site)
    found = survey(site)
    assert found.errors or found.changed or found.state_before is not TreeState.PATCHED
    assert look(site) is None


@pytest.mark.parametrize("change", HARMLESS.values(), ids=HARMLESS.keys())
def test_what_is_recognised_is_told_as_the_survey_tells_it(
    change: Callable[[Path], object], site: Path
) -> None:
    change(site)
    assert look(site) == survey(site)
    assert glance.recognise(str(site), command="apply") == engine.apply(Request(target=str(site)))


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_change_to_any_file_is_judged_as_by_the_survey(
    data: st.DataObject, master: Path
) -> None:
    path = data.draw(st.sampled_from(sorted(p for p in master.rglob("*") if p.is_file())))
    content = path.read_bytes()
    at = data.draw(st.integers(0, len(content)))
    length, inserted = data.draw(st.integers(0, 3)), data.draw(st.binary(max_size=2))
    try:
        path.write_bytes(content[:at] + inserted + content[at + length :])
        seen, found = look(master), survey(master)
    finally:
        path.write_bytes(content)
    patched = found.state_before is TreeState.PATCHED and not found.errors
    assert seen == (found if patched else None)


def test_a_target_that_is_not_plain_is_left_to_the_survey(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to(site)
    for target in ("", "~", str(tmp_path / "link"), str(site.parent), sys.executable):
        assert look(target) is None
    assert glance.recognise(None, command="check") is None
    monkeypatch.chdir(site.parent)
    for target in ("site-packages", "./site-packages/", f"{site}/../site-packages"):
        assert look(target) == survey(target)
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path / "cache"))
    assert look(site) is None


def test_a_tree_on_which_another_run_works_is_left_to_the_survey(site: Path) -> None:
    holder = os.open(site, os.O_RDONLY)
    try:
        fcntl.flock(holder, fcntl.LOCK_EX)
        assert look(site) is None
    finally:
        os.close(holder)
    assert look(site) is not None


def test_a_glance_writes_nothing_and_loads_little(site: Path) -> None:
    code = (
        "import sys; from patcher import glance; "
        f"assert glance.recognise({str(site)!r}, command='apply'); "
        "print([m for m in ('pathlib', 'dataclasses', 'subprocess') if m in sys.modules])"
    )
    root = importlib.util.find_spec("patcher").submodule_search_locations[0]  # type: ignore[union-attr,index]
    before = site.stat().st_mtime_ns
    told = subprocess.run(
        [sys.executable, "-S", "-c", code],
        cwd=Path(root).parent,
        check=True,
        capture_output=True,
        text=True,
    )
    assert told.stdout == "[]\n"
    assert site.stat().st_mtime_ns == before
