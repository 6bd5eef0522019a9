"""One way to start the engine: tree, models, options. Hashable, so that runs can be kept."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.support.engine.models import Models, write_models

REPOSITORY = Path(__file__).parents[3]
STUBS = Path(__file__).with_name("stubs")
# Variables that decide nothing at import: a process that has SGLang imported can still take them.
READ_AGAIN = frozenset({"SGLANG_OVERLAY_KV_SLOTS"})
_MODELS = REPOSITORY / ".cache" / "engine-models"


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How to start SGLang.

    ``tree`` holds ``sglang/`` and its dist-info. ``algorithm`` is ``DFLASH``, ``DDTREE``, ``EAGLE``
    or empty for plain decoding. ``experts`` and ``grouped`` choose another target: with mixtures of
    experts, and with grouped-query attention instead of MLA. ``options`` are further server
    arguments by their Python name, ``variables`` further environment variables; both override the
    bed's own.
    """

    tree: Path
    attention: str = "flashmla"
    algorithm: str = "DFLASH"
    experts: bool = False
    grouped: bool = False
    ranks: int = 1
    options: tuple[tuple[str, Any], ...] = ()
    variables: tuple[tuple[str, str], ...] = ()

    def plain(self) -> Launch:
        """Return the same launch without speculative decoding."""
        return replace(self, algorithm="")

    def on(self, tree: Path) -> Launch:
        """Return the same launch on another tree."""
        return replace(self, tree=tree)

    def release(self) -> str:
        """Return the release of the SGLang in ``tree``, by its metadata."""
        (info,) = self.tree.glob("sglang-*.dist-info")
        return info.name.removeprefix("sglang-").removesuffix(".dist-info")

    def arguments(self) -> dict[str, Any]:
        """Return keyword arguments for ``ServerArgs``; writes the model folders if need be."""
        models = write_models(_MODELS)
        arguments: dict[str, Any] = {
            "model_path": str(self._target(models)),
            "device": "cpu",
            "dtype": "float32",
            "load_format": "dummy",
            "attention_backend": self.attention,
            "grammar_backend": "none",
            "skip_tokenizer_init": True,
            "disable_cuda_graph": True,
            "disable_overlap_schedule": True,
            "max_total_tokens": 4096,
            "max_running_requests": 4,
            "context_length": 1024,
            "random_seed": 1,
            "tp_size": self.ranks,
            "log_level": "warning",
        }
        if self.algorithm:
            drafter = models.nextn_drafter if self.algorithm == "EAGLE" else models.drafter
            arguments |= {
                "speculative_algorithm": self.algorithm,
                "speculative_draft_model_path": str(drafter),
                "speculative_draft_attention_backend": "triton",
            }
        return arguments | dict(self.options)

    def _target(self, models: Models) -> Path:
        if self.grouped:
            return models.grouped_target
        return models.moe_target if self.experts else models.target

    def command(self, port: int) -> list[str]:
        """Return the command line of a real server on 127.0.0.1:``port``."""
        command = [sys.executable, "-m", "sglang.launch_server"]
        settings = self.arguments() | {"host": "127.0.0.1", "port": port}
        for name, value in settings.items():
            flag = "--" + name.replace("_", "-")
            if value is True:
                command.append(flag)
            elif value is not False:
                command += [flag, str(value)]
        return command

    def environment(self, inherited: Mapping[str, str] = os.environ) -> dict[str, str]:
        """Return the environment of a process that uses the SGLang of ``tree``, without orders."""
        # A setting of the caller's shell must not reach the engine.
        kept = {
            name: value
            for name, value in inherited.items()
            if not name.startswith(("SGLANG_", "TRITON_", "PYTHON"))
        }
        paths = (self.tree, STUBS, REPOSITORY)
        kept |= {
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            # Compile once, and leave the shared trees as they are.
            "PYTHONPYCACHEPREFIX": str(REPOSITORY / ".cache" / "engine-bytecode"),
            "TRITON_INTERPRET": "1",
            "SGLANG_USE_CPU_ENGINE": "1",
            "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
            "SGLANG_CPU_OMP_THREADS_BIND": "|".join(map(str, range(self.ranks))),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }
        return kept | dict(self.variables)
