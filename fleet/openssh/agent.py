"""What runs on a host for one order: it comes with the order, and is gone after it.

It is sent together with the modules that it imports and with the bundle, as one archive on the
standard input of ssh. The answer is one JSON object, on the line behind the order's marker.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ansible_collections.ddtree.sglang_overlay.plugins.module_utils import (
    bundle,
    journal,
    server,
    tree,
)

Order = Mapping[str, Any]


class PhaseFault(Exception):
    """A phase failed on this host."""


def look(order: Order) -> dict[str, Any]:
    """Tell what the host is, and with ``plan`` what a change to that would do."""
    status = _ask(order, "status")
    site = Path(status["target"])
    seen: dict[str, Any] = {
        "overlay": status,
        "fingerprint": tree.fingerprint(site),
        "digest": tree.digest(site),
        "place": tree.place(site),
        "journal": _journal(order).read(),
    }
    if order["url"]:
        live = _server(order)
        seen["ready"] = live.ready()
        seen["identities"] = live.identities() if seen["ready"] else []
    expect = "pristine" if status["state_after"] == "pristine" else "patched"
    _, seen["verify"] = _raw(order, "verify", *_expect(order, expect))
    if order.get("plan"):
        free = bundle.free_bytes(site) >> 20
        if free < order["free_mib"]:
            raise PhaseFault(f"{free} MiB are free at {site}, {order['free_mib']} are needed")
        seen["plan"] = _ask(order, _verb(order["plan"]), "--check")
        _journal(order).check_free(order["run"], take_over=order["take_over"])
        failed = bundle.faults(seen["verify"])
        if failed and status["state_after"] == "pristine":
            raise PhaseFault(failed)
    return seen


def begin(order: Order) -> dict[str, Any]:
    """Open the journal."""
    opened = _journal(order).open(
        order["run"],
        order["before"],
        lease=order["lease"],
        take_over=order["take_over"],
        same=lambda: tree.fingerprint(Path(order["site"])) == order["fingerprint"],
    )
    return {"journal": opened}


def drain(order: Order) -> dict[str, Any]:
    """Wait until the server is idle."""
    if order["url"] and _server(order).ready():
        server.wait_idle(_server(order), limit=order["drain_limit"])
    return {}


def stop(order: Order) -> dict[str, Any]:
    """Stop the server; what then lies on the disk is what a rollback has to bring back."""
    _command(order["stop"])
    digest = tree.digest(Path(order["site"]))
    noted = _journal(order).note(order["run"], "stopped", lease=order["lease"], digest=digest)
    return {"journal": noted}


def change(order: Order) -> dict[str, Any]:
    """Apply or revert."""
    options = ["--allow-downgrade"] if order.get("allow_downgrade") else []
    return {"overlay": _ask(order, _verb(order["state"]), *options)}


def verify(order: Order) -> dict[str, Any]:
    """Verify the tree."""
    return {"verify": _ask(order, "verify", *_expect(order, order["state"]))}


def start(order: Order) -> dict[str, Any]:
    """Start the server."""
    _command(order["start"])
    return {}


def gate(order: Order) -> dict[str, Any]:
    """See the server serve what the disk holds, with the answers of stock SGLang."""
    if not order["url"]:
        return {}
    live = _server(order)
    server.wait_ready(live, limit=order["ready_limit"])
    _renew(order)  # the answers take their own time
    server.check_identity(live, tree.fingerprint(Path(order["site"])))
    return {"agreed": server.check_answers(live, order["golden"])}


def route(order: Order) -> dict[str, Any]:
    """Hold the host while the controller puts the server back into the router."""
    return {}


def hold(order: Order) -> dict[str, Any]:
    """Hold the host for the rollback that begins."""
    return {}


def restore(order: Order) -> dict[str, Any]:
    """Stop the server again, bring the tree back and see that it is what it was."""
    _command(order["stop"])
    change(order)
    if order["digest"] and tree.digest(Path(order["site"])) != order["digest"]:
        raise PhaseFault("the tree is not what it was before this rollout: reinstall sglang")
    _command(order["start"])
    return {}


def finish(order: Order) -> dict[str, Any]:
    """Close the journal."""
    _journal(order).close(order["run"])
    return {}


_HOLDING = (drain, stop, change, verify, start, gate, route, hold, restore)
PHASES: Mapping[str, Callable[[Order], dict[str, Any]]] = {
    function.__name__: function for function in (look, begin, *_HOLDING, finish)
}


def _renew(order: Order) -> None:
    """Renew the lease of a host that was begun; fail before anything is done if it is another's."""
    if not order["begun"]:
        return
    kept, phase, lease = _journal(order), order["phase"], order["lease"]
    if order["undo"]:
        kept.own(order["run"], phase, lease=lease)
    else:
        kept.note(order["run"], phase, lease=lease)


def _verb(state: str) -> str:
    return "apply" if state == "patched" else "revert"


def _expect(order: Order, state: str) -> list[str]:
    words = ["--expect", state]
    for name in ("require", "skip"):
        words += [f"--{name}={','.join(order[name])}"] if order[name] else []
    return words


def _journal(order: Order) -> journal.Journal:
    return journal.Journal(Path(order["journal_folder"]), order["target"])


def _server(order: Order) -> server.Server:
    return server.Server(order["url"].rstrip("/"), order["api_key"] or None)


def _raw(order: Order, *words: str) -> tuple[int, Mapping[str, Any]]:
    return bundle.ask(
        Path(order["bundle"]),
        order["sha256"],
        [words[0], "--target", order["target"], *words[1:]],
        python=sys.executable,
    )


def _ask(order: Order, *words: str) -> Mapping[str, Any]:
    code, document = _raw(order, *words)
    if code != 0:
        raise PhaseFault(bundle.faults(document) or f"the bundle ended with code {code}")
    return document


def _command(words: str) -> None:
    done = subprocess.run(  # noqa: S602
        words, shell=True, capture_output=True, text=True, errors="replace", check=False
    )
    if done.returncode != 0:
        raise PhaseFault(f"{words!r} ended with code {done.returncode}: {done.stderr.strip()}")


def main(folder: Path) -> None:
    """Carry out the order in ``folder`` and answer."""
    order = {**json.loads((folder / "order.json").read_text()), "bundle": str(folder / "bundle")}
    phase = PHASES[order["phase"]]
    try:
        if phase in _HOLDING:
            _renew(order)
        answer = {"ok": True, **phase(order)}
    except (PhaseFault, bundle.BundleFault, journal.JournalFault, server.ServerFault) as fault:
        answer = {"ok": False, "message": str(fault)}
    except OSError as error:
        answer = {"ok": False, "message": f"{type(error).__name__}: {error}"}
    sys.stdout.write(f"\n{order['marker']}\n{json.dumps(answer)}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
