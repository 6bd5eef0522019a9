"""The list of hosts: a TOML file, read into what the rest works with."""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomllib
from ansible_collections.ddtree.sglang_overlay.plugins.module_utils import waves


class HostsFault(Exception):
    """The hosts file cannot be used as it is."""


@dataclass(frozen=True, kw_only=True)
class Host:
    """One host and all that is known of it beforehand. ``group`` is its multi-node server.

    ``server_url`` is as seen from the host, empty for a node without HTTP; ``stop`` and ``start``
    are shell commands there, ``router_remove`` and ``router_add`` shell commands here. The limits
    and the lease are seconds; a lease outlasts the limits, or another run could take the host while
    it waits. ``free_mib`` is what must be free at the target. ``require`` and ``skip`` are names of
    checks of verify.
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
    router_limit: float = 120
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
        HostsFault: it is no TOML, lacks something, or holds an unknown name or a wrong value.
    """
    try:
        document = tomllib.loads(path.read_bytes().decode())
    except UnicodeDecodeError as error:
        raise HostsFault(f"{path}: not UTF-8 (byte {error.start}): save it as UTF-8") from error
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise HostsFault(f"{path}: {error}") from error
    defaults = _table(path, "defaults", document.pop("defaults", {}))
    named = _table(path, "hosts", document.pop("hosts", {}))
    _known(path, document, Fleet)
    _check(path, "", document, Fleet)
    _known(path, defaults, Host)
    _check(path, "defaults.", defaults, Host)
    hosts = []
    for name, own in named.items():
        _check(path, f"hosts.{name}.", _table(path, f"hosts.{name}", own), Host)
        values = {"group": name, **defaults, **own, "name": name}
        _known(path, values, Host)
        hosts.append(_make(path, Host, values))
        _outlasts(path, hosts[-1])
    for key in ("bundle", "allowed_signers", "golden", "previous_bundle"):
        if key in document:
            document[key] = path.parent / document[key]
    if not hosts:
        raise HostsFault(f"{path}: names no host; add a table [hosts.NAME]")
    fleet: Fleet = _make(path, Fleet, {**document, "hosts": tuple(hosts)})
    return fleet


def _table(path: Path, name: str, found: object) -> Mapping[str, Any]:
    if not isinstance(found, dict):
        example = f"[{name}]" if name != "hosts" else "[hosts.NAME]"
        raise HostsFault(f"{path}: {name}: got {found!r}, needed a table: write {example}")
    return found


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_seconds(value: object) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return math.isfinite(value) and value >= 0


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _are_waves(value: object) -> bool:
    try:
        return isinstance(value, list) and waves.divide([], value) == []
    except ValueError:
        return False


# By the type of a field: whether a value of the file is one, and what is needed.
_KINDS: Mapping[object, tuple[Callable[[object], bool], str]] = {
    str: (_is_text, 'a text in quotes, as "x"'),
    Path: (_is_text, 'a path in quotes, as "x"'),
    Path | None: (_is_text, 'a path in quotes, as "x"'),
    int: (_is_whole, "a whole number of 0 or more, without quotes"),
    float: (_is_seconds, "a number of seconds of 0 or more, without quotes"),
    tuple[str, ...]: (_are_texts, 'a list of texts, as ["x"]'),
    tuple[str | int, ...]: (
        _are_waves,
        'a list of numbers of server groups (1 or more) or percentages, as [1, "10%", "100%"]',
    ),
}


def _check(path: Path, prefix: str, values: Mapping[str, Any], kind: type[Any]) -> None:
    """Refuse values of a wrong type, all at once. Unknown names are for `_known`."""
    types = typing.get_type_hints(kind)
    wrong = []
    for name, value in values.items():
        if name not in types:
            continue
        fits, needed = _KINDS[types[name]]
        if not fits(value):
            wrong.append(f"{prefix}{name}: got {value!r}, needed {needed}")
    if wrong:
        raise HostsFault(f"{path}: {'; '.join(wrong)}")


def _outlasts(path: Path, host: Host) -> None:
    for name in ("drain_limit", "ready_limit"):
        limit = getattr(host, name)
        if host.lease <= limit:
            raise HostsFault(
                f"{path}: hosts.{host.name}: the lease ({host.lease:g} s) has to be longer than "
                f"{name} ({limit:g} s), or it ends while the host waits: raise lease"
            )


def _make(path: Path, kind: type[Any], values: Mapping[str, Any]) -> Any:
    needed = {f.name for f in dataclasses.fields(kind) if f.default is dataclasses.MISSING}
    if lacking := sorted(needed - set(values)):
        raise HostsFault(f"{path}: lacks {', '.join(lacking)} (of {kind.__name__.lower()})")
    return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})


def _known(path: Path, values: Mapping[str, Any], kind: type[Any]) -> None:
    names = {field.name for field in dataclasses.fields(kind)}
    if unknown := sorted(set(values) - names):
        raise HostsFault(f"{path}: unknown {', '.join(unknown)}; known: {', '.join(sorted(names))}")
