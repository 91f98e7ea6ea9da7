"""A run: entries one after the other, each on file before the next, until the budget is spent."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from . import bench, rows
from .contender import BASE, BROKEN, Contender, ContextLost
from .entries import Entry
from .machine import Machine
from .providers import Provider
from .results import Results, entry_key


@dataclass(frozen=True)
class Plan:
    """What is measured.

    Attributes:
        work: entries with their providers, torch first.
        skipped: rows that there will not be, by provider and reason: ops it does not have, shapes it is not named for.
    """

    work: tuple[tuple[Entry, tuple[Provider, ...]], ...]
    skipped: dict[str, dict[str, int]]


def plan(entries: Sequence[Entry], providers: Sequence[Provider]) -> Plan:
    """Each entry with the providers that run on it; an entry that none but torch runs on is torch's alone."""
    skipped: dict[str, Counter[str]] = {}
    used: Counter[tuple[str, str, str]] = Counter()
    work = []
    for entry in entries:
        wanted = []
        for p in providers:
            why = p.skips(entry.case)
            place = (p.name, entry.op, entry.direction)
            if why is None and p.most is not None and entry.case.own:
                why = f"runs on the first {p.most} shapes only" if used[place] >= p.most else None
            if why is None:
                used[place] += 1
                wanted.append(p)
            else:
                skipped.setdefault(p.name, Counter())[why] += 1
        if wanted:
            work.append((entry, tuple(wanted)))
    return Plan(tuple(work), {name: dict(count) for name, count in skipped.items()})


def run(
    planned: Plan,
    machine: Machine,
    mode: str,
    results: Results,
    *,
    copy_tbps: float | None = None,
    rounds: int = bench.ROUNDS,
    deadline: float = float("inf"),
    progress: Callable[[str], None] = lambda text: None,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Measure what `results` does not hold yet; the number of entries left when the deadline came.

    Raises:
        ContextLost: a provider broke the CUDA context; its row is on file, and a run that goes on leaves it out there.
        OSError: the file cannot be written.
    """
    todo = [
        (entry, providers)
        for entry, providers in planned.work
        if not {p.name for p in providers} <= results.of(entry_key(entry, mode)).keys()
    ]
    done = len(planned.work) - len(todo)
    for n, (entry, providers) in enumerate(todo):
        if clock() > deadline:
            return len(todo) - n
        progress(f"{done + n + 1}/{len(planned.work)} {entry.describe()}")
        known = results.of(entry_key(entry, mode))
        usable = [p for p in providers if not str(known.get(p.name, {}).get("failed") or "").startswith(BROKEN)]
        if not any(p.name == BASE for p in usable):
            why = f"torch {BROKEN}"
            results.add([rows.empty(entry, Contender(p, failed=why), mode) for p in usable])
            continue
        try:
            results.add(bench.measure(entry, usable, machine, mode, copy_tbps=copy_tbps, rounds=rounds))
        except ContextLost as error:
            results.add([rows.empty(entry, Contender(error.provider, failed=error.why), mode)])
            raise
    return 0


def yardstick(results: Results) -> float | None:
    """B: host microseconds that an operator of torch.library adds to torch.mm; None where it was not measured."""
    times = {
        row["provider"]: row["ms"]
        for row in results.rows
        if row["mode"] == "host" and row["op"] == "matmul" and row["ms"] and row["suite"] == "overhead"
    }
    return round((times["library"] - times[BASE]) * 1e3, 2) if {"library", BASE} <= times.keys() else None
