"""The real server, ``python -m sglang.launch_server``, on a free port of 127.0.0.1."""

from __future__ import annotations

import json
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tests.support.engine.launch import Launch
from tests.support.engine.orders import Known, Orders
from tests.support.engine.processes import EngineFailure, EngineProcess, running
from tests.support.engine.record import Record
from tests.support.engine.scene import run_folder

_SECONDS = 600
_POLL_SECONDS = 0.25


@dataclass(frozen=True, kw_only=True)
class Server:
    """A server process that may or may not have begun to serve."""

    process: EngineProcess
    record: Record
    url: str

    def get(self, path: str) -> str:
        """Return the body of ``path``; urllib's errors when there is none."""
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:
            return str(answer.read().decode())

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """Send ``body`` as JSON and return the answer, decoded."""
        request = urllib.request.Request(
            self.url + path,
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.loads(answer.read())

    def stream(self, path: str, body: dict[str, Any]) -> list[Any]:
        """Send ``body`` as JSON and return every event of the answer, decoded."""
        request = urllib.request.Request(
            self.url + path,
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            lines = [line.removeprefix(b"data: ") for line in answer if line.startswith(b"data: ")]
        return [json.loads(line) for line in lines if b"[DONE]" not in line]

    def is_serving(self) -> bool:
        """Say whether the server answers that it is healthy."""
        try:
            self.get("/health")
        except (urllib.error.URLError, ConnectionError):
            return False
        return True

    def wait_until_model(self) -> None:
        """Return once a process of the server has a model, with weights from the harness."""
        self._wait(lambda: self.record.model_processes() > 0, "did not load a model")

    def wait_until_serving(self) -> None:
        """Return once the server is healthy."""
        self._wait(self.is_serving, "did not begin to serve")

    def _wait(self, reached: Callable[[], bool], complaint: str) -> None:
        deadline = time.monotonic() + _SECONDS
        while not reached():
            code = self.process.exit_code()
            if code is not None:
                raise EngineFailure(f"exit code {code}: {complaint}", self.process.stderr())
            if time.monotonic() > deadline:
                raise EngineFailure(f"{complaint} in {_SECONDS} s", self.process.stderr())
            time.sleep(_POLL_SECONDS)


@contextmanager
def started(launch: Launch, *, known: Known = (), fault: str = "") -> Iterator[Server]:
    """Start the server and end it afterwards; whether it serves is the caller's question."""
    port = free_port()
    with run_folder() as folder:
        orders = Orders(record=folder, known=known, fault=fault)
        environment = launch.environment() | orders.environment()
        with running(launch.command(port), environment, folder) as process:
            yield Server(process=process, record=Record(folder), url=f"http://127.0.0.1:{port}")


@contextmanager
def serving(launch: Launch, *, known: Known = (), fault: str = "") -> Iterator[Server]:
    """Start the server, wait until it serves and the harness is active in every rank."""
    with started(launch, known=known, fault=fault) as server:
        server.wait_until_serving()
        if server.record.model_processes() != launch.ranks:
            raise EngineFailure("the harness was not active in the server", server.process.stderr())
        yield server


def free_port() -> int:
    """Return a free port below 55536: SGLang derives its gRPC port by adding 10000."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        if port + 10_000 < 1 << 16:
            return port
