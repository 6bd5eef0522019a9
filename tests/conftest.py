"""Settings that every test shares."""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path

import pytest

RELEASES = ("0.5.11", "0.5.12", "0.5.12.post1")
ENGINE_TESTS = Path("tests/engine")

# What a person's shell may set and what would change the answers of the programs under test.
for name in ("SGLANG_OVERLAY_DISABLE", "PYTHONPYCACHEPREFIX", "PYTHONPATH"):
    os.environ.pop(name, None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    call: pytest.CallInfo[None],
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn a skip into a failure: what cannot run here is deselected by its marker instead."""
    report = yield
    if report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped, but nothing may be skipped here: {call.excinfo}"
    return report


def pytest_configure(config: pytest.Config) -> None:
    """Run Triton kernels in the interpreter, but for the tests that are there for a GPU."""
    if config.option.markexpr != "gpu":
        os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Say which tests stay on one worker; leave out what takes root where there is none.

    The files of the engine tests share their runs within a process, so they stay together; every
    other file is a group of its own.
    """
    for item in items:
        file = item.path.relative_to(config.rootpath)
        group = ENGINE_TESTS if file.is_relative_to(ENGINE_TESTS) else file
        item.add_marker(pytest.mark.xdist_group(str(group)))
    if os.geteuid() == 0:
        return
    left_out = [item for item in items if item.get_closest_marker("root")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture(params=RELEASES)
def release(request: pytest.FixtureRequest) -> str:
    """Each supported release in turn."""
    return str(request.param)
