"""Interleaved rounds: order, drift, throttling, disturbed rounds, halving, the time limit."""

from __future__ import annotations

import random
from statistics import median

import pytest

from tritonops.calibrate.race import HALVING, MIN_ROUNDS, Stage, race
from tritonops.calibrate.telemetry import Monitor, Reading

FOUR = (Stage(20, 8, float("inf")),)


class Card:
    """A GPU whose kernels take `ms` each, times what `drift` says of the number of timings so far."""

    def __init__(self, ms: dict[str, float], drift=lambda n: 1.0):
        self.ms, self.drift, self.log = ms, drift, []

    def contenders(self):
        return {name: lambda name=name: self.time(name) for name in self.ms}

    def time(self, name: str) -> float:
        factor = self.drift(len(self.log))
        self.log.append(name)
        return self.ms[name] * factor


class Nvml(Monitor):
    def __init__(self, *throttled: int):
        self.throttled, self.n = set(throttled), 0

    def read(self) -> Reading:
        self.n += 1
        return Reading(1980, 500, 50, "thermal slowdown" if self.n in self.throttled else None)


def run(card: Card, stages=FOUR, monitor: Monitor | None = None, seed: int = 0, **more):
    return race(
        card.contenders(), base="vendor", stages=stages, rng=random.Random(seed), monitor=monitor or Monitor(), **more
    )


@pytest.mark.parametrize("order", [["vendor", "a", "b"], ["b", "a", "vendor"]])
def test_ben_03_a_clock_that_still_rises_favours_nobody(order) -> None:
    """triton-lang/triton#2306: A and B are one kernel; the clock rises by 30 % over the first 30 timings."""
    card = Card({name: 1.0 for name in order}, drift=lambda n: 1.3 - 0.3 * min(n, 30) / 30)
    times = run(card).times
    ratios = sorted(a / b for a, b in zip(times["a"], times["b"], strict=True))
    assert abs(median(ratios) - 1) < 0.03
    assert {len(t) for t in times.values()} == {20 - run(Card(card.ms, card.drift)).rejected}


def test_every_round_times_each_once_and_the_order_is_drawn_anew() -> None:
    card = Card(dict.fromkeys(("vendor", "a", "b", "c"), 1.0))
    assert {len(t) for t in run(card).times.values()} == {20}
    rounds = [tuple(card.log[i : i + 4]) for i in range(0, 80, 4)]
    assert all(sorted(r) == ["a", "b", "c", "vendor"] for r in rounds) and len(set(rounds)) > 8


def test_rounds_of_two_contenders_can_be_paired() -> None:
    card = Card({"vendor": 1.0, "a": 0.5, "slow": 1.4}, drift=lambda n: 1 + 0.2 * ((n // 3) % 2))
    times = run(card, (Stage(2, 1, 1.2), Stage(6, 1, 1.2)), seed=3).times
    assert len(times["vendor"]) == len(times["a"]) == 8 and len(times["slow"]) == 2
    assert times["slow"] == tuple(t * 1.4 for t in times["vendor"][:2])


def test_a_throttled_round_is_thrown_away_and_taken_again() -> None:
    monitor = Nvml(2, 5)
    result = run(Card({"vendor": 1.0, "a": 0.9}), monitor=monitor)
    assert result.rejected == 2 and len(result.times["a"]) == 20 and monitor.n == 22
    assert len(result.readings) == 20 and all(r.throttled is None for r in result.readings)


def test_a_card_that_is_always_throttled_still_ends() -> None:
    result = run(Card({"vendor": 1.0}), monitor=Nvml(*range(1000)))
    assert len(result.times["vendor"]) == 20 and result.rejected == 11


def test_a_round_in_which_the_base_is_off_its_median_is_left_out_for_all() -> None:
    card = Card({"vendor": 1.0, "a": 0.9}, drift=lambda n: 3.0 if 8 <= n < 10 else 1.0)
    result = run(card)
    assert result.rejected == 1 and set(result.times["vendor"]) == {1.0} and len(result.times["a"]) == 19


def test_halving_keeps_the_base_and_the_best() -> None:
    ms = {"vendor": 5.0} | {f"v{i}": 1 + i / 20 for i in range(12)}
    times = run(Card(ms), HALVING).times
    lengths = {name: len(t) for name, t in times.items()}
    assert lengths["vendor"] == 20 and lengths["v11"] == 2
    assert {n for n, count in lengths.items() if count == 20} == {"vendor", "v0", "v1", "v2"}
    assert sum(lengths.values()) < 120


def test_time_ends_the_race_but_not_before_there_are_enough_rounds() -> None:
    ticks = iter(range(10_000))
    result = run(Card({"vendor": 1.0, "a": 1.0}), HALVING, seconds=0.5, clock=lambda: next(ticks))
    assert len(result.times["vendor"]) == MIN_ROUNDS


def test_the_same_seed_gives_the_same_order_whatever_the_dict_order() -> None:
    one, other = Card({"vendor": 1.0, "a": 1.0, "b": 1.0}), Card({"b": 1.0, "vendor": 1.0, "a": 1.0})
    run(one, seed=7)
    run(other, seed=7)
    assert one.log == other.log


def test_two_rounds_far_apart_leave_one() -> None:
    card = Card({"vendor": 1.0, "a": 0.9}, drift=lambda n: 1.0 if n < 2 else 9.0)
    result = run(card, (Stage(2, 1, 1.2),))
    assert result.times == {"vendor": (1.0,), "a": (0.9,)} and result.rejected == 1
