"""A rollout to a host on which the real SGLang serves, on the CPU (see tests/support/engine).

Real are SGLang's server and its processes, sshd, the tool, the bundle and the tree. Kernels and
weights are the test bed's. The tokenizer is made here: each word is a token. The server starts four
times, one to two minutes each on two busy CPUs; the whole takes six to eleven.
"""

from __future__ import annotations

import dataclasses
import json
import random
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ansible_collections.ddtree.sglang_overlay.plugins.module_utils import server

from tests.support import fleets, trees
from tests.support.engine.launch import Launch
from tests.support.engine.models import VOCABULARY
from tests.support.engine.orders import Orders
from tests.support.fleets import COLLECTIONS, Fleet, Host
from tests.support.snapshots import assert_identical

pytestmark = [pytest.mark.full, pytest.mark.engine]

_PROMPTS = [f"w{number} w{number * 7 % 200} w{number * 13 % 200}" for number in range(10)]
_LIMIT = 600
_SERVICE = """#!/bin/sh
# start|stop the real server of this host
cd "{root}"
case "$1" in
start)
  orders=good
  if test -e broken && test -d "{site}/sglang_overlay"; then orders=bad; fi
  setsid env -i {environment} ENGINE_BED_ORDERS="{root}/$orders/orders.json" {command} \\
    </dev/null >>server.log 2>&1 &
  echo $! >server.pid ;;
stop)
  test -f server.pid || exit 0
  pkill -KILL -s "$(cat server.pid)"
  while pgrep -s "$(cat server.pid)" >/dev/null; do sleep 0.1; done
  rm -f server.pid ;;
esac
"""


@pytest.fixture
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """One host whose server is the real one, from a whole tree of the release."""
    folder = tmp_path_factory.mktemp("f")
    with fleets.fleet(folder, size=1) as made:
        host = dataclasses.replace(made["h1"], http=lasting_port())
        host.halt()
        shutil.copytree(trees.tree(fleets.RELEASE), host.site, dirs_exist_ok=True)
        host.service.write_text(service(host))
        real = dataclasses.replace(made, hosts=(host,))
        try:
            yield real
        finally:
            host.halt()


def lasting_port() -> int:
    """Return a free port that no connection is given meanwhile.

    SGLang chooses its own among those of connections and binds it a minute later; a busy machine
    has given it away by then, and the server ends.
    """
    for port in random.sample(range(20000, 30000), 100):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise AssertionError("no port between 20000 and 30000 is free")


def service(host: Host) -> str:
    """Return the script that starts and stops SGLang on ``host``."""
    write_tokenizer(host.root / "tokenizer")
    options = (
        ("skip_tokenizer_init", False),
        ("tokenizer_path", str(host.root / "tokenizer")),
        ("host", host.address),
        ("port", host.http),
        ("nccl_port", lasting_port()),
    )
    launch = Launch(tree=host.site, options=options)
    for name, fault in (("good", ""), ("bad", "short-verify")):
        (host.root / name).mkdir()
        Orders(record=host.root / name, fault=fault).environment()
    command = launch.command(host.http)
    command[command.index("127.0.0.1")] = host.address
    environment = {**launch.environment(), "HOME": str(host.root)}
    return _SERVICE.format(
        root=host.root,
        site=host.site,
        environment=" ".join(f"{key}={shlex.quote(value)}" for key, value in environment.items()),
        command=shlex.join(command),
    )


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer that takes ``w5`` for the token 5."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{number}": number for number in range(VOCABULARY)}
    plain = Tokenizer(models.WordLevel(words, unk_token="w0"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=plain, bos_token="w256", eos_token="w257", unk_token="w0"
    ).save_pretrained(folder)


def record(fleet: Fleet, host: Host) -> None:
    """Record the golden answers from the stock server, as the guide says."""
    prompts = fleet.folder / "prompts.txt"
    prompts.write_text("\n".join(_PROMPTS) + "\n")
    subprocess.run(
        [sys.executable, str(COLLECTIONS), "record", host.url, "--prompts", str(prompts)]
        + ["--out", str(fleet.folder / "golden.json"), "--max-new-tokens", "4"],
        check=True,
        cwd=fleet.folder,
    )
    assert len(json.loads((fleet.folder / "golden.json").read_text())["answers"]) == len(_PROMPTS)


def test_a_real_server_is_gated_rolled_back_and_rolled_out(fleet: Fleet) -> None:
    host = fleet["h1"]
    host.serve(seconds=_LIMIT)
    server.wait_ready(server.Server(host.url), limit=_LIMIT)
    record(fleet, host)
    before = host.look(folder_times=False)

    (host.root / "broken").touch()  # with the overlay, it answers with other tokens
    failed = fleet.tool("apply", ready_limit=_LIMIT)
    assert failed.code == 1, failed.told
    assert "answers are what stock SGLang says" in failed.stdout, failed.told
    assert "rolled back" in failed.stdout
    assert_identical(before, host.look(folder_times=False), "h1")

    (host.root / "broken").unlink()
    done = fleet.tool("apply", ready_limit=_LIMIT)
    assert done.code == 0, done.told
    assert fleet.states() == {"h1": "patched"}
    status = fleet.tool("status")
    assert "as the disk" in status.stdout, status.told
