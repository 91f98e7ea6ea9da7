"""Learning a table's trees from a raw file: a small cover set of variants, then a regret-minimising tree a section.

A pure function of the raw file. Times enter as ratios to the vendor's of the same round. Losing against the vendor
costs more than missing a gain: a leaf is the vendor's unless the gain of another exceeds the noise on its rows.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..dispatch.problem import MODES
from ..dispatch.variant import VENDOR, OpSpec, Variant
from .raw import Raw
from .samples import Sample, interval, pool, samples
from .tree import Data, Node, grow, leaf_of, pruned, threshold

# One logarithm unit of cost, gain and noise is a millionth; one shape weighs a thousand.
_UNIT, _SHAPE = 1_000_000, 1000

COVERED = 1.03
MAX_COVER = 8
# Mean gain that a leaf of ours needs, and how far below the vendor no row of it may surely lie.
LEAST_GAIN, NO_LOSS = 1.02, 0.98
# How much more a loss against the vendor costs than the same part of a missed gain.
LOSS = 8
LEAST_SHAPES = 3
# Fewer rounds than six have no 95 % interval, an estimate has none either: they count from this gain on.
ROUNDS, FEW_ROUNDS_GAIN = 6, 1.10
FOLDS = 5
# Prices of a leaf that cross-validation tries: parts of a shape's time.
PRICES = (0.0, 0.01, 0.03, 0.1, 0.3, 1.0)


@dataclass(frozen=True)
class LearnedSection:
    """One section of the table to be.

    Attributes:
        when: dtype, layout, aligned, policy, mode.
        hull: smallest and largest size measured, by dimension.
        tree: as in the table's JSON.
        evidence: number of shapes, traits of the cases, the cover set; `verify` adds the held-out score.
        crossvalidated: for each training case's key, the variant that a tree learned without its shape chooses.
        vendors: the leaf that stands for the whole tree where the section is refused.
    """

    when: Mapping[str, Any]
    hull: Mapping[str, list[int]]
    tree: Mapping[str, Any]
    evidence: Mapping[str, Any]
    crossvalidated: Mapping[str, str] = field(default_factory=dict)
    vendors: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Learned:
    op: str
    sections: tuple[LearnedSection, ...]
    default: tuple[str, ...] = (VENDOR,)


def learn(raw: Raw, spec: OpSpec) -> Learned:
    """The sections of an op's table.

    Raises:
        RawError: times that are no times.
    """
    by_pool: dict[tuple[str, tuple[str, str, bool]], list[LearnedSection]] = {}
    for mode in sorted(MODES, reverse=True):
        pools: dict[tuple[str, str, bool], list[Sample]] = {}
        for sample in samples(raw, spec, mode, heldout=False):
            pools.setdefault(pool(sample.measured.case.problem), []).append(sample)
        for key, rows in pools.items():
            if mode == "eager" and not any(row.measured.eager for row in rows):
                # The device is the bottleneck on all of them, so eager equals graph.
                graph = by_pool["graph", key]
                by_pool[mode, key] = [replace(s, when={**s.when, "mode": mode}) for s in graph]
            else:
                by_pool[mode, key] = _sections(spec, mode, key, rows)
    sections = [section for found in by_pool.values() for section in found]
    return Learned(raw.op, tuple(sorted(sections, key=lambda s: [str(v) for v in s.when.values()])))


def _sections(spec: OpSpec, mode: str, key: tuple[str, str, bool], rows: Sequence[Sample]) -> list[LearnedSection]:
    listed = spec.variants()
    known = [vid for vid in listed if any(vid in row.gains for row in rows)]
    cover = _cover(rows, [vid for vid in known if vid != VENDOR])
    choices = [VENDOR, *cover]
    names = (*spec.dims, *spec.feature_names)
    data = _data(rows, choices, names)
    price, chosen = _price(rows, data, names, choices)
    tree = pruned(grow(data), price)
    vendors = leaf_json(VENDOR, rows, known, listed)
    result = []
    for dtype in sorted({row.measured.case.problem.table_dtype for row in rows}):
        mine = [row for row in rows if row.measured.case.problem.table_dtype == dtype]
        evidence: dict[str, Any] = {"shapes": len({row.shape for row in rows}), "cover": choices}
        if len(mine) < len(rows):
            evidence["own_shapes"] = len({row.shape for row in mine})
        evidence["traits"] = _traits(mine)
        result.append(
            LearnedSection(
                {"dtype": dtype, "layout": key[1], "aligned": key[2], "policy": "fast", "mode": mode},
                {
                    name: [min(row.features[name] for row in rows), max(row.features[name] for row in rows)]
                    for name in spec.dims
                },
                _json(tree, rows, choices, names, known, listed),
                evidence,
                {rows[i].measured.case.key: vid for i, vid in chosen.items() if rows[i] in mine},
                vendors,
            )
        )
    return result


def _log(ratio: float) -> int:
    return round(math.log(min(max(ratio, 1e-6), 1e6)) * _UNIT)


def _weights(rows: Sequence[Sample]) -> list[int]:
    """The rows of one shape share its weight, and the mean shape weighs a thousand.

    A user's own shapes, however few, weigh as much as all others together.
    """
    of_shape: dict[tuple[bool, str], list[Sample]] = {}
    for row in rows:
        of_shape.setdefault((row.measured.case.own, row.shape), []).append(row)
    weight = {shape: math.fsum(r.weight for r in found) / len(found) for shape, found in of_shape.items()}
    count = {own: sum(o == own for o, _ in weight) for own in (False, True)}
    total = {own: math.fsum(w for (o, _), w in weight.items() if o == own) for own in (False, True)}
    unit = {False: _SHAPE * count[False], True: _SHAPE * max(count.values())}
    out = []
    for row in rows:
        own = row.measured.case.own
        shape = (own, row.shape)
        out.append(max(1, round(unit[own] * weight[shape] / total[own] / len(of_shape[shape]))))
    return out


def _data(rows: Sequence[Sample], choices: Sequence[str], names: Sequence[str]) -> Data:
    of_shape: dict[str, int] = {}
    for row in rows:
        of_shape[row.shape] = of_shape.get(row.shape, 0) + 1
    weight = _weights(rows)
    shape = (len(rows), len(choices))
    cost, gain, certain, slower = (np.zeros(shape, dtype=np.int64) for _ in range(4))
    for i, row in enumerate(rows):
        best = max(row.gains[vid].value for vid in choices if vid in row.gains)
        for j, vid in enumerate(choices):
            # What cannot serve leaves the call to the vendor.
            found = row.gains.get(vid) or row.gains[VENDOR]
            lost = max(0, _log(1 / found.high)) if vid in row.gains else 0
            cost[i, j] = weight[i] * (_log(best / found.value) + LOSS * lost)
            gain[i, j] = weight[i] * _log(found.value)
            certain[i, j] = weight[i] * (found.low > (1 if len(found.rounds) >= ROUNDS else FEW_ROUNDS_GAIN))
            slower[i, j] = found.high < NO_LOSS
    return Data(
        np.array([[row.features[name] for name in names] for row in rows], dtype=np.int64),
        cost,
        gain,
        certain,
        slower,
        np.array(weight, dtype=np.int64),
        # One shape of the user's own is enough for a leaf.
        np.array(
            [-(-_SHAPE * (LEAST_SHAPES if row.measured.case.own else 1) // of_shape[row.shape]) for row in rows],
            dtype=np.int64,
        ),
        LEAST_SHAPES * _SHAPE,
        _log(LEAST_GAIN),
    )


def _cover(rows: Sequence[Sample], ids: Sequence[str]) -> list[str]:
    """Our variants that with the vendor are within 3 % of the best on every row, few of them; in order of their ids."""
    weight = _weights(rows)

    def near(vid: str, i: int) -> bool:
        gains = rows[i].gains
        best = max(gains[other].value for other in (VENDOR, *ids) if other in gains)
        return vid in gains and gains[vid].value * COVERED >= best

    open_rows = {i for i in range(len(rows)) if not near(VENDOR, i)}
    covers = {vid: {i for i in range(len(rows)) if near(vid, i)} for vid in sorted(ids)}
    chosen: list[str] = []
    while open_rows and len(chosen) < MAX_COVER:
        worth = {vid: sum(weight[i] for i in covers[vid] & open_rows) for vid in covers if vid not in chosen}
        best = min(worth, key=lambda vid: (-worth[vid], vid), default="")
        if not best or not worth[best]:
            break
        chosen.append(best)
        open_rows -= covers[best]
    for vid in list(chosen):
        others = set().union(*(covers[other] for other in chosen if other != vid))
        if all(i in others or near(VENDOR, i) for i in covers[vid]):
            chosen.remove(vid)
    return sorted(chosen)


def _price(
    rows: Sequence[Sample], data: Data, names: Sequence[str], choices: Sequence[str]
) -> tuple[int, dict[int, str]]:
    """The price of a leaf that costs least on shapes left out, and what each row's tree without it chooses.

    Folds are by shape. Among prices within one standard error of the best the highest is taken, for fewer leaves.
    A user's own shapes are the ones that will be asked for: they are never left out, and alone they cost nothing.
    """
    fold = [-1 if row.measured.case.own else hashlib.sha256(row.shape.encode()).digest()[0] % FOLDS for row in rows]
    others = [i for i in range(len(rows)) if fold[i] >= 0]
    if not others:
        return 0, {}
    paid: dict[int, list[int]] = {round(p * _SHAPE * _UNIT): [0] * len(rows) for p in PRICES}
    picked: dict[int, dict[int, int]] = {price: {} for price in paid}
    for k in range(FOLDS):
        inside = np.array([i for i in range(len(rows)) if fold[i] != k], dtype=np.int64)
        left_out = [i for i in range(len(rows)) if fold[i] == k]
        if not left_out:
            continue
        full = grow(data.rows(inside)) if len(inside) else Node(0, 0, inside)
        for price in paid:
            tree = pruned(full, price)
            for i in left_out:
                choice = leaf_of(tree, [rows[i].features[name] for name in names]).choice
                paid[price][i] = int(data.cost[i, choice])
                picked[price][i] = choice
    totals = {price: sum(costs) for price, costs in paid.items()}
    best = min(totals, key=lambda price: (totals[price], -price))
    mean = totals[best] / len(others)
    spread = math.sqrt(math.fsum((paid[best][i] - mean) ** 2 for i in others))
    price = max(p for p, total in totals.items() if total <= totals[best] + spread * 0.5)
    return price, {i: choices[picked[price][i]] for i in others}


def _mean_gain(rows: Sequence[Sample], vid: str) -> float:
    """Mean logarithm of a variant's speed-up; rows that it cannot serve count as the vendor's."""
    return math.fsum(math.log(row.gains[vid].value) for row in rows if vid in row.gains) / max(len(rows), 1)


def _ranked(rows: Sequence[Sample], known: Sequence[str]) -> list[str]:
    """Our variants, the best first: those that serve most of the rows, then by speed."""
    ours = [vid for vid in known if vid != VENDOR and any(vid in row.gains for row in rows)]

    def key(vid: str) -> tuple[float, str]:
        serves = sum(vid in row.gains for row in rows)
        missing = (len(rows) - serves) * math.log(4)
        return -round(_mean_gain(rows, vid) * len(rows) - missing, 6), vid

    return sorted(ours, key=key)


def _json(
    node: Node,
    rows: Sequence[Sample],
    choices: Sequence[str],
    names: Sequence[str],
    known: Sequence[str],
    listed: Mapping[str, Variant],
) -> dict[str, Any]:
    if node.yes is not None and node.no is not None:
        below, above = (_json(child, rows, choices, names, known, listed) for child in (node.yes, node.no))
        return {"f": names[node.feature], "le": threshold(node), "yes": below, "no": above}
    here = [rows[i] for i in node.index]
    return leaf_json(choices[node.choice], here, known, listed)


def _stands_in(left: Sequence[Sample], vid: str) -> bool:
    """Whether a variant may serve before the vendor where a leaf's first is illegal: as good as a first there."""
    safe = all(row.gains[vid].high >= NO_LOSS for row in left if vid in row.gains)
    return safe and _mean_gain(left, vid) > math.log(LEAST_GAIN)


def leaf_json(
    choice: str, rows: Sequence[Sample], known: Sequence[str], listed: Mapping[str, Variant]
) -> dict[str, Any]:
    """A leaf: the choice, what stands in where it is illegal, the vendor, and the best of ours for each policy."""
    ours = [vid for vid in _ranked(rows, known) if vid != choice]
    use = [choice]
    if choice != VENDOR:
        left = [row for row in rows if choice not in row.gains]
        use += [vid for vid in ours if left and _stands_in(left, vid)][:2]
        use.append(VENDOR)
    use += ours[:1]
    use += [vid for vid in ours if listed[vid].deterministic][:1]
    use += [vid for vid in ours if listed[vid].batch_invariant][:1]
    leaf: dict[str, Any] = {"use": list(dict.fromkeys(use)), "n": len({row.shape for row in rows})}
    if choice != VENDOR:
        worst = min((row.gains[choice].value for row in rows if choice in row.gains), default=1.0)
        leaf["gain"] = math.floor(worst * 1000) / 1000
    return leaf


def _traits(rows: Sequence[Sample]) -> dict[str, Any]:
    """What all cases have in common beside their sizes; a table says nothing about calls with other traits."""
    first = dict(rows[0].measured.case.problem.traits)
    kept = {k: v for k, v in first.items() if all(r.measured.case.problem.traits.get(k) == v for r in rows)}
    return dict(sorted(kept.items()))


def noise_of(rows: Sequence[Sample], mode: str) -> float:
    """Half the width of the 95 % interval of the vendor's median time, relative; the median over the rows."""
    widths = []
    for row in rows:
        times = row.measured.eager[VENDOR] if mode == "eager" and row.measured.eager else row.measured.graph[VENDOR]
        low, high = interval(times)
        widths.append((high - low) / (high + low))
    return sorted(widths)[len(widths) // 2] if widths else 0.0


__all__ = ["Learned", "LearnedSection", "leaf_json", "learn", "noise_of"]
