"""What a live SGLang server says over HTTP: readiness, load, identity, generations."""

from __future__ import annotations

import concurrent.futures
import http.client
import json
import math
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_POLL_SECONDS = 0.2
# The share of the prompts whose answer has to be the recorded one.
NEEDED = 0.9
# Fewer prompts than these are no gate.
LEAST = 10


class ServerFault(Exception):
    """The server did not do what was asked for."""


@dataclass(frozen=True)
class Server:
    """One server: its URL without a trailing slash, its key or none, seconds for each request."""

    url: str
    api_key: str | None = None
    timeout: float = 60.0

    def ready(self) -> bool:
        """Tell whether the server calls itself healthy."""
        try:
            self._ask("/health")
        except ServerFault:
            return False
        return True

    def load(self) -> int:
        """Return the number of requests that run or wait."""
        loads = self._json("/v1/loads?include=core")["loads"]
        return sum(int(one["num_running_reqs"]) + int(one["num_waiting_reqs"]) for one in loads)

    def identities(self) -> list[Mapping[str, Any] | None]:
        """Return the overlay's identity of each scheduler: None where it runs no overlay."""
        states = self._json("/server_info")["internal_states"]
        if not states:
            raise ServerFault(f"{self.url}/server_info names no scheduler")
        return [state.get("overlay") for state in states]

    def generate(self, prompt: str, sampling: Mapping[str, Any]) -> dict[str, Any]:
        """Return the text, and the token ids if the server gives them, that follow ``prompt``."""
        order = {"text": prompt, "sampling_params": dict(sampling)}
        answer = self._json("/generate", json.dumps(order).encode())
        return {"text": answer["text"], "output_ids": answer.get("output_ids")}

    def answers(
        self, prompts: Sequence[str], sampling: Mapping[str, Any], *, at_once: int
    ) -> list[dict[str, Any]]:
        """Return what follows each prompt, with ``at_once`` requests in flight."""
        with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(lambda prompt: self.generate(prompt, sampling), prompts))

    def _json(self, path: str, body: bytes | None = None) -> Any:
        try:
            return json.loads(self._ask(path, body))
        except ValueError as error:
            raise ServerFault(f"{self.url}{path} answered no JSON: {error}") from error

    def _ask(self, path: str, body: bytes | None = None) -> bytes:
        headers = {"Content-Type": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        request = urllib.request.Request(self.url + path, data=body, headers=headers)  # noqa: S310
        # Without the environment's proxies: the server is asked on its own host.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=self.timeout) as reply:
                return bytes(reply.read())
        except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
            raise ServerFault(f"{self.url}{path}: {error}") from error


def wait_idle(server: Server, *, limit: float) -> None:
    """Wait until no request runs or waits.

    Raises:
        ServerFault: some still did after ``limit`` seconds.
    """
    deadline = time.monotonic() + limit
    while (left := server.load()) > 0:
        if time.monotonic() >= deadline:
            raise ServerFault(f"{left} requests still run after {limit:g} s; see the drain limit")
        time.sleep(_POLL_SECONDS)


def wait_ready(server: Server, *, limit: float) -> None:
    """Wait until the server is healthy.

    Raises:
        ServerFault: it was not after ``limit`` seconds.
    """
    deadline = time.monotonic() + limit
    while not server.ready():
        if time.monotonic() >= deadline:
            raise ServerFault(f"{server.url}/health was not ready after {limit:g} s")
        time.sleep(_POLL_SECONDS)


def check_identity(server: Server, expected: str | None) -> None:
    """Compare what the server runs with what is on the disk.

    Args:
        server: whom to ask.
        expected: the fingerprint of the overlay on the disk; None: there must be no overlay.

    Raises:
        ServerFault: a scheduler runs something else.
    """
    for rank, identity in enumerate(server.identities()):
        found = identity["fingerprint"] if identity else None
        if found != expected:
            raise ServerFault(
                f"scheduler {rank} runs {_told(found)}, the disk holds {_told(expected)}: "
                "the server was not restarted, or runs from another environment"
            )


def check_golden(golden: object) -> Mapping[str, Any]:
    """Return the recorded answers as they are, if they can be a gate.

    Raises:
        ServerFault: they are not what `record` gives, or too few.
    """
    again = "record them with `fleet record`"
    answers = golden.get("answers") if isinstance(golden, Mapping) else None
    keys = {"prompt", "text", "output_ids"}
    if (
        not isinstance(golden, Mapping)
        or not isinstance(golden.get("sampling_params"), Mapping)
        or not isinstance(answers, list)
        or not all(isinstance(answer, Mapping) and keys <= set(answer) for answer in answers)
    ):
        raise ServerFault(f"these are no golden answers: {again}")
    if len(answers) < LEAST:
        raise ServerFault(f"{len(answers)} golden answers are no gate, {LEAST} are needed: {again}")
    return golden


def check_answers(server: Server, golden: Mapping[str, Any]) -> str:
    """Generate from the recorded prompts and compare; return how many agreed, as ``9 of 10``.

    Raises:
        ServerFault: fewer than `NEEDED` of the answers are the recorded ones.
    """
    entries = golden["answers"]
    prompts = [entry["prompt"] for entry in entries]
    given = server.answers(prompts, golden["sampling_params"], at_once=1)
    wrong = [
        entry["prompt"] for entry, one in zip(entries, given, strict=True) if not _same(entry, one)
    ]
    right = len(entries) - len(wrong)
    told = f"{right} of {len(entries)}"
    if not entries or right < math.ceil(NEEDED * len(entries)):
        raise ServerFault(
            f"{told} answers are what stock SGLang says, {NEEDED:.0%} are needed; wrong after: "
            + "; ".join(repr(prompt[:60]) for prompt in wrong[:3])
        )
    return told


def record(
    server: Server, prompts: Sequence[str], sampling: Mapping[str, Any], *, repeats: int = 5
) -> dict[str, Any]:
    """Return the golden answers: of the prompts that the server answers alike every time.

    Each prompt is asked ``repeats`` times one at a time and as often with eight in flight. Ask a
    stock server: what it cannot repeat itself is no measure for another.
    """
    rounds = [
        server.answers(prompts, sampling, at_once=at_once)
        for at_once in (1, 8)
        for _ in range(repeats)
    ]
    steady = [
        {"prompt": prompt, **given[0]}
        for prompt, *given in zip(prompts, *rounds, strict=True)
        if all(_same(given[0], one) for one in given)
    ]
    return {"schema": 1, "sampling_params": dict(sampling), "answers": steady}


def _same(expected: Mapping[str, Any], given: Mapping[str, Any]) -> bool:
    keys = ("text", "output_ids") if expected["output_ids"] and given["output_ids"] else ("text",)
    return all(expected[key] == given[key] for key in keys)


def _told(fingerprint: str | None) -> str:
    return f"the overlay {fingerprint[:12]}" if fingerprint else "no overlay"
