"""The engine's verbs on real installs of the released wheels."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import os
import py_compile
import shutil
import signal
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from devtools import wheels
from patcher import engine, files, receipt, record, source, transaction
from patcher.engine import Request
from patcher.report import Outcome
from patcher.source import Source
from patcher.states import TreeState
from tests.support.sites import manifest_of, pip_site, slim_site
from tests.support.snapshots import assert_identical, snapshot

RELEASE = "0.5.12.post1"


@pytest.fixture
def site(tmp_path: Path) -> Path:
    return slim_site(RELEASE, tmp_path / "site-packages")


def apply(site: Path, **options: bool) -> Outcome:
    return engine.apply(Request(target=str(site), **options))


def revert(site: Path, **options: bool) -> Outcome:
    return engine.revert(Request(target=str(site), **options))


def status(site: Path) -> TreeState | None:
    return engine.status(Request(target=str(site))).state_after


def codes(outcome: Outcome) -> set[str]:
    assert all(fault.hint for fault in outcome.errors), "each refusal names a way out"
    return {fault.code for fault in outcome.errors}


def hooked_file(site: Path) -> Path:
    return site / "sglang/srt/speculative/dflash_utils.py"


@pytest.fixture
def product(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that makes the engine ship another overlay from then on."""
    real = source.locate().root

    def ship(version: str, modules: dict[str, str | None] | None = None) -> None:
        root = tmp_path / f"product-{version}"
        shutil.rmtree(root, ignore_errors=True)
        for name in ("patches", "overlay"):
            shutil.copytree(str(real / name), root / name)
        package = root / "overlay" / "sglang_overlay"
        init = package / "__init__.py"
        init.write_text(f'"""Test."""\n\n__version__ = "{version}"\n')
        for name, text in (modules or {}).items():
            if text is None:
                (package / name).unlink()
            else:
                (package / name).write_text(text)
        monkeypatch.setattr(source, "locate", lambda: Source(root))

    return ship


def test_round_trip_on_what_pip_installs(release: str, tmp_path: Path) -> None:
    site = pip_site(release, tmp_path / "site-packages")
    before = snapshot(site, folder_times=True)
    assert any(path.endswith(".pyc") for path in before), "pip compiles"

    applied = apply(site)
    assert (applied.errors, applied.changed) == ((), True)
    assert (applied.release, applied.state_after) == (release, TreeState.PATCHED)
    patched = snapshot(site, folder_times=True)
    for path, row in manifest_of(release).files.items():
        assert patched[path].content == row.after

    again = apply(site)
    assert (again.errors, again.changed) == ((), False)
    assert_identical(patched, snapshot(site, folder_times=True), "the second apply")

    reverted = revert(site)
    assert (reverted.errors, reverted.state_after) == ((), TreeState.PRISTINE)
    assert_identical(before, snapshot(site, folder_times=True), "the reverted tree")
    assert not revert(site).changed


def test_record_is_true_while_patched(site: Path) -> None:
    apply(site)
    listing = next(site.glob("*.dist-info/RECORD"))
    rows = record.rows(listing.read_bytes())
    unhashed = {path for path, row in rows.items() if row.endswith(",,")}
    assert unhashed == {listing.relative_to(site).as_posix(), receipt.PATH}
    for path in rows.keys() - unhashed:
        assert rows[path] == record.row(path, (site / path).read_bytes())
    ours = {p.relative_to(site).as_posix() for p in (site / "sglang_overlay").rglob("*.*")}
    assert {path for path in ours if (site / path).is_file()} <= rows.keys()


def test_mode_owner_and_xattrs_are_kept(site: Path) -> None:
    target = hooked_file(site)
    target.chmod(0o640)
    os.chown(target, 12345, 23456)
    os.setxattr(target, "user.origin", b"mirror")
    before = snapshot(site)
    apply(site)
    now = target.stat()
    assert (stat.S_IMODE(now.st_mode), now.st_uid, now.st_gid) == (0o640, 12345, 23456)
    assert os.getxattr(target, "user.origin") == b"mirror"
    revert(site)
    assert_identical(before, snapshot(site))


def test_new_files_belong_to_the_owner_of_the_tree(site: Path) -> None:
    for path in (site, *site.rglob("*")):
        os.chown(path, 1234, 1234)
    apply(site)
    owners = {(p.lstat().st_uid, p.lstat().st_gid) for p in (site / "sglang_overlay").rglob("*")}
    assert owners == {(1234, 1234)}


def test_the_original_of_a_file_beyond_ascii_is_kept(site: Path) -> None:
    apply(site)
    original = next(site.glob("sglang_overlay/_state/originals/*server_args.py.orig"))
    assert (
        files.digest_path(original)
        == manifest_of(RELEASE).files["sglang/srt/server_args.py"].before
    )


def test_check_writes_nothing_and_foretells(site: Path) -> None:
    before = snapshot(site, folder_times=True)
    planned = apply(site, check=True)
    assert (planned.command, planned.changed, planned.state_after) == (
        "check",
        True,
        TreeState.PATCHED,
    )
    assert_identical(before, snapshot(site, folder_times=True))
    done = apply(site)
    assert [a.sha256_after for a in planned.actions] == [a.sha256_after for a in done.actions]
    assert not apply(site, check=True).changed


def test_a_local_edit_is_refused_with_the_hunk_that_clashes(site: Path) -> None:
    target = hooked_file(site)
    text = target.read_text()
    target.write_text(text.replace("def resolve_dflash_verify_mask_policy", "def renamed"))
    before = snapshot(site)
    outcome = apply(site)
    assert codes(outcome) == {"release-unknown", "file-modified"}
    fault = next(f for f in outcome.errors if f.code == "file-modified")
    assert fault.path == "sglang/srt/speculative/dflash_utils.py"
    assert "hunk" in fault.message
    assert_identical(before, snapshot(site))
    assert status(site) is TreeState.FOREIGN


def test_a_changed_witness_is_refused(site: Path) -> None:
    witness = site / next(iter(manifest_of(RELEASE).witnesses))
    witness.write_bytes(witness.read_bytes() + b"# local\n")
    outcome = apply(site)
    assert "file-modified" in codes(outcome)
    assert any(witness.name in fault.path for fault in outcome.errors)


def test_a_version_that_its_files_contradict_is_refused(site: Path) -> None:
    info = next(site.glob("sglang-*.dist-info"))
    info.rename(info.with_name("sglang-0.5.13.dist-info"))
    assert codes(apply(site)) == {"release-unknown"}


def test_a_fork_under_another_name_is_refused(site: Path) -> None:
    info = next(site.glob("sglang-*.dist-info"))
    info.rename(info.with_name("sglang_fork-1.0.dist-info"))
    outcome = apply(site)
    assert codes(outcome) == {"foreign-distribution"}
    assert "sglang_fork-1.0" in outcome.errors[0].message


def test_the_source_folder_of_an_editable_install_is_refused(tmp_path: Path) -> None:
    """Its environment imports `sglang` by a finder, and would not find the overlay beside it."""
    source_folder = slim_site(RELEASE, tmp_path / "python")
    info = next(source_folder.glob("sglang-*.dist-info"))
    info.rename(tmp_path / info.name)
    before = snapshot(source_folder)
    outcome = apply(source_folder)
    assert codes(outcome) == {"metadata-missing"}
    assert "through its environment" in outcome.errors[0].hint
    assert_identical(before, snapshot(source_folder))
    # An earlier overlay may have been put there: that is no success either, but can be taken off.
    (tmp_path / info.name).rename(info)
    assert apply(source_folder).exit_code == 0
    info.rename(tmp_path / info.name)
    assert codes(apply(source_folder)) == {"metadata-missing"}
    assert revert(source_folder).exit_code == 0
    assert status(source_folder) is TreeState.PRISTINE


def test_nothing_to_patch_is_refused(tmp_path: Path) -> None:
    (tmp_path / "site-packages").mkdir()
    assert codes(apply(tmp_path / "site-packages")) == {"sglang-missing"}
    assert codes(apply(tmp_path / "nowhere")) == {"target-missing"}


def test_upgrade_in_place_is_one_step_and_ends_as_a_fresh_apply(
    site: Path, tmp_path: Path, product: Callable[..., None]
) -> None:
    fresh = slim_site(RELEASE, tmp_path / "fresh")
    before = snapshot(site)
    product("0.1.0", {"gone_later.py": '"""Only in the first."""\n'})
    assert apply(site).changed
    product("0.2.0", {"came_later.py": '"""Only in the second."""\n'})
    assert status(site) is TreeState.OUTDATED
    outcome = apply(site)
    assert (outcome.state_before, outcome.state_after) == (TreeState.OUTDATED, TreeState.PATCHED)
    apply(fresh)

    def but_for_times(root: Path) -> dict[str, object]:
        entries = snapshot(root, leave_out=lambda path: path.endswith(("receipt.json", "RECORD")))
        return {p: dataclasses.replace(e, mtime_ns=0) for p, e in entries.items()}

    assert but_for_times(site) == but_for_times(fresh)
    assert not (site / "sglang_overlay/gone_later.py").exists()
    revert(site)
    assert_identical(before, snapshot(site))


def test_a_downgrade_is_refused_or_done_on_purpose(
    site: Path, product: Callable[..., None]
) -> None:
    before = snapshot(site)
    product("0.2.0")
    apply(site)
    product("0.1.9")
    assert status(site) is TreeState.NEWER
    assert codes(apply(site)) == {"overlay-newer"}
    outcome = apply(site, allow_downgrade=True)
    assert (outcome.errors, outcome.state_after) == ((), TreeState.PATCHED)
    revert(site)
    assert_identical(before, snapshot(site))


def test_an_older_engine_takes_back_what_a_newer_overlay_did(
    site: Path, product: Callable[..., None]
) -> None:
    before = snapshot(site)
    product("9.0.0", {"new_module.py": "x = 1\n"})
    apply(site)
    product("0.1.0")
    assert revert(site).state_after is TreeState.PRISTINE
    assert_identical(before, snapshot(site))


def test_a_file_replaced_since_is_left_alone_by_a_revert(site: Path) -> None:
    apply(site)
    hooked_file(site).write_bytes(b"# another release\n")
    outcome = revert(site)
    assert outcome.errors == ()
    assert hooked_file(site).read_bytes() == b"# another release\n"
    assert any("dflash_utils.py" in warning for warning in outcome.warnings)
    assert not (site / "sglang_overlay").exists()
    left = {a.path: a.action.value for a in outcome.actions}
    assert left["sglang/srt/speculative/dflash_utils.py"] == "leave"
    assert left["sglang/srt/server_args.py"] == "restore"


def test_a_hooked_file_edited_since_stops_the_revert(site: Path) -> None:
    apply(site)
    target = hooked_file(site)
    target.write_text(target.read_text() + "# debugging\n")
    before = snapshot(site)
    assert codes(revert(site)) == {"hooked-file-modified"}
    assert_identical(before, snapshot(site))


def test_an_edited_overlay_module_is_neither_overwritten_nor_removed(site: Path) -> None:
    apply(site)
    module = site / "sglang_overlay/switches.py"
    module.write_text("# debugging\n")
    assert codes(apply(site)) == {"overlay-modified"}
    outcome = revert(site)
    assert outcome.errors == ()
    assert module.read_text() == "# debugging\n"
    assert [p.name for p in (site / "sglang_overlay").rglob("*")] == ["switches.py"]


def test_a_lost_overlay_module_is_brought_back(site: Path) -> None:
    apply(site)
    patched = snapshot(site, leave_out=lambda path: path.endswith("receipt.json"))
    (site / "sglang_overlay/switches.py").unlink()
    assert status(site) is TreeState.MIXED
    assert apply(site).state_after is TreeState.PATCHED
    now = snapshot(site, leave_out=lambda path: path.endswith("receipt.json"))
    assert {p: e.content for p, e in now.items()} == {p: e.content for p, e in patched.items()}


def test_record_rewritten_by_others_keeps_their_rows(site: Path) -> None:
    listing = next(site.glob("*.dist-info/RECORD"))
    before = record.rows(listing.read_bytes())
    apply(site)
    listing.write_bytes(listing.read_bytes() + b"sglang/extra.py,,\n")
    revert(site)
    after = record.rows(listing.read_bytes())
    assert after == {**before, "sglang/extra.py": "sglang/extra.py,,"}


def test_a_lost_record_row_is_mended_by_apply(site: Path) -> None:
    apply(site)
    listing = next(site.glob("*.dist-info/RECORD"))
    listing.write_bytes(record.edit(listing.read_bytes(), put={}, drop=["sglang_overlay/py.typed"]))
    assert status(site) is TreeState.MIXED
    assert apply(site).state_after is TreeState.PATCHED
    assert "sglang_overlay/py.typed" in record.rows(listing.read_bytes())


def test_a_patched_tree_without_receipt_is_refused(site: Path) -> None:
    apply(site)
    (site / receipt.PATH).unlink()
    assert codes(apply(site)) == {"receipt-missing"}
    assert codes(revert(site)) == {"receipt-missing"}


def test_a_damaged_original_is_never_put_back(site: Path) -> None:
    apply(site)
    kept = site / receipt.original_name("sglang/srt/server_args.py")
    os.truncate(kept, 100)
    before = snapshot(site)
    assert codes(revert(site)) == {"original-missing"}
    assert_identical(before, snapshot(site))


@pytest.mark.parametrize("text", ["", "{}", '{"schema": 99}', "\x00"])
def test_an_unreadable_receipt_is_refused(site: Path, text: str) -> None:
    apply(site)
    (site / receipt.PATH).write_text(text)
    assert codes(apply(site)) == {"receipt-unreadable"}
    assert codes(revert(site)) == {"receipt-unreadable"}


def test_an_editable_install_is_patched_where_its_package_lies(tmp_path: Path) -> None:
    workspace, site = tmp_path / "work space é" / "python", tmp_path / "site-packages"
    slim_site(RELEASE, workspace)
    info = site / "sglang-0.0.0.dev1+g0123abc.dist-info"
    site.mkdir()
    next(workspace.glob("*.dist-info")).rename(info)
    (info / "direct_url.json").write_text(
        json.dumps({"url": workspace.parent.as_uri(), "dir_info": {"editable": True}})
    )
    (info / "RECORD").write_text(f"{info.name}/METADATA,,\n{info.name}/RECORD,,\n")
    before = [snapshot(workspace), snapshot(site)]
    outcome = apply(site)
    assert (outcome.errors, outcome.release) == ((), RELEASE)
    assert "sglang_overlay" in hooked_file(workspace).read_text()
    assert (site / "sglang_overlay/__init__.py").is_file()
    assert not (workspace / "sglang_overlay").exists()
    assert not apply(site).changed
    assert revert(site).state_after is TreeState.PRISTINE
    for was, root in zip(before, (workspace, site), strict=True):
        assert_identical(was, snapshot(root))


def test_stale_bytecode_of_an_overlay_module_is_dropped(site: Path) -> None:
    apply(site)
    module = site / "sglang_overlay/switches.py"
    text = module.read_text()
    module.write_text("DISABLED = 'old text'\n")
    unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH
    pyc = Path(str(py_compile.compile(str(module), invalidation_mode=unchecked)))
    module.write_text(text)
    assert status(site) is TreeState.MIXED
    assert apply(site).state_after is TreeState.PATCHED
    assert not pyc.exists()


def test_another_user_without_rights_is_told_before_anything_is_written(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = snapshot(site)
    monkeypatch.setattr(os, "geteuid", lambda: 4321)
    assert codes(apply(site)) == {"not-owner"}
    assert_identical(before, snapshot(site))


def test_a_journal_from_a_newer_engine_is_left_alone(site: Path) -> None:
    staging = site / transaction.STAGING
    staging.mkdir()
    (staging / "journal.json").write_text('{"schema": 99}')
    assert status(site) is TreeState.INTERRUPTED
    assert codes(apply(site)) == {"journal-unreadable"}
    assert (staging / "journal.json").exists()


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that moves this process to another host, where no lock of others is seen.

    As on a network filesystem, which keeps the lock on a folder to the host that took it.
    """
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    real = transaction._name
    now = ["first"]
    monkeypatch.setattr(transaction, "_name", lambda: now[0].encode() + b" " + real())
    return lambda name: now.__setitem__(0, name)


@pytest.mark.parametrize("verb", [apply, revert], ids=["apply", "revert"])
@pytest.mark.parametrize("at", ["_open", "_stage", "_commit", "_act", "_drop"])
def test_a_run_on_another_host_in_the_middle_of_one(
    at: str,
    verb: Callable[[Path], Outcome],
    site: Path,
    tmp_path: Path,
    hosts: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = snapshot(site)
    if verb is revert:
        apply(site)
    other: list[Outcome] = []
    step = getattr(transaction, at)

    def interrupted(*given: Any, **named: Any) -> Any:
        if not other:
            monkeypatch.setattr(transaction, at, step)
            hosts("second")
            other.append(verb(site))
            hosts("first")
        return step(*given, **named)

    monkeypatch.setattr(transaction, at, interrupted)
    first = verb(site)
    if at == "_open":  # the second one was quicker: it did all of it
        assert (other[0].exit_code, codes(first)) == (0, {"changed-underneath"})
    else:
        assert (first.exit_code, codes(other[0])) == (0, {"locked"})
    assert not (site / transaction.STAGING).exists()
    assert status(site) is (TreeState.PATCHED if verb is apply else TreeState.PRISTINE)
    revert(site)
    assert_identical(before, snapshot(site))


def test_two_hosts_that_make_the_staging_folder_at_once(
    site: Path, hosts: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder of the other one is left alone, whole."""
    staging, make = site / transaction.STAGING, os.mkdir

    def mkdir(path: Any, *more: Any) -> None:
        if Path(path) == staging:
            make(staging)
            (staging / "owner").write_text("second 1 1\n")
            (staging / "0000.new").touch()
        make(path, *more)

    monkeypatch.setattr(os, "mkdir", mkdir)
    assert codes(apply(site)) == {"locked"}
    assert sorted(path.name for path in staging.iterdir()) == ["0000.new", "owner"]
    monkeypatch.undo()
    assert hooked_file(site).read_bytes() == hooked_file(wheels.tree(RELEASE)).read_bytes()


def test_a_staging_folder_that_another_host_took_away_before_it_had_a_name(
    site: Path, hosts: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    staging, stage = site / transaction.STAGING, transaction._stage

    def replaced(*given: Any, **named: Any) -> Any:
        shutil.rmtree(staging)
        staging.mkdir()
        (staging / "owner").write_text("second 1 1\n")
        return stage(*given, **named)

    monkeypatch.setattr(transaction, "_stage", replaced)
    assert codes(apply(site)) == {"locked"}
    assert (staging / "owner").read_text() == "second 1 1\n"
    assert not (staging / "journal.json").exists()
    assert hooked_file(site).read_bytes() == hooked_file(wheels.tree(RELEASE)).read_bytes()


@pytest.mark.parametrize("named", [False, True])
def test_a_run_that_was_killed_before_it_wrote_its_name_holds_nobody_up(
    site: Path, *, named: bool
) -> None:
    staging = site / transaction.STAGING
    staging.mkdir()
    if named:
        (staging / "owner").touch()
    assert (apply(site).exit_code, status(site)) == (0, TreeState.PATCHED)
    assert not staging.exists()


@pytest.mark.parametrize("age", [-4000, 0, 100, 130, 4000])
def test_what_a_run_on_another_host_left_is_taken_over_after_a_while(
    age: int, site: Path, hosts: Callable[[str], None]
) -> None:
    staging = site / transaction.STAGING
    staging.mkdir()
    (staging / "owner").write_text("second 1 1\n")
    for path in (staging / "owner", staging):
        os.utime(path, (time.time() - age,) * 2)
    outcome = apply(site)
    if 0 <= age < 120:
        assert codes(outcome) == {"locked"}
        assert "after 120 s" in outcome.errors[0].hint
        hosts("second")  # the lock of that host says that it is dead
        outcome = apply(site)
    assert (outcome.exit_code, outcome.state_after) == (0, TreeState.PATCHED)
    assert not staging.exists()


def test_ctrl_c_while_a_change_is_put_back_tells_why(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> None:
        # To this thread alone: a worker of pytest-xdist has others, which do not defer it.
        signal.raise_signal(signal.SIGINT)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(transaction, "_act", fail)
    try:
        outcome = apply(site)
    finally:
        signal.signal(signal.SIGINT, previous)
    assert codes(outcome) == {"io-error"}
    assert status(site) is TreeState.PRISTINE
