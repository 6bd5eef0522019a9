"""Random serving with placement and compaction, on SGLang's real allocator and radix cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.engine.launch import Launch
from tests.support.engine.scene import play

pytestmark = pytest.mark.engine


def random_serving(bed: Any, examples: int, page: int, patient: bool) -> dict[str, int]:
    """Scene: the engine of the bed is not used, but what it is made of."""
    from tests.support.kv_machine import examine

    return examine(examples, page=page, patient=patient)


def faulty_serving(bed: Any, examples: int) -> dict[str, str]:
    """Scene: the histories with each fault planted; what was noticed of it."""
    from tests.support.kv_faults import FAULTS, planted
    from tests.support.kv_machine import examine

    noticed = {}
    for fault in FAULTS:
        with planted(fault):
            try:
                examine(examples, shrink=False)
            except Exception as error:  # noqa: BLE001  whatever it is, it was noticed
                noticed[fault] = f"{type(error).__name__}: {error}"
            else:
                noticed[fault] = ""
    return noticed


@pytest.mark.parametrize(
    ("examples", "page", "patient"),
    [
        pytest.param(150, 0, False, id="short"),
        # 2,000 in all, in two halves: a scene may take ten minutes.
        pytest.param(1000, 1, False, id="long, pages of 1", marks=pytest.mark.full),
        pytest.param(1000, 4, False, id="long, pages of 4", marks=pytest.mark.full),
        pytest.param(300, 0, True, id="held back", marks=pytest.mark.full),
    ],
)
def test_no_slot_is_lost_and_every_token_reads_what_was_written(
    overlay: Path, examples: int, page: int, patient: bool
) -> None:
    happened = play(
        random_serving, Launch(tree=overlay), examples=examples, page=page, patient=patient
    ).result
    # Histories in which nothing was moved or taken back would prove nothing.
    assert {name: count for name, count in happened.items() if not count} == {}


def test_slots_that_are_held_back_are_not_lost_either(overlay: Path) -> None:
    launch = Launch(tree=overlay)
    happened = play(random_serving, launch, examples=40, page=0, patient=True).result
    assert min(happened[name] for name in ("admitted", "verified", "evicted", "taken back")) > 0


def test_every_fault_in_it_is_noticed(overlay: Path) -> None:
    noticed = play(faulty_serving, Launch(tree=overlay), examples=200).result
    assert len(noticed) >= 15
    assert [fault for fault, error in noticed.items() if not error] == []
