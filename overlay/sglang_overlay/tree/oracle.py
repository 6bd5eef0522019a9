"""Plain Python references of the tree's construction and of the walk. Slow on purpose.

Scores are float32, as in the order that `build` defines.
"""

from __future__ import annotations

import heapq
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

# One draft position: its log-probabilities and tokens, by rank.
Position = tuple[Sequence[float], Sequence[int]]


@dataclass(frozen=True)
class Node:
    """A node of the tree; ``parent`` is an index into the same list, −1 for the root."""

    token: int
    parent: int
    depth: int
    score: float


def best_first(positions: Sequence[Position], root: int, n: int) -> list[Node]:
    """Return the root and up to n − 1 nodes, taken from a heap one by one."""
    values = [_descending(log_probs) for log_probs, _ in positions]
    tree = [Node(token=root, parent=-1, depth=0, score=0.0)]
    # The order of `build`: score, depth, parent, rank.
    heap: list[tuple[float, int, int, int]] = []

    def offer(depth: int, parent: int, rank: int) -> None:
        if depth > len(values) or rank == len(values[depth - 1]):
            return
        score = _float32(tree[parent].score + values[depth - 1][rank])
        if score > -math.inf:
            heapq.heappush(heap, (-score, depth, parent, rank))

    offer(1, 0, 0)
    while heap and len(tree) < n:
        score, depth, parent, rank = heapq.heappop(heap)
        token = positions[depth - 1][1][rank]
        tree.append(Node(token=token, parent=parent, depth=depth, score=-score))
        offer(depth, parent, rank + 1)
        offer(depth + 1, len(tree) - 1, 0)
    return tree


def brute_force(positions: Sequence[Position], root: int, n: int) -> list[Node]:
    """Return the same, by writing down every prefix and sorting them all."""
    everything = [(0.0, 0, 0, 0)]  # score, depth, parent's place in this list, rank
    level = [0]
    for depth, (log_probs, _) in enumerate(positions, start=1):
        values = _descending(log_probs)
        reached = [
            (_float32(everything[parent][0] + value), depth, parent, rank)
            for parent in level
            for rank, value in enumerate(values)
        ]
        # A level in its own order: its places then stand for those in the whole.
        reached.sort(key=lambda one: (-one[0], one[2], one[3]))
        level = list(range(len(everything), len(everything) + len(reached)))
        everything += reached
    possible = [place for place in range(1, len(everything)) if everything[place][0] > -math.inf]
    possible.sort(key=lambda place: (-everything[place][0], everything[place][1], place))
    taken = [0, *possible[: n - 1]]
    index = {place: node for node, place in enumerate(taken)}
    tree = [Node(token=root, parent=-1, depth=0, score=0.0)]
    for place in taken[1:]:
        score, depth, parent, rank = everything[place]
        token = positions[depth - 1][1][rank]
        tree.append(Node(token=token, parent=index[parent], depth=depth, score=score))
    return tree


def walk(tokens: Sequence[int], parents: Sequence[int], predicted: Sequence[int]) -> list[int]:
    """Return the nodes on the path from the root along ``predicted``, one choice per node."""
    path = [0]
    while True:
        here = path[-1]
        chosen = [
            node
            for node in range(1, len(tokens))
            if parents[node] == here and tokens[node] == predicted[here]
        ]
        if not chosen:
            return path
        path.append(chosen[0])


def _descending(log_probs: Sequence[float]) -> list[float]:
    """Return the values that `build` takes odd ones for."""
    lowest, values = 0.0, []
    for log_prob in log_probs:
        lowest = -math.inf if math.isnan(log_prob) else min(lowest, log_prob)
        values.append(lowest)
    return values


def _float32(value: float) -> float:
    # A double holds the sum of two float32 well enough for the rounding to be the float32 one.
    return float(struct.unpack("f", struct.pack("f", value))[0])
