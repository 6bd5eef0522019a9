"""What the lockstep says of made-up times whose answer is known."""

from __future__ import annotations

import random
from typing import Any

import pytest

from benchmarks import lockstep
from benchmarks.lockstep import DivergedError, Round, compare

STEP, PREFILL = 6e-3, 25e-3
HALF_A_PERCENT = 0.005
ROUNDS = 600


class Host:
    """A host that is a quarter slower for seconds at a time, and busy elsewhere for moments."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._clock = self._changes_at = 0.0
        self._slow = False

    def spend(self, seconds: float) -> float:
        """Return what takes ``seconds`` on a quiet host."""
        if self._clock >= self._changes_at:
            self._slow = not self._slow
            self._changes_at = self._clock + self._random.uniform(1, 5)
        took = seconds * (1.25 if self._slow else 1.0) * self._random.lognormvariate(0, 0.02)
        took += self._random.expovariate(1 / 0.05) if self._random.random() < 0.01 else 0.0
        self._clock += took
        return took


def play(seed: int, *, more: float = 0.0, look: float = 0.0) -> list[Round]:
    """Return rounds of ``off``, and of ``level``, whose steps take the share ``more`` longer.

    ``look``: the seconds that every 16th round of decoding takes it on top.
    """
    host, rounds = Host(seed), []
    for number in range(ROUNDS):
        prefills = number % 10 == 9
        steps, step = (1, PREFILL) if prefills else (4, STEP)
        looks = not prefills and number % 16 == 0
        seconds = {}
        for name in ("off", "level")[:: 1 if number % 2 else -1]:
            work = steps * step * (1 + more * (name == "level"))
            seconds[name] = host.spend(work + look * (name == "level" and looks))
        rounds.append(
            Round(
                mode="EXTEND" if prefills else "DECODE",
                kind="",
                steps=steps,
                tokens=8 * steps,
                seconds=seconds,
                own={"off": "", "level": "look" * looks},
            )
        )
    return rounds


def in_turns(seed: int, *, more: float, turn: float = 0.8) -> list[float]:
    """Return what turns of 0.8 s, one program after the other, would say: ratios of rates."""
    host, ratios = Host(seed), []
    for _ in range(16):
        rates = []
        for slower in (0.0, more):
            steps = int(turn / STEP)
            rates.append(steps / sum(host.spend(STEP * (1 + slower)) for _ in range(steps)))
        ratios.append(rates[1] / rates[0])
    return ratios


def test_half_a_percent_is_told_from_nothing() -> None:
    seeds = range(20)
    planted = [compare(play(seed, more=HALF_A_PERCENT), "level", "off")["gain"] for seed in seeds]
    none = [compare(play(seed), "level", "off")["gain"] for seed in seeds]
    truth = 1 / (1 + HALF_A_PERCENT) - 1
    # Of 20 intervals for 95 %, 19 hold on average what is true.
    assert sum(low <= truth <= high for _, low, high in planted) >= 17
    assert sum(low <= 0 <= high for _, low, high in none) >= 17
    assert sum(high < 0 for _, _, high in planted) >= 17
    assert max(abs(value - truth) for value, _, _ in planted) < 0.003
    assert max(abs(value) for value, _, _ in none) < 0.003


def test_turns_one_after_the_other_cannot_tell() -> None:
    """Why there is a lockstep: in turns, the same host hides half a percent."""
    ratios = in_turns(1, more=HALF_A_PERCENT)
    assert max(ratios) - min(ratios) > 20 * HALF_A_PERCENT


def test_a_step_is_told_by_mode() -> None:
    modes = compare(play(3, more=0.02), "level", "off")["modes"]
    assert (modes["DECODE"]["steps"], modes["EXTEND"]["steps"]) == (4 * 540, 60)
    for mode, step in (("DECODE", STEP), ("EXTEND", PREFILL)):
        # The host is slow for about half of the time.
        assert step * 1e6 < modes[mode]["step_us"] < 1.25 * step * 1e6
        value, low, high = modes[mode]["more_us"]
        assert low < 0.02 * modes[mode]["step_us"] < high
        assert low < value < high


def test_what_only_some_rounds_cost_is_not_trimmed() -> None:
    """A look in every 16th round is among the fifth that a mean of all would leave out."""
    rounds = play(4, look=2e-3)
    looks = sum(each.own["level"] == "look" for each in rounds)
    value, low, high = compare(rounds, "level", "off")["modes"]["DECODE"]["more_us"]
    # Some of them on a slow host.
    assert low < 1.1 * looks * 2e-3 / (4 * 540) * 1e6 < high
    assert value > 0.7 * looks * 2e-3 / (4 * 540) * 1e6
    same = [Round(**{**vars(each), "own": {"off": "", "level": ""}}) for each in rounds]
    assert compare(same, "level", "off")["modes"]["DECODE"]["more_us"][0] < value / 2


def test_a_few_rounds_are_compared_as_well() -> None:
    """What is written after some seconds, and in a dry run."""
    for count in (1, 2, 9, 20):
        gain = compare(play(5)[:count], "level", "off")["gain"]
        assert gain[1] <= gain[0] <= gain[2]


class Puppet:
    """Answers the same whatever it is asked."""

    def __init__(self, asked: list[Puppet], **differing: Any) -> None:
        self._asked = asked
        same = {"mode": "DECODE", "kind": "", "steps": 4, "tokens": 17, "digest": 1, "over": False}
        self._answer = same | {"seconds": 0.025, "own": ""} | differing

    def ask(self, what: str) -> dict[str, Any]:
        assert what == "visit"
        self._asked.append(self)
        return self._answer


def test_everyone_is_first_and_behind_everyone_as_often() -> None:
    asked: list[Puppet] = []
    players = {name: Puppet(asked) for name in ("off", "placement", "idle")}
    for number in range(6):
        lockstep.play_round(players, number)
    rounds = [asked[at : at + 3] for at in range(0, 18, 3)]
    for player in players.values():
        assert [each.index(player) for each in rounds].count(0) == 2
        assert [each.index(player) for each in rounds].count(1) == 2


def test_a_round_has_what_each_took_and_did() -> None:
    players = {"off": Puppet([]), "idle": Puppet([], seconds=0.026, own="look", over=False)}
    made, over = lockstep.play_round(players, 0)
    assert made.seconds == {"off": 0.025, "idle": 0.026}
    assert made.own == {"off": "", "idle": "look"}
    assert (made.mode, made.steps, made.tokens, over) == ("DECODE", 4, 17, False)


@pytest.mark.parametrize(
    "differing", [{"digest": 2}, {"tokens": 16}, {"steps": 3}, {"mode": "EXTEND"}, {"over": True}]
)
def test_programs_that_do_not_do_the_same_are_refused(differing: dict[str, Any]) -> None:
    players = {"off": Puppet([]), "idle": Puppet([]), "placement": Puppet([], **differing)}
    with pytest.raises(DivergedError, match=r"^round 7: placement did .*, off did ") as refused:
        lockstep.play_round(players, 7)
    ((name, value),) = differing.items()
    assert f"{name!r}: {value!r}" in str(refused.value)
