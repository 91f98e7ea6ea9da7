"""Choosing a few candidates that cover a space, in an order of which any prefix covers it too."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from .candidates import Candidate

Point = tuple[int, ...]


@functools.cache
def log(size: int) -> int:
    """16 log2(size + 1), rounded up: in integers, as the last bit of a logarithm differs between machines."""
    return ((size + 1) ** 16 - 1).bit_length()


class Spread:
    """Candidates with their points, and those chosen so far. Ties go to the earlier candidate."""

    def __init__(self, candidates: Sequence[Candidate], points: Sequence[Point]):
        self.candidates = candidates
        self.points = points
        self.chosen: list[Candidate] = []
        # Squared distance to the nearest that is chosen; -1 where a candidate is itself.
        self._nearest = [1 << 62] * len(candidates)

    def take(self, i: int) -> None:
        self.chosen.append(self.candidates[i])
        self._nearest[i] = -1
        self.avoid(self.points[i])

    def chosen_points(self) -> list[Point]:
        return [self.points[self.candidates.index(c)] for c in self.chosen]

    def avoid(self, point: Point) -> None:
        """Keep away from a point as from one that is chosen."""
        for j, q in enumerate(self.points):
            if self._nearest[j] > 0:
                distance = sum((a - b) * (a - b) for a, b in zip(point, q, strict=True))
                self._nearest[j] = min(self._nearest[j], distance)

    def span(self, count: int) -> None:
        """Take candidates with the smallest or the largest of most sizes, until all extremes are there.

        The extremes are those of the real shapes where there are `count` of them: random ones go beyond them only
        where there is little else.
        """
        real = [c for c in self.candidates if c.group != "fill"]
        sizes = [c.sizes for c in (real if len(real) >= count else self.candidates)]
        ends = {(axis, end) for axis, values in enumerate(zip(*sizes, strict=True)) for end in _ends(values)}
        while ends and len(self.chosen) < count:
            hits = [len(ends.intersection(enumerate(c.sizes))) for c in self.candidates]
            best = max(range(len(hits)), key=lambda i: (hits[i] > 0, hits[i], self._nearest[i], -i))
            self.take(best)
            ends.difference_update(enumerate(self.candidates[best].sizes))

    def extend(self, count: int, turns: Sequence[str]) -> None:
        """Take the farthest candidates, of one group after the other, until `count` are chosen or none is left.

        `turns` names every group that a candidate may have.
        """
        turn = 0
        while len(self.chosen) < min(count, len(self.candidates)):
            group = turns[turn % len(turns)]
            turn += 1
            rest = [i for i, c in enumerate(self.candidates) if c.group == group and self._nearest[i] >= 0]
            if rest:
                self.take(max(rest, key=lambda i: (self._nearest[i], -i)))


def _ends(values: Sequence[int]) -> tuple[int, int]:
    return min(values), max(values)
