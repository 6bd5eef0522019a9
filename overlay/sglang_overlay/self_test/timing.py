"""GPU times of calls that are replayed from a CUDA graph, as a server runs them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Replay:
    """A captured graph, with the calls in it: a graph holds addresses, not the tensors."""

    graph: torch.cuda.CUDAGraph
    calls: Sequence[Callable[[], object]]


def captured(calls: Sequence[Callable[[], object]]) -> Replay:
    """Return a graph of all ``calls``, each run twice before so that everything is compiled."""
    for _ in range(2):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return Replay(graph, calls)


def replay_time(replay: Replay, repeats: int) -> float:
    """Return ms per replay over ``repeats`` replays in a row."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        replay.graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / repeats


def microseconds(calls: Sequence[Callable[[], object]], *, rounds: int = 7) -> float:
    """Return the median over ``rounds`` of the µs of one of ``calls``, all in one graph."""
    replay = captured(calls)
    replay_time(replay, 1)
    times = [replay_time(replay, 3) for _ in range(rounds)]
    return 1e3 * statistics.median(times) / len(calls)
