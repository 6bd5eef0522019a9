"""The parts that need no host: waves, journal, signature, gate, hosts file, report."""

from __future__ import annotations

import io
import json
import os
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from ansible_collections.ddtree.sglang_overlay.plugins.module_utils import (
    bundle,
    journal,
    server,
    tree,
    waves,
)
from ansible_collections.ddtree.sglang_overlay.plugins.plugin_utils import signature
from click.testing import CliRunner
from openssh import cli, hosts, report
from openssh.board import Board
from openssh.rollout import Course
from sglang_overlay import identity

from tests.support.fleets import heeding_ctrl_c
from tests.support.sites import patched_site


@pytest.mark.parametrize(
    ("groups", "sizes", "expected"),
    [
        (1, [1, "10%", "100%"], [1]),
        (12, [1, "10%", "100%"], [1, 2, 9]),
        (30, [1, "10%", "100%"], [1, 3, 26]),
        (5, [2], [2, 2, 1]),
    ],
)
def test_waves(groups: int, sizes: list[str | int], expected: list[int]) -> None:
    assert [len(wave) for wave in waves.divide(range(groups), sizes)] == expected


@pytest.mark.parametrize("size", [0, "0%", "-1", "half", ""])
def test_a_wave_that_takes_nothing_is_refused(size: str | int) -> None:
    with pytest.raises(ValueError, match="a wave is a number"):
        waves.divide([1], [size])


def test_groups_keep_their_order() -> None:
    names = {"a": "x", "b": "y", "c": "x"}
    assert waves.by_group(["a", "b", "c"], names) == [["a", "c"], ["b"]]


def test_the_journal_keeps_what_the_first_run_saw(tmp_path: Path) -> None:
    kept = journal.Journal(tmp_path / "journal", "/opt/venv")
    kept.open("one", {"state": "pristine"}, lease=60, take_over=False)
    kept.note("one", "stopped", lease=60, digest="d1")
    with pytest.raises(journal.JournalFault, match="at work here"):
        kept.open("two", {"state": "patched"}, lease=60, take_over=False)
    kept.note("one", "stopped", lease=-1)  # its lease has ended: it is dead
    kept.open("two", {"state": "patched"}, lease=60, take_over=False)
    document = kept.note("two", "stopped", lease=60, digest="d2")
    assert document["before"] == {"state": "pristine", "digest": "d1"}
    with pytest.raises(journal.JournalFault, match="taken over"):
        kept.close("one")
    kept.close("two")
    assert not (tmp_path / "journal").exists()


def test_a_journal_that_cannot_be_read_is_no_free_host(tmp_path: Path) -> None:
    (tmp_path / "journal").write_text("a file where the folder should be")
    with pytest.raises(journal.JournalFault, match="cannot be read"):
        journal.Journal(tmp_path / "journal", "/t").check_free("one", take_over=False)


def test_a_host_that_was_changed_since_it_was_looked_at_is_not_begun(tmp_path: Path) -> None:
    kept = journal.Journal(tmp_path / "journal", "/t")
    with pytest.raises(journal.JournalFault, match="changed after it was looked at"):
        kept.open("one", {}, lease=60, take_over=False, same=lambda: False)
    assert not (tmp_path / "journal").exists()
    kept.open("one", {}, lease=-1, take_over=False)
    # What a lost run left is not as that run found it: the next one goes on all the same.
    kept.open("two", {}, lease=60, take_over=False, same=lambda: False)


def test_a_journal_on_a_full_disk_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    kept = journal.Journal(tmp_path / "journal", "/t")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(journal.JournalFault, match="No space left"):
        kept.open("one", {}, lease=60, take_over=False)
    assert not (tmp_path / "journal").exists()
    monkeypatch.undo()
    kept.open("one", {"state": "pristine"}, lease=60, take_over=False)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(journal.JournalFault, match="No space left"):
        kept.note("one", "stopped", lease=60)
    found = kept.read()
    assert found
    assert found["phase"] == "begun"


def test_a_rollback_holds_the_host_as_long_as_the_journal_is_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    kept = journal.Journal(tmp_path / "journal", "/t")
    begun = kept.open("one", {"state": "pristine"}, lease=60, take_over=False)
    held = kept.own("one", "hold", lease=600)
    assert held["lease"] > begun["lease"] + 500
    assert kept.read() == held
    monkeypatch.setattr(os, "fsync", full)
    assert kept.own("one", "restore", lease=600)["before"] == {"state": "pristine"}
    monkeypatch.undo()
    kept.open("two", {}, lease=60, take_over=True)
    with pytest.raises(journal.JournalFault, match="taken over"):
        kept.own("one", "restore", lease=600)


def test_of_many_that_open_the_journal_at_once_one_wins(tmp_path: Path) -> None:
    kept, won, barrier = journal.Journal(tmp_path / "j", "/t"), [], threading.Barrier(8)

    def contend(run: str) -> None:
        barrier.wait()
        try:
            kept.open(run, {}, lease=60, take_over=False)
        except journal.JournalFault:
            return
        won.append(run)

    threads = [threading.Thread(target=contend, args=(str(n),)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1


def test_the_digest_sees_every_byte_and_mode(tmp_path: Path) -> None:
    site = patched_site("0.5.12.post1", tmp_path / "site-packages")
    first = tree.digest(site)
    hooks = site / "sglang_overlay/srt/hooks.py"
    text = hooks.read_bytes()
    hooks.write_bytes(text + b"\n")
    assert tree.digest(site) != first
    hooks.write_bytes(text)
    assert tree.digest(site) == first
    hooks.chmod(0o600)
    assert tree.digest(site) != first
    hooks.chmod(0o644)
    (site / "sglang/srt/empty").mkdir()
    assert tree.digest(site) != first


def test_the_digest_is_the_same_when_a_server_has_run(tmp_path: Path) -> None:
    # With bytecode in it, an upgrade could not be rolled back once the older server had run.
    site = patched_site("0.5.12.post1", tmp_path / "site-packages")
    first = tree.digest(site)
    for folder in (site / "sglang", site / "sglang_overlay"):
        cache = folder / "__pycache__"
        cache.mkdir()
        assert tree.digest(site) == first
        (cache / "__init__.cpython-311.pyc").write_bytes(b"bytecode")
        (cache / "__init__.cpython-311.pyc.1234").write_bytes(b"byte")
        assert tree.digest(site) == first
        (cache / "other").write_bytes(b"")
        assert tree.digest(site) != first
        (cache / "other").unlink()
    # Where Python takes it for a module of its own, it counts.
    (site / "sglang/version.pyc").write_bytes(b"bytecode")
    assert tree.digest(site) != first


def test_the_fingerprint_is_the_one_that_a_live_server_states(tmp_path: Path) -> None:
    site = patched_site("0.5.12.post1", tmp_path / "site-packages")
    assert tree.fingerprint(site) == identity.fingerprint(site / "sglang_overlay")


def test_a_bundle_altered_on_the_way_is_not_run(tmp_path: Path) -> None:
    path, ran = tmp_path / "bundle", tmp_path / "ran"
    path.write_text(f"open({str(ran)!r}, 'w')")
    with pytest.raises(bundle.BundleFault, match="altered on the way"):
        bundle.ask(path, "0" * 64, ["status"], python="python3")
    assert not ran.exists()


class Answering(BaseHTTPRequestHandler):
    """Answers that change with every call for prompts that begin with ``odd``."""

    calls = 0

    def do_POST(self) -> None:
        type(self).calls += 1
        prompt = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["text"]
        text = f"{prompt}!{self.calls if prompt.startswith('odd') else ''}"
        body = json.dumps({"text": text, "output_ids": [len(text)]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words: object) -> None:
        """Say nothing."""


@pytest.fixture
def live() -> Iterator[server.Server]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Answering) as http:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        yield server.Server(f"http://127.0.0.1:{http.server_port}")
        http.shutdown()
        thread.join()


def test_only_steady_prompts_are_recorded_and_nine_of_ten_must_agree(live: server.Server) -> None:
    prompts = [f"even {number}" for number in range(10)] + ["odd one"]
    golden = server.record(live, prompts, {"temperature": 0}, repeats=2)
    assert [entry["prompt"] for entry in golden["answers"]] == prompts[:10]
    assert server.check_answers(live, golden) == "10 of 10"
    golden["answers"][0]["text"] = "other"
    assert server.check_answers(live, golden) == "9 of 10"
    golden["answers"][1]["output_ids"] = [0]
    with pytest.raises(server.ServerFault, match="8 of 10"):
        server.check_answers(live, golden)


def test_no_recorded_answer_is_no_gate(live: server.Server) -> None:
    with pytest.raises(server.ServerFault, match="0 of 0"):
        server.check_answers(live, {"answers": [], "sampling_params": {}})


GOOD = {"prompt": "p", "text": "t", "output_ids": None}


@pytest.mark.parametrize(
    ("golden", "told"),
    [
        ([], "no golden answers"),
        ({"answers": [GOOD] * 10}, "no golden answers"),
        ({"answers": [{"prompt": "p"}] * 10, "sampling_params": {}}, "no golden answers"),
        ({"answers": [GOOD] * 9, "sampling_params": {}}, "9 golden answers are no gate"),
    ],
)
def test_answers_that_are_no_gate_are_refused(golden: object, told: str) -> None:
    with pytest.raises(server.ServerFault, match=told):
        server.check_golden(golden)


def write(folder: Path, text: str) -> Path:
    path = folder / "hosts.toml"
    path.write_text(text)
    return path


TOP = 'bundle = "b"\nallowed_signers = "a"\nsigner = "s"\n'


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("x = [", "hosts.toml: "),
        (TOP, "names no host"),
        (f'{TOP}[hosts.h]\ntarget = "/t"\nport = 1\n', "unknown port"),
        (f"{TOP}[hosts.h]\n", "lacks target"),
        ('[hosts.h]\ntarget = "/t"\n', "lacks allowed_signers, bundle, signer"),
    ],
)
def test_a_hosts_file_that_is_wrong(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(hosts.HostsFault, match=told):
        hosts.read(write(tmp_path, text))


HOST = '[hosts.h]\ntarget = "/t"\n'


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (f"{TOP}waves = [0]\n{HOST}", r"toml: waves: got \[0\], needed a list of numbers"),
        (f'{TOP}waves = ["ten"]\n{HOST}', r"waves: got \['ten'\]"),
        (f"{TOP}waves = []\n{HOST}", r"waves: got \[\]"),
        (f'{TOP}ssh = "-v"\n{HOST}', r"ssh: got '-v', needed a list of texts"),
        (f"{TOP}golden = 1\n{HOST}", "golden: got 1, needed a path"),
        (TOP.replace('"b"', "5") + HOST, "toml: bundle: got 5, needed a path in quotes"),
        (f'{TOP}{HOST}lease = "1800"\n', "hosts.h.lease: got '1800', needed a number of seconds"),
        (f"{TOP}{HOST}lease = true\n", "hosts.h.lease: got True"),
        (f"{TOP}{HOST}lease = nan\n", "hosts.h.lease: got nan"),
        (f'{TOP}[defaults]\ndrain_limit = "x"\n{HOST}', "defaults.drain_limit: got 'x'"),
        (f'{TOP}{HOST}require = "gpu"\n', "h.require: got 'gpu', needed a list of texts"),
        (f"{TOP}{HOST}free_mib = 1.5\n", "free_mib: got 1.5, needed a whole number"),
        (f"{TOP}{HOST}stop = 1\nstart = 2\n", "stop: got 1, .*; hosts.h.start: got 2"),
        (f"hosts = 3\n{TOP}", r"hosts: got 3, needed a table: write \[hosts.NAME\]"),
        (f"{TOP}[hosts]\nh = 3\n", r"hosts.h: got 3, needed a table: write \[hosts.h\]"),
        (f"defaults = 3\n{TOP}{HOST}", "defaults: got 3, needed a table"),
        (f"{TOP}{HOST}lease = 1200\n", r"lease \(1200 s\) has to be longer than ready_limit"),
        (f"{TOP}{HOST}drain_limit = 3600\n", r"longer than drain_limit \(3600 s\)"),
    ],
)
def test_a_value_that_is_wrong(tmp_path: Path, text: str, told: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(hosts.HostsFault, match=told):
        hosts.read(path)
    ended = CliRunner().invoke(cli.main, ["apply", "--check", "--hosts", str(path)])
    assert ended.exit_code == 1
    assert ended.output.startswith(f"Error: {path}: ")


def test_a_hosts_file_in_another_encoding(tmp_path: Path) -> None:
    path = tmp_path / "hosts.toml"
    path.write_bytes(f"# gr\xfc\xdfe\n{TOP}{HOST}".encode("latin-1"))
    with pytest.raises(hosts.HostsFault, match=r"not UTF-8 \(byte 4\): save it as UTF-8"):
        hosts.read(path)


def test_a_key_that_cannot_sign_leaves_the_signature_that_is_there(tmp_path: Path) -> None:
    product, key, kept = tmp_path / "b.pyz", tmp_path / "key", tmp_path / "b.pyz.sig"
    product.write_bytes(b"product")
    key.write_text("no key\n")
    key.chmod(0o600)
    kept.write_text("older")
    words = ["sign", str(product), "--key", str(key)]
    ended = CliRunner().invoke(cli.main, words)
    assert ended.exit_code == 1
    assert f"Error: {product} could not be signed with {key} (" in ended.output
    assert "give a private key" in ended.output
    assert kept.read_text() == "older"
    assert sorted(tmp_path.iterdir()) == [product, kept, key]
    key.unlink()
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    assert CliRunner().invoke(cli.main, words).exit_code == 0
    allowed = tmp_path / "allowed"
    allowed.write_text(f"me {(tmp_path / 'key.pub').read_text()}")
    assert signature.verified(product, allowed_signers=allowed, signer="me")[0] == b"product"


def test_a_hosts_file(tmp_path: Path) -> None:
    fleet = hosts.read(write(tmp_path, f'{TOP}[defaults]\ntarget = "/t"\n[hosts.a]\n[hosts.b]\n'))
    assert [(host.name, host.group, host.target) for host in fleet.hosts] == [
        ("a", "a", "/t"),
        ("b", "b", "/t"),
    ]
    assert fleet.bundle == tmp_path / "b"


class Terminal(io.StringIO):
    """A stream that calls itself a terminal."""

    def isatty(self) -> bool:
        return True


def test_the_board_redraws_its_lines_in_a_terminal() -> None:
    courses = [Course(host=hosts.Host(name=n, target="/t", group=n)) for n in ("a", "bb")]
    terminal, pipe = Terminal(), io.StringIO()
    for stream in (terminal, pipe):
        board = Board(courses, stream)
        board.tell(courses[0], "drain")
        board.tell(courses[1], "gate")
    screen = terminal.getvalue().replace("\x1b[2K", "")
    assert screen == "a   drain\nbb  \n\x1b[2Aa   drain\nbb  gate\n"
    assert pipe.getvalue() == "a: drain\nbb: gate\n"


class Gone(io.StringIO):
    """A stream whose reader has gone."""

    def write(self, text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")


def test_the_board_bears_that_nobody_reads_any_more() -> None:
    course = Course(host=hosts.Host(name="a", target="/t", group="a"))
    Board([course], Gone()).tell(course, "drain")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--limit", ""], "--limit names no host"),
        (["--limit", "a,x"], "no host of the list: x"),
        (["--limit", "a"], "move together; add b"),
        (["--json", "/nowhere/report.json"], "there is no folder /nowhere"),
    ],
)
def test_options_that_are_refused_before_anything_is_asked(
    tmp_path: Path, words: list[str], told: str
) -> None:
    path = write(tmp_path, f'{TOP}[defaults]\ntarget = "/t"\ngroup = "g"\n[hosts.a]\n[hosts.b]\n')
    ended = CliRunner().invoke(cli.main, ["apply", "--hosts", str(path), *words])
    assert ended.exit_code != 0
    assert told in ended.output


def test_ctrl_c_does_not_reach_what_a_rollout_starts() -> None:
    # One of four Ctrl-Cs met an ssh that was just being started, and the host counted as lost.
    def work() -> bool:
        return subprocess.run(["sh", "-c", "kill -INT $$; exit 0"], check=False).returncode == 0

    with heeding_ctrl_c():
        assert cli._awake(work)
        assert not work()


def test_the_page_tells_how_many_fared_how() -> None:
    courses = [
        Course(host=hosts.Host(name=name, target="/t", group="g"), result=result)
        for name, result in (("a", "done"), ("b", "failed"), ("c", "done"))
    ]
    assert "2 done, 1 failed" in report.to_html(report.to_json("apply", "now", courses))


def test_the_page_escapes_what_hosts_say() -> None:
    host = hosts.Host(name="<b>", target="/t", group="g")
    course = Course(host=host, result="lost", message="<script>alert(1)</script>")
    page = report.to_html(report.to_json("status", "now", [course]))
    assert "<script" not in page
    assert "<b>" not in page
    assert "src=" not in page
    assert "href=" not in page
