"""One entry: every provider is checked against the float64 oracle, then all are timed against torch, interleaved."""

from __future__ import annotations

import random
import zlib
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import torch

from tritonops import _compat
from tritonops.calibrate.measure import bytes_of, calls_and_sets
from tritonops.calibrate.race import Result, Stage, race
from tritonops.dispatch.variant import REGISTRY

from . import rows
from .accuracy import check
from .contender import BASE, Contender, caught, reason
from .entries import Entry
from .machine import Machine
from .providers import Provider

ROUNDS = 20

Row = dict[str, Any]
Sets = list[tuple[Any, ...]]


def measure(
    entry: Entry,
    providers: Sequence[Provider],
    machine: Machine,
    mode: str,
    *,
    copy_tbps: float | None = None,
    rounds: int = ROUNDS,
) -> list[Row]:
    """The result rows of one entry, torch's first.

    A provider that raises or is wrong has a row that says so; one that is only wrong is timed all the same.

    Args:
        providers: torch among them, which the others are compared with.
        mode: ``graph``, ``eager`` or ``host``: what is timed (tritonops.calibrate.measure).
        copy_tbps: the device's copy bandwidth, what `fraction` is of.
        rounds: of which each times every provider once, in random order; none is eliminated.

    Raises:
        ContextLost: a provider broke the CUDA context.
    """
    contenders = [Contender(p) for p in sorted(providers, key=lambda p: p.name != BASE)]
    if not contenders or contenders[0].name != BASE:
        raise ValueError(f"measure: {BASE!r} is not among the providers")
    if entry.refused:
        return _nothing(entry, contenders, mode, entry.refused)
    machine.case()
    with torch.no_grad(), _compat.float32_precision(entry.case.problem.traits.get("precision") == "tf32"):
        try:
            return _measure(entry, contenders, machine, mode, copy_tbps, rounds)
        except torch.OutOfMemoryError as error:
            if machine.where.type == "cuda":
                torch.cuda.empty_cache()
            return _nothing(entry, contenders, mode, reason("does not fit", error))


def _nothing(entry: Entry, contenders: Sequence[Contender], mode: str, why: str) -> list[Row]:
    for c in contenders:
        c.failed = c.failed or why
    return [rows.empty(entry, c, mode, contenders[0].error) for c in contenders]


def _measure(
    entry: Entry, contenders: Sequence[Contender], machine: Machine, mode: str, copy_tbps: float | None, rounds: int
) -> list[Row]:
    case, spec, where = entry.case, REGISTRY[entry.case.problem.op], machine.where
    with torch.random.fork_rng([where] if where.type == "cuda" else []):
        torch.manual_seed(zlib.crc32(case.key.encode()))
        first = case.sample(spec, str(where))
        size = bytes_of(first) + check(entry, spec, contenders, machine, first)
        calls, count = calls_and_sets(size, machine.device.l2_bytes, machine.memory_bytes)
        sets = [first]
        if contenders[0].call is not None:
            sets += [case.sample(spec, str(where)) for _ in range(count - 1)]
    for c in contenders:
        _prepare(entry, c, machine, mode, sets, calls)
    timers = {c.name: c.timer for c in contenders if c.timer is not None}
    if BASE not in timers:
        return _nothing(entry, contenders, mode, f"torch, what it is compared with: {contenders[0].failed}")
    result = race(
        timers,
        base=BASE,
        stages=(Stage(rounds, len(timers), float("inf")),),
        rng=random.Random(case.key),
        monitor=machine.monitor,
    )
    probes = _probe(entry, contenders, machine, mode, sets, calls, result)
    out = []
    for c in contenders:
        if c.timer is None:
            row = rows.empty(entry, c, mode, contenders[0].error)
        else:
            row = rows.filled(entry, c, mode, result, probes, contenders[0].error, copy_tbps)
        if c.call is not None:
            row["variant"] = c.provider.variant(case, mode)
        out.append(row)
    return out


def _prepare(entry: Entry, c: Contender, machine: Machine, mode: str, sets: Sets, calls: int) -> None:
    """Give a contender its timer, used once; or say why it has none."""
    if c.call is None:
        return
    try:
        own = [c.provider.arguments(entry.case, args) for args in sets]
        with c.provider.around(entry.case):
            timer = c.entered(entry, machine.timer(mode, c.call, own, calls))
        timer()
        c.timer = timer
    except Exception as error:
        why = caught(c, entry, machine, f"cannot be timed in mode {mode}", error)
        c.failed = c.failed or why


def _probe(
    entry: Entry,
    contenders: Sequence[Contender],
    machine: Machine,
    mode: str,
    sets: Sets,
    calls: int,
    result: Result,
) -> Mapping[str, float]:
    """Of short calls the time in the other mode, eager beside graph or graph beside eager; no comparison."""
    other = {"graph": "eager", "eager": "graph"}.get(mode)
    found: dict[str, float] = {}
    for c in contenders:
        if other is None or c.timer is None or c.call is None or median(result.times[c.name]) >= rows.HIDDEN_MS:
            continue
        try:
            own = [c.provider.arguments(entry.case, args) for args in sets]
            with c.provider.around(entry.case):
                timer = machine.timer(other, c.call, own, calls)
                found[c.name] = timer() * c.provider.charge
        except Exception as error:
            caught(c, entry, machine, "raised", error)
    return found
