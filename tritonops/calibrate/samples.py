"""Measured cases as the learner and the verifier see them: speed-ups over the vendor, with intervals, by mode."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from ..device import DeviceInfo
from ..dispatch.problem import Problem
from ..dispatch.variant import VENDOR, OpSpec
from .raw import Measured, Raw, RawError

# What a variant whose eager time was not measured may cost beside the one that was.
_UNMEASURED = 0.9
# Out of memory while ten argument sets and results are kept alive says nothing against a variant.
_HARMLESS = "OutOfMemoryError"


def pool_of(dtype: str) -> str:
    """float16 and bfloat16 move the same bytes and run at the same rate: they are learned from together."""
    return "16-bit" if dtype in ("float16", "bfloat16") else dtype


def pool(problem: Problem) -> tuple[str, str, bool]:
    """What is learned from together: dtype, layout, aligned."""
    return pool_of(problem.table_dtype), problem.layout, problem.aligned


@dataclass(frozen=True)
class Gain:
    """Speed-up over the vendor, time of the vendor / time of the variant, with its 95 % interval.

    Attributes:
        rounds: the speed-ups of single rounds, vendor and variant of the same round; () where it is an estimate.
    """

    value: float
    low: float
    high: float
    rounds: tuple[float, ...] = ()


@dataclass(frozen=True)
class Sample:
    """One measured case in one mode.

    Attributes:
        shape: one text for the sizes, whatever the dtype and the ids.
        gains: by variant, the vendor's 1 with them; what is illegal there has none, and what failed the gate or in any
            case of its pool.
        weight: of the case.
    """

    measured: Measured
    shape: str
    features: Mapping[str, int]
    gains: Mapping[str, Gain]
    weight: float


@functools.cache
def _rank(n: int) -> int:
    """k such that the k-th smallest and k-th largest of n times enclose their median with at least 95 %.

    P(the median lies below the k-th smallest) = P(Binomial(n, 1/2) < k) <= 0.025; 1, the extremes, where n is under 6.
    """
    below, k = 0, 0
    while True:
        below += math.comb(n, k)
        if below * 40 > 2**n:
            return max(k, 1)
        k += 1


def interval(values: Sequence[float]) -> tuple[float, float]:
    """A distribution-free 95 % interval of the median, by order statistics."""
    ordered, k = sorted(values), _rank(len(values))
    return ordered[k - 1], ordered[-k]


def gain_of(vendor: Sequence[float], variant: Sequence[float]) -> Gain:
    rounds = tuple(a / b for a, b in zip(vendor, variant, strict=False))
    return Gain(median(rounds), *interval(rounds), rounds)


def gains_of(measured: Measured, mode: str) -> dict[str, Gain]:
    """By variant. Eager times that were not taken are those of the graph where the device is the bottleneck, else
    estimated: no variant of ours is faster than the measured one's host and than its own graph."""
    graph = {vid: gain_of(measured.graph[VENDOR], times) for vid, times in measured.graph.items()}
    if mode == "graph" or not measured.eager:
        return graph
    eager = {vid: gain_of(measured.eager[VENDOR], times) for vid, times in measured.eager.items()}
    vendor = median(measured.eager[VENDOR])
    host = min((median(times) for vid, times in measured.eager.items() if vid != VENDOR), default=math.inf)
    for vid, times in measured.graph.items():
        if vid not in eager and math.isfinite(host):
            most = vendor / max(host, median(times))
            eager[vid] = Gain(most * _UNMEASURED, most * _UNMEASURED, most)
    return eager


def device_of(raw: Raw) -> DeviceInfo:
    """The device that was measured, as far as a choice depends on it."""
    facts = raw.header["device"]
    return DeviceInfo("cuda", facts["arch"], facts["sms"], 1 << 30, name=facts["names"][0], index=-2)


def refused(raw: Raw) -> set[str]:
    """Variants of ours that failed the gate."""
    return {vid for vid, verdict in raw.header["gate"].items() if verdict["passed"] is not True} - {VENDOR}


def samples(raw: Raw, spec: OpSpec, mode: str, *, heldout: bool) -> Iterator[Sample]:
    """The cases of one kind, in the order of their keys; sizes in the op's order, whatever the file's.

    Raises:
        RawError: a time or a weight is not a positive number, or a case has no time of the vendor's.
    """
    device, failed = device_of(raw), failures(raw)
    for m in sorted(raw.measured, key=lambda m: m.case.key):
        if m.case.heldout != heldout or not m.graph:
            continue
        problem = replace(m.case.problem, dims={name: m.case.problem.dims[name] for name in spec.dims})
        m = replace(m, case=replace(m.case, problem=problem))
        for times in (*m.graph.values(), *m.eager.values()):
            if not times or not all(math.isfinite(t) and t > 0 for t in times):
                raise RawError(f"{problem.describe()}: a time is not a positive number")
        if not (math.isfinite(m.case.weight) and m.case.weight > 0):
            raise RawError(f"{problem.describe()}: its weight is not a positive number")
        if VENDOR not in m.graph or (m.eager and VENDOR not in m.eager):
            raise RawError(f"{problem.describe()}: no time of the vendor's")
        out = failed[pool(problem)]
        gains = {vid: gain for vid, gain in gains_of(m, mode).items() if vid not in out}
        shape = json.dumps(dict(problem.dims), sort_keys=True)
        yield Sample(m, shape, spec.all_features(problem, device), gains, m.case.weight)


def failures(raw: Raw) -> dict[tuple[str, str, bool], set[str]]:
    """By pool, our variants that failed the gate, or raised or gave a wrong result in one of its cases: in a held-out
    one too, and in one that broke the context before a time was taken."""
    out: dict[tuple[str, str, bool], set[str]] = {}
    for m in raw.measured:
        found = out.setdefault(pool(m.case.problem), refused(raw))
        found |= m.graph.keys() - raw.header["gate"].keys() - {VENDOR}  # without a verdict
        found |= {vid for vid, why in m.failed.items() if _HARMLESS not in why} - {VENDOR}
    return out
