"""What a leaf may choose: few variants, and rankings of them in which what cannot serve leaves a call to the next."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..dispatch.variant import VENDOR
from .samples import Sample, pool

Ints = npt.NDArray[np.int64]

# One logarithm unit of cost, gain and noise is a millionth; one shape weighs a thousand.
UNIT, SHAPE = 1_000_000, 1000

COVERED = 1.03
MAX_COVER = 8
MAX_RANKING = 6
# How much more a loss against the vendor costs than the same part of a missed gain.
LOSS = 8
# Variants in the order in which they are asked to serve.
Choice = tuple[str, ...]


def log(ratio: float) -> int:
    return round(math.log(min(max(ratio, 1e-6), 1e6)) * UNIT)


def place(row: Sample) -> tuple[tuple[str, str, bool], str]:
    """What counts as one shape: the sizes with the layout and alignment, whatever the 16-bit dtype and the ids."""
    return pool(row.measured.case.problem), row.shape


def weights(rows: Sequence[Sample]) -> list[int]:
    """The rows of one shape share its weight, and the mean shape weighs a thousand.

    A user's own shapes, however few, weigh as much as all others together.
    """
    of_shape: dict[tuple[Any, ...], list[Sample]] = {}
    for row in rows:
        of_shape.setdefault((row.measured.case.own, place(row)), []).append(row)
    weight = {shape: math.fsum(r.weight for r in found) / len(found) for shape, found in of_shape.items()}
    count = {own: sum(o == own for o, _ in weight) for own in (False, True)}
    total = {own: math.fsum(w for (o, _), w in weight.items() if o == own) for own in (False, True)}
    unit = {False: SHAPE * count[False], True: SHAPE * max(count.values())}
    out = []
    for row in rows:
        own = row.measured.case.own
        shape = (own, place(row))
        out.append(max(1, round(unit[own] * weight[shape] / total[own] / len(of_shape[shape]))))
    return out


def serving(choice: Choice, row: Sample) -> str:
    """Which variant of a ranking serves: the first that can, the vendor where none can."""
    return next((vid for vid in choice if vid in row.gains), VENDOR)


def price_of(row: Sample, vid: str, best: float) -> int:
    """What a variant costs on a row: the time it loses to the best, and more where it surely loses to the vendor."""
    found = row.gains[vid]
    return log(best / found.value) + LOSS * max(0, log(1 / found.high))


def regret(row: Sample, vid: str) -> int:
    """What a variant costs beside the best of all."""
    return price_of(row, vid, max(gain.value for gain in row.gains.values()))


class Rankings:
    """Finds rankings: the smallest tile that holds a row, descriptors where the operands are aligned."""

    def __init__(self, rows: Sequence[Sample], known: Sequence[str]):
        self._every = [VENDOR, *sorted(vid for vid in known if vid != VENDOR)]
        # What each costs on each row, -1 where it is illegal.
        self._costs = np.full((len(rows), len(self._every)), -1, dtype=np.int64)
        for i, (row, weight) in enumerate(zip(rows, weights(rows), strict=True)):
            for j, vid in enumerate(self._every):
                if vid in row.gains:
                    self._costs[i, j] = weight * regret(row, vid)

    def best(self, head: Sequence[str] = (), index: Ints | None = None) -> Choice:
        """The ranking that begins with `head` and grows by whatever insertion saves most over the rows `index`."""
        costs = self._costs if index is None else self._costs[index]

        def total(ranking: Sequence[int]) -> int:
            paid = costs[:, 0]
            for j in reversed(ranking):
                paid = np.where(costs[:, j] >= 0, costs[:, j], paid)
            return int(paid.sum())

        ranking = [self._every.index(vid) for vid in head]
        paid = total(ranking)
        while len(ranking) < MAX_RANKING:
            tried = [
                (total([*ranking[:at], j, *ranking[at:]]), j, at)
                for j in range(1, len(self._every))
                if j not in ranking
                for at in range(len(head), len(ranking) + 1)
            ]
            if not tried or min(tried)[0] >= paid:
                break
            paid, j, at = min(tried)
            ranking.insert(at, j)
        return tuple(self._every[j] for j in ranking) or (VENDOR,)


def cover_of(rows: Sequence[Sample], ids: Sequence[str]) -> list[str]:
    """Our variants that with the vendor are within 3 % of the best on every row, few of them; in order of their ids."""
    weight = weights(rows)

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
