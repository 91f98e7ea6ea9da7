"""A slowdown that is planted, to see whether it is found."""

from __future__ import annotations

from .base import Provider, Renamed

SLOWDOWN = 1.05


class Slowed(Renamed):
    """A provider that is charged 1.05 times the time that it takes, as if of 21 calls 20 were counted.

    More work on the device would not be 5 %: a kernel costs a launch gap as well, and a repeated call finds its
    operands in the L2.
    """

    charge = SLOWDOWN

    def __init__(self, of: Provider):
        super().__init__(of, f"slowed:{of.name}")
