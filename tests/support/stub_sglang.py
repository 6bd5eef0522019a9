"""A STUB that stands for SGLang's HTTP server: its endpoints, none of its work.

Real is: the HTTP, the start and stop as a process of its own, and that it takes the overlay's
fingerprint from the disk once, when it starts, as a process that loads code does. Its answers are
made from the prompt. Faults are told to it in a JSON file:

    dead: it ends at once.              slow: /health says 503 for so many seconds.
    wrong: so many prompts are answered otherwise.   running: requests that run until it is 0.
    patched: the faults above but ``running`` only show when it started with the overlay;
    newer: with an overlay that is not 0.0.9.
    bytecode: when it starts, it leaves bytecode beside what it loads, as Python does.
"""

from __future__ import annotations

import hashlib
import json
import py_compile
import re
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


def identity(site: Path) -> dict[str, str] | None:
    """Return what a process that starts now would load of the overlay in ``site``."""
    package = site / "sglang_overlay"
    if "sglang_overlay" not in (site / "sglang/srt/managers/scheduler.py").read_text():
        return None
    total = hashlib.sha256()
    for name in sorted(str(path.relative_to(package)) for path in package.rglob("*.py")):
        content = (package / name).read_bytes()
        total.update(name.encode() + b"\0" + hashlib.sha256(content).digest())
    found = re.search(r'__version__ = "(.*)"', (package / "__init__.py").read_text())
    assert found
    return {"overlay": found[1], "fingerprint": total.hexdigest(), "verify_path": "stub"}


def main() -> None:
    """Serve until killed: ``stub_sglang.py SITE ADDRESS PORT FAULTS``."""
    site, address, port, told = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), Path(sys.argv[4])
    started, loaded = time.monotonic(), identity(site)

    def faults() -> dict[str, Any]:
        found: dict[str, Any] = json.loads(told.read_text()) if told.exists() else {}
        version = loaded["overlay"] if loaded else None
        spared = {"patched": (None,), "newer": (None, "0.0.9")}
        if any(found.get(key) and version in spared[key] for key in spared):
            return {key: found.get(key, 0) for key in ("running", "bytecode")}
        return found

    if faults().get("bytecode"):
        for source in (site / "sglang/version.py", *(site / "sglang_overlay").rglob("*.py")):
            py_compile.compile(str(source), doraise=True)
    if faults().get("dead"):
        sys.exit("told to be dead")

    class Handler(BaseHTTPRequestHandler):
        def answer(self, document: object, code: int = 200) -> None:
            body = json.dumps(document).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            if self.path == "/health":
                up = time.monotonic() - started >= faults().get("slow", 0)
                self.answer({}, 200 if up else 503)
            elif self.path == "/server_info":
                state = {"overlay": loaded} if loaded else {}
                self.answer({"version": "stub", "internal_states": [state]})
            elif self.path.startswith("/v1/loads"):
                running = {"num_running_reqs": faults().get("running", 0), "num_waiting_reqs": 0}
                self.answer({"loads": [running]})
            else:
                self.answer({}, 404)

        def do_POST(self) -> None:
            order = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            number = int(re.findall(r"\d+", order["text"])[0])
            salt = "otherwise" if number < faults().get("wrong", 0) else ""
            text = hashlib.sha256((order["text"] + salt).encode()).hexdigest()
            self.answer({"text": text, "output_ids": list(text.encode())})

        def log_message(self, *words: object) -> None:
            """Say nothing."""

    ThreadingHTTPServer((address, port), Handler).serve_forever()


if __name__ == "__main__":
    main()
