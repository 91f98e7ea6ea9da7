"""A case: one problem with the data it is timed on, where it comes from, and what it counts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..dispatch.problem import Problem
from ..dispatch.variant import OpSpec


@dataclass(frozen=True)
class Case:
    """One problem to measure.

    Attributes:
        problem: mode ``graph``, policy ``fast``, no flags.
        ids: distribution of the ids of an embedding (``uniform``, ``zipf1.0``), "" for other ops.
        source: the layer it is (``llama-3.1-8b mlp.up wgrad``), ``fill``, or the user's file.
        heldout: used to verify tables, never to learn them.
        weight: how much it counts, for example the number of calls recorded; 1 for listed shapes.
        own: from the user's file of shapes.
    """

    problem: Problem
    ids: str = ""
    source: str = ""
    heldout: bool = False
    weight: float = 1.0
    own: bool = False

    def __post_init__(self) -> None:
        plain = replace(self.problem, mode="graph", policy="fast", flags=0)
        object.__setattr__(self, "problem", plain)

    @property
    def key(self) -> str:
        """One text for one case: what identifies a measurement when a run is resumed."""
        return json.dumps([self.problem_json(), self.ids], sort_keys=True)

    def problem_json(self) -> dict[str, Any]:
        p = self.problem
        return {
            "dims": dict(p.dims),
            "dtype": p.dtype,
            "layout": p.layout,
            "aligned": p.aligned,
            "traits": dict(p.traits),
        }

    def to_json(self) -> dict[str, Any]:
        return {
            **self.problem_json(),
            "ids": self.ids,
            "source": self.source,
            "heldout": self.heldout,
            "weight": self.weight,
            **({"own": True} if self.own else {}),
        }

    @classmethod
    def from_json(cls, op: str, row: Mapping[str, Any]) -> Case:
        problem = Problem(
            op, dict(row["dims"]), row["dtype"], row["layout"], row["aligned"], traits=dict(row["traits"])
        )
        return cls(problem, row["ids"], row["source"], row["heldout"], row["weight"], row.get("own", False))

    def sample(self, spec: OpSpec, device: str) -> tuple[Any, ...]:
        """Fresh op arguments of this case: random on a real device, unallocated on "meta"."""
        return spec.sample(self.problem, device, self.ids) if self.ids else spec.sample(self.problem, device)
