"""Learning a table's trees from a raw file: few variants and rankings of them, then regret-minimising trees.

A pure function of the raw file. Times enter as ratios to the vendor's of the same round. Losing against the vendor
costs more than missing a gain: a leaf is the vendor's unless the gain of another exceeds the noise on its rows.
"""

from __future__ import annotations

import collections
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..dispatch.variant import VENDOR, OpSpec, Variant
from .choices import SHAPE, UNIT, Choice, Ints, Rankings, cover_of, log, place, price_of, regret, serving, weights
from .raw import Raw
from .samples import Sample, interval, pool, pool_of, samples
from .tree import Data, Node, fixed_to, grow, joined, leaf_of, nodes, pruned, threshold

# Mean gain that a leaf of ours needs, and how far below the vendor no row of it may surely lie.
LEAST_GAIN, NO_LOSS = 1.02, 0.98
LEAST_SHAPES = 3
# Fewer rounds than six have no 95 % interval, an estimate has none either: they count from this gain on.
ROUNDS, FEW_ROUNDS_GAIN = 6, 1.10
FOLDS = 5
# Prices of a leaf that cross-validation tries: parts of a shape's time.
PRICES = (0.0, 0.01, 0.03, 0.1, 0.3, 1.0)
# Place in and value of (dtype, layout, aligned): tells some sections from others.
_Test = tuple[int, str | bool]
# What is learned in one tree: all sections, those of one alignment, those of one dtype.
_POOLINGS: tuple[Callable[[tuple[str, str, bool]], Any], ...] = (lambda key: (), lambda key: key[2], lambda key: key[0])


@dataclass(frozen=True)
class LearnedSection:
    """One section of the table to be.

    Attributes:
        when: dtype, layout, aligned, policy, mode.
        hull: smallest and largest size measured, by dimension.
        tree: as in the table's JSON.
        evidence: number of shapes, traits of the cases; `verify` adds the held-out score.
        crossvalidated: for each training case's key, the variant that a tree learned without its shape chooses.
        vendors: the leaf that takes the place of one that `verify` refuses.
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
    rows = list(samples(raw, spec, "graph", heldout=False))
    graph = _best_pooling(spec, rows)
    # Where the device is the bottleneck on all of a pool's rows, eager equals graph.
    timed = {pool(row.measured.case.problem) for row in rows if row.measured.eager}
    eager = _best_pooling(spec, list(samples(raw, spec, "eager", heldout=False))) if timed else graph
    sections = []
    for mode, found in (("graph", graph), ("eager", eager)):
        for section, other in zip(found, graph, strict=True):
            dtype, layout, aligned = (section.when[name] for name in ("dtype", "layout", "aligned"))
            same = mode == "eager" and (pool_of(dtype), layout, aligned) not in timed
            sections.append(replace(other if same else section, when={**section.when, "mode": mode}))
    return Learned(raw.op, tuple(sorted(sections, key=lambda s: [str(v) for v in s.when.values()])))


def _best_pooling(spec: OpSpec, rows: Sequence[Sample]) -> list[LearnedSection]:
    """The sections learned in one tree, by alignment or by dtype: what costs least in cross-validation."""
    poolings: dict[frozenset[frozenset[int]], dict[Any, list[Sample]]] = {}
    for part_of in _POOLINGS:
        parts: dict[Any, list[Sample]] = {}
        for row in rows:
            parts.setdefault(part_of(pool(row.measured.case.problem)), []).append(row)
        poolings.setdefault(frozenset(frozenset(map(id, part)) for part in parts.values()), parts)
    found = []
    for n, parts in enumerate(poolings.values()):
        grown = [_grown(spec, parts[part]) for part in sorted(parts)]
        paid = sum(
            weight * regret(row, vid)
            for g in grown
            for row, weight, vid in zip(g.rows, weights(g.rows), g.crossvalidated, strict=True)
            if vid is not None
        )
        found.append((paid, n, grown))
    sections = [section for g in min(found, key=lambda f: f[:2])[2] for section in _sections(spec, g)]
    return sorted(sections, key=lambda s: [str(v) for v in s.when.values()])


@dataclass(frozen=True)
class _Grown:
    """One tree over the rows of several sections.

    Attributes:
        choices: what its leaves choose from, by their number.
        tests: which tell the sections apart; they are features of 0 or 1 after the op's own.
        crossvalidated: by row, the variant that a tree without its shape chooses.
    """

    rows: Sequence[Sample]
    tree: Node
    choices: Sequence[Choice]
    tests: Sequence[_Test]
    crossvalidated: Sequence[str | None]


def _tests(rows: Sequence[Sample]) -> list[_Test]:
    pools = {pool(row.measured.case.problem) for row in rows}
    named = [(at, name) for at in (0, 1) for name in sorted({key[at] for key in pools})]
    return [(2, True), *named]


def _told(tests: Sequence[_Test], key: tuple[str, str, bool]) -> list[int]:
    return [int(key[at] == value) for at, value in tests]


def _distinct(choices: Sequence[Choice], rows: Sequence[Sample]) -> list[Choice]:
    """The first of those by which the same variants serve."""
    found: dict[tuple[str, ...], Choice] = {}
    for choice in choices:
        found.setdefault(tuple(serving(choice, row) for row in rows), choice)
    return list(found.values())


def _grown(spec: OpSpec, rows: Sequence[Sample]) -> _Grown:
    known = _known(spec, rows)
    names = (*spec.dims, *spec.feature_names)
    tests = _tests(rows)
    features = np.array(
        [[*(row.features[name] for name in names), *_told(tests, pool(row.measured.case.problem))] for row in rows],
        dtype=np.int64,
    )
    price, chosen = _price(rows, features, known)
    choices = _choices(rows, features, known)
    return _Grown(rows, pruned(grow(_data(rows, features, choices)), price), choices, tests, chosen)


def _choices(rows: Sequence[Sample], features: Ints, known: Sequence[str]) -> list[Choice]:
    """The vendor, the cover set, and the best rankings over all rows and over those of each node of a rough tree."""
    rankings = Rankings(rows, known)
    cover = cover_of(rows, [vid for vid in known if vid != VENDOR])
    found = [(VENDOR,), *((vid,) for vid in cover), rankings.best(), *(rankings.best((vid,)) for vid in cover)]
    rough = grow(_data(rows, features, _distinct(found, rows)), ahead=False)
    return _distinct([*found, *(rankings.best((), node.index) for node in nodes(rough))], rows)


def _seen(node: Node, own: Sequence[bool]) -> Node:
    """The tree with the vendor in leaves that hold none of a section's own rows: other sections alone prove nothing."""
    if node.yes is None or node.no is None:
        return node if any(own[i] for i in node.index) else replace(node, choice=0)
    yes, no = _seen(node.yes, own), _seen(node.no, own)
    return joined(node, yes, no)


def _known(spec: OpSpec, rows: Sequence[Sample]) -> list[str]:
    return [vid for vid in spec.variants() if any(vid in row.gains for row in rows)]


def _sections(spec: OpSpec, grown: _Grown) -> list[LearnedSection]:
    """What is left of the tree for each section, with hull, evidence and stand-ins of its own rows."""
    rows, listed, known = grown.rows, spec.variants(), _known(spec, grown.rows)
    names = (*spec.dims, *spec.feature_names)
    result = []
    keys = {(p.table_dtype, p.layout, p.aligned): pool(p) for p in (row.measured.case.problem for row in rows)}
    for (dtype, layout, aligned), key in sorted(keys.items()):
        mine = [row for row in rows if pool(row.measured.case.problem) == key]
        own = [row for row in mine if row.measured.case.problem.table_dtype == dtype]
        tree = fixed_to(grown.tree, dict(enumerate(_told(grown.tests, key), len(names))))
        tree = _seen(tree, [pool(row.measured.case.problem) == key for row in rows])
        evidence: dict[str, Any] = {"shapes": len({row.shape for row in mine})}
        if len(own) < len(mine):
            evidence["own_shapes"] = len({row.shape for row in own})
        evidence["traits"] = _traits(own)
        result.append(
            LearnedSection(
                {"dtype": dtype, "layout": layout, "aligned": aligned, "policy": "fast"},
                {
                    name: [min(row.features[name] for row in mine), max(row.features[name] for row in mine)]
                    for name in spec.dims
                },
                _json(tree, rows, key, grown.choices, names, known, listed),
                evidence,
                {
                    row.measured.case.key: vid
                    for row, vid in zip(rows, grown.crossvalidated, strict=True)
                    if vid is not None and any(row is other for other in own)
                },
                leaf_json((VENDOR,), mine, known, listed),
            )
        )
    return result


def _data(rows: Sequence[Sample], features: Ints, choices: Sequence[Choice]) -> Data:
    of_shape = collections.Counter(place(row) for row in rows)
    weight = weights(rows)
    shape = (len(rows), len(choices))
    cost, gain, certain, slower = (np.zeros(shape, dtype=np.int64) for _ in range(4))
    for i, row in enumerate(rows):
        served = [serving(choice, row) for choice in choices]
        best = max(row.gains[vid].value for vid in served)
        for j, vid in enumerate(served):
            found = row.gains[vid]
            cost[i, j] = weight[i] * price_of(row, vid, best)
            gain[i, j] = weight[i] * log(found.value)
            certain[i, j] = weight[i] * (found.low > (1 if len(found.rounds) >= ROUNDS else FEW_ROUNDS_GAIN))
            slower[i, j] = found.high < NO_LOSS
    return Data(
        features,
        cost,
        gain,
        certain,
        slower,
        np.array(weight, dtype=np.int64),
        # One shape of the user's own is enough for a leaf.
        np.array(
            [-(-SHAPE * (LEAST_SHAPES if row.measured.case.own else 1) // of_shape[place(row)]) for row in rows],
            dtype=np.int64,
        ),
        LEAST_SHAPES * SHAPE,
        log(LEAST_GAIN),
    )


def _price(rows: Sequence[Sample], features: Ints, known: Sequence[str]) -> tuple[int, list[str | None]]:
    """The price of a leaf that costs least on shapes left out, and what each row's tree without it chooses.

    Folds are by shape. Among prices within half a standard error of the best the highest is taken, for fewer leaves.
    A user's own shapes are the ones that will be asked for: they are never left out, and alone they cost nothing.
    """
    fold = [-1 if row.measured.case.own else hashlib.sha256(row.shape.encode()).digest()[0] % FOLDS for row in rows]
    others = [i for i in range(len(rows)) if fold[i] >= 0]
    if not others:
        return 0, [None] * len(rows)
    weight, pools = weights(rows), [pool(row.measured.case.problem) for row in rows]
    paid: dict[int, list[int]] = {round(p * SHAPE * UNIT): [0] * len(rows) for p in PRICES}
    picked: dict[int, list[str | None]] = {price: [None] * len(rows) for price in paid}
    for k in range(FOLDS):
        inside = [i for i in range(len(rows)) if fold[i] != k]
        left_out = [i for i in range(len(rows)) if fold[i] == k]
        if not left_out:
            continue
        choices: list[Choice] = [(VENDOR,)]
        full = Node(0, 0, np.zeros(0, dtype=np.int64))
        if inside:
            seen, places = [rows[i] for i in inside], features[inside]
            choices = _choices(seen, places, known)
            full = grow(_data(seen, places, choices))
        for price in paid:
            tree = pruned(full, price)
            for i in left_out:
                leaf = leaf_of(tree, features[i].tolist())
                own = any(pools[inside[j]] == pools[i] for j in leaf.index)
                vid = serving(choices[leaf.choice], rows[i]) if own else VENDOR
                paid[price][i] = weight[i] * regret(rows[i], vid)
                picked[price][i] = vid
    totals = {price: sum(costs) for price, costs in paid.items()}
    best = min(totals, key=lambda price: (totals[price], -price))
    mean = totals[best] / len(others)
    spread = math.sqrt(math.fsum((paid[best][i] - mean) ** 2 for i in others))
    price = max(p for p, total in totals.items() if total <= totals[best] + spread * 0.5)
    return price, picked[price]


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
    key: tuple[str, str, bool],
    choices: Sequence[Choice],
    names: Sequence[str],
    known: Sequence[str],
    listed: Mapping[str, Variant],
) -> dict[str, Any]:
    if node.yes is not None and node.no is not None:
        below, above = (_json(child, rows, key, choices, names, known, listed) for child in (node.yes, node.no))
        return {"f": names[node.feature], "le": threshold(node), "yes": below, "no": above}
    here = [rows[i] for i in node.index]
    own = [row for row in here if pool(row.measured.case.problem) == key]
    return {**leaf_json(choices[node.choice], own or here, known, listed), "n": len({place(row) for row in own})}


def _stands_in(left: Sequence[Sample], vid: str) -> bool:
    """Whether a variant may serve before the vendor where a leaf's first is illegal: as good as a first there."""
    safe = all(row.gains[vid].high >= NO_LOSS for row in left if vid in row.gains)
    return safe and _mean_gain(left, vid) > math.log(LEAST_GAIN)


def leaf_json(
    choice: Choice, rows: Sequence[Sample], known: Sequence[str], listed: Mapping[str, Variant]
) -> dict[str, Any]:
    """A leaf: the choice, what stands in where it is illegal, the vendor, and the best of ours for each policy."""
    ours = [vid for vid in _ranked(rows, known) if vid not in choice]
    use = list(choice)
    if choice != (VENDOR,):
        left = [row for row in rows if not any(vid in row.gains for vid in choice)]
        use += [vid for vid in ours if left and _stands_in(left, vid)][:2]
        use.append(VENDOR)
    use += ours[:1]
    use += [vid for vid in ours if listed[vid].deterministic][:1]
    use += [vid for vid in ours if listed[vid].batch_invariant][:1]
    leaf: dict[str, Any] = {"use": list(dict.fromkeys(use)), "n": len({place(row) for row in rows})}
    if choice != (VENDOR,):
        worst = min((row.gains[choice[0]].value for row in rows if choice[0] in row.gains), default=1.0)
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
