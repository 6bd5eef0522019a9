"""What a DFLASH worker verifies: its chain, or what its class plants."""

from __future__ import annotations

from typing import Any

from sglang_overlay.srt.ddtree import drafting


class Stock:
    """SGLang's worker hands unknown attributes on to the target's."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"asked the target's worker for {name}")


class Planter(Stock):
    def plant(self, batch: str, chain: str) -> str:
        return f"tree of {batch} from {chain}"


def test_a_worker_of_sglangs_own_verifies_its_chain() -> None:
    assert drafting.verify_input(Stock(), "batch", "chain") == "chain"


def test_a_worker_that_plants_verifies_its_tree() -> None:
    assert drafting.verify_input(Planter(), "batch", "chain") == "tree of batch from chain"
