"""Comparing contenders fairly: interleaved rounds in random order, successive halving, bad rounds left out."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, median_low

from .telemetry import Monitor, Reading

# A round in which the base is this far off its median was disturbed, whatever NVML says.
_DISTURBED = 0.25


@dataclass(frozen=True)
class Stage:
    """Rounds of a stage; then at most `keep` contenders stay, those within `within` of the best. The base stays."""

    rounds: int
    keep: int
    within: float


HALVING = (Stage(2, 8, 1.35), Stage(4, 4, 1.10), Stage(14, 4, 1.10))
MIN_ROUNDS = 8


@dataclass(frozen=True)
class Result:
    """Times by contender, in milliseconds: the k-th of two contenders are of one round; eliminated ones have fewer."""

    times: Mapping[str, tuple[float, ...]]
    rejected: int
    readings: tuple[Reading, ...]


def race(
    contenders: Mapping[str, Callable[[], float]],
    *,
    base: str,
    stages: Sequence[Stage] = HALVING,
    rng: random.Random,
    monitor: Monitor,
    seconds: float = float("inf"),
    clock: Callable[[], float] = time.perf_counter,
) -> Result:
    """Time the contenders against each other.

    In each round every contender that is left is timed once, in an order drawn anew, so that drift of clocks and
    temperature meets all of them alike. A round during which the GPU was throttled is thrown away and repeated (half
    as many again at most), one in which the base is 25 % off its median is thrown away.

    Args:
        contenders: name -> a function that times one execution, in milliseconds.
        base: the contender that is never eliminated.
        seconds: wall time after which no further round starts, once the contenders that are left have
            MIN_ROUNDS rounds.
    """
    started = clock()
    alive = sorted(contenders)
    rounds: list[dict[str, float]] = []
    readings: list[Reading] = []
    rejected = 0
    for stage in stages:
        wanted, retries = stage.rounds, stage.rounds // 2 + 1
        while wanted:
            if clock() - started > seconds and len(rounds) >= MIN_ROUNDS:
                break
            order = alive[:]
            rng.shuffle(order)
            taken = {name: contenders[name]() for name in order}
            reading = monitor.read()
            if reading.throttled is not None and retries:
                retries -= 1
                rejected += 1
                continue
            readings.append(reading)
            rounds.append(taken)
            wanted -= 1
        kept = _undisturbed(rounds, base)
        rejected += len(rounds) - len(kept)
        rounds = kept
        alive = _survivors(alive, rounds, base, stage)
    times = {name: tuple(r[name] for r in rounds if name in r) for name in sorted(contenders)}
    return Result(times, rejected, tuple(readings))


def _undisturbed(rounds: list[dict[str, float]], base: str) -> list[dict[str, float]]:
    # One of the times, so that at least its round stays.
    middle = median_low(r[base] for r in rounds)
    return [r for r in rounds if abs(r[base] / middle - 1) <= _DISTURBED]


def _survivors(alive: list[str], rounds: list[dict[str, float]], base: str, stage: Stage) -> list[str]:
    middle = {name: median(r[name] for r in rounds if name in r) for name in alive}
    limit = stage.within * min(middle.values())
    ranked = sorted((n for n in alive if n != base and middle[n] <= limit), key=lambda n: (middle[n], n))
    return sorted([base, *ranked[: stage.keep]])
