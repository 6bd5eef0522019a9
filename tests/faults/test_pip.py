"""pip works on a patched tree as on any other, and what it did is never taken back by a revert.

The quick tests install wheels of the released files that matter here; the `full` one the released
wheels themselves. pip is the real one, on a virtual environment of its own.
"""

from __future__ import annotations

import compileall
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from devtools import wheels
from patcher import record
from tests.support.bench import RELEASE
from tests.support.runs import KILLED, CommandLine, Ended, Fault, serve
from tests.support.sites import manifest_of, slim_site
from tests.support.snapshots import Snapshot, assert_identical, snapshot

OLDER = "0.5.12"
OVERLAY = "sglang_overlay"


class Environment:
    """A virtual environment without pip in it, and pip and the command line to work on it."""

    def __init__(self, folder: Path, wheel: Callable[[str], Path], program: CommandLine) -> None:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
        self._python = folder / "bin" / "python"
        self._wheel = wheel
        self._program = program
        self.site = next(folder.glob("lib/python3*/site-packages"))

    def install(self, release: str, *options: str) -> None:
        wheel = str(self._wheel(release))
        self._pip("install", "--quiet", "--no-deps", "--no-index", *options, wheel)

    def uninstall(self) -> None:
        self._pip("uninstall", "--quiet", "--yes", "sglang")

    def run(self, *verb: str, faults: Sequence[Fault] = (), trace: bool = False) -> Ended:
        return self._program.run("--target", self.site, *verb, faults=faults, trace=trace)

    def succeed(self, *verb: str) -> Ended:
        ended = self.run(*verb)
        assert ended.code == 0, ended.told
        return ended

    def look(self) -> Snapshot:
        """Take down the site; pip gives what it unpacks and compiles the time of doing so."""
        return {
            path: entry
            for path, entry in snapshot(self.site).items()
            if not path.endswith(".pyc") and "__pycache__" not in path
        }

    def contents(self) -> dict[str, str]:
        return {path: entry.content for path, entry in self.look().items()}

    def _pip(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "pip", "--python", str(self._python), *arguments]
        done = subprocess.run(
            [*command, "--disable-pip-version-check", "--root-user-action=ignore"],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr


@pytest.fixture(scope="session")
def slim_wheel(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function from a release to a wheel with a small part of its files."""
    made: dict[str, Path] = {}

    def make(release: str) -> Path:
        if release not in made:
            folder = tmp_path_factory.mktemp("wheel")
            site = slim_site(release, folder / "site")
            made[release] = folder / f"sglang-{release}-py3-none-any.whl"
            with zipfile.ZipFile(made[release], "w") as archive:
                for path in sorted(site.rglob("*")):
                    archive.write(path, path.relative_to(site))
        return made[release]

    return make


@pytest.fixture(scope="session")
def program() -> Iterator[CommandLine]:
    with serve() as served:
        yield served


@pytest.fixture
def environment(
    tmp_path: Path, slim_wheel: Callable[[str], Path], program: CommandLine
) -> Environment:
    return Environment(tmp_path / "environment", slim_wheel, program)


def use(environment: Environment) -> None:
    """Leave what a server that ran would: bytecode of the hooked files and of the overlay."""
    for path in manifest_of(RELEASE).files:
        compileall.compile_file(environment.site / path, quiet=2)
    compileall.compile_dir(environment.site / OVERLAY, quiet=2)


def test_reinstall_over_a_patched_tree(environment: Environment) -> None:
    _reinstall(environment)


@pytest.mark.full
def test_reinstall_of_the_released_wheel(tmp_path: Path, program: CommandLine) -> None:
    environment = Environment(tmp_path / "environment", wheels.wheel, program)
    _reinstall(environment)
    environment.succeed()
    use(environment)
    environment.uninstall()
    assert [path for path in environment.contents() if "sglang" in path] == []


def test_uninstall_of_a_patched_tree(environment: Environment) -> None:
    empty = environment.contents()
    environment.install(RELEASE)
    environment.succeed()
    use(environment)
    environment.uninstall()
    assert environment.contents() == empty
    assert environment.succeed("--revert").code == 0
    assert environment.run().code == 1
    assert environment.contents() == empty


@pytest.mark.parametrize(("first", "second"), [(OLDER, RELEASE), (RELEASE, OLDER)])
def test_other_release_over_a_patched_tree(
    first: str, second: str, environment: Environment
) -> None:
    environment.install(second)
    wanted = environment.contents()
    environment.install(first, "--force-reinstall")
    environment.succeed()
    use(environment)
    environment.install(second, "--force-reinstall")
    assert environment.contents() == wanted
    _round_trip(environment)


@pytest.mark.parametrize("verb", [["--revert"], []], ids=["revert", "apply"])
def test_release_unpacked_over_a_patched_tree(
    verb: list[str], environment: Environment, slim_wheel: Callable[[str], Path]
) -> None:
    """As by `pip install --target` or an image layer: newer files, and the overlay still there."""
    environment.install(OLDER)
    environment.succeed()
    use(environment)
    next(environment.site.glob("*.dist-info")).rename(environment.site / "gone")
    for path in sorted((environment.site / "gone").rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    (environment.site / "gone").rmdir()
    with zipfile.ZipFile(slim_wheel(RELEASE)) as archive:
        archive.extractall(environment.site)
        names = {name for name in archive.namelist() if not name.endswith("/")}
    newer = {path: entry for path, entry in environment.look().items() if path in names}

    environment.succeed(*verb)
    if not verb:
        applied = environment.succeed("--status", "--json")
        assert f'"release": "{RELEASE}"' in applied.stdout
        environment.succeed("--revert")
    left = environment.look()
    assert_identical(newer, {path: left[path] for path in names if path in left}, "the release")
    assert [path for path in left if path.startswith(OVERLAY)] == []


def test_same_release_unpacked_over_a_patched_tree(
    environment: Environment, slim_wheel: Callable[[str], Path]
) -> None:
    """The files are as released again, so that nothing is to be put back; ours has to go."""
    environment.install(RELEASE)
    pristine = environment.contents()
    environment.succeed()
    with zipfile.ZipFile(slim_wheel(RELEASE)) as archive:
        archive.extractall(environment.site)
    environment.succeed("--revert")
    left = environment.contents()
    assert {path for path in left if path.startswith(OVERLAY)} == set()
    listing = next(path for path in left if path.endswith("/RECORD"))
    differ = {
        path for path in pristine.keys() | left.keys() if pristine.get(path) != left.get(path)
    }
    assert differ <= {listing}
    rows = record.rows((environment.site / listing).read_bytes())
    assert not [path for path in rows if path.startswith(OVERLAY)]


@pytest.mark.parametrize("second", [OLDER, RELEASE, None], ids=["other", "same", "uninstall"])
@pytest.mark.parametrize(
    "part", [0.5, *(pytest.param(one, marks=pytest.mark.full) for one in (0.1, 0.3, 0.7, 0.9))]
)
def test_pip_after_a_killed_apply(
    part: float, second: str | None, environment: Environment
) -> None:
    """What pip puts there before the recovery stays; all that the killed run put there goes."""
    empty = environment.contents()
    if second:
        environment.install(second)
    wanted = environment.contents()
    environment.install(RELEASE, "--force-reinstall")
    calls = environment.run(trace=True).calls
    environment.succeed("--revert")
    renames = [call for call in calls if call.name == "rename"][1:]
    kill = renames[int(part * len(renames))].fault("signal=KILL")
    assert environment.run(faults=[kill]).code == KILLED

    if second:
        environment.install(second, "--force-reinstall")
    else:
        environment.uninstall()
    ended = environment.succeed("--revert")
    assert "was interrupted" in ended.told
    assert environment.contents() == (wanted if second else empty)
    if second:
        _round_trip(environment)


def test_edited_hooked_file_is_refused_and_kept(environment: Environment) -> None:
    environment.install(RELEASE)
    environment.succeed()
    hooked = environment.site / min(manifest_of(RELEASE).files)
    hooked.write_text(hooked.read_text() + "# a change of somebody's own\n")
    edited = environment.look()
    for verb, code in (["--revert"], "hooked-file-modified"), ([], "file-modified"):
        ended = environment.run(*verb, "--json")
        assert ended.code == 1, ended.told
        assert f'"code": "{code}"' in ended.stdout
        assert_identical(edited, environment.look())


def test_edited_file_without_hooks_is_left_as_it_is(environment: Environment) -> None:
    environment.install(RELEASE)
    pristine = environment.look()
    environment.succeed()
    path = min(manifest_of(RELEASE).files)
    (environment.site / path).write_text("# replaced by somebody's own\n")
    theirs = environment.look()[path]
    ended = environment.succeed("--revert")
    assert f"{path} was replaced since" in ended.told
    assert_identical({**pristine, path: theirs}, environment.look())


def test_edited_overlay_module_is_left_and_told(environment: Environment) -> None:
    environment.install(RELEASE)
    pristine = environment.look()
    environment.succeed()
    module = environment.site / OVERLAY / "switches.py"
    module.write_text(module.read_text() + "# a change of somebody's own\n")
    assert environment.run().code == 1
    ended = environment.succeed("--revert")
    assert f"{OVERLAY}/switches.py was edited since" in ended.told
    left = environment.look()
    assert {path for path in left if path.startswith(f"{OVERLAY}/")} == {f"{OVERLAY}/switches.py"}
    ours = {path: entry for path, entry in left.items() if not path.startswith(OVERLAY)}
    assert_identical(pristine, ours)


def _reinstall(environment: Environment) -> None:
    environment.install(RELEASE)
    wanted = environment.contents()
    environment.succeed()
    use(environment)
    environment.install(RELEASE, "--force-reinstall")
    assert environment.contents() == wanted
    _round_trip(environment)


def _round_trip(environment: Environment) -> None:
    """A revert finds nothing to do; apply and revert end where they began."""
    installed = snapshot(environment.site)
    assert "nothing to do" in environment.succeed("--revert").told
    assert_identical(installed, snapshot(environment.site), "the site after an empty revert")
    environment.succeed()
    environment.succeed("--revert")
    assert_identical(installed, snapshot(environment.site), "the site after apply and revert")
