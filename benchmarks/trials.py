"""Whether verdicts can be trusted: two runs of a suite, the same provider twice, a slowdown that was planted."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .contender import BASE
from .results import IDENTITY, ResultsError, key_of
from .rows import FALSE_POSITIVES
from .scores import AGAIN, SLOWED, File, Row, shape_of, verdict_of

# What two runs of a suite must agree on, and a planted slowdown must be found on.
AGREE = 0.90
DETECT = 0.95
# A planted slowdown must be found from this time of torch on.
LONG_MS = 0.020
_SHOWN = 10


@dataclass(frozen=True)
class Outcome:
    """Lines for people, and whether the bar is met."""

    lines: tuple[str, ...]
    passed: bool


def describe(row: Row) -> str:
    return f"{row['provider']} {row['op']} {row['pass']} {row['dtype']} {shape_of(row)} {row['mode']} ({row['suite']})"


def _ratio(row: Row) -> str:
    low, high = row["speedup_ci95"]
    return f"{row['speedup']:.3f} ({low:.3f}-{high:.3f})"


def _some(title: str, found: Sequence[str]) -> list[str]:
    more = [f"  and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else []
    return [f"{title}:", *(f"  {line}" for line in found[:_SHOWN]), *more] if found else []


def compare(a: File, b: File) -> Outcome:
    """Verdicts of the rows that two runs have in common; one that only one of them could time counts as another.

    Raises:
        ResultsError: they have no row in common.
    """
    first, second = _by_key(a), _by_key(b)
    common = [key for key in first if key in second]
    pairs = [(first[key], second[key]) for key in common]
    pairs = [(x, y) for x, y in pairs if verdict_of(x) is not None or verdict_of(y) is not None]
    if not pairs:
        raise ResultsError(f"{a.path} and {b.path} have no timed row in common")
    same = sum(verdict_of(x) == verdict_of(y) for x, y in pairs)
    turned = [(x, y) for x, y in pairs if (verdict_of(x), verdict_of(y)) == ("win", "loss")]
    back = sum((verdict_of(x), verdict_of(y)) == ("loss", "win") for x, y in pairs)
    share = same / len(pairs)
    out = [f"{a.path} against {b.path}: {len(pairs)} rows in both"]
    for name in IDENTITY:
        if a.environment.get(name) != b.environment.get(name):
            out.append(f"made otherwise: {name} {a.environment.get(name)} and {b.environment.get(name)}")
    alone = len(first) + len(second) - 2 * len(common)
    out += [f"{alone} rows are in one of them alone"] if alone else []
    names = ("win", "tie", "loss", None)
    for x in names:
        counts = ((y, sum((verdict_of(p), verdict_of(q)) == (x, y) for p, q in pairs)) for y in names)
        out += [f"  {x or 'not timed':9s} then {y or 'not timed':9s} {n:5d}" for y, n in counts if n]
    out.append(f"same verdict: {same} of {len(pairs)} rows, {share:.1%}; the bar is {AGREE:.0%}")
    out.append(f"wins turned losses: {len(turned)}; the bar is 0 (losses turned wins: {back})")
    out += _some("wins turned losses", [f"{describe(x)}: {_ratio(x)}, then {_ratio(y)}" for x, y in turned])
    differ = [
        f"{describe(x)}: {verdict_of(x) or 'not timed'}, then {verdict_of(y) or 'not timed'}"
        for x, y in pairs
        if verdict_of(x) != verdict_of(y) and (x, y) not in turned
    ]
    return Outcome((*out, *_some("other verdicts", differ)), share >= AGREE and not turned)


def _by_key(file: File) -> dict[tuple[str, str], Row]:
    return {(key_of(row), str(row["provider"])): row for row in file.rows if row["provider"] != BASE}


def tail(wrong: int, count: int, rate: float = FALSE_POSITIVES) -> float:
    """The chance that of `count` rows of equals `wrong` or more are told apart, each with probability `rate`."""
    return math.fsum(math.comb(count, k) * rate**k * (1 - rate) ** (count - k) for k in range(wrong, count + 1))


def same_twice(file: File) -> Outcome:
    """A/A: torch against itself under another name must be called different in no more rows than stated.

    Raises:
        ResultsError: nothing of it was timed.
    """
    found = _timed(file, AGAIN, f"{BASE}#2")
    wrong = [row for row in found if verdict_of(row) != "tie"]
    wins = sum(verdict_of(row) == "win" for row in wrong)
    most = math.floor(FALSE_POSITIVES * len(found) + 1e-9)
    gap = max(abs(math.log(row["speedup"])) for row in found)
    out = [
        f"{file.path}: the same provider twice, {len(found)} rows",
        f"called different: {len(wrong)} ({wins} wins, {len(wrong) - wins} losses); the stated false-positive rate of "
        f"{FALSE_POSITIVES:.0%} allows {most}",
        f"the chance of so many or more at that rate: {tail(len(wrong), len(found)):.2g}; the largest difference: "
        f"{math.expm1(gap):.1%}",
        *_some("called different", [f"{describe(row)}: {_ratio(row)}" for row in wrong]),
    ]
    return Outcome(tuple(out), len(wrong) <= most)


def planted(file: File) -> Outcome:
    """Torch slowed by 5 % must be a loss in 95 % of the rows in which torch takes 20 us or more, a win in none.

    Raises:
        ResultsError: nothing of it was timed, or no row is that long.
    """
    found = _timed(file, SLOWED, SLOWED)
    base = {key_of(row): row["ms"] for row in file.rows if row["provider"] == BASE}
    long = [row for row in found if (base.get(key_of(row)) or 0.0) >= LONG_MS]
    if not long:
        raise ResultsError(f"{file.path}: torch takes {LONG_MS * 1e3:g} us or more in no row of {SLOWED}")
    hit = sum(verdict_of(row) == "loss" for row in long)
    reversed_ = [row for row in long if verdict_of(row) == "win"]
    short = len(found) - len(long)
    found_short = sum(verdict_of(row) == "loss" for row in found) - hit
    missed = [f"{describe(row)}: {_ratio(row)}" for row in long if verdict_of(row) != "loss"]
    out = [
        f"{file.path}: torch slowed by 5 %, {len(long)} rows of {LONG_MS * 1e3:g} us or more",
        f"detected: {hit} of {len(long)}, {hit / len(long):.1%}; the bar is {DETECT:.0%}",
        f"reversed: {len(reversed_)}; the bar is 0",
        f"of {short} shorter rows: {found_short} detected",
        *_some("missed", missed),
    ]
    return Outcome(tuple(out), hit >= DETECT * len(long) and not reversed_)


def _timed(file: File, prefix: str, asked: str) -> list[Row]:
    found = [row for row in file.rows if str(row["provider"]).startswith(prefix) and verdict_of(row) is not None]
    if not found:
        raise ResultsError(f"{file.path}: no timed row of {asked}; measure with --providers {asked}")
    return found


def trials_in(files: Sequence[File]) -> Mapping[str, Outcome]:
    """The trials that published files hold, by the file's name and the trial's."""
    out = {}
    for file in files:
        for name, prefix, judge in (("A/A", AGAIN, same_twice), ("planted", SLOWED, planted)):
            if any(str(row["provider"]).startswith(prefix) and verdict_of(row) is not None for row in file.rows):
                out[f"{file.path.name} {name}"] = judge(file)
    return out
