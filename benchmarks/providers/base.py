"""What a provider is: a name, whether it is here, and a call for an op and pass."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable
from importlib import metadata
from typing import Any

from tritonops.calibrate.case import Case
from tritonops.calibrate.outputs import Poison
from tritonops.dispatch.problem import Problem

# On one argument set of the case, as Case.sample makes them (Provider.arguments converts it once, untimed): the
# outputs that the public call has, a tensor or a tuple of them.
Call = Callable[..., Any]
Arguments = tuple[Any, ...]


class Refused(Exception):
    """What a provider cannot do; the text is the reason in the result row."""


class Provider:
    """One implementation of the ops; its docstring says what exactly is timed.

    Attributes:
        name: as in a result row.
        distribution: the package whose version goes on file, "" for none of its own.
        module: what is imported; it is looked for, not imported, to say whether it is here.
        ops: names of the ops' records that it has, backwards included; None: all.
        named: where not None, it runs only on these, as `shape_key` writes them, and on the user's own shapes.
        most: on at most so many of the user's own shapes of an op and pass.
        charge: what every time of it is multiplied by; 1 unless a slowdown is planted.
    """

    name = ""
    distribution = ""
    module = ""
    ops: frozenset[str] | None = None
    named: frozenset[str] | None = None
    most: int | None = None
    charge: float = 1.0

    def available(self) -> str | None:
        """Why it cannot run here, or None."""
        if self.module and importlib.util.find_spec(self.module) is None:
            return f"{self.distribution or self.module} is not installed"
        return None

    def version(self) -> str | None:
        """Of its package; None where it has none of its own."""
        try:
            return metadata.version(self.distribution) if self.distribution else None
        except metadata.PackageNotFoundError:
            return None

    def skips(self, case: Case) -> str | None:
        """Why there is no row of it for a case, or None: what it does not have, or is not asked to run on."""
        if self.ops is not None and case.problem.op not in self.ops:
            return f"has no {case.problem.op}"
        if self.named is not None and not case.own and shape_key(case.problem) not in self.named:
            return "runs on named shapes only"
        return None

    def call(self, case: Case) -> Call:
        """What is timed.

        Raises:
            Refused: it cannot serve this problem.
            Exception: whatever its package raises.
        """
        raise NotImplementedError

    def arguments(self, case: Case, args: Arguments) -> Arguments:
        """The call's arguments from a sampled set, disjoint where those are; not timed."""
        return args

    def around(self, case: Case) -> contextlib.AbstractContextManager[Any]:
        """Entered around every call, capture and timing, outside what is timed."""
        return contextlib.nullcontext()

    def poison(self) -> contextlib.AbstractContextManager[Any]:
        """Entered around the call whose result is checked: what it allocates starts as NaN."""
        return Poison()

    def variant(self, case: Case, mode: str) -> str | None:
        """Which of our variants served."""
        return None


class Renamed(Provider):
    """A provider under another name."""

    def __init__(self, of: Provider, name: str):
        self.of, self.name = of, name
        self.distribution, self.module, self.ops = of.distribution, of.module, of.ops
        self.named, self.most = of.named, of.most
        for method in ("available", "version", "skips", "call", "arguments", "around", "poison", "variant"):
            setattr(self, method, getattr(of, method))


def shape_key(problem: Problem) -> str:
    """``matmul nt 4096x4096x512``."""
    sizes = "x".join(str(v) for k, v in problem.dims.items() if k != "batch")
    return " ".join(w for w in (problem.op, problem.layout, sizes) if w)


def plain(problem: Problem) -> None:
    """Raise Refused unless it is one product without bias, a norm with all its parameters, or a lookup as it comes."""
    t, dims = problem.traits, problem.dims
    if problem.op == "matmul":
        if dims["batch"] != 1 or t["bias"] or t["out"] != problem.dtype:
            raise Refused("takes one product, without bias and in the operands' dtype")
    elif "norm" in problem.op:
        wanted = ("weight", "bias") if problem.op.startswith("layer_norm") else ("weight",)
        if any(t[name] != problem.dtype for name in wanted):
            raise Refused(f"needs {' and '.join(wanted)} of the input's dtype")
        if t.get("grads", "xwb"[: 1 + len(wanted)]) != "xwb"[: 1 + len(wanted)]:
            raise Refused("computes every gradient, which is not asked for")
    elif t["padding"] or t["scale_grad_by_freq"]:
        raise Refused("takes neither padding_idx nor scale_grad_by_freq")
