"""A decision tree that minimises regret: integer arithmetic, so that every machine grows the same one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isqrt

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

MAX_DEPTH = 8
# Thresholds of a feature that the look-ahead tries; the split itself tries all.
_PROBES = 10
# Above any sum of costs: a hundred thousand rows, each a million times slower than the vendor.
_NEVER = np.int64(1) << 60


@dataclass(frozen=True)
class Data:
    """What a tree is grown from; all integers.

    Attributes:
        features: (rows, features).
        cost: (rows, choices), weighted; the first choice is the vendor.
        gain: (rows, choices), weighted logarithm of the speed-up over the vendor.
        certain: (rows, choices), weight of rows on which the choice is surely faster than the vendor.
        slower: (rows, choices), 1 where it is surely slower.
        weight: (rows,).
        share: (rows,), a thousandth part of shapes: all rows of one shape make a thousand.
        least: shapes, in thousandths, that a leaf other than the vendor's needs.
        least_gain: mean logarithm of the speed-up that it needs, in the unit of `gain` for a weight of 1.
    """

    features: Ints
    cost: Ints
    gain: Ints
    certain: Ints
    slower: Ints
    weight: Ints
    share: Ints
    least: int
    least_gain: int

    def rows(self, index: Ints) -> Data:
        return Data(
            self.features[index],
            self.cost[index],
            self.gain[index],
            self.certain[index],
            self.slower[index],
            self.weight[index],
            self.share[index],
            self.least,
            self.least_gain,
        )


@dataclass(frozen=True)
class Node:
    """A leaf (feature < 0) or a split: rows with features[feature] <= a go to yes, those of b or more to no."""

    choice: int
    cost: int
    index: Ints
    feature: int = -1
    a: int = 0
    b: int = 0
    yes: Node | None = None
    no: Node | None = None

    def children(self) -> Iterator[Node]:
        if self.yes is not None and self.no is not None:
            yield self.yes
            yield self.no


def _leaf_costs(data: Data, sums: tuple[Ints, ...]) -> Ints:
    """(..., choices): what each choice costs as a leaf of each set of rows; what may not be one costs _NEVER."""
    cost, gain, certain, slower, weight, share = sums
    weight, share = weight[..., None], share[..., None]
    allowed = (slower == 0) & (share >= data.least) & (gain >= data.least_gain * weight) & (5 * certain >= 3 * weight)
    allowed[..., 0] = True
    return np.where(allowed, cost, _NEVER)


def _parts(data: Data) -> tuple[Ints, ...]:
    return data.cost, data.gain, data.certain, data.slower, data.weight, data.share


def _best_leaf(data: Data) -> tuple[int, int]:
    costs = _leaf_costs(data, tuple(part.sum(axis=0, dtype=np.int64) for part in _parts(data)))
    choice = int(costs.argmin())
    return choice, int(costs[choice])


def _splits(data: Data) -> tuple[Ints, Ints]:
    """(rows, features) sorted values, and (rows - 1, features) costs of the splits behind each, each side being its
    best leaf; no split is between equal values: it costs twice _NEVER."""
    order = np.argsort(data.features, axis=0, kind="stable")
    values = np.take_along_axis(data.features, order, axis=0)
    sums = tuple(np.cumsum(part[order], axis=0, dtype=np.int64) for part in _parts(data))
    below = tuple(part[:-1] for part in sums)
    above = tuple(part[-1:] - part[:-1] for part in sums)
    cost = _leaf_costs(data, below).min(axis=-1) + _leaf_costs(data, above).min(axis=-1)
    return values, np.where(values[1:] != values[:-1], cost, 2 * _NEVER)


def _cheapest(data: Data) -> int:
    """The cost of the rows as one leaf or split once."""
    return min(_best_leaf(data)[1], int(_splits(data)[1].min(initial=2 * _NEVER)))


def grow(data: Data, index: Ints | None = None, depth: int = 0, *, ahead: bool = True) -> Node:
    """The tree of the rows `index`: each split is the one whose sides cost least, `ahead` says split once more."""
    index = np.arange(len(data.weight)) if index is None else index
    here = data.rows(index)
    choice, cost = _best_leaf(here)
    leaf = Node(choice, cost, index)
    if depth == MAX_DEPTH or len(index) < 2 or cost == 0:
        return leaf
    best: tuple[int, int, int, int, int] | None = None
    values, paid = _splits(here)
    for feature in range(here.features.shape[1]):
        at = np.flatnonzero(paid[:, feature] < 2 * _NEVER)
        if not len(at):
            continue
        below, above, costs = values[at, feature], values[at + 1, feature], paid[at, feature]
        if not ahead:
            i = int(costs.argmin())
            found = (int(costs[i]), int(costs[i]), feature, int(below[i]), int(above[i]))
            best = found if best is None else min(best, found)
            continue
        spread = {round(i * (len(costs) - 1) / (_PROBES - 1)) for i in range(_PROBES)}
        probes = sorted(spread | {int(i) for i in np.argsort(costs, kind="stable")[:3]})
        for i in probes:
            yes = here.features[:, feature] <= below[i]
            halves = _cheapest(here.rows(np.flatnonzero(yes))) + _cheapest(here.rows(np.flatnonzero(~yes)))
            found = (halves, int(costs[i]), feature, int(below[i]), int(above[i]))
            best = found if best is None else min(best, found)
    if best is None or best[0] >= cost:
        return leaf
    _, _, feature, a, b = best
    yes = data.features[index, feature] <= a
    sides = (grow(data, index[side], depth + 1, ahead=ahead) for side in (yes, ~yes))
    return Node(choice, cost, index, feature, a, b, *sides)


def pruned(node: Node, price: int) -> Node:
    """The subtree that costs least where every leaf costs `price` more; a leaf where two cost the same."""
    return _pruned(node, price)[0]


def _pruned(node: Node, price: int) -> tuple[Node, int]:
    leaf = Node(node.choice, node.cost, node.index)
    if node.yes is None or node.no is None:
        return leaf, node.cost + price
    yes, yes_cost = _pruned(node.yes, price)
    no, no_cost = _pruned(node.no, price)
    equal = yes.yes is None and no.yes is None and yes.choice == no.choice
    if equal or node.cost + price <= yes_cost + no_cost:
        return leaf, node.cost + price
    return Node(node.choice, node.cost, node.index, node.feature, node.a, node.b, yes, no), yes_cost + no_cost


def _beside(node: Node, feature: int, above: bool) -> tuple[int, int]:
    """(rows in leaves of the vendor, rows) of the leaves that reach the upper or lower end of a feature's values."""
    if node.yes is None or node.no is None:
        return len(node.index) * (node.choice == 0), len(node.index)
    ends = node.children() if node.feature != feature else (node.no if above else node.yes,)
    vendors, rows = zip(*(_beside(end, feature, above) for end in ends), strict=True)
    return sum(vendors), sum(rows)


def threshold(node: Node) -> int:
    """The `le` of a split. What lies between goes where more of what it borders on is the vendor's, else it is cut at
    the geometric mean."""
    if node.yes is None or node.no is None:
        raise ValueError("a leaf has no threshold")
    yes, rows_below = _beside(node.yes, node.feature, True)
    no, rows_above = _beside(node.no, node.feature, False)
    if yes * rows_above > no * rows_below:
        return node.b - 1
    if yes * rows_above < no * rows_below:
        return node.a
    return min(max(isqrt(node.a * node.b), node.a), node.b - 1)


def leaf_of(node: Node, features: Sequence[int]) -> Node:
    while node.yes is not None and node.no is not None:
        node = node.yes if features[node.feature] <= threshold(node) else node.no
    return node


def leaves(node: Node) -> Iterator[Node]:
    if node.yes is None or node.no is None:
        yield node
    else:
        yield from leaves(node.yes)
        yield from leaves(node.no)


def nodes(node: Node) -> Iterator[Node]:
    yield node
    for child in node.children():
        yield from nodes(child)


def fixed_to(node: Node, features: Mapping[int, int]) -> Node:
    """The tree that is left where some features are known."""
    if node.yes is None or node.no is None:
        return node
    if node.feature in features:
        return fixed_to(node.yes if features[node.feature] <= node.a else node.no, features)
    return joined(node, fixed_to(node.yes, features), fixed_to(node.no, features))


def joined(node: Node, yes: Node, no: Node) -> Node:
    """A split with other sides; a leaf where they say the same."""
    if yes.yes is None and no.yes is None and yes.choice == no.choice:
        return Node(yes.choice, node.cost, np.concatenate([yes.index, no.index]))
    return replace(node, yes=yes, no=no)
