"""The server check: does a running server run the overlay that is on the disk?

A server says in ``/server_info`` which overlay it loaded (``internal_states[].overlay``). The
fingerprint there is compared with one computed from the tree, by the rule that the overlay's
``identity`` module documents. A server with an API key is asked with that of the environment.
"""

from __future__ import annotations

import hashlib
import json
import os
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

from patcher.checks import Check, Expect, Scene, Status
from patcher.receipt import PACKAGE

API_KEY = "SGLANG_OVERLAY_API_KEY"

_SECONDS = 30.0
_REFUSALS = (401, 403)
_HINT = (
    "Pass the address that the server listens on, such as http://127.0.0.1:30000, once it is ready."
)


def check_server(scene: Scene, url: str) -> Check:
    """Compare what each scheduler of the server at ``url`` says with the tree."""
    try:
        states = _ask(url, os.environ.get(API_KEY, "").strip())
    except urllib.error.HTTPError as error:
        hint = f"{API_KEY} must hold the server's --api-key." if error.code in _REFUSALS else _HINT
        return _check(Status.FAILED, f"{url} did not tell its server info: {error}", hint)
    except (OSError, ValueError) as error:
        return _check(
            Status.FAILED,
            f"{url} did not tell its server info: {error}",
            _HINT,
        )
    said = [state.get("overlay") for state in states]
    if scene.expect is Expect.PRISTINE:
        if any(said):
            return _check(Status.FAILED, f"{url} runs an overlay", "Restart the server.")
        return _check(Status.PASSED, f"{url} runs no overlay")
    faults = [_difference(scene, one) for one in said] or ["it names no scheduler"]
    if any(faults):
        return _check(
            Status.FAILED,
            f"{url} does not run what is on the disk: {next(filter(None, faults))}",
            f"Restart the server; if it comes from another tree than {scene.survey.site.root}, "
            "pass that one as --target.",
        )
    first = said[0]
    assert isinstance(first, dict)
    return _check(
        Status.PASSED,
        f"{url} runs overlay {first['overlay']} from this tree: {first.get('mask_policy')}, verify "
        f"path {first.get('verify_path')}",
    )


def fingerprint(package: Path) -> str:
    """Return the fingerprint of the overlay package in the folder ``package``, in hex."""
    total = hashlib.sha256()
    files = {path.relative_to(package).as_posix(): path for path in package.rglob("*.py")}
    for name in sorted(files):
        total.update(name.encode() + b"\0" + hashlib.sha256(files[name].read_bytes()).digest())
    return total.hexdigest()


def _ask(url: str, key: str) -> list[dict[str, Any]]:
    if urllib.parse.urlparse(url).scheme not in ("http", "https"):
        raise ValueError("it is not an http or https address")
    if not (key.isascii() and key.isprintable()):  # without the key in the message, as later
        raise ValueError(f"{API_KEY} holds what no header can")
    request = urllib.request.Request(f"{url.rstrip('/')}/server_info")  # noqa: S310
    if key:
        request.add_unredirected_header("Authorization", f"Bearer {key}")
    # A proxy of the environment is for other hosts, and would be shown the key.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=_SECONDS) as reply:
        document = json.load(reply)
    states = document.get("internal_states") if isinstance(document, dict) else None
    if not isinstance(states, list) or not all(isinstance(state, dict) for state in states):
        raise ValueError("it has no internal_states: this is not an SGLang server")
    return states


def _difference(scene: Scene, said: object) -> str:
    """Return what a scheduler's identity contradicts on the disk, or nothing."""
    survey = scene.survey
    if not isinstance(said, dict):
        return "a scheduler runs without the overlay, or with it switched off"
    disk = fingerprint(survey.site.root / PACKAGE)
    if said.get("fingerprint") != disk:
        return (
            f"a scheduler runs overlay {said.get('overlay')} with the fingerprint "
            f"{str(said.get('fingerprint'))[:12]}, the disk has {disk[:12]}"
        )
    # An editable install has a version of its own making.
    if survey.manifest and not survey.site.editable and said.get("release") != survey.site.version:
        return f"a scheduler runs SGLang {said.get('release')}, the disk has {survey.site.version}"
    return ""


def _check(status: Status, message: str, hint: str = "") -> Check:
    return Check(name="server", status=status, message=message, hint=hint)
