"""DDTREE's modules beside SGLang's worker, with fakes for the few names that they take from it."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

PACKAGE = "sglang_overlay.srt.ddtree"
MODULES = ("commit", "tally", "verify_input", "worker")


@dataclass
class DFlashVerifyInput:
    """SGLang's input of a chain: keeps what it was made of, and how its verify was called."""

    draft_token: torch.Tensor
    positions: torch.Tensor | None
    draft_token_num: int
    custom_mask: torch.Tensor | None = None

    def prepare_for_verify(
        self, batch: Any, page_size: int, *, build_custom_mask: bool = True
    ) -> None:
        batch.prepared = (page_size, build_custom_mask)

    def verify(self, *, batch: Any, logits_output: Any, page_size: int) -> Any:
        batch.verified = SimpleNamespace(
            chain=self, output=logits_output, page_size=page_size, sampling=batch.sampling_info
        )
        if (slots := getattr(batch, "frees", None)) is not None:
            batch.token_to_kv_pool_allocator.free(slots)
        return batch.result


@dataclass
class LogitsProcessorOutput:
    next_token_logits: torch.Tensor
    hidden_states: torch.Tensor | None = None


class DFlashWorker:
    """SGLang's worker: its sizes, and the attributes that a subclass reads."""

    block_size = 4
    page_size = 64
    device = "cpu"

    def __init__(self, server_args: Any, model_runner: Any) -> None:
        self.server_args = server_args
        self.model_runner = model_runner
        self.drafter_tokens = server_args.speculative_num_draft_tokens


FAKES: dict[str, dict[str, Any]] = {
    "sglang.srt.distributed": {"get_tp_group": lambda: SimpleNamespace(world_size=1)},
    "sglang.srt.layers.logits_processor": {"LogitsProcessorOutput": LogitsProcessorOutput},
    "sglang.srt.speculative.dflash_info": {"DFlashVerifyInput": DFlashVerifyInput},
    "sglang.srt.speculative.dflash_worker": {"DFlashWorker": DFlashWorker},
}


@pytest.fixture
def ddtree(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The modules of `MODULES`, imported over the fakes and forgotten afterwards."""
    for dotted, names in FAKES.items():
        parts = dotted.split(".")
        for end in range(1, len(parts)):
            package = ModuleType(".".join(parts[:end]))
            package.__path__ = []
            monkeypatch.setitem(sys.modules, package.__name__, package)
        module = ModuleType(dotted)
        module.__dict__.update(names)
        monkeypatch.setitem(sys.modules, dotted, module)
    for name in MODULES:
        # Set first, so that it is taken away afterwards, whoever imports it.
        monkeypatch.setitem(sys.modules, f"{PACKAGE}.{name}", ModuleType(name))
        del sys.modules[f"{PACKAGE}.{name}"]
    loaded = {name: importlib.import_module(f"{PACKAGE}.{name}") for name in MODULES}
    return SimpleNamespace(**loaded)
