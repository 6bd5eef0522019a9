"""What the verify paths of this host compute, against the oracle, and how long they take.

Run by ``verify_install.py --self-test`` in the target's own Python. A row is one path at one shape.
To give a further path its rows, add it to `paths.PATHS`.

- `paths`     the registry: every verify path, and what keeps it from running here
- `shapes`    the sizes that each path is tried at
- `case`      the random tensors of one verify step, and the oracle's answer
- `distance`  how far a result is from the oracle's
- `timing`    µs of calls that are replayed from a CUDA graph
- `measurement`  one row: build, compare, time
- `rows`      the rows themselves

Importing this package imports neither torch nor triton: a host that lacks them still gets rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from sglang_overlay.self_test import rows
from sglang_overlay.self_test.paths import PATHS, VerifyPath
from sglang_overlay.self_test.rows import Row
from sglang_overlay.self_test.shapes import SHAPES, Shape


def run(
    paths: Sequence[VerifyPath] = PATHS, shapes: Sequence[Shape] = SHAPES
) -> list[dict[str, Any]]:
    """Try every path at every shape; return `rows.Row` as dictionaries, in that order.

    A path that cannot run here gives rows with the status ``skipped`` and the reason. A row whose
    result is wrong, or that ends in an error, is ``failed``; nothing is raised.
    """
    return [asdict(row) for path in paths for row in _rows(path, shapes)]


def _rows(path: VerifyPath, shapes: Sequence[Shape]) -> Iterator[Row]:
    reason = path.obstacle()
    if reason is not None:
        yield from (rows.row(path, shape, "skipped", reason) for shape in shapes)
        return
    from sglang_overlay.self_test import measurement  # needs torch and triton

    yield from (measurement.measure(path, shape) for shape in shapes)
