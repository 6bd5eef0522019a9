"""A fleet on this machine: one real sshd per host, on a loopback address of its own.

Each host has a root folder with a real installed SGLang (few of its files, all real), a service
script and a stub server (`stub_sglang`). Everything lies below one temporary folder.
"""

from __future__ import annotations

import getpass
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from devtools import bundle as bundles
from tests.support.sites import slim_site
from tests.support.snapshots import Snapshot, snapshot

ROOT = Path(__file__).resolve().parents[2]
COLLECTIONS = ROOT / "fleet"
RELEASE = "0.5.12.post1"
SIGNER = "release@example.org"
# The real server of one test needs minutes on a busy machine.
_SECONDS = 1800
# A bare interpreter: a host has no packages of ours.
PYTHON = str(Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}")

_SERVICE = """#!/bin/sh
# start|stop the stub server of this host
cd "{root}"
case "$1" in
start)
  PYTHONPATH="{site}" setsid {python} -I -S {stub} "{site}" {address} {http} "{root}/faults.json" \\
    </dev/null >>"{root}/server.log" 2>&1 &
  echo $! >"{root}/server.pid" ;;
stop)
  {before_stop}
  test -f server.pid || exit 0
  kill "$(cat server.pid)" 2>/dev/null
  while kill -0 "$(cat server.pid)" 2>/dev/null; do sleep 0.02; done
  rm -f server.pid ;;
esac
"""
_SSHD = """
Port {port}
ListenAddress {address}
HostKey {fleet}/host_key
AuthorizedKeysFile {fleet}/client_key.pub
PidFile {root}/sshd.pid
StrictModes no
PasswordAuthentication no
UsePAM no
Subsystem sftp internal-sftp
"""
_MANAGER = """#!/bin/sh
# A STUB that stands for {manager}: it takes down each call, and the service script does the work.
echo "{manager} $*" >>"{root}/manager.log"
exec "{root}/service" "$1"
"""
# The service managers that `_MANAGER` stands for, by the kind of service.
_MANAGERS = {"systemd": "systemctl", "docker": "docker"}
_CLIENT = """
Host {name}
  HostName {address}
  Port {port}
"""
_CLIENT_ALL = """
Host *
  User {user}
  IdentityFile {fleet}/client_key
  IdentitiesOnly yes
  UserKnownHostsFile {fleet}/known_hosts
  GlobalKnownHostsFile /dev/null
  StrictHostKeyChecking yes
  BatchMode yes
"""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a command ended."""

    code: int
    stdout: str
    stderr: str

    @property
    def told(self) -> str:
        """All it said."""
        return f"exit code {self.code}\n{self.stdout}\n{self.stderr}"

    def recap(self, host: str) -> dict[str, int]:
        """Return Ansible's counts for ``host``."""
        line = re.search(rf"^{host} +: (.*)$", self.stdout, re.MULTILINE)
        assert line, f"no recap of {host} in: {self.told}"
        return {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", line[1])}


@dataclass(frozen=True, kw_only=True)
class Host:
    """One host: its sshd's and its server's port are both on its own address.

    ``kind`` is that of the service: ``command`` for the service script itself, else a stub of
    systemctl or docker stands before it.
    """

    name: str
    address: str
    port: int
    http: int
    root: Path
    site: Path
    kind: str = "command"

    @property
    def url(self) -> str:
        """The stub server's URL."""
        return f"http://{self.address}:{self.http}"

    @property
    def service(self) -> Path:
        """The script that starts and stops the server."""
        return self.root / "service"

    def command(self, verb: str) -> str:
        """Return the command that starts or stops the server on the host."""
        if self.kind == "command":
            return f"{self.service} {verb}"
        return f"{_MANAGERS[self.kind]} {verb} sglang"

    def managed(self) -> list[str]:
        """Return what the stub of the service manager was called with, in order."""
        log = self.root / "manager.log"
        return log.read_text().splitlines() if log.exists() else []

    def fail(self, **faults: object) -> None:
        """Tell the server its faults, instead of those told before."""
        (self.root / "faults.json").write_text(json.dumps(faults))

    def serve(self, *, seconds: float = 20) -> None:
        """Start the server and wait until it listens, up to ``seconds``."""
        subprocess.run([self.service, "start"], check=True)
        deadline = time.monotonic() + seconds
        while True:
            try:
                socket.create_connection((self.address, self.http), 1).close()
            except OSError:
                assert time.monotonic() < deadline, (self.root / "server.log").read_text()
                time.sleep(0.05)
            else:
                return

    def halt(self) -> None:
        """Stop the server."""
        subprocess.run([self.service, "stop"], check=False)

    def connect(self) -> None:
        """Start the sshd."""
        subprocess.run(
            [_sshd(), "-f", self.root / "sshd_config", "-E", self.root / "sshd.log"], check=True
        )

    def disconnect(self) -> None:
        """End the sshd, and with it every connection it holds."""
        if (self.root / "sshd.pid").exists():
            subprocess.run(["sh", "-c", cut(self)], check=False)

    def look(self, *, folder_times: bool = True) -> Snapshot:
        """Take down all that a rollout may change: the site and the journal's folder."""
        return {
            **snapshot(self.site, folder_times=folder_times),
            **{
                f"journal/{path}": entry
                for path, entry in (
                    snapshot(self.root / "journal") if (self.root / "journal").exists() else {}
                ).items()
            },
        }


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """Hosts, and what a controller needs to reach them: all below ``folder``."""

    folder: Path
    hosts: tuple[Host, ...]
    bundle: Path
    groups: Mapping[str, str]

    @property
    def environment(self) -> dict[str, str]:
        """The controller's environment: nothing is read from or written to a real home."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("ANSIBLE_", "SSH_"))}
        return {
            **kept,
            "HOME": str(self.folder),
            "ANSIBLE_HOME": str(self.folder / "ansible"),
            "ANSIBLE_LOCAL_TEMP": str(self.folder / "ansible-tmp"),
            "ANSIBLE_COLLECTIONS_PATH": str(COLLECTIONS),
            "ANSIBLE_CONFIG": str(COLLECTIONS / "ansible.cfg"),
            "ANSIBLE_SSH_CONTROL_PATH_DIR": str(self.folder / "cp"),
            "ANSIBLE_NOCOLOR": "1",
            "ANSIBLE_LOCALHOST_WARNING": "false",
            "PYTHONWARNINGS": "ignore",
        }

    def __getitem__(self, name: str) -> Host:
        """Return the host of that name."""
        return next(host for host in self.hosts if host.name == name)

    def variables(self, host: Host) -> dict[str, object]:
        """Return the host's variables, as an inventory has them."""
        return {
            "ansible_remote_tmp": str(host.root / "ansible-tmp"),
            "ansible_python_interpreter": PYTHON,
            "rollout_target": str(host.site),
            "rollout_server_url": host.url,
            "rollout_group": self.groups.get(host.name, host.name),
            "rollout_service": (
                {"kind": "command", "start": host.command("start"), "stop": host.command("stop")}
                if host.kind == "command"
                else {"kind": host.kind, "name": "sglang"}
            ),
            "rollout_journal_folder": str(host.root / "journal"),
            "rollout_router_remove": f"{self.folder}/router remove {host.name}",
            "rollout_router_add": f"{self.folder}/router add {host.name}",
        }

    def inventory(self, **changes: object) -> Path:
        """Write the inventory, with ``changes`` to the variables of all, and return it."""
        common: dict[str, object] = {
            "ansible_ssh_common_args": f"-F {self.folder}/ssh_config",
            "rollout_bundle": str(self.bundle),
            "rollout_allowed_signers": str(self.folder / "allowed_signers"),
            "rollout_signer": SIGNER,
            "rollout_golden": str(self.folder / "golden.json"),
            "rollout_require": [],
            "rollout_skip": ["import", "gpu"],
            "rollout_free_mib": 1,
            "rollout_drain_limit": 5,
            "rollout_ready_limit": 5,
            **changes,
        }
        hosts = {host.name: self.variables(host) for host in self.hosts}
        path = self.folder / "inventory.json"
        path.write_text(
            json.dumps({"all": {"children": {"sglang": {"hosts": hosts, "vars": common}}}})
        )
        return path

    def play(self, book: str, *words: str, **changes: object) -> Ended:
        """Run a playbook of the collection with ansible-playbook."""
        done = subprocess.run(
            [str(Path(sys.executable).with_name("ansible-playbook"))]
            + [f"ddtree.sglang_overlay.{book}", "-i", str(self.inventory(**changes)), *words],
            env=self.environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=_SECONDS,
        )
        return Ended(code=done.returncode, stdout=done.stdout, stderr=done.stderr)

    def hosts_file(self, **changes: object) -> Path:
        """Write the hosts file, with ``changes`` to the defaults of all, and return it."""
        defaults = {
            "python": PYTHON,
            "require": [],
            "skip": ["import", "gpu"],
            "free_mib": 1,
            "drain_limit": 5,
            "ready_limit": 5,
            **changes,
        }
        top = {
            "bundle": str(self.bundle),
            "allowed_signers": "allowed_signers",
            "signer": SIGNER,
            "golden": "golden.json",
            "ssh": ["-F", str(self.folder / "ssh_config")],
            **{key: defaults.pop(key) for key in ("previous_bundle",) if key in defaults},
        }
        tables = {"defaults": defaults, **{f"hosts.{h.name}": self._entry(h) for h in self.hosts}}
        lines = [f"{key} = {json.dumps(value)}" for key, value in top.items()]
        for name, table in tables.items():
            lines += [f"[{name}]", *(f"{key} = {json.dumps(v)}" for key, v in table.items())]
        path = self.folder / "hosts.toml"
        path.write_text("\n".join(lines) + "\n")
        return path

    def tool(self, *words: str, **changes: object) -> Ended:
        """Run ``fleet COMMAND`` on the hosts."""
        started = self.begin_tool(*words, **changes)
        stdout, stderr = started.communicate(timeout=_SECONDS)
        return Ended(code=started.returncode, stdout=stdout, stderr=stderr)

    def begin_tool(self, *words: str, **changes: object) -> subprocess.Popen[str]:
        """Begin ``fleet COMMAND`` on the hosts, in a process group of its own as a shell does."""
        hosts = str(self.hosts_file(**changes))
        with heeding_ctrl_c():
            return subprocess.Popen(
                [sys.executable, str(COLLECTIONS), words[0], "--hosts", hosts, *words[1:]],
                env=self.environment,
                cwd=self.folder,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )

    def doubled(self) -> Fleet:
        """Return a fleet whose first host is listed twice, the second time under another name."""
        first = self.hosts[0]
        again = replace(first, name=f"{first.name}-again")
        config = self.folder / "ssh_config"
        config.write_text(_CLIENT.format(**vars(again)) + config.read_text())
        return replace(self, hosts=(*self.hosts, again))

    def _entry(self, host: Host) -> dict[str, object]:
        return {
            "target": str(host.site),
            "group": self.groups.get(host.name, host.name),
            "server_url": host.url,
            "stop": host.command("stop"),
            "start": host.command("start"),
            "router_remove": f"{self.folder}/router remove {host.name}",
            "router_add": f"{self.folder}/router add {host.name}",
            "journal_folder": str(host.root / "journal"),
        }

    def states(self) -> dict[str, str]:
        """Return the state of each host's tree, as its bundle tells it."""
        return {host.name: str(self.ask(host, "status")["state_after"]) for host in self.hosts}

    def ask(self, host: Host, *words: str, bundle: Path | None = None) -> dict[str, Any]:
        """Run the bundle on a host's tree, locally."""
        done = subprocess.run(
            [PYTHON, "-I", str(bundle or self.bundle), *words, "--target", str(host.site)]
            + ["--json"],
            capture_output=True,
            text=True,
            check=False,
        )
        document: dict[str, Any] = json.loads(done.stdout)
        return document

    def routed(self) -> list[str]:
        """Return what the router was told, in order: ``remove h1``, ``add h1``."""
        log = self.folder / "router.log"
        return log.read_text().splitlines() if log.exists() else []


def sign(bundle: Path, folder: Path, *, key: str = "release_key") -> None:
    """Sign ``bundle`` with a key of the fleet: the release key, or one that nobody allowed."""
    signature = bundle.with_name(f"{bundle.name}.sig")
    signature.unlink(missing_ok=True)
    _keygen("-Y", "sign", "-f", str(folder / key), "-n", "sglang-overlay", str(bundle))


@contextmanager
def heeding_ctrl_c() -> Iterator[None]:
    """Let what is started here heed SIGINT, which tests in the background inherit as ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def fleet(
    folder: Path,
    *,
    size: int,
    groups: Mapping[str, str] | None = None,
    kinds: Mapping[str, str] | None = None,
) -> Iterator[Fleet]:
    """Make a fleet of ``size`` hosts below ``folder``, all pristine and serving; end it after.

    ``groups`` names the server groups of hosts that have a peer, ``kinds`` the kinds of services
    that are not commands.
    """
    for key in ("host_key", "client_key", "release_key"):
        _keygen("-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(folder / key))
    public = (folder / "release_key.pub").read_text()
    (folder / "allowed_signers").write_text(f'{SIGNER} namespaces="sglang-overlay" {public}')
    bundle = folder / "sglang-overlay.pyz"
    bundle.write_bytes(bundles.build())
    sign(bundle, folder)
    write_router(folder, {})
    if os.getuid() == 0:  # sshd's compiled-in folder for privilege separation
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    kinds = kinds or {}
    hosts = tuple(
        _host(folder, f"h{number}", f"127.0.7.{number}", kind=kinds.get(f"h{number}", "command"))
        for number in range(1, size + 1)
    )
    names = "".join(_CLIENT.format(**vars(host)) for host in hosts)
    everyone = _CLIENT_ALL.format(user=getpass.getuser(), fleet=folder)
    (folder / "ssh_config").write_text(names + everyone)
    key = (folder / "host_key.pub").read_text()
    (folder / "known_hosts").write_text("".join(f"[{h.address}]:{h.port} {key}" for h in hosts))
    made = Fleet(folder=folder, hosts=hosts, bundle=bundle, groups=groups or {})
    try:
        for host in hosts:
            host.connect()
            host.serve()
        (folder / "golden.json").write_text(json.dumps(golden()))
        yield made
    finally:
        for host in hosts:
            write_service(host)  # a test may have broken its stop
            host.halt()
            host.disconnect()


def golden(size: int = 10) -> dict[str, object]:
    """Return the answers of a stub without faults."""
    import hashlib

    answers = []
    for number in range(size):
        prompt = f"prompt {number}"
        text = hashlib.sha256(prompt.encode()).hexdigest()
        answers.append({"prompt": prompt, "text": text, "output_ids": list(text.encode())})
    return {"schema": 1, "sampling_params": {"temperature": 0}, "answers": answers}


def _host(folder: Path, name: str, address: str, *, kind: str) -> Host:
    root = folder / name
    # With a space: every command of a rollout has to bear one.
    site = slim_site(RELEASE, root / "a venv/lib/python3.11/site-packages")
    host = Host(
        name=name,
        address=address,
        port=_free_port(address),
        http=_free_port(address),
        root=root,
        site=site,
        kind=kind,
    )
    config = _SSHD.format(port=host.port, address=address, fleet=folder, root=root)
    if kind != "command":
        (root / "bin").mkdir()
        manager = _MANAGERS[kind]
        _script(root / "bin" / manager, _MANAGER.format(manager=manager, root=root))
        config += f"SetEnv PATH={root}/bin:{os.defpath.strip(':')}\n"
    (root / "sshd_config").write_text(config)
    write_service(host)
    return host


def write_service(host: Host, *, before_stop: str = ":") -> None:
    """Write the host's service script; ``before_stop`` is a shell command of the stop."""
    stub = Path(__file__).with_name("stub_sglang.py")
    words = {**vars(host), "python": PYTHON, "stub": stub, "before_stop": before_stop}
    _script(host.service, _SERVICE.format(**words))


def write_router(folder: Path, calls: Mapping[str, str]) -> None:
    """Write the router's script; ``calls`` are shell commands for calls such as ``add h1``."""
    cases = "".join(f'"{call}") {command} ;;\n' for call, command in calls.items())
    log = f'echo "$1 $2" >>"{folder}/router.log"'
    _script(folder / "router", f'#!/bin/sh\n{log}\ncase "$1 $2" in\n{cases}esac\n')


def once(folder: Path, command: str) -> str:
    """Return a shell command that does ``command`` the first time it is run."""
    return f'test -e "{folder}/once" || {{ touch "{folder}/once"; {command}; }}'


def is_bytecode(path: Path) -> bool:
    """Tell whether ``path`` is bytecode, which every start of a server may write."""
    return path.suffix == ".pyc"


def phases(journal: Path, running: Callable[[], bool]) -> Iterator[dict[str, Any]]:
    """Yield the journal in each phase that is met there while something is ``running``."""
    last: object = None
    while running():
        with suppress(OSError, ValueError):
            found = json.loads(next(journal.glob("*.json"), journal).read_text())
            if found["phase"] != last:
                last = found["phase"]
                yield found
        time.sleep(0.01)


def cut(host: Host) -> str:
    """Return a shell command that ends the host's sshd and the connections that it holds."""
    # The connections are found first: they have another parent once the listener is gone.
    return f'p=$(cat "{host.root}/sshd.pid"); c=$(pgrep -P "$p"); kill "$p" $c'


def older_bundle(folder: Path) -> Path:
    """Build and sign the bundle of an older overlay: the same, with a lower version number."""
    path = folder / "sglang-overlay-older.pyz"
    path.write_bytes(_older(bundles.build()))
    sign(path, folder)
    return path


def _older(content: bytes) -> bytes:
    import io
    import zipfile

    old, new = io.BytesIO(content), io.BytesIO(bundles.INTERPRETER)
    new.seek(0, io.SEEK_END)
    with zipfile.ZipFile(old) as source, zipfile.ZipFile(new, "a") as target:
        for info in source.infolist():
            text = source.read(info)
            if info.filename == "overlay/sglang_overlay/__init__.py":
                text = re.sub(rb'__version__ = ".*"', b'__version__ = "0.0.9"', text)
            target.writestr(info, text)
    return new.getvalue()


def _free_port(address: str) -> int:
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def _script(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def _keygen(*words: str) -> None:
    subprocess.run(["ssh-keygen", *words], check=True, capture_output=True)


def _sshd() -> str:
    found = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
    assert found, "sshd is not installed: apt-get install openssh-server"
    return found
