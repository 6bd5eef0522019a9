"""No path in a receipt or journal, and no link on the way, leads out of the target."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from patcher import bounds, engine, files, receipt, transaction
from patcher.engine import Request
from patcher.report import Outcome
from tests.support.sites import patched_site, slim_site
from tests.support.snapshots import assert_identical, snapshot

RELEASE = "0.5.12.post1"
PRECIOUS = b"precious\n"
SHA = files.digest(PRECIOUS)


@pytest.fixture
def site(tmp_path: Path) -> Path:
    return slim_site(RELEASE, tmp_path / "site-packages")


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    (tmp_path / "victim" / "empty").mkdir(parents=True)
    path = tmp_path / "victim" / "x"
    path.write_bytes(PRECIOUS)
    return path


def codes(outcome: Outcome) -> set[str]:
    return {fault.code for fault in outcome.errors}


@pytest.mark.parametrize("path", ["a", "a/b", "a/.b/c d", "größe"])
def test_plain_paths_pass(path: str) -> None:
    assert bounds.plain(path) == path


@pytest.mark.parametrize(
    "path", ["", "/", "/a", "..", "../a", "a/../b", "a//b", "a/", "./a", "a\0b", None, 7, ["a"]]
)
def test_other_paths_are_refused(path: object) -> None:
    with pytest.raises(ValueError, match="path"):
        bounds.plain(path)


def test_a_path_must_lie_below_its_prefix() -> None:
    assert bounds.plain("sglang/x", "sglang/") == "sglang/x"
    with pytest.raises(ValueError, match="not below sglang/"):
        bounds.plain("sglang_overlay/x", "sglang/")


def journal(site: Path, **changes: Any) -> None:
    step = {"base": 0, "path": "sglang/x.py", "before": SHA, "after": None}
    document = {
        "schema": 1,
        "purpose": "apply 0.1.0",
        "bases": [str(site)],
        "steps": [step],
        "new_folders": [],
        "prune": [],
    }
    (site / transaction.STAGING).mkdir()
    text = json.dumps({**document, **changes})
    (site / transaction.STAGING / "journal.json").write_text(text)


OUT = {"base": 0, "path": "../victim/x", "before": SHA, "after": None}


@pytest.mark.parametrize(
    "changes",
    [
        {"steps": [OUT]},
        {"steps": [{**OUT, "path": "/etc/x"}]},
        {"steps": [{**OUT, "base": 1, "path": "x"}]},
        {"steps": [{**OUT, "base": -1, "path": "x"}]},
        {"steps": [{**OUT, "path": 7}]},
        {"steps": [{**OUT, "path": "a\0b"}]},
        {"steps": [{}]},
        {"steps": 7},
        {"new_folders": [[0, "../victim/new"]]},
        {"prune": [[0, "../victim/empty"]]},
        {"prune": [["0", "sglang"]]},
        {"bases": ["/site", "/elsewhere"]},
        {"bases": 5},
        {"purpose": "\x1b[2J apply"},
        {"purpose": None},
        {"schema": 2},
    ],
)
@pytest.mark.parametrize("verb", [engine.apply, engine.revert])
def test_a_journal_cannot_reach_out(
    site: Path, victim: Path, changes: dict[str, Any], verb: Any
) -> None:
    journal(site, **changes)
    before = snapshot(site.parent, folder_times=True)
    assert codes(verb(Request(target=str(site)))) == {"journal-unreadable"}
    assert_identical(before, snapshot(site.parent, folder_times=True))
    assert victim.read_bytes() == PRECIOUS


def test_a_journal_cannot_reach_out_through_a_link(site: Path, victim: Path) -> None:
    (site / "sglang" / "away").symlink_to(victim.parent)
    journal(site, steps=[{**OUT, "path": "sglang/away/x"}])
    assert codes(engine.apply(Request(target=str(site)))) == {"journal-unreadable"}
    assert victim.exists()


def tamper(site: Path, **changes: Any) -> None:
    path = site / receipt.PATH
    document = json.loads(path.read_text())
    for name, value in changes.items():
        if isinstance(value, dict):
            document[name].update(value)
        else:
            document[name] = value
    path.write_text(json.dumps(document))


KEPT = {
    "before": SHA,
    "after": SHA,
    "original": "sglang_overlay/_state/originals/sglang/srt/server_args.py.orig",
}


@pytest.mark.parametrize(
    "changes",
    [
        {"overlay": {"../victim/x": SHA}},
        {"overlay": {"sglang/version.py": SHA}},
        {"files": {"../victim/x": KEPT}},
        {"files": {"sglang/x.py": {**KEPT, "original": "../victim/x"}}},
        {"files": {"sglang/x.py": {**KEPT, "original": 5}}},
        {"bytecode": {"/victim/x": KEPT}},
        {"record": {"other-1.0.dist-info/RECORD": KEPT}},
        {"folders": {"../victim": {"mtime_ns": 0, "names": ""}}},
        {"folders": {".": {"mtime_ns": "abc", "names": ""}}},
        {"overlay": []},
        {"files": 7},
        {"overlay_version": 5},
        {"overlay_version": "one"},
        {"applied_at": None},
    ],
)
def test_a_receipt_cannot_reach_out(tmp_path: Path, victim: Path, changes: dict[str, Any]) -> None:
    site = patched_site(RELEASE, tmp_path / "site-packages")
    tamper(site, **changes)
    before = snapshot(tmp_path, folder_times=True)
    for verb in (engine.apply, engine.revert, engine.status):
        assert codes(verb(Request(target=str(site)))) == {"receipt-unreadable"}
    assert_identical(before, snapshot(tmp_path, folder_times=True))
    assert victim.exists()


@pytest.mark.parametrize("where", ["sglang_overlay", "sglang_overlay/_state"])
def test_a_linked_overlay_folder_is_refused(site: Path, victim: Path, where: str) -> None:
    (site / where).parent.mkdir(exist_ok=True)
    (site / where).symlink_to(victim.parent)
    before = snapshot(site.parent)
    assert codes(engine.apply(Request(target=str(site)))) == {"link-out-of-tree"}
    assert_identical(before, snapshot(site.parent))


def test_a_folder_that_became_a_link_is_not_followed(tmp_path: Path) -> None:
    site = patched_site(RELEASE, tmp_path / "site-packages")
    (site / "sglang_overlay").rename(tmp_path / "away")
    (site / "sglang_overlay").symlink_to(tmp_path / "away")
    before = snapshot(tmp_path)
    assert codes(engine.revert(Request(target=str(site)))) == {"link-out-of-tree"}
    assert_identical(before, snapshot(tmp_path))


def test_a_file_where_the_overlay_goes_is_refused(site: Path) -> None:
    (site / "sglang_overlay").write_text("mine\n")
    before = snapshot(site)
    assert codes(engine.apply(Request(target=str(site)))) == {"link-out-of-tree"}
    assert_identical(before, snapshot(site))


def test_a_relative_link_for_record_is_refused(site: Path) -> None:
    listing = next(site.glob("*.dist-info/RECORD"))
    listing.rename(site.parent / "RECORD")
    listing.symlink_to("../../RECORD")
    assert codes(engine.apply(Request(target=str(site)))) == {"link-out-of-tree"}


@pytest.mark.parametrize("kind", ["file", "link"])
def test_something_else_where_the_staging_folder_goes(site: Path, victim: Path, kind: str) -> None:
    staging = site / transaction.STAGING
    if kind == "file":
        staging.write_text("mine\n")
    else:
        staging.symlink_to(victim.parent)
    assert codes(engine.apply(Request(target=str(site)))) == {"overlay-modified"}
    assert victim.exists()


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("sglang/srt/server_args.py", "file-modified"),
        (receipt.PATH, "receipt-unreadable"),
        (f"{transaction.STAGING}/journal.json", "journal-unreadable"),
    ],
)
def test_a_pipe_is_not_waited_for(site: Path, path: str, code: str) -> None:
    (site / path).unlink(missing_ok=True)
    (site / path).parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(site / path)
    assert code in codes(engine.apply(Request(target=str(site))))


def test_every_row_of_a_doubled_record_is_made_true(site: Path) -> None:
    listing = next(site.glob("*.dist-info/RECORD"))
    listing.write_bytes(listing.read_bytes() * 2)
    before = snapshot(site)
    applied = engine.apply(Request(target=str(site)))
    assert applied.state_after is not None
    assert applied.state_after.value == "patched"
    engine.revert(Request(target=str(site)))
    assert_identical(before, snapshot(site))
