"""Compares programs that do the same work, on a host that does not keep its pace.

A host that others share may be a quarter slower for seconds. Runs one after the other then tell
nothing of half a percent, however many there are. So the programs go in lockstep: each makes one
short visit, the next one the same visit, and so on, in ever another order. What slows the host
slows all of them alike, and is no part of the difference between two times of one `Round`.

The differences of all rounds of one kind have a trimmed mean: few rounds see the host change its
pace, or do something else for a moment, and those are trimmed. A cost that is there in a few rounds
only would be trimmed as well. So rounds in which it may be are of a kind of their own; that must be
told by what was done, never by what it took.

The interval for 95 % is from a bootstrap over blocks of rounds that follow one another, since
neighbours may have something in common.

Checked with made-up times in ``tests/benchmarks/test_lockstep.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

TRIMMED = 0.2
"""The share of the values that a mean leaves out at either end."""
REPLICATES, BLOCK = 400, 24

# What all must have done alike in a visit.
SAME = ("mode", "kind", "steps", "tokens", "digest", "over")


class Player(Protocol):
    """A program that makes a visit whenever it is asked to.

    Its answer has `SAME`, the visit's ``seconds``, and in ``own`` what it alone did, or nothing.
    """

    def ask(self, what: str) -> dict[str, Any]:
        """Return the answer to ``what``, once it is there."""


@dataclass(frozen=True, kw_only=True)
class Round:
    """One visit of each program.

    ``steps`` of one ``mode`` were made; ``kind`` tells such rounds apart. ``seconds``, and ``own``:
    what a program did that is no part of the others' work, by the program's name.
    """

    mode: str
    kind: str
    steps: int
    tokens: int
    seconds: Mapping[str, float]
    own: Mapping[str, str]


class DivergedError(Exception):
    """Two programs did not do the same."""


def play_round(
    players: Mapping[str, Player], number: int, what: str = "visit"
) -> tuple[Round, bool]:
    """Let each of ``players`` make its visit; return the round, and whether it was the last.

    Raises:
        DivergedError: they did not do the same, so their times cannot be compared.
    """
    orders = list(permutations(players))
    answers = {name: players[name].ask(what) for name in orders[number % len(orders)]}
    base, *others = players
    did = {name: {key: answer[key] for key in SAME} for name, answer in answers.items()}
    for name in others:
        if did[name] != did[base]:
            raise DivergedError(
                f"round {number}: {name} did {did[name]}, {base} did {did[base]}; their times can "
                f"only be compared if they do the same: look for what decides it by time or chance"
            )
    first = answers[base]
    made = Round(
        mode=first["mode"],
        kind=first["kind"],
        steps=first["steps"],
        tokens=first["tokens"],
        seconds={name: answers[name]["seconds"] for name in players},
        own={name: answers[name]["own"] for name in players},
    )
    return made, bool(first["over"])


def trimmed_mean(values: NDArray[np.float64]) -> float:
    """Return the mean of what is left of ``values`` [n] without `TRIMMED` of them at either end."""
    cut = int(TRIMMED * len(values))
    return float(np.sort(values)[cut : len(values) - cut].mean())


def compare(rounds: Sequence[Round], name: str, base: str) -> dict[str, Any]:
    """Return what ``name`` takes longer than ``base``, each with what it lies between at 95 %.

    ``gain``: the throughput over that of ``base``, less 1. By mode, ``more_us``: how much longer a
    step takes in µs; ``step_us``: what one of ``base`` takes; ``steps``: how many there were.
    """
    found = _Differences(rounds, name, base)
    blocks = np.array_split(np.arange(len(rounds)), max(len(rounds) // BLOCK, min(len(rounds), 8)))
    source = np.random.default_rng(0)
    drawn = source.integers(len(blocks), size=(REPLICATES, len(blocks)))
    replicates = [found.of(np.concatenate([blocks[each] for each in row])) for row in drawn]
    whole = found.of(np.arange(len(rounds)))
    return {
        "gain": _interval(_gain(whole), [_gain(each) for each in replicates]),
        "modes": {
            mode: {
                "steps": int(whole[mode].steps),
                "step_us": whole[mode].base / whole[mode].steps * 1e6,
                "more_us": _interval(
                    whole[mode].more / whole[mode].steps * 1e6,
                    [e[mode].more / e[mode].steps * 1e6 for e in replicates if mode in e],
                ),
            }
            for mode in sorted(whole)
        },
    }


@dataclass
class _Total:
    """Of one mode: the steps, the seconds of ``base``, and how many more the other takes."""

    steps: float = 0.0
    base: float = 0.0
    more: float = 0.0


class _Differences:
    """The times of a program's steps beside those of ``base``, round by round."""

    def __init__(self, rounds: Sequence[Round], name: str, base: str) -> None:
        kinds = [(each.mode, each.kind, each.own[name]) for each in rounds]
        self._kinds = sorted(set(kinds))
        self._kind = np.array([self._kinds.index(kind) for kind in kinds])
        self._steps = np.array([each.steps for each in rounds], dtype=np.float64)
        self._base = np.array([each.seconds[base] for each in rounds]) / self._steps
        self._more = np.array([each.seconds[name] for each in rounds]) / self._steps - self._base

    def of(self, chosen: NDArray[np.int64]) -> dict[str, _Total]:
        """Return the totals by mode of the rounds with the numbers ``chosen``."""
        totals: dict[str, _Total] = {}
        kind = self._kind[chosen]
        for number in np.unique(kind):
            rows = chosen[kind == number]
            total = totals.setdefault(self._kinds[number][0], _Total())
            steps = float(self._steps[rows].sum())
            total.steps += steps
            total.base += steps * trimmed_mean(self._base[rows])
            total.more += steps * trimmed_mean(self._more[rows])
        return totals


def _gain(totals: Mapping[str, _Total]) -> float:
    base = sum(total.base for total in totals.values())
    return base / (base + sum(total.more for total in totals.values())) - 1


def _interval(value: float, replicates: Sequence[float]) -> list[float]:
    low, high = np.percentile(replicates, [2.5, 97.5])
    return [value, float(low), float(high)]
