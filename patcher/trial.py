"""The import check: what the target's own Python loads, found out in a clean subprocess of it."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

from patcher.checks import Check, Expect, Scene, Status
from patcher.site import Site

_SECONDS = 300.0
_ANSWER_LIMIT = 65536


def check_import(scene: Scene) -> Check:
    """Import the hooked modules and the overlay in the Python that owns the target."""
    site = scene.survey.site
    if not (site.installed and scene.hooked):
        return _check(Status.SKIPPED, "there is no known sglang to import")
    python = interpreter(site)
    # By the environment, not by -B: what the import starts in turn must not write either.
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    if python is None:
        python = Path(sys.executable)
        path = [*map(str, site.bases), os.environ.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    try:
        answer = _ask(python, scene, environment)
    except subprocess.TimeoutExpired:
        return _check(Status.FAILED, f"{python} had not imported it after {_SECONDS:.0f} s")
    except OSError as error:
        return _check(Status.SKIPPED, f"{python} cannot be run: {error.strerror}")
    if isinstance(answer, int):
        names = ", ".join(_modules(scene))
        return _check(
            Status.FAILED,
            f"{python} ended with {answer} while it imported {names}",
            f"Run `{shlex.quote(str(python))} -B -c 'import {names}'` and see.",
        )
    status, message = Status(answer["status"]), answer["message"]
    if status is Status.PASSED:
        return _check(status, f"Python {message} ({python}) imports {', '.join(_modules(scene))}")
    if status is Status.SKIPPED:
        return _check(status, f"{message} ({python})")
    return _check(
        status,
        message,
        f"Where the check `files` passed, mend the environment of {python}: SGLang does not start "
        "in it as it is.",
    )


def interpreter(site: Site) -> Path | None:
    """Return the Python that has ``site`` on its search path, None where no layout tells."""
    if any(entry and Path(entry).resolve() == site.root for entry in sys.path[1:]):
        return Path(sys.executable)
    library = site.root.parent
    if not library.name.startswith("python3"):
        return None
    # A 64-bit library folder and a distribution's own lie as deep as a virtual environment's.
    for name in (library.name, "python3", "python"):
        candidate = library.parent.parent / "bin" / name
        if os.access(candidate, os.X_OK):
            return candidate
    return None


def _ask(python: Path, scene: Scene, environment: dict[str, str]) -> dict[str, str] | int:
    """Return the probe's answer, or the exit code of a Python that died without one."""
    site = scene.survey.site
    order = {
        "root": str(site.root),
        "package_root": str(site.package_root),
        "hooked": [report.path for report in scene.hooked],
        "version": scene.survey.source.version if scene.expect is Expect.PATCHED else None,
    }
    # Read as a file of the product, which may be a zip archive.
    text = (scene.survey.source.root / "patcher" / "probe.py").read_text(encoding="utf-8")
    reader, writer = os.pipe()
    try:
        # What SGLang prints is not wanted, and no pipe of it may outlive the probe.
        done = subprocess.run(
            [str(python), "-c", text, json.dumps(order), str(writer)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[writer],
            cwd="/",
            env=environment,
            timeout=_SECONDS,
            check=False,
        )
        os.set_blocking(reader, False)
        answer = os.read(reader, _ANSWER_LIMIT)
    except BlockingIOError:
        answer = b""
    finally:
        os.close(reader)
        os.close(writer)
    if not answer:
        return done.returncode
    document: dict[str, str] = json.loads(answer)
    return document


def _modules(scene: Scene) -> list[str]:
    names = [report.path.removesuffix(".py").replace("/", ".") for report in scene.hooked]
    return names if scene.expect is Expect.PRISTINE else ["sglang_overlay", *names]


def _check(status: Status, message: str, hint: str = "") -> Check:
    return Check(name="import", status=status, message=message, hint=hint)
