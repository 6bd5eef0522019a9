"""What `patcher.verify` looks at, one function a check. All of them only read.

A check that finds nothing to judge is *skipped*, with the reason, and never counts as passed. A
*warning* is something to know that leaves the verdict as it is.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from patcher import bytecode, processes, receipt, record
from patcher.receipt import PACKAGE, STAGING
from patcher.state import Survey
from patcher.states import FileReport, FileState
from patcher.value import Value

_GPU_SECONDS = 60.0
_LISTED = 4
_NAME = re.compile(re.escape(PACKAGE.encode()))
_MODULE = re.compile(_NAME.pattern + rb"(\.\w+)*")
_IMPORT = re.compile(rb"^\s*(from|import)\s+" + _NAME.pattern, re.MULTILINE)


class Status(str, Enum):
    """How a check came out."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"
    WARNING = "warning"


class Expect(str, Enum):
    """What the target is meant to be."""

    PATCHED = "patched"
    PRISTINE = "pristine"


class Check(Value):
    """One check and how it came out; ``hint`` says what the reader can do.

    ``rows`` are the self-test's, of the JSON form's keys.
    """

    name: str
    status: Status
    message: str
    hint: str = ""
    rows: tuple[Mapping[str, Any], ...] = ()


class Scene(Value):
    """What the checks judge: the tree as it was found, and what it is meant to be."""

    survey: Survey
    expect: Expect

    @property
    def apply(self) -> str:
        """The command that applies the overlay to this target."""
        return self._command("apply")

    @property
    def mend(self) -> str:
        """The command that brings this target to what it is meant to be."""
        return self._command("revert" if self.expect is Expect.PRISTINE else "apply")

    def _command(self, verb: str) -> str:
        target = f"--target {shlex.quote(str(self.survey.site.root))}"
        archive = self.survey.source.archive
        if archive is not None:
            return f"python3 {shlex.quote(archive)} {verb} {target}"
        return f"python apply.py {target}{' --revert' if verb == 'revert' else ''}"

    @property
    def hooked(self) -> tuple[FileReport, ...]:
        """SGLang's files that the series changes, or that an older one has changed."""
        manifest, applied = self.survey.manifest, self.survey.receipt
        paths = {*(manifest.files if manifest else ()), *(applied.files if applied else ())}
        return tuple(report for report in self.survey.files if report.path in paths)


def check_files(scene: Scene) -> Check:
    """Compare every file that the overlay touches, builds on or ships with what is expected."""
    survey = scene.survey
    releases = ", ".join(sorted(one.release for one in survey.source.manifests))
    if not survey.site.installed:
        return _failed(
            "files",
            f"there is no sglang package in {survey.site.package_root}",
            f"Install one of the supported releases ({releases}).",
        )
    if survey.manifest is None or survey.strangers():
        version = f"sglang {survey.site.version}" if survey.site.version else "an sglang"
        listed = _listed(survey.strangers()) or "no file is known"
        return _failed(
            "files",
            f"{version} is not as released in any supported release ({releases}): {listed}",
            "Reinstall a supported release with `pip install --force-reinstall --no-deps "
            f"sglang==VERSION`, then run `{scene.apply}`.",
        )
    if scene.expect is Expect.PATCHED:
        return _patched_files(scene)
    return _pristine_files(scene)


def _patched_files(scene: Scene) -> Check:
    survey, applied = scene.survey, scene.survey.receipt
    assert survey.manifest is not None
    wrong = [f for f in scene.hooked if f.state is not FileState.PATCHED]
    wrong += [f for f in survey.overlay if f.state is not FileState.PATCHED]
    own = survey.source.version
    if all(f.state is FileState.PRISTINE for f in scene.hooked):
        was = f"overlay {applied.overlay_version} was applied, but " if applied else ""
        return _failed(
            "files",
            f"{was}the hooked files of sglang {survey.manifest.release} are as released: the "
            "overlay is not active. A reinstall or an upgrade of sglang removes it in silence",
            f"Run `{scene.apply}`.",
        )
    if applied is not None and applied.fingerprint != survey.source.fingerprint:
        return _failed(
            "files",
            f"overlay {applied.overlay_version} is applied, with other content than this copy, "
            f"{own}",
            f"Run `{scene.apply}` to put this copy in its place, or verify with the copy that was "
            "applied.",
        )
    if applied is None or applied.release != survey.manifest.release or wrong:
        unreceipted = [] if applied else ["there is no receipt"]
        if applied is not None and applied.release != survey.manifest.release:
            unreceipted = [f"the receipt is one for sglang {applied.release}"]
        return _failed(
            "files",
            f"half patched: {'; '.join([*unreceipted, *_told(wrong)])}",
            f"Run `{scene.apply}`: it puts right what it can and says what it cannot.",
        )
    return _passed(
        "files",
        f"{len(scene.hooked)} files of sglang {survey.manifest.release} are patched, "
        f"{len(survey.files) - len(scene.hooked)} more are as released, and all "
        f"{len(survey.overlay)} of overlay {own} are here",
    )


def _pristine_files(scene: Scene) -> Check:
    survey = scene.survey
    assert survey.manifest is not None
    wrong = [f for f in survey.files if f.state is not FileState.PRISTINE]
    if survey.receipt or survey.overlay or wrong:
        found = f"overlay {survey.receipt.overlay_version} is" if survey.receipt else "overlay is"
        count = len(wrong) + len(survey.overlay)
        return _failed(
            "files",
            f"{found} here: {count} files are not as released ({_listed(wrong) or PACKAGE})",
            f"Run `{scene.mend}`.",
        )
    return _passed(
        "files",
        f"{len(survey.files)} files of sglang {survey.manifest.release} are as released, and none "
        "is the overlay's",
    )


def check_record(scene: Scene) -> Check:
    """Compare sglang's RECORD with what the overlay put there, or must have taken away."""
    survey = scene.survey
    patched = scene.expect is Expect.PATCHED
    if patched and survey.site.installed and survey.site.dist_info is None:
        return _failed(
            "record",
            "there is no metadata of an installed sglang here: the Python that imports this "
            "package may not find the overlay",
            survey.site.metadata_hint,
        )
    if survey.site.record is None:
        return _skipped("record", "sglang has no RECORD here: no installer keeps account of it")
    rows = record.rows(survey.site.record.read_bytes())
    ours = {path for path in rows if path.startswith(f"{PACKAGE}/")}
    if scene.expect is Expect.PRISTINE:
        gaps = sorted(ours) + [path for path in _pristine_paths(scene) if path in rows]
        gaps = [path for path in gaps if path in ours or not _is_true(scene, path, rows[path])]
    elif survey.receipt is None:
        return _skipped("record", "nothing of the overlay is recorded as applied here")
    else:
        listed = {*survey.receipt.overlay, *survey.receipt.originals(), receipt.PATH}
        gaps = [*survey.record_gaps, *sorted(ours - listed)]
    if gaps:
        return _failed(
            "record",
            f"RECORD is not true for {_some(gaps)}: pip would leave or miss files",
            f"Run `{scene.mend}`; if that finds nothing to do, run `pip install --force-reinstall "
            "--no-deps sglang==VERSION` first.",
        )
    return _passed("record", "RECORD is true for every file that the overlay touches")


def _pristine_paths(scene: Scene) -> list[str]:
    return [] if scene.survey.site.editable else [report.path for report in scene.hooked]


def _is_true(scene: Scene, path: str, row: str) -> bool:
    digest = scene.survey.digests.get(path)
    return digest is not None and record.lists(row, digest)


def check_bytecode(scene: Scene) -> Check:
    """Look for pycs that Python would run in place of the text that is there.

    Unchecked-hash pycs are compared by the hash of the text. A pyc that goes by time and size is
    only asked whether it names the overlay where the text does: compiling the text would cost more
    than all other checks. The import check compares the code itself.
    """
    site = scene.survey.site
    stale, seen = [], 0
    for source in _sources(scene):
        pycs = [*bytecode.beside(source), *bytecode.in_prefix(source)]
        if not pycs:
            continue
        text, status = source.read_bytes(), source.stat()
        seen += len(pycs)
        hooked = site.root / PACKAGE not in source.parents
        stale += [
            pyc
            for pyc in pycs
            if bytecode.outvotes(pyc, text)
            or (hooked and bytecode.claims(pyc, status) and _disagrees(pyc, text))
        ]
    if stale:
        return _failed(
            "bytecode",
            f"Python would run old code in place of the text: {', '.join(map(str, stale))}",
            "Delete these files; Python makes them anew.",
        )
    return _passed("bytecode", f"no compiled file stands in for other text ({seen} looked at)")


def _sources(scene: Scene) -> Iterator[Path]:
    site = scene.survey.site
    for folder, reports in (
        (site.package_root, scene.hooked),
        (site.root, scene.survey.overlay),
    ):
        for report in reports:
            if report.digest is not None and report.path.endswith(".py"):
                yield folder / report.path


def _disagrees(pyc: Path, text: bytes) -> bool:
    return bool(_IMPORT.search(text)) != _imports_overlay(pyc.read_bytes())


def _imports_overlay(code: bytes) -> bool:
    """Tell whether compiled code holds the name of an overlay module, at any optimisation level.

    A name is marshalled behind its length. The path of the source, which stands in every pyc, may
    hold the same letters, but not alone.
    """
    for found in _NAME.finditer(code):
        start = found.start()
        if _MODULE.fullmatch(code[start : start + code[start - 1]]):
            return True
    return False


def check_leftovers(scene: Scene) -> Check:
    """Look for what an interrupted run, a removed install or a stranger left behind."""
    site, applied = scene.survey.site, scene.survey.receipt
    stagings = [base / STAGING for base in site.bases if os.path.lexists(base / STAGING)]
    if stagings:
        return _failed(
            "leftovers",
            f"an earlier run was interrupted and left {', '.join(map(str, stagings))}",
            f"Run `{scene.mend}`: it finishes or undoes the interrupted run first.",
        )
    known = {*applied.overlay, *applied.originals(), receipt.PATH} if applied else set()
    present = _present(site.root)
    extra = sorted(present - known)
    if extra and applied is None:
        return _failed(
            "leftovers",
            f"there is no receipt for what is in {site.root / PACKAGE}: {_some(extra)}",
            f"Run `{scene.apply}`: it takes over what it knows. What is not the overlay's must be "
            "deleted by hand.",
        )
    if extra:
        return _warning(
            "leftovers",
            f"not the overlay's, but in its folder: {_some(extra)}",
            "Delete them unless they are yours on purpose.",
        )
    return _passed("leftovers", "nothing is left of an earlier run")


def _present(root: Path) -> set[str]:
    return {
        path.relative_to(root).as_posix()
        for path in (root / PACKAGE).rglob("*")
        if "__pycache__" not in path.parts and not path.is_dir()
    }


def check_pins(scene: Scene) -> Check:
    """Compare the installed packages that the overlay's behaviour depends on with the pins."""
    survey = scene.survey
    if survey.manifest is None:
        return _skipped("pins", "the release is not known, so neither are its pins")
    installed = _distributions(survey.site.root)
    same, missing, different = [], [], []
    for name, pin in sorted(survey.manifest.requires.items()):
        found = installed.get(_normal(name), [])
        if not found:
            missing.append(name)
        elif all(_fits(version, pin) for version in found):
            same.append(f"{name} {found[0]}")
        else:
            different.append(f"{name} is {' and '.join(found)}, sglang pins {pin}")
    if different:
        return _failed(
            "pins",
            "; ".join(different),
            f"Install the versions that sglang {survey.manifest.release} pins: the overlay was "
            "measured and tested with no others.",
        )
    if missing:
        beside = f" ({', '.join(same)} as pinned)" if same else ""
        return _skipped(
            "pins", f"not installed in {survey.site.root}: {', '.join(missing)}{beside}"
        )
    return _passed("pins", f"as sglang pins them: {', '.join(same)}")


def _distributions(root: Path) -> dict[str, list[str]]:
    """Return normal name → versions, by the names of the dist-info folders alone."""
    found: dict[str, list[str]] = {}
    for entry in sorted(root.glob("*.dist-info")):
        name, _, version = entry.name.removesuffix(".dist-info").partition("-")
        found.setdefault(_normal(name), []).append(version)
    return found


def _normal(name: str) -> str:
    """Return the name of a distribution as PyPA's "Names and normalization" spells it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _fits(version: str, pin: str) -> bool:
    # A local part (+cu130) names a build of the same version, which a pin without one allows.
    return version == pin or ("+" not in pin and version.partition("+")[0] == pin)


def check_gpu(scene: Scene) -> Check:
    """Ask nvidia-smi which GPUs there are, and say which verify path each would take."""
    del scene  # the host is judged, not the tree
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return _skipped("gpu", "there is no nvidia-smi here")
    import subprocess  # a host without GPUs need not load it

    command = [tool, "--query-gpu=compute_cap,name", "--format=csv,noheader"]
    try:
        answer = subprocess.run(
            command, capture_output=True, check=True, text=True, timeout=_GPU_SECONDS
        )
    except (OSError, subprocess.SubprocessError) as error:
        return _skipped("gpu", f"nvidia-smi does not answer: {error}")
    counts = Counter(line.strip() for line in answer.stdout.splitlines() if line.strip())
    told = [_gpu_line(line, count) for line, count in counts.items()]
    usable = any(_verify_path(line.partition(",")[0]) for line in counts)
    if not usable:
        return _skipped("gpu", f"no GPU that the overlay can use: {'; '.join(told) or 'none'}")
    return _passed("gpu", "; ".join(told))


def _gpu_line(line: str, count: int) -> str:
    capability, _, name = (part.strip() for part in line.partition(","))
    path = _verify_path(capability) or "no verify path"
    return f"{count} × {name} (compute capability {capability}): {path}"


def _verify_path(capability: str) -> str | None:
    """Return how a tree is verified on a GPU, None where it cannot be.

    The FlashMLA that SGLang ships decodes densely on sm_90 alone; the portable kernel needs what
    came with sm_80.
    """
    try:
        number = tuple(int(part) for part in capability.split("."))
    except ValueError:
        return None
    if number == (9, 0):
        return "FlashMLA for the prefix"
    return "the portable kernel for the prefix" if number >= (8, 0) else None


def check_processes(scene: Scene) -> Check:
    """Look for live servers on this tree that started before the overlay was applied."""
    if not processes.visible():
        return _skipped("processes", "this system does not show its processes under /proc")
    found = processes.find(scene.survey.site)
    if not found:
        return _passed("processes", "no live process runs SGLang from this tree")
    certain = [process for process in found if process.certain]
    applied = scene.survey.receipt
    if applied is None:
        return _warning(
            "processes",
            f"there is no receipt to compare their start with: {_processes(found)}",
            "Restart them if the overlay was taken off since they were started.",
        )
    ahead = applied.applied_at - time.time()
    stale = [process for process in certain if process.started_at < applied.applied_at]
    if stale and ahead > 0:
        # As in an image that a clock ahead of this one built: no start would ever be late enough.
        return _warning(
            "processes",
            f"by this host's clock the overlay will be applied in {ahead:.0f} s, so that nobody "
            f"knows whether these started before: {_processes(stale)}",
            "Set the clocks. Restart these if the overlay was applied while they ran.",
        )
    if stale:
        return _failed(
            "processes",
            f"started before the overlay was applied, and run the old code: {_processes(stale)}",
            "Restart them.",
        )
    if len(certain) < len(found):
        doubtful = [process for process in found if not process.certain]
        return _warning(
            "processes",
            f"cannot be looked into: {_processes(doubtful)}",
            "Run this as the user of that server, or as root.",
        )
    return _passed("processes", f"started after the overlay was applied: {_processes(found)}")


def _processes(found: Iterable[processes.Process]) -> str:
    return ", ".join(f"process {process}" for process in found)


def _some(paths: list[str]) -> str:
    more = len(paths) - _LISTED
    return ", ".join(paths[:_LISTED]) + (f" and {more} more" if more > 0 else "")


def _told(reports: Iterable[FileReport]) -> list[str]:
    return [f"{report.path} is {report.state.value}" for report in reports]


def _listed(reports: Iterable[FileReport]) -> str:
    return "; ".join(_told(reports))


def _passed(name: str, message: str) -> Check:
    return Check(name=name, status=Status.PASSED, message=message)


def _skipped(name: str, message: str) -> Check:
    return Check(name=name, status=Status.SKIPPED, message=message)


def _failed(name: str, message: str, hint: str) -> Check:
    return Check(name=name, status=Status.FAILED, message=message, hint=hint)


def _warning(name: str, message: str, hint: str) -> Check:
    return Check(name=name, status=Status.WARNING, message=message, hint=hint)
