"""The caller's wishes: policy, SM budget, forced and excluded variants, packed into one int.

Every op takes that int as its last argument, so that a backward runs under the policy of its forward even on
another thread, and so that torch.compile guards on it (it is a module-level value that Dynamo reads).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from .. import _compat
from .problem import POLICIES
from .variant import ID, REGISTRY

# bits 0-1 policy, 2-13 SM budget (0: all), 14 and up: index into _OVERRIDES
_BUDGET_SHIFT, _OVERRIDE_SHIFT = 2, 14
_BUDGET_MAX = (1 << (_OVERRIDE_SHIFT - _BUDGET_SHIFT)) - 1


@dataclass(frozen=True, slots=True)
class Overrides:
    """Forced and excluded variants; ``forced`` maps an op to a variant id or family, "" to a family for all ops."""

    forced: tuple[tuple[str, str], ...] = ()
    excluded: frozenset[str] = frozenset()


_OVERRIDES: list[Overrides] = [Overrides()]
_INDEX: dict[Overrides, int] = {_OVERRIDES[0]: 0}
_lock = threading.RLock()
_compat.renew_after_fork(_lock)

flags: int = 0


def policy(bits: int) -> str:
    return POLICIES[bits & 3]


def sm_budget(bits: int) -> int | None:
    return (bits >> _BUDGET_SHIFT & _BUDGET_MAX) or None


def overrides(bits: int) -> Overrides:
    return _OVERRIDES[bits >> _OVERRIDE_SHIFT]


def forced(bits: int, op: str, known: Iterable[str]) -> str | None:
    """The variant id or family that `bits` force on `op`, or None.

    `known` are the op's variant ids. A wish binds the op it names, that op's backward, or with "" every op, where
    they own the variant or family.
    """
    wishes = dict(overrides(bits).forced)
    if op in wishes and owns(known, wishes[op]):
        return wishes[op]
    for wider in (op.removesuffix("_backward"), ""):
        if wider in wishes and owns(known, wishes[wider]):
            return wishes[wider]
    return None


def matches(variant_id: str, wish: str) -> bool:
    """Whether `wish` names this variant or its family."""
    return variant_id == wish or variant_id.partition("/")[0] == wish


def owns(known: Iterable[str], wish: str) -> bool:
    return any(matches(v, wish) for v in known)


def _intern(value: Overrides) -> int:
    with _lock:
        index = _INDEX.get(value)
        if index is None:
            index = _INDEX[value] = len(_OVERRIDES)
            _OVERRIDES.append(value)
        return index


def _check_wish(argument: str, wish: object, op: str | None = None) -> str:
    if not isinstance(wish, str) or not ID.fullmatch(wish):
        raise ValueError(f"use(): {argument}: expected a variant id or family such as 'tiled', got {wish!r}")
    names = [n for n in (op, f"{op}_backward") if n in REGISTRY] if op else list(REGISTRY)
    if not any(owns(REGISTRY[name].variants(), wish) for name in names):
        where = f"op {op!r}" if op else "any op"
        raise ValueError(f"use(): {argument}: {wish!r} is no variant or family of {where}; see tritonops.variants()")
    return wish


@dataclass(frozen=True, slots=True, eq=False)
class _Wishes:
    """The checked arguments of one use()."""

    policy: int | None
    variant: str | Mapping[str, str] | None
    exclude: frozenset[str]
    sm_budget: int | None

    def over(self, bits: int) -> int:
        """`bits` with these wishes changed."""
        if self.policy is not None:
            bits = bits & ~3 | self.policy
        if self.sm_budget is not None:
            bits = bits & ~(_BUDGET_MAX << _BUDGET_SHIFT) | self.sm_budget << _BUDGET_SHIFT
        if self.variant is not None or self.exclude:
            outer = overrides(bits)
            forced = dict(outer.forced)
            if isinstance(self.variant, str):
                forced = {"": self.variant}
            elif self.variant is not None:
                forced.update(self.variant)
            index = _intern(Overrides(tuple(sorted(forced.items())), outer.excluded | self.exclude))
            bits = bits & ((1 << _OVERRIDE_SHIFT) - 1) | index << _OVERRIDE_SHIFT
        return bits


def _checked(policy: object, variant: object, exclude: object, sm_budget: object) -> _Wishes:
    if policy is not None and policy not in POLICIES:
        raise ValueError(f"use(): policy: expected one of {POLICIES}, got {policy!r}")
    if sm_budget is not None:
        if not isinstance(sm_budget, int) or isinstance(sm_budget, bool):
            raise TypeError(f"use(): sm_budget: expected an int, got {type(sm_budget).__name__}")
        if not 1 <= sm_budget <= _BUDGET_MAX:
            raise ValueError(f"use(): sm_budget: expected 1 to {_BUDGET_MAX} SMs, got {sm_budget}")
    wishes: str | dict[str, str] | None = None
    if isinstance(variant, str):
        wishes = _check_wish("variant", variant)
    elif isinstance(variant, Mapping):
        unknown = [op for op in variant if op not in REGISTRY]
        if unknown:
            raise ValueError(f"use(): variant: unknown op {unknown[0]!r}; ops are {sorted(REGISTRY)}")
        wishes = {op: _check_wish("variant", wish, op) for op, wish in variant.items()}
    elif variant is not None:
        raise TypeError(f"use(): variant: expected a str or a dict of op to str, got {type(variant).__name__}")
    if exclude is None:
        names: Iterable[object] = ()
    elif isinstance(exclude, str):
        names = [exclude]
    elif isinstance(exclude, Iterable):
        names = exclude
    else:
        raise TypeError(f"use(): exclude: expected a str or several, got {type(exclude).__name__}")
    return _Wishes(
        None if policy is None else POLICIES.index(str(policy)),
        wishes,
        frozenset(_check_wish("exclude", n) for n in names),
        sm_budget,
    )


def pack(
    policy: str | None = None,
    variant: str | Mapping[str, str] | None = None,
    exclude: str | Iterable[str] | None = None,
    sm_budget: int | None = None,
    base: int = 0,
) -> int:
    """`base` with the given wishes changed. Raises ValueError or TypeError naming the argument."""
    return _checked(policy, variant, exclude, sm_budget).over(base)


# Those of the blocks that run now, outermost first. Blocks of several threads need not end in the order of a stack.
_in_force: list[_Wishes] = []


def _refresh() -> None:
    global flags
    bits = 0
    for wishes in _in_force:
        bits = wishes.over(bits)
    flags = bits


@contextlib.contextmanager
def use(
    *,
    policy: str | None = None,
    variant: str | Mapping[str, str] | None = None,
    exclude: str | Iterable[str] | None = None,
    sm_budget: int | None = None,
) -> Iterator[None]:
    """Change how variants are chosen, for the whole process, while the block runs; blocks nest.

    The backward of a call runs under the choice that was in force at its forward, whenever and on whatever
    thread it runs. Blocks that overlap on several threads all count, the one entered last first, until each ends.

    Args:
        policy: ``fast`` (default), ``deterministic`` (same bits from the same inputs) or ``batch_invariant``
            (a row's bits do not depend on the batch either; the choice depends on N, K and dtype alone; where no
            variant has that property, as on the CPU and for float64, the call raises VariantUnavailable).
        variant: a variant id or family. A str binds every op that owns it, a dict ``{"matmul": "tiled"}`` one
            op. A forced variant never falls back: a call it cannot serve raises VariantUnavailable.
        exclude: variant ids or families that must not be chosen; ``exclude="vendor"`` picks the best of our own.
        sm_budget: number of SMs a persistent kernel may occupy.

    Raises:
        ValueError, TypeError: naming the argument.
    """
    wishes = _checked(policy, variant, exclude, sm_budget)
    with _lock:
        _in_force.append(wishes)
        _refresh()
    try:
        yield
    finally:
        with _lock:
            _in_force.remove(wishes)
            _refresh()


def effective(bits: int) -> int:
    """`bits` with torch.use_deterministic_algorithms taken into account: fast becomes deterministic."""
    return bits | 1 if bits & 3 == 0 and torch.are_deterministic_algorithms_enabled() else bits
