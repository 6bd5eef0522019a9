"""What the target's own Python loads and computes, found out in a clean subprocess of it."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from patcher.checks import Check, Expect, Scene, Status
from patcher.site import Site

_SECONDS = 300.0
_ANSWER_LIMIT = 65536


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What the probe in ``python`` found; ``died`` where that Python ended without an answer.

    ``rows`` are the self-test's, if it was asked for and ran.
    """

    python: Path
    status: Status
    message: str
    died: bool = False
    rows: tuple[Mapping[str, Any], ...] | None = None


def check_import(scene: Scene) -> Check:
    """Import the hooked modules and the overlay in the Python that owns the target."""
    if not (scene.survey.site.installed and scene.hooked):
        return _check(Status.SKIPPED, "there is no known sglang to import")
    reply = ask(scene, hooked=[report.path for report in scene.hooked], seconds=_SECONDS)
    names = ", ".join(_modules(scene))
    if reply.died:
        return _check(
            Status.FAILED,
            f"{reply.message} while it imported {names}",
            f"Run `{shlex.quote(str(reply.python))} -B -c 'import {names}'` and see.",
        )
    if reply.status is Status.PASSED:
        lent = interpreter(scene.survey.site) is None  # then it proves nothing of an environment
        how = ", with the target on its PYTHONPATH," if lent else ""
        told = f"Python {reply.message} ({reply.python}){how} imports {names}"
        return _check(reply.status, told)
    if reply.status is Status.SKIPPED:
        return _check(reply.status, f"{reply.message} ({reply.python})")
    return _check(
        reply.status,
        reply.message,
        f"Where the check `files` passed, mend the environment of {reply.python}: SGLang does not "
        "start in it as it is.",
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


def ask(scene: Scene, *, hooked: list[str], seconds: float, self_test: bool = False) -> Reply:
    """Start the probe in the target's Python and return what it found.

    It imports the overlay and the ``hooked`` files, and with ``self_test`` runs that.
    """
    site = scene.survey.site
    order = {
        "root": str(site.root),
        "package_root": str(site.package_root),
        "hooked": hooked,
        "version": scene.survey.source.version if scene.expect is Expect.PATCHED else None,
        "self_test": self_test,
    }
    # By the environment, not by -B: what the import starts in turn must not write either.
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    python = interpreter(site)
    if python is None:
        python = Path(sys.executable)
        path = [*map(str, site.bases), os.environ.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    # Read as a file of the product, which may be a zip archive.
    text = (scene.survey.source.root / "patcher" / "probe.py").read_text(encoding="utf-8")
    try:
        answer = _run([str(python), "-c", text, json.dumps(order)], environment, seconds)
    except subprocess.TimeoutExpired:
        told = f"{python} was not through after {seconds:.0f} s"
        return Reply(python=python, status=Status.FAILED, message=told)
    except OSError as error:
        told = f"{python} cannot be run: {error.strerror}"
        return Reply(python=python, status=Status.SKIPPED, message=told)
    if isinstance(answer, int):
        told = f"{python} ended with {answer}"
        return Reply(python=python, status=Status.FAILED, message=told, died=True)
    return Reply(
        python=python,
        status=Status(answer["status"]),
        message=answer["message"],
        rows=tuple(answer["rows"]) if "rows" in answer else None,
    )


def _run(command: list[str], environment: dict[str, str], seconds: float) -> dict[str, Any] | int:
    """Return the answer of ``command`` on the pipe that it is given, or else its exit code."""
    reader, writer = os.pipe()
    try:
        # What SGLang prints is not wanted, and no pipe of it may outlive the probe.
        done = subprocess.run(
            [*command, str(writer)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[writer],
            cwd="/",
            env=environment,
            timeout=seconds,
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
    document: dict[str, Any] = json.loads(answer)
    return document


def _modules(scene: Scene) -> list[str]:
    names = [report.path.removesuffix(".py").replace("/", ".") for report in scene.hooked]
    return names if scene.expect is Expect.PRISTINE else ["sglang_overlay", *names]


def _check(status: Status, message: str, hint: str = "") -> Check:
    return Check(name="import", status=status, message=message, hint=hint)
