"""Rollouts with the real ansible-core over real sshd: what they change, and above all what not."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from ansible_collections.ddtree.sglang_overlay.plugins.module_utils import journal

from tests.support import fleets
from tests.support.fleets import Fleet, Host
from tests.support.snapshots import assert_identical


@pytest.fixture
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Three server groups: a canary of two hosts, and two of one host each."""
    folder = tmp_path_factory.mktemp("f")
    with fleets.fleet(folder, size=4, groups={"h1": "canary", "h2": "canary"}) as made:
        yield made


def test_a_failed_canary_is_rolled_back_and_ends_the_play(hosts: Fleet) -> None:
    before = {host.name: host.look(folder_times=host.name > "h2") for host in hosts.hosts}
    hosts["h2"].fail(wrong=2, patched=True)
    ended = hosts.play("rollout")
    assert ended.code != 0
    assert "8 of 10 answers" in ended.stdout, ended.told
    assert "h1 was rolled back and serves as before" in ended.stdout, ended.told
    assert "h2 was rolled back and serves as before" in ended.stdout, ended.told
    # Groups after it: not one byte or time changed, not drained, not taken out of the router.
    for host in hosts.hosts:
        now = host.look(folder_times=host.name > "h2")
        assert_identical(before[host.name], now, host.name)
    assert sorted(hosts.routed()) == ["add h1", "add h2", "remove h1", "remove h2"]


def test_a_rollout_and_the_same_again(hosts: Fleet) -> None:
    ended = hosts.play("rollout")
    assert ended.code == 0, ended.told
    assert set(hosts.states().values()) == {"patched"}
    # The canary's two hosts together, first; then the others.
    assert set(hosts.routed()[:4]) == {"remove h1", "remove h2", "add h1", "add h2"}
    assert not list(hosts.folder.glob("*/journal"))
    before = {host.name: host.look() for host in hosts.hosts}
    again = hosts.play("rollout")
    assert again.code == 0, again.told
    for host in hosts.hosts:
        assert again.recap(host.name)["changed"] == 0, again.told
        assert_identical(before[host.name], host.look(), host.name)
    assert len(hosts.routed()) == 8


@pytest.mark.full
def test_check_changes_nothing_and_predicts(hosts: Fleet) -> None:
    before = {host.name: host.look() for host in hosts.hosts}
    planned = hosts.ask(hosts["h1"], "apply", "--check", "--diff")["diff"]
    hooked = sum(line.startswith("+++ ") for line in planned.splitlines())
    assert hooked > 0
    checked = hosts.play("rollout", "--check", "--diff")
    assert checked.code == 0, checked.told
    for host in hosts.hosts:
        assert_identical(before[host.name], host.look(), host.name)
        assert checked.recap(host.name)["changed"] > 0
    assert hosts.routed() == []
    done = hosts.play("rollout", "--diff")
    assert done.code == 0, done.told
    assert diffs(checked.stdout) == diffs(done.stdout)
    assert sum(line.startswith("+++ ") for line in diffs(done.stdout)) == 4 * hooked


@pytest.mark.full
def test_rollback_of_a_subset(hosts: Fleet) -> None:
    before = {host.name: host.look(folder_times=False) for host in hosts.hosts}
    assert hosts.play("rollout").code == 0
    part = hosts.play("rollback", "--limit", "h1")
    assert part.code != 0
    assert "move together" in part.stdout
    ended = hosts.play("rollback", "--limit", "h3")
    assert ended.code == 0, ended.told
    assert_identical(before["h3"], hosts["h3"].look(folder_times=False), "h3")
    assert [hosts.states()[name] for name in ("h1", "h2", "h4")] == ["patched"] * 3
    assert hosts.play("rollback").code == 0
    for host in hosts.hosts:
        assert_identical(before[host.name], host.look(folder_times=False), host.name)


@pytest.mark.full
def test_what_is_wrong_with_one_host_is_found_before_any_is_touched(hosts: Fleet) -> None:
    before = {host.name: host.look() for host in hosts.hosts}
    doubled = hosts.doubled().play("rollout")
    assert doubled.code != 0
    assert "h1 and h1-again are one host with one tree" in doubled.stdout, doubled.told
    full = hosts.play("rollout", rollout_free_mib=1 << 40)
    assert full.code != 0
    assert f"MiB are free at {hosts['h1'].site}" in full.stdout, full.told
    golden = hosts.folder / "golden.json"
    kept = golden.read_text()
    golden.write_text(json.dumps(fleets.golden(9)))
    assert "9 golden answers are no gate" in hosts.play("rollout").stdout
    golden.write_text(kept)
    hosts["h4"].disconnect()
    lost = hosts.play("rollout")
    assert lost.code != 0
    assert lost.recap("h4")["unreachable"] == 1
    # The play ended there: it once went on to a second error that named the wrong thing.
    assert "serial" not in lost.stdout + lost.stderr, lost.told
    for host in hosts.hosts:
        assert_identical(before[host.name], host.look(), host.name)
    assert hosts.routed() == []


def foreign(host: Host) -> None:
    path = host.site / "sglang/srt/server_args.py"
    path.write_text(path.read_text() + "# edited here\n")


def held(host: Host) -> None:
    kept = journal.Journal(host.root / "journal", str(host.site))
    kept.open("another", {"state": "pristine"}, lease=600, take_over=False)


def busy(host: Host) -> None:
    host.fail(running=3)


def stays_down(host: Host) -> None:
    host.fail(dead=True, patched=True)


def slow(host: Host) -> None:
    host.fail(slow=30, patched=True)


def not_stopped(host: Host) -> None:
    host.service.write_text(host.service.read_text().replace("stop)", "stop) exit 1 ;;\nx)"))


def edited_when_stopped(host: Host) -> None:
    # Between preflight and apply: the engine refuses, the phase apply fails.
    path = host.site / "sglang/srt/server_args.py"
    once = f'test -f {host.root}/done || echo "# edited" >>"{path}"; touch {host.root}/done'
    fleets.write_service(host, before_stop=once)


def lives_on(host: Host) -> None:
    # The first stop says it did and did nothing: an old server is left when the tree is verified.
    once = f"test -f {host.root}/done || {{ touch {host.root}/done; exit 0; }}"
    fleets.write_service(host, before_stop=once)


FAULTS: dict[str, tuple[Callable[[Host], None], str]] = {
    "preflight": (foreign, "file-modified"),
    "two at once": (held, "is at work here"),
    "drain": (busy, "requests still run"),
    "stop": (not_stopped, "Stop the server"),
    "apply": (edited_when_stopped, "Change the tree"),
    "verify": (lives_on, "started before the overlay was applied"),
    "start": (stays_down, "was not ready"),
    "gate": (slow, "was not ready"),
}


@pytest.mark.full
@pytest.mark.parametrize("phase", FAULTS)
def test_a_failure_at_each_phase(hosts: Fleet, phase: str) -> None:
    break_it, told = FAULTS[phase]
    break_it(hosts["h2"])
    # An edit made while it runs is kept: what was there before the rollout is not what it meets.
    touched = ("h1",) if phase == "apply" else ("h1", "h2")
    before = {host.name: host.look(folder_times=host.name > "h2") for host in hosts.hosts}
    ended = hosts.play("rollout", rollout_ready_limit=2, rollout_drain_limit=1)
    assert ended.code != 0
    assert told in ended.stdout, ended.told
    for name in (*touched, "h3", "h4"):
        now = hosts[name].look(folder_times=name > "h2")
        if (phase, name) == ("stop", "h2"):
            # What cannot be stopped cannot be brought back: it is left, with its journal open.
            assert "h2 could NOT be rolled back and is out of the router" in ended.stdout
            now = {path: one for path, one in now.items() if not path.startswith("journal")}
        assert_identical(before[name], now, name)
    assert not [line for line in hosts.routed() if line.endswith(("h3", "h4"))]


@pytest.mark.full
def test_services_of_a_manager(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("f")
    with fleets.fleet(folder, size=2, kinds={"h1": "systemd", "h2": "docker"}) as fleet:
        fleet["h2"].fail(wrong=2, patched=True)
        ended = fleet.play("rollout")
        assert ended.code != 0
        assert "h2 was rolled back and serves as before" in ended.stdout, ended.told
        assert fleet.states() == {"h1": "patched", "h2": "pristine"}
        assert fleet["h1"].managed() == ["systemctl stop sglang", "systemctl start sglang"]
        assert fleet["h2"].managed() == ["docker stop sglang", "docker start sglang"] * 2


@pytest.mark.full
def test_a_host_lost_in_the_middle_is_finished_by_the_next_run(hosts: Fleet) -> None:
    fleets.write_service(hosts["h3"], before_stop=fleets.cut(hosts["h3"]))
    before = hosts["h4"].look()
    ended = hosts.play("rollout")
    assert ended.code != 0
    assert_identical(before, hosts["h4"].look(), "h4")
    assert hosts.states()["h1"] == "patched"
    assert (hosts["h3"].root / "journal").exists()
    fleets.write_service(hosts["h3"])
    hosts["h3"].connect()
    # Another run may not take the host before the lease ends, unless it is told to.
    refused = hosts.play("rollout")
    assert refused.code != 0
    assert "is at work here" in refused.stdout, refused.told
    finished = hosts.play("rollout", rollout_take_over=True)
    assert finished.code == 0, finished.told
    assert set(hosts.states().values()) == {"patched"}
    assert not list(hosts.folder.glob("*/journal"))


@pytest.mark.full
def test_a_failed_upgrade_goes_back_to_the_older_overlay(hosts: Fleet) -> None:
    older = fleets.older_bundle(hosts.folder)
    for host in hosts.hosts:
        host.halt()
        assert hosts.ask(host, "apply", bundle=older)["state_after"] == "patched"
        # A server leaves bytecode, also of the older overlay: it once made a rollback impossible.
        host.fail(bytecode=True)
        host.serve()
    refused = hosts.play("rollout")
    assert refused.code != 0
    assert "rollout_previous_bundle" in refused.stdout, refused.told
    before = {host.name: tree(host) for host in hosts.hosts}
    assert list(hosts["h1"].site.rglob("sglang_overlay/__pycache__/*.pyc"))
    hosts["h1"].fail(wrong=5, newer=True, bytecode=True)
    ended = hosts.play("rollout", rollout_previous_bundle=str(older))
    assert ended.code != 0
    assert "h1 was rolled back and serves as before" in ended.stdout, ended.told
    assert {host.name: tree(host) for host in hosts.hosts} == before
    hosts["h1"].fail()
    ended = hosts.play("rollout", rollout_previous_bundle=str(older))
    assert ended.code == 0, ended.told
    assert set(hosts.states().values()) == {"patched"}


@pytest.mark.full
def test_a_router_that_takes_one_host_of_a_group_only(hosts: Fleet) -> None:
    # h1 is in the router again, with requests, when the router refuses h2: it was once stopped so.
    h1, cut_off = hosts["h1"], hosts.folder / "cut-off"
    said = f"{h1.root}/faults.json"
    come = f"""echo '{{"running": 3}}' >"{said}"; (sleep 4; rm "{said}") >/dev/null 2>&1 &"""
    refuse = fleets.once(hosts.folder, "sleep 1; exit 7")
    fleets.write_router(hosts.folder, {"add h1": come, "add h2": refuse})
    fleets.write_service(h1, before_stop=f'test ! -e "{said}" || touch "{cut_off}"')
    before = {host.name: host.look(folder_times=host.name > "h2") for host in hosts.hosts}
    ended = hosts.play("rollout")
    assert ended.code != 0
    assert "h1 was rolled back and serves as before" in ended.stdout, ended.told
    assert "h2 was rolled back and serves as before" in ended.stdout, ended.told
    assert not cut_off.exists()
    told = [line for line in hosts.routed() if line.endswith("h1")]
    assert told == ["remove h1", "add h1"] * 2
    for host in hosts.hosts:
        now = host.look(folder_times=host.name > "h2")
        assert_identical(before[host.name], now, host.name)


@pytest.mark.full
def test_a_router_that_does_not_answer(hosts: Fleet) -> None:
    fleets.write_router(hosts.folder, {"add h2": fleets.once(hosts.folder, "exec sleep 30")})
    ended = hosts.play("rollout", rollout_router_limit=3)
    assert ended.code != 0
    assert "h1 was rolled back and serves as before" in ended.stdout, ended.told
    assert "h2 was rolled back and serves as before" in ended.stdout, ended.told
    # Once more: now the router does not let go of h1, and that is what is told.
    inside = hosts.folder / "inside"
    calls = {"add h1": f"touch {inside}", "remove h1": f"test ! -e {inside}", "add h2": "exit 7"}
    fleets.write_router(hosts.folder, calls)
    ended = hosts.play("rollout")
    assert ended.code != 0
    assert "h1 could NOT be rolled back and may be in the router" in ended.stdout, ended.told
    assert hosts.states()["h1"] == "patched"


@pytest.mark.full
def test_a_journal_that_cannot_be_closed_undoes_nothing(hosts: Fleet) -> None:
    fleets.write_router(hosts.folder, {"add h2": f'rm -r "{hosts["h2"].root}/journal"'})
    ended = hosts.play("rollout")
    assert ended.code != 0
    assert "h2: Close the journal" in ended.stdout, ended.told
    assert "rolled back" not in ended.stdout, ended.told
    assert [hosts.states()[name] for name in ("h1", "h2")] == ["patched"] * 2
    assert not (hosts["h1"].root / "journal").exists()
    assert sorted(hosts.routed()) == ["add h1", "add h2", "remove h1", "remove h2"]


@pytest.mark.full
def test_every_phase_renews_the_lease(tmp_path: Path) -> None:
    with fleets.fleet(tmp_path, size=1) as fleet, ThreadPoolExecutor(1) as pool:
        short = fleet.play("rollout", rollout_lease=5)
        assert "rollout_lease (5 s) has to be longer than" in short.stdout, short.told
        fleet["h1"].fail(wrong=2, patched=True)
        play = pool.submit(fleet.play, "rollout")
        met = list(fleets.phases(fleet["h1"].root / "journal", lambda: not play.done()))
        assert "h1 was rolled back and serves as before" in play.result().stdout
        forth = ["begun", "drain", "stop", "stopped", "change", "verify", "start", "gate"]
        assert [one["phase"] for one in met] == [*forth, "rollback", "gate"]
        leases = [one["lease"] for one in met]
        assert leases == sorted(set(leases))


@pytest.mark.full
def test_a_host_that_was_taken_over_is_left_alone(tmp_path: Path) -> None:
    with fleets.fleet(tmp_path, size=1) as fleet, ThreadPoolExecutor(1) as pool:
        host = fleet["h1"]
        host.fail(slow=4, wrong=2, patched=True)
        play = pool.submit(fleet.play, "rollout")
        kept = journal.Journal(host.root / "journal", str(host.site))
        for one in fleets.phases(host.root / "journal", lambda: not play.done()):
            if one["phase"] == "gate":
                kept.open("another", {}, lease=600, take_over=True)
                break
        fleets.write_service(host, before_stop=f'touch "{fleet.folder}/stopped"')
        ended = play.result()
        assert ended.code != 0
        assert "h1 was left alone" in ended.stdout, ended.told
        assert "was taken over by another rollout" in ended.stdout
        assert not (fleet.folder / "stopped").exists()
        assert fleet.routed() == ["remove h1"]
        found = kept.read()
        assert found
        assert found["run"] == "another"


@pytest.mark.full
@pytest.mark.parametrize("how", ["altered", "unsigned", "by another"])
def test_a_bundle_that_is_not_rightly_signed_is_refused(hosts: Fleet, how: str) -> None:
    before = {host.name: host.look() for host in hosts.hosts}
    signature = hosts.bundle.with_name(f"{hosts.bundle.name}.sig")
    if how == "altered":
        hosts.bundle.write_bytes(hosts.bundle.read_bytes() + b"\n")
    elif how == "unsigned":
        signature.unlink()
    else:
        fleets.sign(hosts.bundle, hosts.folder, key="client_key")
    ended = hosts.play("rollout")
    assert ended.code != 0
    assert ("no signature" if how == "unsigned" else "is refused") in ended.stdout, ended.told
    for host in hosts.hosts:
        assert_identical(before[host.name], host.look(), host.name)


def tree(host: Host) -> dict[str, bytes]:
    """Return the content of the host's tree but for bytecode and the receipt with its time."""
    return {
        str(path.relative_to(host.site)): path.read_bytes()
        for path in host.site.rglob("*")
        if path.is_file() and path.name != "receipt.json" and not fleets.is_bytecode(path)
    }


def diffs(output: str) -> list[str]:
    """Return the lines of the unified diffs that Ansible printed, sorted."""
    return sorted(
        line
        for block in output.split("\nTASK [")
        if "Change the tree" in block.partition("]")[0]
        for line in block.splitlines()
        if line.startswith(("+", "-"))
    )
