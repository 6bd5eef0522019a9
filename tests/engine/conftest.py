"""The trees that the engine tests run on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import trees

RELEASE = "0.5.12.post1"


@pytest.fixture(scope="session")
def stock() -> Path:
    """Return a site folder with SGLang as released."""
    return trees.tree(RELEASE)


@pytest.fixture(scope="session")
def overlay() -> Path:
    """Return a site folder with the overlay applied to a copy of the same release."""
    return trees.patched(RELEASE)
