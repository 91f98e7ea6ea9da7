"""Result rows: the format of benchmarks/results, and what a row says of a comparison."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import median
from typing import Any

from tritonops.calibrate.race import Result
from tritonops.calibrate.raw import digits
from tritonops.calibrate.samples import gain_of, interval
from tritonops.calibrate.verify import useful

from .contender import BASE, Contender
from .entries import Entry

# Fewer rounds than these give no 95 % interval of a median.
MIN_ROUNDS = 6
# Equals are told apart by mistake in at most so many rows: the interval's 5 %.
FALSE_POSITIVES = 0.05
# A call whose eager time is so many times its device time waits for the host.
LAUNCH_BOUND = 1.5
# From this device time on the queue hides the host of every provider (tritonops.calibrate.sweep.EAGER_BELOW_MS).
HIDDEN_MS = 0.2

_ITEMSIZE = {"float32": 4, "tf32": 4, "float16": 2, "bfloat16": 2, "float64": 8}


def verdict(low: float, high: float, rounds: int) -> str:
    """``win``, ``loss`` or ``tie`` by the 95 % interval of the paired ratio torch / provider."""
    if rounds < MIN_ROUNDS or low <= 1 <= high:
        return "tie"
    return "win" if low > 1 else "loss"


def bytes_and_operations(row: Mapping[str, Any]) -> tuple[int, int]:
    """(useful bytes, operations) of a result row; 0 operations where bytes are what counts."""
    backward = row["pass"] == "bwd" and row["op"] != "matmul"
    op = f"{row['op']}_backward" if backward else str(row["op"])
    operations, moved = useful(op, {"batch": 1, **row["shape"]}, _ITEMSIZE.get(row["dtype"], 1))
    return moved, operations


def empty(entry: Entry, c: Contender, mode: str, error_torch: float | None = None) -> dict[str, Any]:
    """The row of a provider that was not timed."""
    return {
        **entry.facts(),
        "provider": c.name,
        "variant": None,
        "mode": mode,
        "ms": None,
        "ci95": None,
        "rounds": 0,
        "clock_mhz": None,
        "fraction": None,
        "tflops": None,
        "error": _finite(c.error),
        "error_torch": _finite(error_torch),
        "failed": c.failed,
        "heldout": entry.case.heldout,
        "speedup": None,
        "speedup_ci95": None,
        "verdict": None,
        "launch_bound": None,
    }


def filled(
    entry: Entry,
    c: Contender,
    mode: str,
    result: Result,
    probes: Mapping[str, float],
    error_torch: float | None,
    copy_tbps: float | None,
) -> dict[str, Any]:
    """The row of a provider with its times.

    Beside the fields that every result file has, ``speedup`` is torch's time over the provider's, of the same rounds;
    ``ms_eager`` (in mode graph) or ``ms_graph`` (in mode eager) is the time in the other mode, where it was looked at.
    """
    times = result.times[c.name]
    clocks = sorted(r.clock_mhz for r in result.readings if r.clock_mhz is not None)
    gain, ms = gain_of(result.times[BASE], times), median(times)
    row = empty(entry, c, mode, error_torch)
    moved, operations = bytes_and_operations(row)
    row |= {
        "ms": digits(ms),
        "ci95": [digits(t) for t in interval(times)],
        "rounds": len(times),
        "clock_mhz": clocks[len(clocks) // 2] if clocks else None,
        "fraction": digits(moved / ms / 1e9 / copy_tbps, 3) if copy_tbps else None,
        "tflops": digits(operations / ms / 1e9) if operations else None,
        "speedup": digits(gain.value),
        "speedup_ci95": [digits(gain.low), digits(gain.high)],
        "verdict": None if c.name == BASE else verdict(gain.low, gain.high, len(times)),
        "launch_bound": False if mode != "host" and ms >= HIDDEN_MS else None,
    }
    if c.name in probes:
        row["ms_eager" if mode == "graph" else "ms_graph"] = digits(probes[c.name])
        eager, graph = (probes[c.name], ms) if mode == "graph" else (ms, probes[c.name])
        row["launch_bound"] = eager > LAUNCH_BOUND * graph
    return row


def _finite(value: float | None) -> float | None:
    """JSON has no infinity: an infinite error is none, and `failed` says so."""
    return digits(value, 3) if value is not None and math.isfinite(value) else None
