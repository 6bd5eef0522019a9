"""The self-test's check: what the rows add up to, and how they are shown."""

from __future__ import annotations

from typing import Any

import pytest

from patcher import self_test
from patcher.checks import Status


def row(status: str, **found: Any) -> dict[str, Any]:
    nothing = dict.fromkeys(("max_error", "relative_error", "microseconds", "stock_microseconds"))
    reason = "" if status == "passed" else "it is so"
    sizes = {"page_size": 64, "requests": 8, "context": 8192, "heads": 16, "nodes": 32}
    path = {"engine": "flashmla", "cache_dtype": "bfloat16", "status": status, "reason": reason}
    return nothing | sizes | path | found


@pytest.mark.parametrize(
    ("statuses", "status", "message"),
    [
        (["passed", "passed"], Status.PASSED, "2 rows: 2 passed"),
        (["passed", "skipped"], Status.PASSED, "2 rows: 1 passed, 1 skipped"),
        (["skipped", "skipped"], Status.SKIPPED, "2 rows: 2 skipped"),
        (["passed", "failed", "skipped"], Status.FAILED, "3 rows: 1 passed, 1 failed, 1 skipped"),
        ([], Status.SKIPPED, "0 rows: nothing to try"),
    ],
)
def test_what_the_rows_add_up_to(statuses: list[str], status: Status, message: str) -> None:
    rows = tuple(row(each) for each in statuses)
    found = self_test.judge(rows)
    assert (found.name, found.status, found.message) == ("self-test", status, message)
    assert found.rows == rows
    assert bool(found.hint) == (status is Status.FAILED)


def test_the_table_has_aligned_columns_and_reasons() -> None:
    fast = row("passed", max_error=3.14159e-3, microseconds=42.34, stock_microseconds=4990.0)
    assert self_test.table([fast, row("skipped")]) == [
        "engine    KV        page  shape                           max error  µs    stock µs"
        "  verdict",
        "flashmla  bfloat16  64    bs 8, 8192, 16 heads, 32 nodes  3.1e-03    42.3  4990.0  "
        "  passed",
        "flashmla  bfloat16  64    bs 8, 8192, 16 heads, 32 nodes  -          -     -       "
        "  skipped: it is so",
    ]
