"""Targets: what people pass, and which folders it means."""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from patcher import site
from patcher.errors import Refused

FINDER = """
from __future__ import annotations
MAPPING: dict[str, str] = {mapping!r}
NAMESPACES: dict[str, list[str]] = {{}}
"""


def put(folder: Path, version: str = "0.5.12") -> Path:
    (folder / "sglang" / "srt").mkdir(parents=True)
    (folder / "sglang" / "__init__.py").touch()
    info = folder / f"sglang-{version}.dist-info"
    info.mkdir()
    (info / "RECORD").write_text("sglang/__init__.py,,\n")
    return folder


def code(target: str | None) -> str:
    with pytest.raises(Refused) as refusal:
        site.resolve(target)
    assert refusal.value.faults[0].hint
    return refusal.value.faults[0].code


@pytest.mark.parametrize("name", ["site-packages", "with space", "größe-日本"])
def test_a_site_packages_folder(tmp_path: Path, name: str) -> None:
    folder = put(tmp_path / name)
    found = site.resolve(str(folder) + "/")
    assert (found.root, found.package_root, found.version) == (folder, folder, "0.5.12")
    assert found.record == folder / "sglang-0.5.12.dist-info" / "RECORD"
    assert (found.installed, found.editable, found.notes) == (True, False, ())


def test_a_relative_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path / "site-packages")
    monkeypatch.chdir(tmp_path)
    assert site.resolve("site-packages").root == tmp_path / "site-packages"
    monkeypatch.chdir(tmp_path / "site-packages" / "sglang")
    assert site.resolve("..").root == tmp_path / "site-packages"


def test_a_linked_folder_is_resolved_and_said(tmp_path: Path) -> None:
    folder = put(tmp_path / "real")
    (tmp_path / "link").symlink_to(folder)
    found = site.resolve(str(tmp_path / "link"))
    assert found.root == folder
    assert "symbolic link" in found.notes[0]


def test_the_package_itself_means_its_folder(tmp_path: Path) -> None:
    folder = put(tmp_path / "site-packages")
    assert site.resolve(str(folder / "sglang")).root == folder


@pytest.mark.parametrize("given", [".", "bin/python", "bin/python3"])
def test_a_virtual_environment_or_its_python(tmp_path: Path, given: str) -> None:
    environment = tmp_path / "an env"
    venv.create(environment, with_pip=False, symlinks=True)
    folder = put(next(environment.glob("lib/python3*/site-packages")))
    found = site.resolve(str(environment / given))
    assert found.root == folder
    assert "was taken" in found.notes[-1]


def test_no_target_means_the_python_that_runs_this(tmp_path: Path) -> None:
    environment = tmp_path / "env"
    venv.create(environment, with_pip=False, symlinks=True)
    folder = put(next(environment.glob("lib/python3*/site-packages")))
    root = Path(__file__).resolve().parents[2]
    code = f"import sys; sys.path.insert(1, {str(root)!r})\n" + (
        "from patcher import site; print(site.resolve(None).root)"
    )
    done = subprocess.run(
        [environment / "bin" / "python", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str(folder)


def test_an_environment_without_sglang_is_still_a_site(tmp_path: Path) -> None:
    venv.create(tmp_path / "env", with_pip=False, symlinks=True)
    found = site.resolve(str(tmp_path / "env"))
    assert (found.root.name, found.installed) == ("site-packages", False)


def test_what_is_no_target(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").touch()
    assert code(str(tmp_path / "missing")) == "target-missing"
    assert code(str(tmp_path / "notes.txt")) == "target-unknown"
    assert code(str(tmp_path / "folder")) == "target-unknown"
    assert code("/bin/true") == "target-unknown"
    assert code("~nobody-of-this-name/venv") == "target-missing"
    assert code(str(tmp_path / ("long" * 100))) == "target-missing"


def test_two_distributions_at_once_are_refused(tmp_path: Path) -> None:
    folder = put(tmp_path / "site-packages")
    (folder / "sglang-0.5.11.dist-info").mkdir()
    assert code(str(folder)) == "target-ambiguous"


def test_other_distributions_are_not_taken_for_sglang(tmp_path: Path) -> None:
    folder = put(tmp_path / "site-packages")
    (folder / "sglang_kernel-0.4.2.dist-info").mkdir()
    (folder / "sglang-router-0.1.dist-info").mkdir()
    assert site.resolve(str(folder)).version == "0.5.12"


@pytest.mark.parametrize("how", ["path file", "finder", "address"])
def test_an_editable_install(tmp_path: Path, how: str) -> None:
    workspace = tmp_path / "sgl workspace" / "python"
    (workspace / "sglang").mkdir(parents=True)
    (workspace / "sglang" / "__init__.py").touch()
    folder = tmp_path / "site-packages"
    info = folder / "sglang-0.0.0.dev1+gabc.dist-info"
    info.mkdir(parents=True)
    if how == "path file":
        (folder / "__editable__.sglang-0.0.0.pth").write_text(f"{workspace}\n")
    elif how == "finder":
        mapping = {"sglang": str(workspace / "sglang")}
        finder = folder / "__editable___sglang_0_0_0_finder.py"
        finder.write_text(FINDER.format(mapping=mapping))
    else:
        address = {"url": workspace.parent.as_uri(), "dir_info": {"editable": True}}
        (info / "direct_url.json").write_text(json.dumps(address))
    found = site.resolve(str(folder))
    assert (found.root, found.package_root, found.editable) == (folder, workspace, True)
    assert found.bases == (folder, workspace)
    assert found.version == "0.0.0.dev1+gabc"
    assert "editable" in found.notes[-1]


def test_the_running_interpreter_is_not_the_project(tmp_path: Path) -> None:
    assert site.resolve(sys.executable).root != Path(__file__).resolve().parents[2]


def test_a_source_folder_on_the_path_means_the_environment_it_is_installed_in(
    tmp_path: Path,
) -> None:
    """As with PYTHONPATH, or the path file of an editable install in front of its metadata."""
    workspace, folder = tmp_path / "source" / "python", tmp_path / "site-packages"
    put(workspace)
    (workspace / "sglang-0.5.12.dist-info" / "RECORD").unlink()
    (workspace / "sglang-0.5.12.dist-info").rmdir()
    (folder / "sglang-0.5.12.dist-info").mkdir(parents=True)
    (folder / "__editable__.sglang.pth").write_text(f"{workspace}\n")
    found = site._from_search_path([str(workspace), str(folder)], "a test")
    assert (found.root, found.package_root) == (folder, workspace)
    (folder / "__editable__.sglang.pth").unlink()
    found = site._from_search_path([str(workspace), str(folder)], "a test")
    assert (found.root, found.dist_info) == (workspace, None)


def test_odd_metadata_of_an_editable_install_is_passed_over(tmp_path: Path) -> None:
    workspace, folder = tmp_path / "python", tmp_path / "site-packages"
    (workspace / "sglang").mkdir(parents=True)
    (workspace / "sglang" / "__init__.py").touch()
    info = folder / "sglang-0.5.12.dist-info"
    info.mkdir(parents=True)
    path_file = folder / "__editable__.sglang.pth"
    path_file.write_bytes(b"/gr\xf6\xdfe/python\nimport " + b"x" * 5000 + b"\n")
    (folder / "__editable___sglang_finder.py").write_bytes(b"# \xf6\nMAPPING = {}\n")
    for address in ("[]", '{"dir_info": []}', '{"dir_info": {"editable": true}, "url": 7}', "\xf6"):
        (info / "direct_url.json").write_text(address, encoding="latin-1")
        assert site.resolve(str(folder)).package_root == folder
    path_file.write_bytes(path_file.read_bytes() + b"../python\n")  # relative to the path file
    assert site.resolve(str(folder)).package_root == workspace
