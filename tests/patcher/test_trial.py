"""The import check on small packages that are imported for real, in a Python of their own."""

from __future__ import annotations

import os
import py_compile
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from patcher import files, source, trial
from patcher.checks import Check, Expect, Scene, Status
from patcher.manifest import Digests, Manifest
from patcher.site import Site
from patcher.state import Survey
from patcher.states import FileReport, FileState
from tests.support.sites import snapshot

HOOKED = "sglang/srt/hooked.py"
HOOK = "from sglang_overlay.srt import hooks\n"


@pytest.fixture(autouse=True)
def writable_bytecode(monkeypatch: pytest.MonkeyPatch) -> None:
    # Where this is set, "no bytecode was written" would prove nothing.
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)


def build(root: Path, text: str, more: Mapping[str, str] | None = None) -> Scene:
    """Make a site of one hooked file with ``text`` and the real overlay, and judge it patched."""
    overlay = source.locate().overlay
    contents = {"sglang/__init__.py": b"", HOOKED: text.encode(), **overlay}
    contents.update({path: content.encode() for path, content in (more or {}).items()})
    for path, content in contents.items():
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
    digest = files.digest(text.encode())
    return Scene(
        survey=Survey(
            site=Site(root=root, package_root=root, dist_info=None, version=None),
            source=source.locate(),
            manifest=Manifest(
                release="1",
                family="small",
                requires={},
                files={HOOKED: Digests(before="", after=digest)},
                witnesses={},
            ),
            receipt=None,
            files=(FileReport(path=HOOKED, state=FileState.PATCHED, digest=digest, links=1),),
            overlay=(),
            interrupted=False,
        ),
        expect=Expect.PATCHED,
    )


def check(root: Path, text: str, more: Mapping[str, str] | None = None) -> Check:
    return trial.check_import(build(root, text, more))


def test_imports_the_hooked_module_and_the_overlay_and_writes_nothing(tmp_path: Path) -> None:
    scene = build(tmp_path, HOOK + "print('noise' * 100_000)\n")
    before = snapshot(tmp_path)
    found = trial.check_import(scene)
    assert found.status is Status.PASSED, found
    assert "PYTHONPATH, imports sglang_overlay, sglang.srt.hooked" in found.message
    assert sys.executable in found.message
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize(
    ("text", "lacking"),
    [
        ("import absent_package.part\n", "the package absent_package"),
        (
            "try:\n    import absent_package\nexcept ImportError as error:\n"
            "    raise ImportError('please install it') from error\n",
            "the package absent_package",
        ),
        (
            "raise OSError('libcuda.so.1: cannot open shared object file: No such file')\n",
            "a library (libcuda.so.1",
        ),
    ],
)
def test_what_the_environment_lacks_is_a_skip(tmp_path: Path, text: str, lacking: str) -> None:
    found = check(tmp_path, HOOK + text)
    assert found.status is Status.SKIPPED, found
    assert found.message.startswith(f"sglang.srt.hooked needs {lacking}")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("from sglang_overlay.srt import absent\n", "cannot import name 'absent'"),
        ("import sglang_overlay.absent\n", "No module named 'sglang_overlay.absent'"),
        ("import sglang.srt.absent\n", "No module named 'sglang.srt.absent'"),
        ("import json.absent\n", "No module named 'json.absent'"),
        ("from json import absent\n", "cannot import name 'absent'"),
        ("hooks.absent\n", "AttributeError"),
        ("raise SystemExit(0)\n", "SystemExit: 0"),
    ],
)
def test_an_import_that_fails_otherwise_is_a_failure(tmp_path: Path, text: str, said: str) -> None:
    found = check(tmp_path, HOOK + text)
    assert found.status is Status.FAILED, found
    assert said in found.message
    assert f"{HOOKED}, line 2" in found.message
    assert found.hint


def test_a_missing_package_does_not_excuse_the_overlay(tmp_path: Path) -> None:
    text = (
        "try:\n    import absent_package\nexcept ImportError:\n"
        "    from sglang_overlay.srt import absent\n"
    )
    found = check(tmp_path, text)
    assert found.status is Status.FAILED
    assert "cannot import name 'absent'" in found.message


def test_an_overlay_that_cannot_be_imported_is_a_failure(tmp_path: Path) -> None:
    found = check(tmp_path, HOOK, {"sglang_overlay/__init__.py": "raise RuntimeError('broken')\n"})
    assert found.status is Status.FAILED
    assert "importing sglang_overlay ends with RuntimeError: broken" in found.message


def test_another_version_of_the_overlay_is_a_failure(tmp_path: Path) -> None:
    found = check(tmp_path, HOOK, {"sglang_overlay/__init__.py": '__version__ = "0.0.1"\n'})
    assert found.status is Status.FAILED
    assert found.message == f"sglang_overlay is 0.0.1 when imported, not {source.locate().version}"


def test_a_misspelt_switch_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_OVERLAY_DISABLE", "yes")
    more = "from sglang_overlay import switches\n"
    found = check(tmp_path, HOOK + more)
    assert found.status is Status.FAILED
    assert "SGLANG_OVERLAY_DISABLE='yes' is not understood" in found.message


def test_a_syntax_error_is_a_failure_even_where_packages_are_absent(tmp_path: Path) -> None:
    more = {"sglang/__init__.py": "import absent_package\n"}
    found = check(tmp_path, HOOK + "def (:\n", more)
    assert found.status is Status.FAILED
    assert f"{HOOKED}, line 2" in found.message


def test_a_python_that_dies_is_a_failure(tmp_path: Path) -> None:
    found = check(tmp_path, HOOK + "import os; os.abort()\n")
    assert found.status is Status.FAILED
    assert f"ended with {-signal.SIGABRT}" in found.message
    assert "-B -c 'import sglang_overlay, sglang.srt.hooked'" in found.hint


def test_a_child_that_outlives_the_import_is_not_waited_for(tmp_path: Path) -> None:
    number = tmp_path / "child"
    text = (
        "import os, time\nchild = os.fork()\nif not child:\n    time.sleep(600)\n"
        f"open({str(number)!r}, 'w').write(str(child))\n"
    )
    try:
        assert check(tmp_path, HOOK + text).status is Status.PASSED
    finally:
        os.kill(int(number.read_text()), signal.SIGKILL)


@pytest.mark.parametrize("mode", ["UNCHECKED_HASH", "TIMESTAMP"])
def test_code_of_other_text_is_a_failure_before_it_is_run(tmp_path: Path, mode: str) -> None:
    old, new = HOOK + "answer = 1\n", HOOK + "answer = 2\n"
    scene = build(tmp_path, old)
    status = (tmp_path / HOOKED).stat()
    pyc = py_compile.compile(
        str(tmp_path / HOOKED),
        doraise=True,
        invalidation_mode=py_compile.PycInvalidationMode[mode],
    )
    assert trial.check_import(scene).status is Status.PASSED
    (tmp_path / HOOKED).write_text(new)
    os.utime(tmp_path / HOOKED, ns=(status.st_atime_ns, status.st_mtime_ns))
    found = trial.check_import(scene)
    assert found.status is Status.FAILED
    assert found.message.startswith(f"Python runs {pyc}, which was compiled from other text")


def test_damaged_bytecode_is_a_failure(tmp_path: Path) -> None:
    scene = build(tmp_path, HOOK)
    pyc = Path(str(py_compile.compile(str(tmp_path / HOOKED), doraise=True)))
    pyc.write_bytes(pyc.read_bytes()[:16] + b"\xff")
    found = trial.check_import(scene)
    assert found.status is Status.FAILED
    assert f"{HOOKED} cannot be loaded" in found.message


def test_a_stock_tree_is_imported_without_the_overlay(tmp_path: Path) -> None:
    scene = build(tmp_path, "answer = 1\n", {"sglang_overlay/__init__.py": "raise ValueError\n"})
    found = trial.check_import(Scene(survey=scene.survey, expect=Expect.PRISTINE))
    assert found.status is Status.PASSED
    assert found.message.endswith("imports sglang.srt.hooked")


def environment(folder: Path) -> Path:
    """Lay out a virtual environment, without what pip would add, and return its site."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = folder / "lib" / version / "site-packages"
    site.mkdir(parents=True)
    (folder / "bin").mkdir()
    (folder / "bin" / "python").symlink_to(sys.executable)
    base = Path(sys.base_prefix) / "bin"
    (folder / "pyvenv.cfg").write_text(f"home = {base}\n")
    return site


def test_the_python_of_a_virtual_environment_is_the_one_asked(tmp_path: Path) -> None:
    site = environment(tmp_path / "venv")
    found = check(site, HOOK)
    assert found.status is Status.PASSED, found
    assert str(tmp_path / "venv" / "bin" / "python") in found.message
    assert "PYTHONPATH" not in found.message


def test_another_sglang_in_front_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = environment(tmp_path / "venv")
    shadow = tmp_path / "shadow" / "sglang"
    shadow.mkdir(parents=True)
    (shadow / "__init__.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(shadow.parent))
    found = check(site, HOOK)
    assert found.status is Status.FAILED
    assert f"imports sglang from {shadow / '__init__.py'}" in found.message


def test_the_running_python_is_asked_where_the_site_is_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = environment(tmp_path / "venv")
    assert trial.interpreter(site_of(site)) == tmp_path / "venv" / "bin" / "python"
    monkeypatch.setattr(sys, "path", [*sys.path, str(site)])
    assert trial.interpreter(site_of(site)) == Path(sys.executable)
    assert trial.interpreter(site_of(tmp_path)) is None


def site_of(root: Path) -> Site:
    return Site(root=root, package_root=root, dist_info=None, version=None)


def test_the_probe_can_be_an_argument_in_every_locale() -> None:
    text = (source.locate().root / "patcher" / "probe.py").read_text(encoding="utf-8")
    assert text.isascii()
