"""A family folder is read whole or refused with all its faults, and rendered the same way."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from patcher.diff import FilePatch, Hunk
from patcher.errors import Fault, Refused, refuse
from patcher.series import Entry, Patch, Series, load, render

PROSE = """Ask the overlay for the mask policy

Why: the stock skip set names classes,
  and not what they can do.
How: one decorator.
Upstream: not offered yet
Remove when: the policy asks the backend.

"""
MASK = (
    PROSE
    + """--- a/sglang/srt/mask.py
+++ b/sglang/srt/mask.py
@@ -1,2 +1,3 @@
 import os
+import overlay
 x = 1
--- a/sglang/srt/worker.py
+++ b/sglang/srt/worker.py
@@ -1 +1 @@
-y = 1
+y = 2
"""
)
WORKER = (
    PROSE
    + """--- a/sglang/srt/worker.py
+++ b/sglang/srt/worker.py
@@ -1 +1,2 @@
 y = 2
+z = 3
"""
)
LIST = "# the mask policy\n0001-mask.patch\n\n  0002-worker.patch  # after 0001\n"
ORIGINALS = {"sglang/srt/mask.py": b"import os\nx = 1\n", "sglang/srt/worker.py": b"y = 1\n"}


def write(folder: Path, **changes: str | None) -> Path:
    """Write the family, with files changed, added or (None) left out."""
    files = {"series": LIST, "0001-mask.patch": MASK, "0002-worker.patch": WORKER, **changes}
    for name, text in files.items():
        if text is not None:
            (folder / name).write_bytes(text.encode(errors="surrogateescape"))
    return folder


def faults(folder: Entry) -> list[Fault]:
    with pytest.raises(Refused) as caught:
        load(folder, family="fam")
    assert all(fault.hint for fault in caught.value.faults)
    return list(caught.value.faults)


def test_load_reads_patches_in_the_order_of_the_list(tmp_path: Path) -> None:
    prose = {
        "subject": "Ask the overlay for the mask policy",
        "why": "the stock skip set names classes,\nand not what they can do.",
        "how": "one decorator.",
        "upstream": "not offered yet",
        "remove_when": "the policy asks the backend.",
    }
    import_overlay = Hunk(
        source_start=1,
        source=(b"import os\n", b"x = 1\n"),
        target=(b"import os\n", b"import overlay\n", b"x = 1\n"),
        added=1,
    )
    raise_y = Hunk(source_start=1, source=(b"y = 1\n",), target=(b"y = 2\n",), added=1)
    add_z = Hunk(source_start=1, source=(b"y = 2\n",), target=(b"y = 2\n", b"z = 3\n"), added=1)
    mask, worker = "sglang/srt/mask.py", "sglang/srt/worker.py"
    first, second = "0001-mask.patch", "0002-worker.patch"
    series = load(write(tmp_path), family="fam")
    assert series == Series(
        family="fam",
        patches=(
            Patch(
                name=first,
                files=(
                    FilePatch(path=mask, hunks=(import_overlay,), origin=first),
                    FilePatch(path=worker, hunks=(raise_y,), origin=first),
                ),
                **prose,
            ),
            Patch(
                name=second,
                files=(FilePatch(path=worker, hunks=(add_z,), origin=second),),
                **prose,
            ),
        ),
    )
    assert series.paths == (mask, worker)


def test_a_series_in_an_archive_reads_the_same(tmp_path: Path) -> None:
    folder = write(tmp_path)
    archive = tmp_path / "overlay.pyz"
    with zipfile.ZipFile(archive, "w") as file:
        for path in sorted(folder.iterdir()):
            if path != archive:
                file.write(path, f"patches/fam/{path.name}")
    with zipfile.ZipFile(archive) as file:
        inside = zipfile.Path(file, "patches/").joinpath("fam")
        assert load(inside, family="fam") == load(folder, family="fam")


def test_other_files_in_the_folder_are_not_read(tmp_path: Path) -> None:
    write(tmp_path, **{"0.5.12.json": "{}"})
    (tmp_path / "manifests").mkdir()
    assert len(load(tmp_path, family="fam").patches) == 2


@pytest.mark.parametrize(
    ("changes", "code", "told"),
    [
        ({"series": None}, "series-missing", "patches/fam has no file `series`"),
        ({"0001-mask.patch": None}, "series-patch-missing", "0001-mask.patch is listed and does"),
        ({"0003-x.patch": MASK}, "series-patch-unlisted", "0003-x.patch exists and is not listed"),
        ({"series": LIST + "0001-mask.patch\n"}, "series-duplicate", "0001-mask.patch is listed"),
        ({"series": LIST + "../0001-mask.patch\n"}, "series-name", "'../0001-mask.patch' is not"),
        ({"series": LIST + "/etc/0001-x.patch\n"}, "series-name", "'/etc/0001-x.patch' is not"),
        ({"series": LIST + "mask.patch\n"}, "series-name", "'mask.patch' is not"),
        ({"series": LIST + "0001-Mask.patch\n"}, "series-name", "'0001-Mask.patch' is not"),
        ({"series": LIST + "0001-mask.patch -p1\n"}, "series-name", "'0001-mask.patch -p1' is"),
        ({"series": LIST + "0003-m\udcffsk.patch\n"}, "series-name", "'0003-m\\\\xffsk.patch' is"),
    ],
)
def test_a_wrong_list_is_refused(
    changes: dict[str, str | None], code: str, told: str, tmp_path: Path
) -> None:
    (fault,) = faults(write(tmp_path, **changes))
    assert fault.code == code
    assert fault.message.startswith(told)
    assert fault.path == "fam/series"


def test_a_list_without_patches_is_refused(tmp_path: Path) -> None:
    found = faults(write(tmp_path, series="# 0001-mask.patch\n\n"))
    assert [fault.code for fault in found] == ["series-empty"] + ["series-patch-unlisted"] * 2


def test_a_list_converted_to_crlf_is_refused(tmp_path: Path) -> None:
    found = faults(write(tmp_path, series="0001-mask.patch\r\n0002-worker.patch\r\n"))
    assert [fault.code for fault in found] == ["series-name"] * 2 + ["series-patch-unlisted"] * 2


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    assert [fault.code for fault in faults(tmp_path / "none")] == ["series-missing"]


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("Why:", "Because:", ["field `Why:` is missing", "outside of all fields: 'Because: the"]),
        ("How: one decorator.\n", "", ["the field `How:` is missing or empty"]),
        (
            "Upstream: not offered yet\n",
            "Upstream:\n",
            ["the field `Upstream:` is missing or empty"],
        ),
        ("Upstream:", "Upstream: no\nUpstream:", ["the field `Upstream:` is there more than once"]),
        (
            "Remove when: the policy asks the backend.\n",
            "",
            ["the field `Remove when:` is missing"],
        ),
        ("Ask the overlay for the mask policy", "", ["the first line is not a subject"]),
        (
            "Ask the overlay for the mask policy\n\nWhy",
            "Why",
            ["the first line is not a subject", "the field `Why:` is missing", "outside of all"],
        ),
        ("\n\nWhy", "\nsome more\n\nWhy", ["text outside of all fields: 'some more'"]),
        ("one decorator", "one d\udcffcorator", ["0001-mask.patch: line 5 is not UTF-8"]),
    ],
)
def test_a_wrong_header_is_refused(old: str, new: str, told: list[str], tmp_path: Path) -> None:
    assert MASK.count(old) == 1
    found = faults(write(tmp_path, **{"0001-mask.patch": MASK.replace(old, new)}))
    assert [fault.code for fault in found] == ["patch-header-field"] * len(told)
    for fault, part in zip(found, told, strict=True):
        assert fault.message.startswith("0001-mask.patch: ")
        assert part in fault.message
        assert fault.path == "0001-mask.patch"


def test_the_faults_of_the_list_and_of_all_patches_come_together(tmp_path: Path) -> None:
    found = faults(
        write(
            tmp_path,
            **{
                "series": LIST + "x\n",
                "0001-mask.patch": MASK.replace("How:", "Now:").replace("a/sglang", "a/../sglang"),
                "0002-worker.patch": WORKER.replace("@@ -1 +1,2 @@", "@@ -1 +1,9 @@"),
                "0003-more.patch": WORKER,
            },
        )
    )
    assert [(fault.code, fault.path) for fault in found] == [
        ("series-name", "fam/series"),
        ("series-patch-unlisted", "fam/series"),
        ("patch-header-field", "0001-mask.patch"),
        ("patch-path-unsafe", "0001-mask.patch"),
        ("patch-path-unsafe", "0001-mask.patch"),
        ("patch-hunk-count", "0002-worker.patch"),
    ]


def test_render_applies_the_patches_of_a_file_one_after_the_other(tmp_path: Path) -> None:
    series = load(write(tmp_path), family="fam")
    assert render(series, ORIGINALS.__getitem__) == {
        "sglang/srt/mask.py": b"import os\nimport overlay\nx = 1\n",
        "sglang/srt/worker.py": b"y = 2\nz = 3\n",
    }


def test_render_in_another_order_does_not_fit(tmp_path: Path) -> None:
    series = load(write(tmp_path, series="0002-worker.patch\n0001-mask.patch\n"), family="fam")
    with pytest.raises(Refused) as caught:
        render(series, ORIGINALS.__getitem__)
    # The later patch of the same file would fit, but is not looked at behind the first fault.
    assert [(fault.code, fault.path) for fault in caught.value.faults] == [
        ("hunk-mismatch", "sglang/srt/worker.py")
    ]


def test_render_reports_the_faults_of_all_files(tmp_path: Path) -> None:
    third = WORKER.replace("srt/worker", "srt/absent")
    fourth = WORKER.replace("srt/worker", "srt/locked")
    names = {"0003-absent.patch": third, "0004-locked.patch": fourth}
    series = load(write(tmp_path, series=LIST + "\n".join(names), **names), family="fam")

    def read(path: str) -> bytes:
        if path.endswith("locked.py"):
            raise refuse("file-unreadable", "no permission", path=path)
        if path.endswith("absent.py"):
            raise FileNotFoundError(path)
        return b"import os\nx = 2\n" if path.endswith("mask.py") else b"y = 1\ny = 1\n"

    with pytest.raises(Refused) as caught:
        render(series, read)
    assert [(fault.code, fault.path) for fault in caught.value.faults] == [
        ("file-missing", "sglang/srt/absent.py"),
        ("file-unreadable", "sglang/srt/locked.py"),
        ("hunk-mismatch", "sglang/srt/mask.py"),
        ("hunk-ambiguous", "sglang/srt/worker.py"),
    ]
