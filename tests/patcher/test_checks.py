"""Each check against a real, small site: what it accepts, and each way in which it must not."""

from __future__ import annotations

import json
import os
import py_compile
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from patcher import checks, engine, processes, receipt, source, state
from patcher import record as records
from patcher import site as sites
from patcher.checks import Check, Expect, Scene, Status
from patcher.receipt import STAGING
from tests.support.sites import manifest_of, patched_site, slim_site

RELEASE = "0.5.12.post1"
HOOKED = "sglang/srt/speculative/dflash_utils.py"
WITNESS = "sglang/srt/speculative/spec_info.py"
MODULE = "sglang_overlay/srt/hooks.py"
WAIT = "print(flush=True); import time; time.sleep(600)"


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("templates")
    return {
        "pristine": slim_site(RELEASE, folder / "pristine"),
        "patched": patched_site(RELEASE, folder / "patched"),
    }


@pytest.fixture
def pristine(templates: dict[str, Path], tmp_path: Path) -> Path:
    return shutil.copytree(templates["pristine"], tmp_path / "pristine")


@pytest.fixture
def patched(templates: dict[str, Path], tmp_path: Path) -> Path:
    return shutil.copytree(templates["patched"], tmp_path / "patched")


def scene(site: Path, expect: Expect = Expect.PATCHED) -> Scene:
    return Scene(
        survey=state.survey(sites.resolve(str(site)), source.locate()),
        expect=expect,
    )


def files(site: Path, expect: Expect = Expect.PATCHED) -> Check:
    return checks.check_files(scene(site, expect))


def reinstall(site: Path, original: Path) -> None:
    """Do what pip does to the files that the wheel holds, and to nothing else."""
    for path in (path for path in original.rglob("*") if path.is_file()):
        shutil.copy2(path, site / path.relative_to(original))


def change_receipt(site: Path, **values: object) -> None:
    path = site / receipt.PATH
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


class TestFiles:
    @pytest.mark.parametrize("release", ["0.5.11", "0.5.12", "0.5.12.post1"])
    def test_passes_on_every_release_once_applied(self, release: str, tmp_path: Path) -> None:
        found = files(patched_site(release, tmp_path / "site"))
        assert found.status is Status.PASSED
        known = manifest_of(release)
        counts = f"{len(known.files)} files of sglang {release} are patched, {len(known.witnesses)}"
        assert f"{counts} more are as released" in found.message

    def test_a_reinstall_that_removed_the_overlay_is_noticed(
        self, patched: Path, templates: dict[str, Path]
    ) -> None:
        reinstall(patched, templates["pristine"])
        shutil.rmtree(patched / "sglang_overlay")
        found = files(patched)
        assert found.status is Status.FAILED
        assert "the overlay is not active" in found.message
        assert "A reinstall or an upgrade of sglang removes it in silence" in found.message
        assert found.hint == f"Run `python apply.py --target {patched}`."

    def test_a_reinstall_that_left_the_overlay_s_folder_is_noticed(
        self, patched: Path, templates: dict[str, Path]
    ) -> None:
        reinstall(patched, templates["pristine"])
        found = files(patched)
        assert found.status is Status.FAILED
        assert found.message.startswith("overlay 0.1.0 was applied, but the hooked files")

    def test_an_edited_file_is_named(self, patched: Path) -> None:
        with (patched / HOOKED).open("a") as stream:
            stream.write("# mine\n")
        found = files(patched)
        assert found.status is Status.FAILED
        assert f"{HOOKED} is foreign" in found.message
        assert "--force-reinstall" in found.hint

    def test_a_missing_witness_is_named(self, patched: Path) -> None:
        (patched / WITNESS).unlink()
        found = files(patched)
        assert found.status is Status.FAILED
        assert f"{WITNESS} is missing" in found.message

    def test_a_half_patched_tree_is_told_file_by_file(
        self, patched: Path, pristine_text: bytes
    ) -> None:
        (patched / HOOKED).write_bytes(pristine_text)
        found = files(patched)
        assert found.status is Status.FAILED
        assert found.message == f"half patched: {HOOKED} is pristine"

    @pytest.fixture
    def pristine_text(self, templates: dict[str, Path]) -> bytes:
        return (templates["pristine"] / HOOKED).read_bytes()

    def test_an_edited_overlay_module_is_named(self, patched: Path) -> None:
        (patched / MODULE).write_text("")
        assert files(patched).message == f"half patched: {MODULE} is foreign"

    def test_a_deleted_overlay_module_is_named(self, patched: Path) -> None:
        (patched / MODULE).unlink()
        assert files(patched).message == f"half patched: {MODULE} is missing"

    def test_a_deleted_receipt_is_named(self, patched: Path) -> None:
        (patched / receipt.PATH).unlink()
        assert files(patched).message == "half patched: there is no receipt"

    def test_another_version_of_the_overlay_is_not_this_one(self, patched: Path) -> None:
        change_receipt(patched, overlay_version="0.0.9", fingerprint="0" * 64)
        found = files(patched)
        assert found.status is Status.FAILED
        assert found.message.startswith("overlay 0.0.9 is applied, with other content")

    def test_an_empty_site_has_nothing_to_verify(self, tmp_path: Path) -> None:
        (tmp_path / "site-packages").mkdir()
        for expect in Expect:
            found = files(tmp_path / "site-packages", expect)
            assert found.status is Status.FAILED
            assert "there is no sglang package" in found.message

    def test_passes_on_a_pristine_tree_that_is_meant_to_be(self, pristine: Path) -> None:
        assert files(pristine, Expect.PRISTINE).status is Status.PASSED

    def test_a_pristine_tree_is_not_a_patched_one(self, pristine: Path) -> None:
        assert files(pristine).status is Status.FAILED

    def test_a_patched_tree_is_not_a_pristine_one(self, patched: Path) -> None:
        found = files(patched, Expect.PRISTINE)
        assert found.status is Status.FAILED
        assert found.hint == f"Run `python apply.py --target {patched} --revert`."

    def test_a_single_module_of_the_overlay_is_not_pristine(self, pristine: Path) -> None:
        (pristine / "sglang_overlay").mkdir()
        (pristine / "sglang_overlay" / "__init__.py").write_text("")
        assert files(pristine, Expect.PRISTINE).status is Status.FAILED

    def test_a_target_with_spaces_is_quoted_in_the_hint(self, tmp_path: Path) -> None:
        site = slim_site(RELEASE, tmp_path / "two words")
        assert f"--target '{site}'" in files(site).hint


class TestRecord:
    def record(self, site: Path) -> Path:
        return next(site.glob("sglang-*.dist-info")) / "RECORD"

    def check(self, site: Path, expect: Expect = Expect.PATCHED) -> Check:
        return checks.check_record(scene(site, expect))

    def edit(self, site: Path, put: dict[str, str], drop: tuple[str, ...] = ()) -> None:
        path = self.record(site)
        path.write_bytes(records.edit(path.read_bytes(), put=put, drop=drop))

    def test_passes_once_applied_and_once_reverted(self, patched: Path) -> None:
        assert self.check(patched).status is Status.PASSED
        engine.revert(engine.Request(target=str(patched)))
        assert self.check(patched, Expect.PRISTINE).status is Status.PASSED

    @pytest.mark.parametrize("path", [HOOKED, MODULE, receipt.PATH])
    def test_a_lost_row_is_named(self, patched: Path, path: str) -> None:
        self.edit(patched, {}, (path,))
        found = self.check(patched)
        assert found.status is Status.FAILED
        assert path in found.message

    @pytest.mark.parametrize("path", [HOOKED, MODULE])
    def test_a_row_with_another_hash_is_named(self, patched: Path, path: str) -> None:
        self.edit(patched, {path: records.row(path, b"other")})
        found = self.check(patched)
        assert found.status is Status.FAILED
        assert path in found.message

    def test_a_row_for_a_file_that_was_never_put_there_is_named(self, patched: Path) -> None:
        path = "sglang_overlay/old.py"
        self.edit(patched, {path: records.row(path, b"")})
        found = self.check(patched)
        assert found.status is Status.FAILED
        assert path in found.message

    def test_a_pristine_tree_must_list_nothing_of_the_overlay(self, pristine: Path) -> None:
        self.edit(pristine, {MODULE: records.row(MODULE, b"")})
        found = self.check(pristine, Expect.PRISTINE)
        assert found.status is Status.FAILED
        assert MODULE in found.message

    def test_a_pristine_tree_must_list_its_files_truly(self, pristine: Path) -> None:
        self.edit(pristine, {HOOKED: records.row(HOOKED, b"patched")})
        found = self.check(pristine, Expect.PRISTINE)
        assert found.status is Status.FAILED
        assert HOOKED in found.message

    def test_a_source_folder_that_was_patched_is_a_failure(self, patched: Path) -> None:
        info = self.record(patched).parent
        info.rename(patched.parent / info.name)
        found = self.check(patched)
        assert found.status is Status.FAILED
        assert "may not find the overlay" in found.message
        assert "--revert" in found.hint

    def test_is_skipped_where_no_installer_keeps_account(self, patched: Path) -> None:
        self.record(patched).unlink()
        assert self.check(patched).status is Status.SKIPPED

    def test_is_skipped_where_nothing_was_applied(self, pristine: Path) -> None:
        assert self.check(pristine).status is Status.SKIPPED


class TestBytecode:
    def compile(self, text: Path, site: Path, path: str, mode: str = "UNCHECKED_HASH") -> Path:
        """Put a pyc of ``text`` where Python looks for that of ``path``."""
        pyc = site / path
        pyc = pyc.parent / "__pycache__" / f"{pyc.stem}.{sys.implementation.cache_tag}.pyc"
        py_compile.compile(
            str(text),
            cfile=str(pyc),
            doraise=True,
            invalidation_mode=py_compile.PycInvalidationMode[mode],
        )
        return pyc

    def original(self, site: Path) -> Path:
        return site / receipt.original_name(HOOKED)

    def check(self, site: Path, expect: Expect = Expect.PATCHED) -> Check:
        return checks.check_bytecode(scene(site, expect))

    def claim(self, pyc: Path, source_file: Path) -> None:
        """Give a pyc that goes by time and size those of ``source_file``."""
        status = source_file.stat()
        stamp = int(status.st_mtime).to_bytes(4, "little") + status.st_size.to_bytes(4, "little")
        pyc.write_bytes(pyc.read_bytes()[:8] + stamp + pyc.read_bytes()[16:])

    def test_passes_with_none_and_with_pycs_of_this_text(self, patched: Path) -> None:
        assert "(0 looked at)" in self.check(patched).message
        self.compile(patched / HOOKED, patched, HOOKED)
        found = self.check(patched)
        assert found.status is Status.PASSED
        assert "(1 looked at)" in found.message

    def test_an_unchecked_pyc_of_the_original_is_named(self, patched: Path) -> None:
        pyc = self.compile(self.original(patched), patched, HOOKED)
        found = self.check(patched)
        assert found.status is Status.FAILED
        assert str(pyc) in found.message
        assert "Delete" in found.hint

    def test_an_unchecked_pyc_of_another_overlay_module_is_named(self, patched: Path) -> None:
        pyc = self.compile(self.original(patched), patched, MODULE)
        found = self.check(patched)
        assert found.status is Status.FAILED
        assert str(pyc) in found.message

    def test_a_pyc_with_the_right_time_and_size_but_old_code_is_named(self, patched: Path) -> None:
        pyc = self.compile(self.original(patched), patched, HOOKED, "TIMESTAMP")
        assert self.check(patched).status is Status.PASSED  # Python sees that it is older
        self.claim(pyc, patched / HOOKED)
        found = self.check(patched)
        assert found.status is Status.FAILED
        assert str(pyc) in found.message

    def test_a_pyc_by_time_of_this_text_passes(self, patched: Path) -> None:
        self.compile(patched / HOOKED, patched, HOOKED, "TIMESTAMP")
        assert self.check(patched).status is Status.PASSED

    def test_patched_code_in_a_pristine_tree_is_named(
        self, pristine: Path, templates: dict[str, Path]
    ) -> None:
        pyc = self.compile(templates["patched"] / HOOKED, pristine, HOOKED, "TIMESTAMP")
        self.claim(pyc, pristine / HOOKED)
        assert self.check(pristine, Expect.PRISTINE).status is Status.FAILED

    def test_the_cache_prefix_is_looked_at_too(
        self, patched: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path / "prefix"))
        py_compile.compile(
            str(self.original(patched)),
            cfile=str(Path(sys.pycache_prefix or "") / str(patched)[1:] / HOOKED)[:-3]
            + f".{sys.implementation.cache_tag}.pyc",
            invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
        )
        found = self.check(patched)
        assert found.status is Status.FAILED
        assert str(tmp_path / "prefix") in found.message


class TestLeftovers:
    def check(self, site: Path) -> Check:
        return checks.check_leftovers(scene(site))

    def test_passes_on_both_clean_trees(self, patched: Path, pristine: Path) -> None:
        assert self.check(patched).status is Status.PASSED
        assert self.check(pristine).status is Status.PASSED

    def test_the_folder_of_an_interrupted_run_is_named(self, pristine: Path) -> None:
        (pristine / STAGING).mkdir()
        found = self.check(pristine)
        assert found.status is Status.FAILED
        assert str(pristine / STAGING) in found.message

    def test_an_overlay_without_a_receipt_is_a_failure(self, patched: Path) -> None:
        (patched / receipt.PATH).unlink()
        found = self.check(patched)
        assert found.status is Status.FAILED
        assert "there is no receipt" in found.message

    def test_a_stray_module_is_a_warning(self, patched: Path) -> None:
        (patched / "sglang_overlay" / "mine.py").write_text("")
        found = self.check(patched)
        assert found.status is Status.WARNING
        assert "sglang_overlay/mine.py" in found.message

    def test_bytecode_of_the_overlay_is_no_leftover(self, patched: Path) -> None:
        (patched / "sglang_overlay" / "__pycache__").mkdir()
        (patched / "sglang_overlay" / "__pycache__" / "x.cpython-311.pyc").write_bytes(b"")
        assert self.check(patched).status is Status.PASSED


class TestPins:
    PINS = manifest_of(RELEASE).requires

    def check(self, site: Path, **installed: str) -> Check:
        for name, version in installed.items():
            (site / f"{name}-{version}.dist-info").mkdir()
        return checks.check_pins(scene(site))

    def test_passes_with_the_pins_in_any_spelling_and_build(self, patched: Path) -> None:
        found = self.check(
            patched,
            torch=self.PINS["torch"] + "+cu130",
            sglang_kernel=self.PINS["sglang-kernel"],
            Flashinfer_Python=self.PINS["flashinfer-python"],
        )
        assert found.status is Status.PASSED
        assert "torch 2.11.0+cu130" in found.message

    def test_another_version_is_a_failure(self, patched: Path) -> None:
        found = self.check(patched, torch="2.11.1")
        assert found.status is Status.FAILED
        assert found.message == "torch is 2.11.1, sglang pins 2.11.0"

    def test_a_pin_is_not_a_prefix(self, patched: Path) -> None:
        assert self.check(patched, torch="2.11.0.1").status is Status.FAILED

    def test_two_versions_beside_each_other_are_a_failure(self, patched: Path) -> None:
        (patched / "torch-2.11.0.dist-info").mkdir()
        assert self.check(patched, torch="2.10.0").status is Status.FAILED

    def test_none_of_them_is_a_skip(self, patched: Path) -> None:
        assert self.check(patched).status is Status.SKIPPED

    def test_one_absent_is_a_skip_that_tells_the_rest(self, patched: Path) -> None:
        found = self.check(
            patched,
            torch=self.PINS["torch"],
            sglang_kernel=self.PINS["sglang-kernel"],
        )
        assert found.status is Status.SKIPPED
        assert "not installed" in found.message
        assert "flashinfer-python" in found.message
        assert "torch 2.11.0" in found.message


class TestGpu:
    @pytest.fixture
    def tools(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        folder = tmp_path / "bin"
        folder.mkdir()
        monkeypatch.setenv("PATH", str(folder))
        return folder

    def answer(self, tools: Path, text: str, code: int = 0) -> None:
        script = tools / "nvidia-smi"
        # The query is part of the answer's meaning: any other gets none.
        script.write_text(
            f'#!/bin/sh\n[ "$1" = --query-gpu=compute_cap,name ] || exit 9\n'
            f"printf '{text}'\nexit {code}\n"
        )
        script.chmod(0o755)

    def check(self, site: Path) -> Check:
        return checks.check_gpu(scene(site))

    def test_without_the_tool_it_is_skipped(self, pristine: Path, tools: Path) -> None:
        assert self.check(pristine).status is Status.SKIPPED

    def test_flashmla_is_for_sm_90_alone(self, pristine: Path, tools: Path) -> None:
        self.answer(tools, "9.0, NVIDIA H200\\n9.0, NVIDIA H200\\n")
        found = self.check(pristine)
        assert found.status is Status.PASSED
        assert found.message == "2 × NVIDIA H200 (compute capability 9.0): FlashMLA for the prefix"

    @pytest.mark.parametrize("capability", ["8.0", "10.0", "12.0"])
    def test_others_take_the_portable_kernel(
        self, pristine: Path, tools: Path, capability: str
    ) -> None:
        self.answer(tools, f"{capability}, Some GPU\\n")
        found = self.check(pristine)
        assert found.status is Status.PASSED
        assert "the portable kernel" in found.message

    def test_an_old_gpu_alone_does_not_pass(self, pristine: Path, tools: Path) -> None:
        self.answer(tools, "7.5, Old GPU\\n")
        found = self.check(pristine)
        assert found.status is Status.SKIPPED
        assert "Old GPU" in found.message

    def test_an_old_gpu_beside_a_fit_one_is_told(self, pristine: Path, tools: Path) -> None:
        self.answer(tools, "7.5, Old GPU\\n9.0, NVIDIA H200\\n")
        found = self.check(pristine)
        assert found.status is Status.PASSED
        assert "Old GPU (compute capability 7.5): no verify path" in found.message

    @pytest.mark.parametrize(("text", "code"), [("", 0), ("No devices were found\\n", 6)])
    def test_no_gpu_and_a_broken_driver_are_skipped(
        self, pristine: Path, tools: Path, text: str, code: int
    ) -> None:
        self.answer(tools, text, code)
        assert self.check(pristine).status is Status.SKIPPED


class TestProcesses:
    @pytest.fixture
    def servers(self) -> Iterator[list[subprocess.Popen[bytes]]]:
        started: list[subprocess.Popen[bytes]] = []
        yield started
        for process in started:
            process.kill()
            process.wait()

    def serve(self, site: Path, servers: list[subprocess.Popen[bytes]]) -> int:
        """Start a process that calls itself sglang and has ``site`` on its path."""
        code = "print(flush=True); import time; time.sleep(600)"
        process = subprocess.Popen(
            [sys.executable, "-S", "-c", code, "sglang::scheduler"],
            env={**os.environ, "PYTHONPATH": str(site)},
            stdout=subprocess.PIPE,
        )
        servers.append(process)
        assert process.stdout is not None
        with process.stdout:
            process.stdout.readline()
        return process.pid

    def check(self, site: Path, expect: Expect = Expect.PATCHED) -> Check:
        return checks.check_processes(scene(site, expect))

    def test_passes_without_any(self, patched: Path) -> None:
        found = self.check(patched)
        assert found.status is Status.PASSED
        assert found.message == "no live process runs SGLang from this tree"

    def test_one_that_is_older_than_the_overlay_is_a_failure(
        self, pristine: Path, servers: list[subprocess.Popen[bytes]]
    ) -> None:
        pid = self.serve(pristine, servers)
        assert engine.apply(engine.Request(target=str(pristine))).exit_code == 0
        found = self.check(pristine)
        assert found.status is Status.FAILED
        assert f"process {pid} " in found.message
        assert found.hint == "Restart them."

    def test_one_that_was_started_right_after_passes(
        self, pristine: Path, servers: list[subprocess.Popen[bytes]]
    ) -> None:
        # Right at the start of a second: a clock of whole seconds would call it older.
        time.sleep(1 - time.time() % 1 + 0.3)
        assert engine.apply(engine.Request(target=str(pristine))).exit_code == 0
        time.sleep(0.02)
        pid = self.serve(pristine, servers)
        found = self.check(pristine)
        assert found.status is Status.PASSED, found
        assert f"process {pid} " in found.message

    def test_an_apply_in_the_future_is_a_warning(
        self,
        pristine: Path,
        servers: list[subprocess.Popen[bytes]],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """An image that was built by a clock an hour ahead would else fail every server."""
        now = time.time
        with monkeypatch.context() as ahead:
            ahead.setattr(time, "time", lambda: now() + 3600)
            assert engine.apply(engine.Request(target=str(pristine))).exit_code == 0
        assert self.check(pristine).status is Status.PASSED
        pid = self.serve(pristine, servers)
        found = self.check(pristine)
        assert found.status is Status.WARNING
        assert "applied in 3" in found.message
        assert f"process {pid} " in found.message
        # Once that time is past, a start before it is one again.
        monkeypatch.setattr(time, "time", lambda: now() + 3700)
        monkeypatch.setattr(processes, "_boot_time", lambda: now() - 3600)
        monkeypatch.setattr(processes, "_start_ticks", lambda _: 0)
        assert self.check(pristine).status is Status.FAILED

    def test_without_a_receipt_nobody_knows(
        self, pristine: Path, servers: list[subprocess.Popen[bytes]]
    ) -> None:
        pid = self.serve(pristine, servers)
        found = self.check(pristine, Expect.PRISTINE)
        assert found.status is Status.WARNING
        assert f"process {pid} " in found.message

    def test_one_of_another_tree_is_nobody_s_business(
        self, patched: Path, tmp_path: Path, servers: list[subprocess.Popen[bytes]]
    ) -> None:
        (tmp_path / "elsewhere").mkdir()
        self.serve(tmp_path / "elsewhere", servers)
        assert self.check(patched).message == "no live process runs SGLang from this tree"

    def start(
        self, servers: list[subprocess.Popen[bytes]], arguments: list[str], **options: Any
    ) -> int:
        """Start a process that says a line when it runs."""
        process = subprocess.Popen(arguments, stdout=subprocess.PIPE, **options)
        servers.append(process)
        assert process.stdout is not None
        with process.stdout:
            process.stdout.readline()
        return process.pid

    def test_a_python_called_as_bin_python_is_not_everybody_s(
        self, patched: Path, servers: list[subprocess.Popen[bytes]]
    ) -> None:
        """A training script that has a package of sglang's name among its words, say."""
        arguments = ["/bin/python3", "-S", "-c", WAIT, "sglang-dataset"]
        self.start(servers, arguments, executable=sys.executable)
        assert self.check(patched).message == "no live process runs SGLang from this tree"

    @pytest.mark.parametrize("form", ["checkout", "relative", "fleet", "bundle", "probe"])
    def test_the_product_s_own_commands_are_no_servers(
        self, form: str, patched: Path, tmp_path: Path, servers: list[subprocess.Popen[bytes]]
    ) -> None:
        checkout = tmp_path / "sglang-overlay"
        (checkout / "patcher").mkdir(parents=True)
        (checkout / "patcher" / "probe.py").touch()
        (checkout / "apply.py").write_text(WAIT)
        (checkout / "fleet").mkdir()
        (checkout / "fleet" / "__main__.py").write_text(WAIT)
        with zipfile.ZipFile(tmp_path / "bundle", "w") as archive:
            archive.writestr("patcher/probe.py", "")
            archive.writestr("__main__.py", WAIT)
        probe = (source.locate().root / "patcher" / "probe.py").read_text().partition("\n")[0]
        words = {
            "checkout": [str(checkout / "apply.py"), "--target", str(patched)],
            "relative": ["apply.py", "--target", "sglang"],
            "fleet": [f"{checkout / 'fleet'}/", "apply", "hosts.toml"],
            "bundle": [str(tmp_path / "bundle"), "apply", "sglang"],
            "probe": ["-c", f'{probe}"""\n{WAIT}', "sglang"],
        }[form]
        environment = {**os.environ, "PYTHONPATH": str(patched)}
        arguments = [sys.executable, "-S", "-Wignore", *words]
        self.start(servers, arguments, env=environment, cwd=checkout)
        assert self.check(patched).message == "no live process runs SGLang from this tree"

    @pytest.mark.parametrize("words", [["serve.py"], ["-m", "serve"], ["-Im", "serve"]])
    def test_a_server_that_is_given_a_file_of_the_product_counts(
        self, words: list[str], patched: Path, tmp_path: Path
    ) -> None:
        (tmp_path / "patcher").mkdir()
        (tmp_path / "patcher" / "probe.py").touch()
        (tmp_path / "apply.py").touch()
        (tmp_path / "below").mkdir()
        (tmp_path / "below" / "serve.py").touch()
        more = [str(tmp_path / "apply.py")] if words[0].startswith("-") else []
        place = str(tmp_path / "below" / words[-1])
        given = [*words[:-1], place if not more else words[-1], *more]
        assert not processes._is_product(Path("/proc/self"), given)
        assert processes._is_product(Path("/proc/self"), [str(tmp_path / "apply.py")])

    @pytest.mark.parametrize("age", [-1.0, 1.0])
    def test_one_that_cannot_be_looked_into_is_a_warning(
        self, patched: Path, age: float, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        judged = scene(patched)
        assert judged.survey.receipt is not None
        doubtful = processes.Process(
            pid=7,
            title="sglang::scheduler",
            started_at=judged.survey.receipt.applied_at + age,
            certain=False,
        )
        monkeypatch.setattr(processes, "find", lambda site: (doubtful,))
        found = checks.check_processes(judged)
        assert found.status is Status.WARNING
        assert "process 7 sglang::scheduler (another user's" in found.message

    def test_is_skipped_where_the_system_shows_no_processes(
        self, patched: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(processes, "_PROC", tmp_path / "absent")
        assert self.check(patched).status is Status.SKIPPED
