"""The process that a scene runs in: what it does with one call, whichever way it was started.

``python -m tests.support.engine.child <call.json>`` plays one call. `tests.support.engine.warm` has
SGLang imported already and forks a child per call.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from tests.support.engine import harness
from tests.support.engine.stepper import Stepper


def play_and_exit(path: Path) -> NoReturn:
    """Play the call in ``path`` and end this process: 0, or 1 with a traceback on stderr."""
    code = 0
    try:
        _play(json.loads(path.read_text()))
    except BaseException:  # noqa: BLE001  whatever it was, the exit code must tell
        traceback.print_exc()
        code = 1
    # The scheduler leaves threads and sockets behind that would keep this process alive.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _play(call: dict[str, Any]) -> None:
    """Build the driver, let the scene play, write its result as JSON."""
    from sglang.srt.plugins import load_plugins

    _read_switches_again()
    scene = _load(Path(call["file"]), call["scene"])
    load_plugins()
    if not harness.is_active():
        raise RuntimeError("SGLang did not load the harness plugin of the tests in this process")
    if call["driver"] == "stepper":
        result = scene(Stepper(call["server_args"]), **call["arguments"])
    else:
        result = _play_on_engine(scene, call)
    Path(call["result"]).write_text(json.dumps(result))


def _read_switches_again() -> None:
    """Let the overlay, if there is one, see this call's variables: see `launch.READ_AGAIN`."""
    switches = sys.modules.get("sglang_overlay.switches")
    if switches is not None:
        switches.ACTIVE = switches.read_switches(os.environ)  # type: ignore[attr-defined]


def _play_on_engine(scene: Callable[..., Any], call: dict[str, Any]) -> Any:
    import sglang

    engine = sglang.Engine(**call["server_args"])
    try:
        return scene(engine, **call["arguments"])
    finally:
        engine.shutdown()


def _load(file: Path, name: str) -> Callable[..., Any]:
    """Import the file that holds the scene, under a name of its own, and return the scene."""
    spec = importlib.util.spec_from_file_location("engine_scene", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses of the file look their module up by name.
    sys.modules["engine_scene"] = module
    spec.loader.exec_module(module)
    scene: Callable[..., Any] = getattr(module, name)
    return scene


if __name__ == "__main__":
    play_and_exit(Path(sys.argv[1]))
