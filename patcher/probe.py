"""Run by `patcher.trial` in the target's own Python: what would a server there load?

Its text goes to ``python -c``, with an `Order` in JSON and a pipe's number as arguments, so it
stands alone: standard library only, nothing of this package, ASCII for the sake of every locale.
It answers on the pipe with one JSON object, ``{"status": passed|failed|skipped, "message": ...,
"rows": [...]}``; there are rows only where the overlay's self-test was asked for.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import json
import os
import sys
import traceback
from pathlib import Path
from typing import TypedDict

OVERLAY = "sglang_overlay"
OURS = ("sglang", OVERLAY)
SELF_TEST = f"{OVERLAY}.self_test"


class Order(TypedDict):
    """What to try: the folders, the hooked files below the second, the overlay's version.

    ``version`` is None where no overlay is meant to be there. With ``self_test`` the overlay's
    self-test runs, on top.
    """

    root: str
    package_root: str
    hooked: list[str]
    version: str | None
    self_test: bool


class Finding(Exception):
    """The end of the trial, and how it came out."""

    def __init__(self, status: str, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


def examine(order: Order) -> None:
    """Load what a server would load.

    Raises:
        Finding: something stands in the way.
    """
    package_root = Path(order["package_root"])
    expect_origin("sglang", find("sglang"), package_root / "sglang")
    for path in order["hooked"]:
        compare_code(package_root / path, module_name(path))
    if order["version"] is not None:
        load(OVERLAY, Path(order["root"]) / OVERLAY)
        version = getattr(sys.modules[OVERLAY], "__version__", None)
        if version != order["version"]:
            raise Finding("failed", f"{OVERLAY} is {version} when imported, not {order['version']}")
    for path in order["hooked"]:
        load(module_name(path), package_root / path)


def run_self_test(order: Order) -> list[dict[str, object]]:
    """Return the rows of the overlay's self-test.

    Raises:
        Finding: it cannot be loaded, or does not come to an end.
    """
    load(SELF_TEST, Path(order["root"]) / OVERLAY / "self_test")
    try:
        rows: list[dict[str, object]] = sys.modules[SELF_TEST].run()
    except Exception as error:  # whatever it was, it is the answer
        raise Finding("failed", f"the self-test ends with {said(error)}") from error
    return rows


def module_name(path: str) -> str:
    """Return the dotted name of the module in the file ``path``."""
    return path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")


def find(name: str) -> str | None:
    """Return the file that ``import name`` would start with, without importing it."""
    spec = importlib.util.find_spec(name)
    return spec.origin if spec else None


def expect_origin(name: str, origin: str | None, place: Path) -> None:
    """Raise `Finding` unless ``origin`` is the file ``place``, or lies right in that folder."""
    if origin is None:
        raise Finding("failed", f"{sys.executable} does not find {name}, which should be {place}")
    found, wanted = Path(origin).resolve(), place.resolve()
    if wanted not in (found, found.parent):
        raise Finding("failed", f"{sys.executable} imports {name} from {found}, not from {place}")


def compare_code(path: Path, name: str) -> None:
    """Raise `Finding` unless the code that Python would run for ``path`` is that of its text."""
    loader = importlib.machinery.SourceFileLoader(name, str(path))
    try:
        text = loader.get_data(str(path))
        fresh = compile(text, path, "exec", dont_inherit=True)
        loaded = loader.get_code(name)
    except SyntaxError as error:
        raise Finding("failed", f"{path}, line {error.lineno}: {error.msg}") from error
    except (OSError, EOFError, TypeError, ValueError, ImportError) as error:
        raise Finding("failed", f"{path} cannot be loaded: {said(error)}") from error
    if loaded != fresh:
        pyc = importlib.util.cache_from_source(str(path))
        raise Finding(
            "failed", f"Python runs {pyc}, which was compiled from other text than {path}"
        )


def load(name: str, place: Path) -> None:
    """Import the module ``name``, which must come from ``place``.

    Raises:
        Finding: it does not, or cannot be imported.
    """
    try:
        module = importlib.import_module(name)
    except BaseException as error:  # a module may also try to end the program
        if isinstance(error, KeyboardInterrupt):
            raise
        lacking = missing(error)
        if lacking:
            raise Finding("skipped", f"{name} needs {lacking}, absent here") from error
        where = traceback.extract_tb(error.__traceback__)[-1]
        raise Finding(
            "failed",
            f"importing {name} ends with {said(error)} ({where.filename}, line {where.lineno})",
        ) from error
    expect_origin(name, getattr(module, "__file__", None), place)


def missing(error: BaseException) -> str | None:
    """Return what the environment lacks, if that is why an import failed; None if it is not.

    A package that is there but has not the module that is asked for does not count as lacking, and
    neither does anything of SGLang's or the overlay's.
    """
    seen: BaseException | None = error
    while isinstance(seen, (ImportError, OSError)):
        name = getattr(seen, "name", None) or ""
        top = name.partition(".")[0]
        if top in OURS:
            return None
        if isinstance(seen, ModuleNotFoundError) and name and not is_there(top):
            return f"the package {top}"
        if "cannot open shared object file" in str(seen):
            return f"a library ({str(seen).strip().splitlines()[-1]})"
        seen = seen.__cause__ or seen.__context__
    return None


def is_there(top: str) -> bool:
    """Tell whether the top-level module ``top`` can be found."""
    try:
        return top in sys.modules or importlib.util.find_spec(top) is not None
    except (ImportError, ValueError):
        return False


def said(error: BaseException) -> str:
    """Return an exception in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def main() -> None:
    """Carry out the order and answer."""
    order: Order = json.loads(sys.argv[1])
    # `-c` puts the working directory first; a server does not look there.
    sys.path[:] = [entry for entry in sys.path if entry]
    answer: dict[str, object] = {"status": "passed", "message": sys.version.partition(" ")[0]}
    try:
        examine(order)
        if order["self_test"]:
            answer["rows"] = run_self_test(order)
    except Finding as finding:
        answer = {"status": finding.status, "message": finding.message}
    os.write(int(sys.argv[2]), json.dumps(answer).encode())
    # Threads and exit hooks of what was imported are of no interest here.
    os._exit(0)


if __name__ == "__main__":
    main()
