"""The self-test: the overlay's verify paths, computed and timed in the target's own Python.

What is tried stands in the overlay (`sglang_overlay.self_test`); here it is started, judged and
shown. It takes a minute or two and some GPU memory, so it runs only where it is asked for.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from patcher import trial
from patcher.checks import Check, Expect, Scene, Status

_SECONDS = 900.0  # a host's first run compiles every kernel
_HEAD = ("engine", "KV", "page", "shape", "max error", "µs", "stock µs", "verdict")


def check_self_test(scene: Scene) -> Check:
    """Run the self-test of the overlay in the target; the table's rows come with the check."""
    if scene.expect is Expect.PRISTINE or not scene.survey.overlay:
        return _check(Status.SKIPPED, "there is no overlay to test")
    reply = trial.ask(scene, hooked=[], seconds=_SECONDS, self_test=True)
    if reply.died:
        code = "from sglang_overlay import self_test; print(self_test.run())"
        hint = f"Run `{shlex.quote(str(reply.python))} -B -c {shlex.quote(code)}` and see."
        return _check(Status.FAILED, f"{reply.message} in the self-test", hint)
    if reply.rows is None:
        return _check(reply.status, reply.message)
    return judge(reply.rows)


def judge(rows: tuple[Mapping[str, Any], ...]) -> Check:
    """Return the check over ``rows``: failed by one, skipped where none passed."""
    counts = Counter(row["status"] for row in rows)
    told = ", ".join(f"{counts[one.value]} {one.value}" for one in Status if counts[one.value])
    status, hint = Status.PASSED, ""
    if counts[Status.FAILED.value]:
        status = Status.FAILED
        hint = "Do not serve draft trees from here: set SGLANG_OVERLAY_VERIFY_ENGINE=stock."
    elif not counts[Status.PASSED.value]:
        status = Status.SKIPPED
    return _check(status, f"{len(rows)} rows: {told or 'nothing to try'}", hint, rows)


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return ``rows`` as lines of aligned columns, the reason of a verdict behind it."""
    cells = [_HEAD, *(_cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(_HEAD))]
    return [
        "  ".join(f"{cell:{width}}" for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    ]


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    shape = "bs {requests}, {context}, {heads} heads, {nodes} nodes".format(**row)
    verdict = row["status"] + (f": {row['reason']}" if row["reason"] else "")
    return (
        row["engine"],
        row["cache_dtype"],
        str(row["page_size"]),
        shape,
        _number(row["max_error"], ".1e"),
        _number(row["microseconds"], ".1f"),
        _number(row["stock_microseconds"], ".1f"),
        verdict,
    )


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _check(
    status: Status, message: str, hint: str = "", rows: tuple[Mapping[str, Any], ...] = ()
) -> Check:
    return Check(name="self-test", status=status, message=message, hint=hint, rows=rows)
