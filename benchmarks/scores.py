"""What result files say of each provider: wins, losses, ties, geometric mean and worst row against torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import rows as result_rows
from .contender import BASE
from .results import ResultsError, read

Row = Mapping[str, Any]

# Rows of these check the method, not a provider (benchmarks.trials).
AGAIN, SLOWED = f"{BASE}#", f"slowed:{BASE}"


@dataclass(frozen=True)
class File:
    """A result file that was read and checked."""

    path: Path
    environment: Mapping[str, Any]
    rows: tuple[Row, ...]


def load(path: Path) -> File:
    """A result file whose numbers are numbers.

    Raises:
        ResultsError: it is damaged; names it and the row.
        OSError: it cannot be read.
    """
    top = read(path)
    for i, row in enumerate(top["rows"]):
        wrong = [name for name in ("ms", "speedup", "tflops", "fraction") if not _positive(row.get(name))]
        wrong += [name for name in ("ci95", "speedup_ci95") if not _pair(row.get(name))]
        wrong += [name for name in _TEXTS if not isinstance(row[name], str)]
        wrong += [f"shape {k}" for k, v in row["shape"].items() if type(v) is not int or v < 1]
        wrong += ["rounds"] if type(row.get("rounds", 0)) is not int else []
        if wrong:
            raise ResultsError(f"{path}: rows[{i}]: {', '.join(wrong)}: not what a row has there")
    return File(path, top["environment"], tuple(top["rows"]))


_TEXTS = ("suite", "op", "pass", "dtype", "provider", "mode")


def _positive(value: Any) -> bool:
    if value is None:
        return True
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0


def _pair(value: Any) -> bool:
    return value is None or (isinstance(value, list) and len(value) == 2 and all(v and _positive(v) for v in value))


def verdict_of(row: Row) -> str | None:
    """``win``, ``loss`` or ``tie`` against torch by the interval of the ratio; None for torch and for what has none."""
    interval = row.get("speedup_ci95")
    if row["provider"] == BASE or row["ms"] is None or interval is None:
        return None
    low, high = interval
    return result_rows.verdict(low, high, row.get("rounds", 0))


def is_trial(row: Row) -> bool:
    return str(row["provider"]).startswith((AGAIN, SLOWED))


def shape_of(row: Row) -> str:
    """``4096x4096x512``; with the layout of a product and the ids of an embedding."""
    words = ["x".join(map(str, row["shape"].values())), row["layout"], row["ids"]]
    words += [f"{k}={v}" for k, v in (row.get("traits") or {}).items()]
    return " ".join(str(w) for w in words if w)


@dataclass(frozen=True)
class Score:
    """Of some rows of one provider, how they compare with torch; what is wrong counts as neither win nor loss.

    Attributes:
        key: what the rows have in common.
        wrong: timed, but the accuracy gate says that the result is wrong.
        untimed: it could not be timed.
        geomean: of time of torch / time of the provider over the right rows; None where there are none.
        worst: the row with the smallest such ratio; None where there are none.
    """

    key: tuple[str, ...]
    wins: int
    losses: int
    ties: int
    wrong: int
    untimed: int
    geomean: float | None
    worst: Row | None

    @property
    def count(self) -> int:
        return self.wins + self.losses + self.ties + self.wrong + self.untimed


def score(key: tuple[str, ...], found: Sequence[Row]) -> Score:
    timed = [row for row in found if verdict_of(row) is not None]
    right = [row for row in timed if not row["failed"]]
    verdicts = [verdict_of(row) for row in right]
    ratios = [float(row["speedup"]) for row in right if row.get("speedup")]
    return Score(
        key,
        wins=verdicts.count("win"),
        losses=verdicts.count("loss"),
        ties=verdicts.count("tie"),
        wrong=len(timed) - len(right),
        untimed=len(found) - len(timed),
        geomean=math.exp(math.fsum(map(math.log, ratios)) / len(ratios)) if ratios else None,
        worst=min(right, key=lambda row: (row["speedup"], shape_of(row))) if ratios else None,
    )


def grouped(found: Iterable[Row], key: Callable[[Row], tuple[str, ...]]) -> dict[tuple[str, ...], list[Row]]:
    """Rows by key, in the order in which the keys come."""
    out: dict[tuple[str, ...], list[Row]] = {}
    for row in found:
        out.setdefault(key(row), []).append(row)
    return out


def scores(found: Iterable[Row], *names: str) -> list[Score]:
    """The score of each provider but torch for each combination of the named fields, e.g. op and pass."""
    theirs = [row for row in found if row["provider"] != BASE]
    by = grouped(theirs, lambda row: (*(str(row[name]) for name in names), str(row["provider"])))
    return [score(key, members) for key, members in by.items()]


def versions(environment: Mapping[str, Any]) -> str:
    """``NVIDIA H200, torch 2.11.0, Triton 3.6.0, driver 580.1``: what a picture and a table name."""
    named = [("torch", "torch"), ("triton", "Triton"), ("driver", "driver")]
    found = [f"{label} {environment[name]}" for name, label in named if environment.get(name)]
    return ", ".join([str(environment.get("gpu") or "unknown GPU"), *found])


HEAD = ("rows", "wins", "ties", "losses", "wrong", "not timed", "geomean", "worst", "worst row")


def cells(s: Score) -> list[str]:
    """A score as text, in the order of HEAD."""
    return [
        *map(str, (s.count, s.wins, s.ties, s.losses, s.wrong, s.untimed)),
        "" if s.geomean is None else f"{s.geomean:.2f}",
        "" if s.worst is None else f"{s.worst['speedup']:.2f}",
        "" if s.worst is None else f"{shape_of(s.worst)} {s.worst['dtype']}",
    ]


def text_table(head: Sequence[str], body: Sequence[Sequence[str]], left: int) -> list[str]:
    """Lines of a table for a terminal; the first `left` columns and the last are aligned to the left."""
    every = [list(head), *map(list, body)]
    widths = [max(len(line[i]) for line in every) for i in range(len(head))]
    last = len(head) - 1
    return [
        "  ".join(
            c.ljust(w) if i < left or i == last else c.rjust(w)
            for i, (c, w) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in every
    ]
