"""What SGLang's objects say about the holders of KV slots."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang_overlay import upstream

RADIX = type("RadixCache", (), {"__module__": "sglang.srt.mem_cache.radix_cache"})


def algorithm(name: str) -> Any:
    return SimpleNamespace(is_none=lambda: not name, is_dflash=lambda: name in ("DFLASH", "DDTREE"))


def scheduler(speculation: str = "", cache: Any = RADIX, **changes: Any) -> Any:
    arguments = {
        "disaggregation_mode": "null",
        "pp_size": 1,
        "enable_hierarchical_cache": False,
        "enable_lmcache": False,
        "enable_streaming_session": False,
        "enable_hisparse": False,
        "enable_pdmux": False,
        "disable_overlap_schedule": False,
        "dllm_algorithm": None,
        "speculative_algorithm": speculation,
    }
    fields = {"is_hybrid_swa": False, "is_hybrid_ssm": False, "enable_overlap": False}
    for name, value in changes.items():
        (arguments if name in arguments else fields)[name] = value
    return SimpleNamespace(
        tree_cache=cache(),
        server_args=SimpleNamespace(**arguments),
        spec_algorithm=algorithm(speculation),
        **fields,
    )


@pytest.mark.parametrize("speculation", ["", "DFLASH", "DDTREE"])
def test_the_radix_cache_alone_can_be_moved(speculation: str) -> None:
    assert upstream.slot_holders(scheduler(speculation)) == []
    assert upstream.overlapping(scheduler(speculation)) == []


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"disaggregation_mode": "decode"}, "--disaggregation-mode"),
        ({"pp_size": 2}, "--pp-size above 1"),
        ({"enable_hierarchical_cache": True}, "--enable-hierarchical-cache"),
        ({"enable_lmcache": True}, "--enable-lmcache"),
        ({"enable_streaming_session": True}, "--enable-streaming-session"),
        ({"enable_hisparse": True}, "--enable-hisparse"),
        ({"is_hybrid_swa": True}, "sliding-window attention"),
        ({"is_hybrid_ssm": True}, "a state-space model"),
        ({"dllm_algorithm": "block"}, "a diffusion language model"),
        ({"speculation": "EAGLE3"}, "the drafter of EAGLE3"),
        ({"cache": type("RadixCache", (RADIX,), {"__module__": "a.fork"})}, "known is RadixCache"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_other_holder_is_named(change: dict[str, Any], named: str) -> None:
    (reason,) = upstream.slot_holders(scheduler(**change))
    assert named in reason


def test_overlapping_batches_are_named() -> None:
    (reason,) = upstream.overlapping(scheduler(enable_overlap=True))
    assert reason.startswith("batches overlap under ")


def test_two_streams_that_allocate_are_named() -> None:
    assert upstream.allocating_twice(scheduler().server_args) == []
    (reason,) = upstream.allocating_twice(scheduler(enable_pdmux=True).server_args)
    assert reason.startswith("--enable-pdmux")


@pytest.mark.parametrize(
    ("changes", "behind"),
    [
        ({}, False),
        ({"disaggregation_mode": "decode"}, True),
        ({"enable_hierarchical_cache": True}, True),
        ({"enable_lmcache": True}, True),
        ({"disaggregation_mode": "prefill", "disable_overlap_schedule": True}, False),
        ({"disaggregation_mode": "decode", "disable_overlap_schedule": True, "pp_size": 2}, True),
    ],
    ids=str,
)
def test_writers_that_do_not_wait_for_a_forward(changes: dict[str, Any], behind: bool) -> None:
    assert upstream.writes_behind_the_host(scheduler(**changes).server_args) == behind


def test_only_exact_caches_have_known_nodes() -> None:
    assert upstream.has_known_nodes(RADIX())
    assert not upstream.has_known_nodes(type("RadixCache", (RADIX,), {"__module__": "a.fork"})())
    assert not upstream.has_known_nodes(type("ChunkCache", (), {})())


@pytest.mark.parametrize(
    ("gathers", "tensor_ranks", "context_ranks", "largest"),
    [(False, 8, 1, 50), (True, 8, 1, 56), (True, 8, 3, 72), (False, 8, 4, 52)],
)
def test_a_graph_batch_is_rounded_up_as_sglang_does(
    monkeypatch: pytest.MonkeyPatch,
    *,
    gathers: bool,
    tensor_ranks: int,
    context_ranks: int,
    largest: int,
) -> None:
    """By the sizes of groups that a CPU server of one rank never has."""
    attention = SimpleNamespace(
        get_attention_tp_size=lambda: tensor_ranks, get_attention_cp_size=lambda: context_ranks
    )
    utils = SimpleNamespace(require_gathered_buffer=lambda _: gathers)
    monkeypatch.setitem(sys.modules, "sglang.srt.layers.dp_attention", attention)
    monkeypatch.setitem(sys.modules, "sglang.srt.utils", utils)
    for parent in ("sglang", "sglang.srt", "sglang.srt.layers"):
        monkeypatch.setitem(sys.modules, parent, SimpleNamespace(__path__=[]))
    assert upstream.largest_graph_batch(SimpleNamespace(), 50) == largest


def test_layers_in_a_plain_dict_are_found_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's frame around Transformers' models (``--model-impl transformers``) has such a one."""
    attention: Any = type("RadixAttention", (torch.nn.Module,), {})
    stub = SimpleNamespace(RadixAttention=attention)
    monkeypatch.setitem(sys.modules, "sglang.srt.layers.radix_attention", stub)
    for parent in ("sglang", "sglang.srt", "sglang.srt.layers"):
        monkeypatch.setitem(sys.modules, parent, SimpleNamespace(__path__=[]))
    model, plain, framed = torch.nn.Module(), attention(), attention()
    model.add_module("own", plain)
    model.add_module("framework", torch.nn.Module())
    model.attention_instances = {0: framed}
    assert upstream.attention_layers(model) == [framed, plain]
    assert upstream.attention_layers(torch.nn.Module()) == []
