"""What the command lines need of the Python that runs them, said in one sentence if it is missing.

This module must load on any Python 3 and without any package.
"""

import sys

PACKAGES = {"click": "click>=8.1,<9", "unidiff": "unidiff>=0.7.5,<2"}


def demand():
    # type: () -> None
    """End the program with the one command to run, if something is missing."""
    if sys.version_info < (3, 10):  # noqa: UP036 - this is where an older one is turned away
        found = ".".join(str(part) for part in sys.version_info[:3])
        sys.exit("needed: Python 3.10 or newer; this is {} ({})".format(found, sys.executable))  # noqa: UP032
    missing = [name for name in PACKAGES if not _is_there(name)]
    if missing:
        wanted = " ".join("'{}'".format(PACKAGES[name]) for name in missing)  # noqa: UP032
        sys.exit(
            "{} missing. Run `{} -m pip install {}`, or use the one-file bundle, which needs "
            "nothing but Python 3.10.".format(
                " and ".join(missing) + (" is" if len(missing) == 1 else " are"),
                sys.executable,
                wanted,
            )
        )


def _is_there(name):
    # type: (str) -> bool
    return any(finder.find_spec(name, None) for finder in sys.meta_path)
