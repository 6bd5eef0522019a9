"""The server check, against a stub that stands where SGLang would answer."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from sglang_overlay import identity

from patcher import live, site, source, state
from patcher.checks import Expect, Scene, Status
from tests.support.sites import patched_site, slim_site

RELEASE = "0.5.12.post1"


@contextmanager
def stub(document: object, *, key: str = "", to: str = "") -> Iterator[str]:
    """Serve ``document`` at /server_info, as SGLang does: with a ``key``, only to who has it.

    With ``to``, send the caller to that address instead.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = self.path == "/server_info"
            allowed = not key or self.headers["Authorization"] == f"Bearer {key}"
            self.send_response(302 if to else 401 if not allowed else 200 if known else 404)
            if to:
                self.send_header("Location", f"{to}/server_info")
            self.end_headers()
            self.wfile.write(json.dumps(document).encode())

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def scene(folder: Path, expect: Expect = Expect.PATCHED) -> Scene:
    survey = state.survey(site.resolve(str(folder)), source.locate())
    return Scene(survey=survey, expect=expect)


def info(folder: Path, **changes: object) -> dict[str, Any]:
    said: dict[str, object] = {
        "overlay": source.locate().version,
        "fingerprint": identity.fingerprint(folder / "sglang_overlay"),
        "release": RELEASE,
        "mask_policy": "chain: right without a mask",
        "verify_path": "causal",
    }
    return {"internal_states": [{"overlay": {**said, **changes}}]}


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return patched_site(RELEASE, tmp_path_factory.mktemp("live") / "site-packages")


def test_the_fingerprint_is_that_of_the_overlay_itself(patched: Path) -> None:
    package = patched / "sglang_overlay"
    assert live.fingerprint(package) == identity.fingerprint(package)


def test_a_server_that_runs_the_tree_passes(patched: Path) -> None:
    with stub(info(patched)) as url:
        check = live.check_server(scene(patched), url + "/")
    assert (check.status, "verify path causal" in check.message) == (Status.PASSED, True)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"fingerprint": "0" * 64}, "with the fingerprint 000000000000"),
        ({"release": "0.5.11"}, "runs SGLang 0.5.11, the disk has 0.5.12.post1"),
    ],
)
def test_a_server_that_runs_something_else_fails(
    patched: Path, changes: dict[str, object], said: str
) -> None:
    with stub(info(patched, **changes)) as url:
        check = live.check_server(scene(patched), url)
    assert check.status is Status.FAILED
    assert said in check.message
    assert "Restart the server" in check.hint


def test_one_scheduler_without_the_overlay_fails(patched: Path) -> None:
    document = info(patched)
    document["internal_states"].append({})
    with stub(document) as url:
        check = live.check_server(scene(patched), url)
    assert check.status is Status.FAILED
    assert "without the overlay" in check.message


@pytest.mark.parametrize("document", [{}, [], {"internal_states": 7}, {"internal_states": []}])
def test_what_is_no_sglang_server_fails(patched: Path, document: object) -> None:
    with stub(document) as url:
        assert live.check_server(scene(patched), url).status is Status.FAILED


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "file:///etc/passwd", "localhost:30000"])
def test_an_address_that_does_not_answer_fails(patched: Path, url: str) -> None:
    check = live.check_server(scene(patched), url)
    assert (check.status, bool(check.hint)) == (Status.FAILED, True)


def test_a_pristine_tree_wants_a_server_without_overlay(tmp_path: Path, patched: Path) -> None:
    folder = slim_site(RELEASE, tmp_path / "site-packages")
    with stub({"internal_states": [{}]}) as url:
        assert live.check_server(scene(folder, Expect.PRISTINE), url).status is Status.PASSED
    with stub(info(patched)) as url:
        assert live.check_server(scene(folder, Expect.PRISTINE), url).status is Status.FAILED


def test_a_server_with_an_api_key(patched: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with stub(info(patched), key="secret word") as url:
        for given in ("", "another", "two\nlines", "schlüssel"):
            monkeypatch.setenv("SGLANG_OVERLAY_API_KEY", given)
            check = live.check_server(scene(patched), url)
            assert check.status is Status.FAILED
            assert not given or given not in f"{check}"
            assert "SGLANG_OVERLAY_API_KEY" in f"{check}"
        monkeypatch.setenv("SGLANG_OVERLAY_API_KEY", "secret word\n")  # as from a file
        assert live.check_server(scene(patched), url).status is Status.PASSED


def test_the_api_key_goes_to_no_other_server(
    patched: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_OVERLAY_API_KEY", "secret")
    with stub(info(patched), key="secret") as other, stub({}, to=other) as url:
        assert "401" in live.check_server(scene(patched), url).message


def test_a_proxy_of_the_environment_is_not_asked(
    patched: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with stub(info(patched)) as url:
        assert live.check_server(scene(patched), url).status is Status.PASSED
