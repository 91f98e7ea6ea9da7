"""Result files without a GPU: rows of real suites with simulated times, made by the runner's own code."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from bench_cases import ENVIRONMENT, Fake
from benchmarks import rows
from benchmarks.contender import Contender
from benchmarks.entries import Entry, of_suite
from benchmarks.results import dump
from tritonops.calibrate.race import Result

Speed = Callable[[Entry], float | None]
HOSTILE = "<script>alert('1')</script>|&"


def simulated(
    entries: Iterable[Entry], speeds: dict[str, Speed], *, mode: str = "graph", sigma: float = 0.01, seed: int = 0,
    rounds: int = 20, torch_ms: float | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Rows of torch and of providers that are so many times as fast; None: it could not be timed.

    A round has a common disturbance (clocks), and each time one of its own of `sigma`.
    """
    out = []
    for entry in entries:
        rng = random.Random(zlib.crc32(f"{seed} {entry.describe()}".encode()))
        probe = rows.empty(entry, Contender(Fake("torch")), mode)
        moved, operations = rows.bytes_and_operations(probe)
        ms = torch_ms or max(operations / 650e9, moved / 2.6e9, 0.003)
        common = [1 + 0.05 * abs(rng.gauss(0, 1)) for _ in range(rounds)]
        found = {"torch": 1.0} | {name: speed(entry) for name, speed in speeds.items()}
        times = {
            name: tuple(ms / speed * c * max(rng.gauss(1, sigma), 0.5) for c in common)
            for name, speed in found.items()
            if speed is not None
        }
        result = Result(times, 0, ())
        for name, speed in found.items():
            c = Contender(Fake(name), error=1e-3)
            if speed is None:
                c.failed = "raised: RuntimeError: no kernel"
                out.append(rows.empty(entry, c, mode, 1e-3))
                continue
            row = rows.filled(entry, c, mode, result, {}, 1e-3, ENVIRONMENT["copy_tbps"])
            if name == "ours":
                row["variant"] = "vendor" if speed == 1.0 else f"tiled/{'big' if ms > 0.1 else 'small'}"
            out.append(row)
    return out


def suite(name: str, **more: Any) -> list[dict[str, Any]]:
    """Ours wins on large sizes and loses a little on small ones, Liger fails on wide rows."""

    def ours(entry: Entry) -> float:
        size = max(entry.sizes.values())
        return 1.3 if size > 8192 else 1.0 if size > 4096 else 0.93

    def liger(entry: Entry) -> float | None:
        return None if max(entry.sizes.values()) > 12000 else 1.1

    speeds: dict[str, Speed] = {"ours": ours, "liger": liger, "compile": lambda e: 0.9, "tutorial": lambda e: 0.6}
    return simulated(of_suite(name), speeds, **more)


def write(path: Path, found: list[dict[str, Any]], **environment: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(dump("python -m benchmarks.run", ENVIRONMENT | environment, found))
    return path
