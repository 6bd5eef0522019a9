"""The rollout over OpenSSH alone: real ssh, real sshd, the same canary."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ansible_collections.ddtree.sglang_overlay.plugins.module_utils import journal

from tests.support import fleets
from tests.support.fleets import Fleet, Host
from tests.support.snapshots import Snapshot, assert_identical


@pytest.fixture
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A canary group of two hosts, and two groups of one."""
    folder = tmp_path_factory.mktemp("f")
    with fleets.fleet(folder, size=4, groups={"h1": "canary", "h2": "canary"}) as made:
        yield made


def results(fleet: Fleet) -> dict[str, str]:
    """Return the result of each host in the JSON report."""
    report = json.loads((fleet.folder / "report.json").read_text())
    return {host["host"]: host["result"] for host in report["hosts"]}


def apply(fleet: Fleet, *words: str, **changes: object) -> fleets.Ended:
    report = str(fleet.folder / "report.json")
    return fleet.tool("apply", "--json", report, *words, **changes)


def test_break_the_canary_then_fix_it(hosts: Fleet) -> None:
    before = {host.name: host.look(folder_times=host.name > "h2") for host in hosts.hosts}
    hosts["h2"].fail(wrong=2, patched=True)
    failed = apply(hosts)
    assert failed.code == 1
    assert results(hosts) == {
        "h1": "rolled back",
        "h2": "rolled back",
        "h3": "untouched",
        "h4": "untouched",
    }
    assert "8 of 10 answers" in failed.stdout
    for host in hosts.hosts:
        now = host.look(folder_times=host.name > "h2")
        assert_identical(before[host.name], now, host.name)
    assert sorted(hosts.routed()) == ["add h1", "add h2", "remove h1", "remove h2"]
    hosts["h2"].fail(wrong=1, patched=True)  # 9 of 10 are enough
    page = hosts.folder / "page.html"
    assert apply(hosts, "--html", str(page)).code == 0
    assert set(hosts.states().values()) == {"patched"}
    assert "4 of 4 hosts patched" in page.read_text()
    once = {host.name: host.look() for host in hosts.hosts}
    assert apply(hosts).code == 0
    assert set(results(hosts).values()) == {"unchanged"}
    for host in hosts.hosts:
        assert_identical(once[host.name], host.look(), host.name)


def foreign(host: Host) -> None:
    path = host.site / "sglang/srt/server_args.py"
    path.write_text(path.read_text() + "# edited here\n")


def foreign_when_stopped(host: Host) -> None:
    path = host.site / "sglang/srt/server_args.py"
    once = f'test -f {host.root}/done || echo "# edited" >>"{path}"; touch {host.root}/done'
    fleets.write_service(host, before_stop=once)


def busy(host: Host) -> None:
    host.fail(running=3)


def down(host: Host) -> None:
    host.fail(dead=True, patched=True)


def slow(host: Host) -> None:
    host.fail(slow=60, patched=True)


def unstoppable(host: Host) -> None:
    text = host.service.read_text()
    host.service.write_text(text.replace("stop)", "stop)\n  exit 7", 1))


def lives_on(host: Host) -> None:
    # The first stop says it did and did nothing: an old server is left when the tree is verified.
    once = f"test -f {host.root}/done || {{ touch {host.root}/done; exit 0; }}"
    fleets.write_service(host, before_stop=once)


FAULTS: dict[str, tuple[Callable[[Host], None], str, str]] = {
    "preflight": (foreign, "file-modified", "refused"),
    "drain": (busy, "requests still run", "rolled back"),
    "stop": (unstoppable, "code 7", "out of service"),
    "apply": (foreign_when_stopped, "file-modified", "rolled back"),
    "verify": (lives_on, "started before the overlay was applied", "rolled back"),
    "start": (down, "was not ready", "rolled back"),
    "gate": (slow, "was not ready", "rolled back"),
}


@pytest.mark.full
@pytest.mark.parametrize("phase", FAULTS)
def test_a_failure_at_each_phase(hosts: Fleet, phase: str) -> None:
    break_it, told, result = FAULTS[phase]
    break_it(hosts["h2"])
    before = {host.name: host.look(folder_times=host.name > "h2") for host in hosts.hosts}
    ended = apply(hosts, ready_limit=3, drain_limit=1)
    assert ended.code == 1
    assert told in ended.stdout, ended.told
    assert results(hosts)["h2"] == result, ended.told
    # An edit that was made meanwhile, in the phase apply, is the operator's and is kept.
    for name in ("h1", "h3", "h4", *(() if phase == "apply" else ("h2",))):
        now = hosts[name].look(folder_times=name > "h2")
        kept = {path: one for path, one in now.items() if not path.startswith("journal/")}
        assert_identical(before[name], kept, name)
    assert results(hosts)["h3"] == "untouched"
    assert not [line for line in hosts.routed() if line.endswith(("h3", "h4"))]


def test_services_of_a_manager(tmp_path: Path) -> None:
    with fleets.fleet(tmp_path, size=2, kinds={"h1": "systemd", "h2": "docker"}) as fleet:
        assert apply(fleet).code == 0
        assert set(fleet.states().values()) == {"patched"}
        assert fleet["h1"].managed() == ["systemctl stop sglang", "systemctl start sglang"]
        assert fleet["h2"].managed() == ["docker stop sglang", "docker start sglang"]


def test_a_host_lost_in_the_middle(hosts: Fleet) -> None:
    fleets.write_service(hosts["h3"], before_stop=fleets.cut(hosts["h3"]))
    before = hosts["h4"].look()
    assert apply(hosts).code == 1
    assert results(hosts) == {"h1": "done", "h2": "done", "h3": "lost", "h4": "untouched"}
    assert_identical(before, hosts["h4"].look(), "h4")
    fleets.write_service(hosts["h3"])
    hosts["h3"].connect()
    refused = apply(hosts)
    assert refused.code == 1
    assert "is at work here" in refused.stdout
    assert_identical(before, hosts["h4"].look(), "h4")
    assert apply(hosts, "--take-over").code == 0
    assert set(hosts.states().values()) == {"patched"}
    assert not list(hosts.folder.glob("*/journal"))


@pytest.mark.full
def test_what_is_wrong_with_one_host_is_found_before_any_is_touched(hosts: Fleet) -> None:
    before = {host.name: host.look() for host in hosts.hosts}
    # A host twice in one wave would have its own journal closed under it.
    doubled = apply(hosts.doubled())
    assert doubled.code == 1
    assert "h1 and h1-again are one host with one tree" in doubled.stdout, doubled.told
    full = apply(hosts, free_mib=1 << 40)
    assert full.code == 1
    assert f"MiB are free at {hosts['h1'].site}" in full.stdout, full.told
    golden = hosts.folder / "golden.json"
    kept = golden.read_text()
    golden.write_text(json.dumps(fleets.golden(9)))
    assert "9 golden answers are no gate" in apply(hosts).stderr
    golden.write_text(kept)
    hosts["h4"].disconnect()
    lost = apply(hosts)
    assert lost.code == 1
    assert results(hosts) == {"h1": "untouched", "h2": "untouched", "h3": "untouched", "h4": "lost"}
    for host in hosts.hosts:
        assert_identical(before[host.name], host.look(), host.name)
    assert hosts.routed() == []


def test_a_router_that_takes_one_host_of_a_group_only(hosts: Fleet) -> None:
    # h1 is in the router again, with requests, when the router refuses h2: it was once stopped so.
    h1, cut_off = hosts["h1"], hosts.folder / "cut-off"
    said = f"{h1.root}/faults.json"
    come = f"""echo '{{"running": 3}}' >"{said}"; (sleep 2; rm "{said}") >/dev/null 2>&1 &"""
    refuse = fleets.once(hosts.folder, "sleep 1; exit 7")
    fleets.write_router(hosts.folder, {"add h1": come, "add h2": refuse})
    fleets.write_service(h1, before_stop=f'test ! -e "{said}" || touch "{cut_off}"')
    before = {host.name: host.look(folder_times=host.name > "h2") for host in hosts.hosts}
    ended = apply(hosts)
    assert ended.code == 1
    assert [results(hosts)[name] for name in ("h1", "h2")] == ["rolled back"] * 2, ended.told
    assert "code 7" in ended.stdout
    assert not cut_off.exists()
    told = [line for line in hosts.routed() if line.endswith("h1")]
    assert told == ["remove h1", "add h1"] * 2
    assert hosts.routed()[-1].startswith("add")
    for host in hosts.hosts:
        now = host.look(folder_times=host.name > "h2")
        assert_identical(before[host.name], now, host.name)


@pytest.mark.full
def test_a_router_that_does_not_answer(hosts: Fleet) -> None:
    fleets.write_router(hosts.folder, {"add h2": fleets.once(hosts.folder, "sleep 300")})
    ended = apply(hosts, router_limit=2)
    assert ended.code == 1
    assert "did not end within 2 s; see router_limit" in ended.stdout, ended.told
    assert [results(hosts)[name] for name in ("h1", "h2")] == ["rolled back"] * 2, ended.told
    # Once more: now the router does not let go of h1, and that is what is told.
    inside = hosts.folder / "inside"
    calls = {"add h1": f"touch {inside}", "remove h1": f"test ! -e {inside}", "add h2": "exit 7"}
    fleets.write_router(hosts.folder, calls)
    ended = apply(hosts)
    assert ended.code == 1
    assert results(hosts)["h1"] == "failed", ended.told
    assert "it was not rolled back, and may be in the router" in ended.stdout
    assert results(hosts)["h2"] == "out of service", ended.told
    assert hosts.states()["h1"] == "patched"


@pytest.mark.full
def test_a_journal_that_cannot_be_closed_undoes_nothing(hosts: Fleet) -> None:
    lose = f'rm -r "{hosts["h2"].root}/journal"'
    fleets.write_router(hosts.folder, {"add h2": lose})
    ended = apply(hosts)
    assert ended.code == 1
    assert results(hosts) == {"h1": "done", "h2": "failed", "h3": "untouched", "h4": "untouched"}
    assert "it is in the router" in ended.stdout, ended.told
    assert [hosts.states()[name] for name in ("h1", "h2")] == ["patched"] * 2
    assert sorted(hosts.routed()) == ["add h1", "add h2", "remove h1", "remove h2"]


@pytest.mark.full
def test_every_phase_renews_the_lease(tmp_path: Path) -> None:
    with fleets.fleet(tmp_path, size=1) as fleet:
        fleet["h1"].fail(wrong=2, patched=True)
        started = begin(fleet)
        journal_folder = fleet["h1"].root / "journal"
        met = list(fleets.phases(journal_folder, lambda: started.poll() is None))
        told = started.communicate(timeout=60)
        assert results(fleet) == {"h1": "rolled back"}, told
        forth = ["begun", "drain", "stop", "stopped", "change", "verify", "start", "gate"]
        assert [one["phase"] for one in met] == [*forth, "hold", "restore", "gate"]
        leases = [one["lease"] for one in met]
        assert leases == sorted(set(leases))


@pytest.mark.full
def test_a_host_that_was_taken_over_is_left_alone(tmp_path: Path) -> None:
    with fleets.fleet(tmp_path, size=1) as fleet:
        host = fleet["h1"]
        host.fail(slow=4, wrong=2, patched=True)
        started = begin(fleet)
        for one in fleets.phases(host.root / "journal", lambda: started.poll() is None):
            if one["phase"] == "gate":
                kept = journal.Journal(host.root / "journal", str(host.site))
                kept.open("another", {}, lease=600, take_over=True)
                break
        fleets.write_service(host, before_stop=f'touch "{fleet.folder}/stopped"')
        told, _ = started.communicate(timeout=60)
        assert started.returncode == 1
        assert "was taken over by another rollout" in told
        assert results(fleet) == {"h1": "failed"}, told
        assert not (fleet.folder / "stopped").exists()
        assert fleet.routed() == ["remove h1"]
        found = kept.read()
        assert found
        assert found["run"] == "another"


def test_a_host_that_greets(tmp_path: Path) -> None:
    with fleets.fleet(tmp_path, size=1) as fleet:
        greeting = tmp_path / "greeting"
        greeting.write_text(
            f"#!/bin/sh\nprintf 'Welcome to {{'\n{fleets.PYTHON} \"$@\"\necho 'Good {{bye}}'\n"
        )
        greeting.chmod(0o755)
        ended = fleet.tool("status", python=str(greeting))
        assert ended.code == 0, ended.told
        assert "pristine" in ended.stdout


def begin(fleet: Fleet) -> subprocess.Popen[str]:
    return fleet.begin_tool("apply", "--json", str(fleet.folder / "report.json"))


def interrupt(started: subprocess.Popen[str], line: str, *, times: int) -> None:
    """Press Ctrl-C so many times once ``line`` has been said."""
    assert started.stdout
    assert started.stderr
    for said in started.stdout:
        if said == f"{line}\n":
            break
    for _ in range(times):
        os.killpg(started.pid, signal.SIGINT)
        if started.poll() is None and times > 1:
            started.stderr.readline()  # it has taken notice


@pytest.mark.full
def test_ctrl_c_brings_back_what_is_in_work(hosts: Fleet) -> None:
    # The stop takes a while, so that it is interrupted in its midst.
    fleets.write_service(hosts["h2"], before_stop="sleep 3")
    before = {host.name: host.look(folder_times=host.name > "h2") for host in hosts.hosts}
    started = begin(hosts)
    interrupt(started, "h2: stop", times=1)
    told, _ = started.communicate(timeout=120)
    assert started.returncode == 130
    assert results(hosts) == {
        "h1": "rolled back",
        "h2": "rolled back",
        "h3": "untouched",
        "h4": "untouched",
    }
    assert "interrupted after stop" in told
    for host in hosts.hosts:
        now = host.look(folder_times=host.name > "h2")
        assert_identical(before[host.name], now, host.name)
    assert sorted(hosts.routed()) == ["add h1", "add h2", "remove h1", "remove h2"]


@pytest.mark.full
def test_ctrl_c_twice_leaves_at_once_and_the_next_run_goes_on(hosts: Fleet) -> None:
    fleets.write_service(hosts["h1"], before_stop="sleep 2")
    started = begin(hosts)
    interrupt(started, "h1: stop", times=2)
    started.communicate(timeout=30)
    assert started.returncode == 130
    assert (hosts["h1"].root / "journal").exists()
    assert "is at work here, or was lost in the phase" in hosts.tool("status").stdout
    refused = apply(hosts)
    assert refused.code == 1
    assert "is at work here" in refused.stdout, refused.told
    finished = apply(hosts, "--take-over")
    assert finished.code == 0, finished.told
    assert set(hosts.states().values()) == {"patched"}
    assert not list(hosts.folder.glob("*/journal"))


@pytest.mark.full
def test_of_two_at_once_one_goes_on_at_most(hosts: Fleet) -> None:
    both = [hosts.begin_tool("apply") for _ in range(2)]
    told = [started.communicate(timeout=300) for started in both]
    codes = sorted(started.returncode for started in both)
    assert codes in ([0, 1], [1, 1]), told
    assert set(hosts.states().values()) == {"patched" if 0 in codes else "pristine"}, told
    assert not list(hosts.folder.glob("*/journal"))
    status = hosts.tool("status")
    assert status.stdout.count("as the disk") == 4, status.told


def without_ballast(look: Snapshot) -> Snapshot:
    return {path: entry for path, entry in look.items() if path != "ballast"}


@pytest.mark.full
@pytest.mark.root
def test_a_disk_that_fills_up_under_the_change(hosts: Fleet) -> None:
    host, ballast = hosts["h2"], hosts["h2"].site / "ballast"
    kept = shutil.copytree(host.site, host.root / "kept", symlinks=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", host.site], check=True)
    try:
        shutil.copytree(kept, host.site, symlinks=True, dirs_exist_ok=True)
        ballast.touch()
        before = {one.name: one.look(folder_times=False) for one in hosts.hosts}
        once = f'test -s "{ballast}" || head -c 80M /dev/zero >"{ballast}" 2>/dev/null || true'
        fleets.write_service(host, before_stop=once)
        ended = apply(hosts)
        assert ended.code == 1
        assert "no-space" in ended.stdout, ended.told
        assert results(hosts)["h2"] == "rolled back", ended.told
        assert results(hosts)["h3"] == "untouched", ended.told
        ballast.write_bytes(b"")
        for one in hosts.hosts:
            now = one.look(folder_times=False)
            assert_identical(without_ballast(before[one.name]), without_ballast(now), one.name)
    finally:
        fleets.write_service(host)
        host.halt()
        subprocess.run(["umount", host.site], check=True)


@pytest.mark.parametrize("how", ["altered", "unsigned", "signed by another"])
def test_a_bundle_that_is_not_rightly_signed_is_refused(tmp_path: Path, how: str) -> None:
    with fleets.fleet(tmp_path, size=1) as fleet:
        before = fleet["h1"].look()
        if how == "altered":
            fleet.bundle.write_bytes(fleet.bundle.read_bytes() + b"\n")
        elif how == "unsigned":
            fleet.bundle.with_name(f"{fleet.bundle.name}.sig").unlink()
        else:
            fleets.sign(fleet.bundle, tmp_path, key="client_key")
        ended = fleet.tool("apply")
        assert ended.code == 1
        told = "no signature" if how == "unsigned" else "is refused"
        assert told in ended.stderr, ended.told
        assert_identical(before, fleet["h1"].look(), "h1")


@pytest.mark.full
def test_an_older_overlay_is_what_a_failed_upgrade_goes_back_to(hosts: Fleet) -> None:
    older = fleets.older_bundle(hosts.folder)
    for host in hosts.hosts:
        host.halt()
        assert hosts.ask(host, "apply", bundle=older)["state_after"] == "patched"
        # A server leaves bytecode, also of the older overlay: it once made a rollback impossible.
        host.fail(bytecode=True)
        host.serve()
    refused = apply(hosts)
    assert refused.code == 1
    assert "set previous_bundle" in refused.stdout
    before = {host.name: content(host) for host in hosts.hosts}
    assert list(hosts["h1"].site.rglob("sglang_overlay/__pycache__/*.pyc"))
    hosts["h1"].fail(wrong=5, newer=True, bytecode=True)
    ended = apply(hosts, previous_bundle=str(older))
    assert ended.code == 1
    assert results(hosts)["h1"] == "rolled back", ended.told
    assert {host.name: content(host) for host in hosts.hosts} == before
    hosts["h1"].fail()
    assert apply(hosts, previous_bundle=str(older)).code == 0
    assert set(hosts.states().values()) == {"patched"}


def content(host: Host) -> dict[str, bytes]:
    """Return every file of the host's tree but bytecode and the receipt, which holds a time."""
    return {
        str(path.relative_to(host.site)): path.read_bytes()
        for path in host.site.rglob("*")
        if path.is_file() and path.name != "receipt.json" and not fleets.is_bytecode(path)
    }
