"""A family's series: its patch files in order, read whole, and what they make of the originals.

A family folder holds a file ``series``, one patch name a line with ``#`` comments, and the files
it names. Each patch starts with prose: a subject line, then the fields ``Why:``, ``How:``,
``Upstream:`` and ``Remove when:``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from patcher.diff import FilePatch, apply, parse, split_header
from patcher.errors import Fault, Refused
from patcher.value import Value

_PATCH_NAME = re.compile(r"[0-9]{4}-[a-z0-9]+(-[a-z0-9]+)*\.patch")
_FIELDS = {
    "Why": "why",
    "How": "how",
    "Upstream": "upstream",
    "Remove when": "remove_when",
}
_HEADER_HINT = (
    "A patch starts with a subject line; below it come Why:, How:, Upstream: and Remove when:."
)
_SERIES_HINT = "The overlay's own files are incomplete or were edited: fetch the overlay again."


class Entry(Protocol):
    """What `load` needs of a folder and its files: a part of `pathlib.Path` and `zipfile.Path`."""

    @property
    def name(self) -> str:
        """Last component of the path."""

    def joinpath(self, *names: str) -> Entry:
        """Return the entry of that name inside this folder, existing or not."""

    def iterdir(self) -> Iterator[Entry]:
        """Yield what is inside this folder."""

    def is_file(self) -> bool:
        """Tell whether this is an existing file."""

    def read_bytes(self) -> bytes:
        """Return the content of this file."""


class Patch(Value):
    """One patch file: what its prose says and the changes it makes, each file once."""

    name: str
    subject: str
    why: str
    how: str
    upstream: str
    remove_when: str
    files: tuple[FilePatch, ...]


class Series(Value):
    """The patches of a family of releases, in the order in which they are applied."""

    family: str
    patches: tuple[Patch, ...]

    @property
    def paths(self) -> tuple[str, ...]:
        """Every path that the series touches, sorted."""
        return tuple(sorted({file.path for patch in self.patches for file in patch.files}))


def load(folder: Entry, *, family: str) -> Series:
    """Read the series in ``folder``.

    Raises `Refused` with every fault of the list and of all its patches.
    """
    index = folder.joinpath("series")
    if not index.is_file():
        fault = Fault(
            code="series-missing",
            message=f"patches/{family} has no file `series`",
            path=f"{family}/series",
            hint=_SERIES_HINT,
        )
        raise Refused([fault])
    names = [name for line in index.read_bytes().split(b"\n") if (name := _listed_name(line))]
    faults = [
        Fault(code=code, message=message, path=f"{family}/series", hint=_SERIES_HINT)
        for code, message in _list_faults(names, {entry.name for entry in folder.iterdir()})
    ]
    patches = []
    for name in dict.fromkeys(names):
        entry = folder.joinpath(name)
        if not _PATCH_NAME.fullmatch(name) or not entry.is_file():
            continue  # has its fault
        try:
            patches.append(_read_patch(name, entry.read_bytes()))
        except Refused as refused:
            faults += refused.faults
    if faults:
        raise Refused(faults)
    return Series(family=family, patches=tuple(patches))


def render(series: Series, read: Callable[[str], bytes]) -> dict[str, bytes]:
    """Apply the whole series to the originals that ``read`` returns by path.

    Returns path -> patched content for every path of ``series.paths``; nothing is written. Raises
    `Refused` with the faults of all files: those of hunks, and those of ``read``, which may raise
    `Refused` or `FileNotFoundError` itself. Behind its first patch that does not fit, a file is
    left out: what later patches would find there says nothing.
    """
    faults: list[Fault] = []
    rendered: dict[str, bytes] = {}
    changes: dict[str, list[FilePatch]] = {path: [] for path in series.paths}
    for patch in series.patches:
        for file in patch.files:
            changes[file.path].append(file)
    for path, files in changes.items():
        try:
            content = read(path)
            for file in files:
                content = apply(file, content)
            rendered[path] = content
        except Refused as refused:
            faults += refused.faults
        except FileNotFoundError:
            faults.append(_absent(path))
    if faults:
        raise Refused(faults)
    return rendered


def _absent(path: str) -> Fault:
    return Fault(
        code="file-missing",
        message=f"{path} is to be patched and does not exist",
        path=path,
        hint="The installation is incomplete or of another release: reinstall sglang.",
    )


def _listed_name(line: bytes) -> str:
    # Only blanks are stripped: a carriage return stays, and makes the name a bad one.
    return line.partition(b"#")[0].strip(b" \t").decode(errors="backslashreplace")


def _list_faults(names: list[str], present: set[str]) -> Iterable[tuple[str, str]]:
    """Yield code and message for whatever is wrong with the list and the folder around it."""
    if not names:
        yield "series-empty", "the series names no patch"
    for at, name in enumerate(names):
        if not _PATCH_NAME.fullmatch(name):
            yield "series-name", f"{name!r} is not a patch name of the form 0001-topic.patch"
        elif name in names[:at]:
            yield "series-duplicate", f"{name} is listed more than once"
        elif name not in present:
            yield "series-patch-missing", f"{name} is listed and does not exist"
    for name in sorted(present - set(names)):
        if name.endswith(".patch"):
            yield "series-patch-unlisted", f"{name} exists and is not listed"


def _read_patch(name: str, text: bytes) -> Patch:
    faults: list[Fault] = []
    files: tuple[FilePatch, ...] = ()
    prose, _ = split_header(text)
    subject, fields = _read_prose(prose.decode(errors="backslashreplace"))
    for number, line in enumerate(prose.split(b"\n"), start=1):
        try:
            line.decode()
        except UnicodeDecodeError:
            faults.append(_header_fault(name, f"line {number} is not UTF-8"))
    if not subject or subject.partition(":")[0] in _FIELDS:
        faults.append(_header_fault(name, "the first line is not a subject"))
    for label, attribute in _FIELDS.items():
        values = fields.get(attribute, [])
        if len(values) != 1 or not values[0]:
            found = "is missing or empty" if not any(values) else "is there more than once"
            faults.append(_header_fault(name, f"the field `{label}:` {found}"))
    if any(fields.get("", ())):
        faults.append(_header_fault(name, f"text outside of all fields: {fields[''][0]!r}"))
    try:
        files = parse(text, origin=name)
    except Refused as refused:
        faults += refused.faults
    if faults:
        raise Refused(faults)
    return Patch(
        name=name, subject=subject, files=files, **{key: fields[key][0] for key in _FIELDS.values()}
    )


def _read_prose(prose: str) -> tuple[str, dict[str, list[str]]]:
    """Return the subject and, by attribute name, the values of each field in the prose.

    Lines below a field belong to it up to the next field. What stands above the first field is
    returned under the empty name.
    """
    subject, _, rest = prose.partition("\n")
    fields: dict[str, list[str]] = {"": [""]}
    current = fields[""]
    for line in rest.split("\n"):
        label, colon, value = line.partition(":")
        if colon and label in _FIELDS:
            current = fields.setdefault(_FIELDS[label], [])
            current.append(value.strip())
        else:
            current[-1] = f"{current[-1]}\n{line.strip()}".strip()
    return subject.strip(), fields


def _header_fault(name: str, message: str) -> Fault:
    return Fault(
        code="patch-header-field", message=f"{name}: {message}", path=name, hint=_HEADER_HINT
    )
