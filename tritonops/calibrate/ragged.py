"""Small ragged problems that stand for planned ones where correctness is checked."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..device import DeviceInfo
from ..dispatch import override
from ..dispatch.problem import Problem
from ..dispatch.select import illegal
from ..dispatch.variant import OpSpec, Variant
from .case import Case

MAX_TRIALS = 6

# Elements of x in a norm with many rows.
_MANY = 1 << 21


@dataclass(frozen=True, slots=True)
class Trial:
    """A problem with its data's distribution; `key` is one text for it."""

    problem: Problem
    ids: str

    @property
    def key(self) -> str:
        p = self.problem
        return json.dumps([dict(p.dims), p.dtype, p.layout, p.aligned, dict(p.traits), p.flags, self.ids])


def trials(spec: OpSpec, variant: Variant, cases: Sequence[Case], device: DeviceInfo) -> tuple[list[Trial], str]:
    """At most MAX_TRIALS trials of a variant that is a candidate in these cases; and, where there is none, why.

    One for each dtype, layout, alignment and set of traits, as far as they go; every second one confines persistent
    kernels to one SM, so that a program has several tiles.
    """
    groups: dict[str, list[Case]] = {}
    for case in cases:
        groups.setdefault(_group(case.problem), []).append(case)
    chosen = [sorted(group, key=_size) for group in _varied(list(groups.values()))]
    out: dict[str, Trial] = {}
    why = "it is a candidate nowhere"
    for number in range(min(2 * len(chosen), MAX_TRIALS)):
        turn, place = divmod(number, len(chosen))
        group, many = chosen[place], (turn + place) % 2 == 1
        case = group[len(group) // 2] if many else group[0]
        problem = _smaller(spec, variant, case.problem, device, many)
        if isinstance(problem, Problem):
            trial = Trial(problem, case.ids)
            out.setdefault(trial.key, trial)
        else:
            why = problem
    return list(out.values()), why


def _facts(problem: Problem) -> dict[str, str]:
    traits = json.dumps(dict(problem.traits), sort_keys=True)
    return {
        "dtype": problem.table_dtype, "layout": problem.layout, "aligned": str(problem.aligned), "traits": traits
    }  # fmt: skip


def _group(problem: Problem) -> str:
    return json.dumps(_facts(problem))


def _size(case: Case) -> int:
    return math.prod(case.problem.dims.values())


def _varied(groups: list[list[Case]]) -> list[list[Case]]:
    """MAX_TRIALS groups which have most pairs of facts among them, the earlier first where it makes no difference."""
    seen: set[Any] = set()
    left = list(groups)
    out: list[list[Case]] = []
    while left and len(out) < MAX_TRIALS:
        pairs = [set(itertools.combinations(sorted(_facts(group[0].problem).items()), 2)) for group in left]
        best = max(range(len(left)), key=lambda i: (len(pairs[i] - seen), -i))
        seen |= pairs[best]
        out.append(left.pop(best))
    return out


def _one_sm() -> int:
    """The flags of a call with an SM budget of 1."""
    with override.use(sm_budget=1):
        return override.flags


def _smaller(spec: OpSpec, variant: Variant, problem: Problem, device: DeviceInfo, many: bool) -> Problem | str:
    """The first small problem that the variant can serve, or why it cannot serve the first."""
    flags = _one_sm() if many else problem.flags
    first: str | None = None
    for dims in _DIMS.get(spec.dims, _any)(problem, many):
        small = dataclasses.replace(problem, dims=dims, flags=flags)
        why = illegal(spec, variant, small, device)
        if why is None:
            return small
        first = first or why
    return first or "no small problem"


def _product(problem: Problem, many: bool) -> Iterator[Mapping[str, int]]:
    """M x N x K with partial tiles in M and N; K a whole number of steps in every second one that is aligned."""
    batch = min(problem.dims["batch"], 3)
    rows = (333, 97, 13, 5, 1) if many else (97, 333, 13, 5, 1)
    columns = (208, 2064) if problem.aligned else (203, 2059)
    aligned = problem.traits.get("operands_aligned", problem.aligned)
    inner = (256, 2048) if many and aligned else (144, 2064) if aligned else (139, 2059)
    for n, k, m in itertools.product(columns, inner, rows):
        yield {"batch": batch, "M": m, "N": n, "K": k}


def _norm(problem: Problem, many: bool) -> Iterator[Mapping[str, int]]:
    """Rows of the planned width, or 16 short of it where it is a power of two."""
    n = problem.dims["N"]
    short = n - 16 if n >= 64 and n & (n - 1) == 0 else n
    rows = (333, 37) if many and 333 * n <= _MANY else (37,)
    for columns, m in itertools.product((n, short) if many else (short, n), (*rows, 5, 1)):
        yield {"M": m, "N": columns}


def _lookup(problem: Problem, many: bool) -> Iterator[Mapping[str, int]]:
    """Tokens that share rows of a small table, of the planned width where that is small."""
    width = (1104 if many else 208) - (0 if problem.aligned else 5)
    for tokens in (333, 37, 1):
        yield {"T": tokens, "D": min(problem.dims["D"], width), "V": 97}


def _any(problem: Problem, many: bool) -> Iterator[Mapping[str, int]]:
    for most in (97, 37, 5, 1):
        yield {name: min(size, most) for name, size in problem.dims.items()}


_DIMS: Mapping[tuple[str, ...], Callable[[Problem, bool], Iterator[Mapping[str, int]]]] = {
    ("batch", "M", "N", "K"): _product,
    ("M", "N"): _norm,
    ("T", "D", "V"): _lookup,
}
