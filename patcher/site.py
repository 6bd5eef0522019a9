"""From what people pass as a target to the folders that matter.

People have a site-packages folder, a virtual environment, a Python executable or nothing at all;
SGLang may be installed as usual or editable (its official images), where the package lies in a
source folder elsewhere. Nothing is imported to find out.
"""

from __future__ import annotations

import errno
import json
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path

from patcher.errors import refuse
from patcher.receipt import STAGING
from patcher.value import Value

_DIST_INFO = re.compile(r"sglang-(?P<version>[^-/]+)\.dist-info\Z")
_PYTHON = r"(python|pypy)[\d.]*\Z"  # compiled if asked for: most targets are folders
_NO_FOLDER = ("import ", "import\t", "#")  # lines of a path file that name none
_TARGET_HINT = (
    "Pass a site-packages folder, the root of a virtual environment, or a Python executable."
)


class Site(Value):
    """One installed SGLang.

    ``root`` is the site-packages folder (the overlay goes there), ``package_root`` the folder that
    holds ``sglang/``: the same, unless the install is editable. ``dist_info`` and ``version`` are
    None where no metadata of a distribution named sglang stands in ``root``. ``notes`` tell how
    the target was resolved, where that was not plain.
    """

    root: Path
    package_root: Path
    dist_info: Path | None
    version: str | None
    notes: tuple[str, ...] = ()

    @property
    def editable(self) -> bool:
        """Whether the package lies outside of site-packages."""
        return self.package_root != self.root

    @property
    def reinstall(self) -> str:
        """What brings this install's original files back when the overlay cannot."""
        if self.editable:
            return f"Bring the files in {self.package_root} back with git, or from the sdist."
        return (
            "Run `pip install --force-reinstall --no-deps sglang==RELEASE`: it brings the original "
            "files and removes the overlay."
        )

    @property
    def bases(self) -> tuple[Path, ...]:
        """The folders that a transaction works in, site-packages first."""
        return (self.root, self.package_root) if self.editable else (self.root,)

    @property
    def metadata_hint(self) -> str:
        """What to do where ``dist_info`` is None: nothing says that a Python imports this."""
        return (
            "Pass the environment that imports it, or its Python. An editable install is patched "
            "through its environment, never through its source folder. What an earlier overlay "
            "put here, --revert takes off."
        )

    @property
    def record(self) -> Path | None:
        """The RECORD of the distribution, where there is one."""
        if self.dist_info is None or not (self.dist_info / "RECORD").is_file():
            return None
        return self.dist_info / "RECORD"

    @property
    def installed(self) -> bool:
        """Whether there is an SGLang package to work on."""
        return (self.package_root / "sglang" / "__init__.py").is_file()


def unfinished(bases: Iterable[Path]) -> bool:
    """Tell whether an earlier run left its staged work behind in one of the folders ``bases``."""
    return any(os.path.lexists(base / STAGING) for base in bases)


def resolve(target: str | None) -> Site:
    """Find the site that ``target`` means; None means the running interpreter's.

    Raises:
        Refused: ``target`` does not exist, or is nothing in which SGLang could be installed.
    """
    if target is None:
        return _from_search_path(sys.path[1:], f"the Python that runs this, {sys.executable}")
    try:
        given = Path(target).expanduser()
        found = bool(target) and given.exists()
    except RuntimeError as error:  # ~ of a user that there is not
        raise refuse("target-missing", str(error), path=target, hint=_TARGET_HINT) from error
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        found = False
    if not found:
        raise refuse("target-missing", "does not exist", path=target, hint=_TARGET_HINT)
    if not given.is_dir():
        return _from_python(given)
    root = given.resolve()
    notes = (f"{given} is a symbolic link to {root}",) if given.is_symlink() else ()
    if _holds_sglang(root) or root.name in {"site-packages", "dist-packages"}:
        return _inspect(root, notes)
    if root.name == "sglang" and (root / "srt").is_dir():
        return _inspect(
            root.parent,
            (
                *notes,
                f"{given} is the package; its folder was taken",
            ),
        )
    for python in (root / "bin" / "python", root / "bin" / "python3"):
        if python.exists():
            return _from_python(python)
    folders = sorted(root.glob("lib*/python3*/*-packages"))
    if folders:
        return _from_search_path([str(folder) for folder in folders], str(given))
    if any(root.glob("*.dist-info")) or not any(root.iterdir()):
        return _inspect(root, notes)
    raise refuse(
        "target-unknown",
        "is neither a site-packages folder nor a virtual environment nor a Python executable",
        path=str(given),
        hint=_TARGET_HINT,
    )


def _from_python(python: Path) -> Site:
    if not re.match(_PYTHON, python.name) or not os.access(python, os.X_OK):
        raise refuse(
            "target-unknown", "is not a Python executable", path=str(python), hint=_TARGET_HINT
        )
    import subprocess  # most targets are folders

    # The executable must be run under this very name: a virtual environment's is a link, and
    # Python finds the environment by where the link stands.
    code = "import json, sys; print(json.dumps(sys.path[1:]))"
    try:
        answer = subprocess.run(
            [str(python.absolute()), "-E", "-c", code], capture_output=True, check=True, text=True
        )
        search_path = json.loads(answer.stdout)
    except (OSError, subprocess.CalledProcessError, ValueError) as error:
        raise refuse(
            "target-unknown",
            f"did not tell its module search path: {error}",
            path=str(python),
            hint=_TARGET_HINT,
        ) from error
    return _from_search_path(search_path, str(python))


def _from_search_path(search_path: Iterable[str], whose: str) -> Site:
    folders = [Path(entry).resolve() for entry in search_path if entry and Path(entry).is_dir()]
    holding = [folder for folder in folders if _holds_sglang(folder)]
    if holding:
        found = _inspect(holding[0], (f"{holding[0]} was taken, from {whose}",))
        if found.dist_info is None:  # the source folder of an editable install, it may be
            for folder in holding[1:]:
                other = _inspect(folder, (f"{folder} was taken, from {whose}",))
                if other.package_root == holding[0]:
                    return other
        return found
    for folder in folders:
        if folder.name in {"site-packages", "dist-packages"}:
            return _inspect(folder, (f"{folder} was taken, from {whose}",))
    raise refuse(
        "target-unknown",
        "has no site-packages folder",
        path=whose,
        hint=_TARGET_HINT,
    )


def _holds_sglang(folder: Path) -> bool:
    return (folder / "sglang" / "__init__.py").is_file() or bool(_dist_infos(folder))


def _dist_infos(folder: Path) -> list[Path]:
    return sorted(e for e in folder.glob("sglang-*.dist-info") if _DIST_INFO.match(e.name))


def _inspect(root: Path, notes: tuple[str, ...]) -> Site:
    found = _dist_infos(root)
    if len(found) > 1:
        raise refuse(
            "target-ambiguous",
            f"holds {len(found)} sglang distributions: {', '.join(e.name for e in found)}",
            path=str(root),
            hint="An upgrade was broken off. Run `pip install --force-reinstall --no-deps "
            "sglang==VERSION` in this environment, then this again.",
        )
    dist_info = found[0] if found else None
    package_root = root
    if dist_info is not None and not (root / "sglang" / "__init__.py").is_file():
        editable = _editable_folder(root, dist_info)
        if editable is not None:
            package_root = editable
            notes = (*notes, f"editable install: the package is {editable / 'sglang'}")
    match = _DIST_INFO.match(dist_info.name) if dist_info else None
    return Site(
        root=root,
        package_root=package_root,
        dist_info=dist_info,
        version=match["version"] if match else None,
        notes=notes,
    )


def _editable_folder(root: Path, dist_info: Path) -> Path | None:
    """Return the folder that holds ``sglang/`` in an editable install, where it can be found.

    The three places that say so: a path file, the mapping in setuptools' finder module, and the
    project's address in direct_url.json (PEP 610).
    """
    import ast  # only an editable install needs these
    import urllib.parse

    candidates: list[Path] = []
    for path_file in sorted(root.glob("*sglang*.pth")):
        lines = os.fsdecode(path_file.read_bytes()).splitlines()
        candidates += [root / one for one in lines if one and not one.startswith(_NO_FOLDER)]
    for finder in sorted(root.glob("__editable___sglang*_finder.py")):
        text = os.fsdecode(finder.read_bytes())
        mapping = re.search(r"^MAPPING[^=\n]*= (\{.*\})$", text, re.MULTILINE)
        if mapping:
            package = ast.literal_eval(mapping[1]).get("sglang")
            candidates += [Path(package).parent] if package else []
    try:
        direct = json.loads((dist_info / "direct_url.json").read_bytes())
        if direct["dir_info"]["editable"]:
            folder = Path(urllib.parse.unquote(urllib.parse.urlparse(direct["url"]).path))
            candidates += [folder, folder / "python"]
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        pass
    for candidate in candidates:
        if (candidate / "sglang" / "__init__.py").is_file():
            return candidate.resolve()
    return None
