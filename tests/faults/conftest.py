"""What the tests of faults share: a bench, and a count of the faults that were really injected."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from tests.support.bench import Bench, set_up

_INJECTED: Counter[str] = Counter()


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """Return the one site of the session. A test that uses it brings it to where it starts."""
    with set_up(tmp_path_factory.mktemp("bench")) as made:
        yield made


@pytest.fixture(scope="session")
def small_bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """Return a bench of a small product: every kind of file and phase, a quarter of the calls.

    For the tests that go through all calls: of the real product's, most do the same to the next
    module of ninety.
    """
    with set_up(tmp_path_factory.mktemp("small"), small=True) as made:
        yield made


@pytest.fixture(scope="session")
def injected() -> Counter[str]:
    """Return the count of faults by kind, which the end of the session prints."""
    return _INJECTED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how many faults were injected, so that the numbers can be quoted."""
    if _INJECTED:
        listed = ", ".join(f"{count} {kind}" for kind, count in sorted(_INJECTED.items()))
        terminalreporter.write_line(f"faults injected: {listed}")
