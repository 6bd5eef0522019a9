"""The list of hosts: a TOML file, read into what the rest works with."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomllib


class HostsFault(Exception):
    """The hosts file cannot be used as it is."""


@dataclass(frozen=True, kw_only=True)
class Host:
    """One host and all that is known of it beforehand. ``group`` is its multi-node server.

    ``server_url`` is as seen from the host, empty for a node without HTTP; ``stop`` and ``start``
    are shell commands there, ``router_remove`` and ``router_add`` shell commands here. The limits
    are seconds, ``free_mib`` is what must be free at the target. ``require`` and ``skip`` are names
    of checks of verify.
    """

    name: str
    target: str
    group: str
    python: str = "python3"
    server_url: str = "http://127.0.0.1:30000"
    api_key: str = ""
    stop: str = "systemctl stop sglang"
    start: str = "systemctl start sglang"
    router_remove: str = ""
    router_add: str = ""
    drain_limit: float = 600
    ready_limit: float = 1200
    lease: float = 1800
    free_mib: int = 512
    journal_folder: str = "/var/lib/sglang-overlay"
    require: tuple[str, ...] = ("gpu", "pins")
    skip: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """The hosts, in the order of a rollout, and what is rolled out. Paths are here, not there.

    ``ssh`` are options for every call of ssh; ``waves`` sizes in server groups or percent.
    """

    hosts: tuple[Host, ...]
    bundle: Path
    allowed_signers: Path
    signer: str
    golden: Path | None = None
    previous_bundle: Path | None = None
    waves: tuple[str | int, ...] = (1, "10%", "100%")
    ssh: tuple[str, ...] = ()


def read(path: Path) -> Fleet:
    """Return the fleet that the file describes. Relative paths in it start at its folder.

    Raises:
        HostsFault: it is no TOML, lacks something, or holds an unknown name.
    """
    try:
        document = tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise HostsFault(f"{path}: {error}") from error
    defaults, named = document.pop("defaults", {}), document.pop("hosts", {})
    _known(path, document, Fleet)
    hosts = []
    for name, own in named.items():
        values = {"group": name, **defaults, **own, "name": name}
        _known(path, values, Host)
        hosts.append(_make(path, Host, values))
    for key in ("bundle", "allowed_signers", "golden", "previous_bundle"):
        if key in document:
            document[key] = path.parent / document[key]
    if not hosts:
        raise HostsFault(f"{path}: names no host; add a table [hosts.NAME]")
    fleet: Fleet = _make(path, Fleet, {**document, "hosts": tuple(hosts)})
    return fleet


def _make(path: Path, kind: type[Any], values: Mapping[str, Any]) -> Any:
    needed = {f.name for f in dataclasses.fields(kind) if f.default is dataclasses.MISSING}
    if lacking := sorted(needed - set(values)):
        raise HostsFault(f"{path}: lacks {', '.join(lacking)} (of {kind.__name__.lower()})")
    return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})


def _known(path: Path, values: Mapping[str, Any], kind: type[Any]) -> None:
    names = {field.name for field in dataclasses.fields(kind)}
    if unknown := sorted(set(values) - names):
        raise HostsFault(f"{path}: unknown {', '.join(unknown)}; known: {', '.join(sorted(names))}")
