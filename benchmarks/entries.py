"""What is measured: entries of one op, pass, shape, dtype and layout, from a suite or the user's own list."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tritonops.calibrate.candidates import Section, problem_of
from tritonops.calibrate.case import Case
from tritonops.calibrate.listed import read_shapes
from tritonops.calibrate.shapes import DIMS, MAX_SIZE, PlanError, load
from tritonops.dispatch.variant import REGISTRY

from .suites import BOTH_IDS, OPS, PASSES, SUITES, Item, gradients, kind_of

# The suite of the user's own shapes.
OWN = "own"

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "tf32": "tf32", "fp8": "float8_e4m3fn"}


class SuiteError(ValueError):
    """A suite, or a list of shapes, that gives nothing to measure: why."""


@dataclass(frozen=True)
class Entry:
    """One row of the plan: what every provider is timed on.

    Attributes:
        op: one of OPS.
        direction: ``fwd`` or ``bwd``; the backward of a product is the two products that give its gradients.
        refused: why nothing of it can be measured in this version, or "".
    """

    suite: str
    op: str
    direction: str
    case: Case
    refused: str = ""

    @property
    def sizes(self) -> dict[str, int]:
        """As a result row has them: without batch where there is one."""
        return {k: v for k, v in self.case.problem.dims.items() if k != "batch" or v != 1}

    @property
    def unusual(self) -> dict[str, Any]:
        """What else than sizes, dtype and layout the user's own problem has: a bias, misaligned operands."""
        p = self.case.problem
        if not self.case.own:
            return {}
        sizes = tuple(v for k, v in p.dims.items() if k != "batch")
        usual = problem_of(REGISTRY[p.op], Section(p.table_dtype, p.layout.replace("x", "n"), True), sizes)
        found = {k: v for k, v in p.traits.items() if usual.traits.get(k) != v}
        return found if p.aligned == usual.aligned else {**found, "aligned": p.aligned}

    def facts(self) -> dict[str, Any]:
        """What identifies it in a result row; ``traits`` is there where something is unusual."""
        p, unusual = self.case.problem, self.unusual
        return {
            "suite": self.suite,
            "op": self.op,
            "pass": self.direction,
            "shape": self.sizes,
            "dtype": p.table_dtype,
            "layout": p.layout or None,
            "ids": self.case.ids or None,
            **({"traits": unusual} if unusual else {}),
        }

    def describe(self) -> str:
        """``matmul fwd bfloat16 nt M=4096 N=4096 K=512``."""
        f = self.facts()
        more = [f"{k}={v}" for k, v in f.get("traits", {}).items()]
        words = [
            self.op,
            self.direction,
            f["dtype"],
            f["layout"],
            f["ids"],
            *more,
            *(f"{k}={v}" for k, v in self.sizes.items()),
        ]
        return " ".join(str(w) for w in words if w)


def _refused(dtype: str) -> str:
    return "fp8 is not in this version" if dtype.startswith("float8") and "scaled_matmul" not in REGISTRY else ""


def _entries(suite: str, op: str, direction: str, dtype: str, item: Item) -> Iterator[Entry]:
    backward = direction == "bwd" and op != "matmul"
    spec = REGISTRY[f"{op}_backward" if backward else op]
    problem = problem_of(spec, Section(dtype, item.layout, True), item.sizes)
    for ids in item.ids if op == "embedding" else ("",):
        yield Entry(
            suite, op, direction, Case(problem, ids, item.source, item.heldout, own=suite == OWN), _refused(dtype)
        )


def of_suite(
    name: str,
    ops: Sequence[str] = (),
    directions: Sequence[str] = (),
    dtypes: Sequence[str] = (),
    k: Sequence[int] = (),
) -> list[Entry]:
    """The entries of a suite; what is left out is the suite's own choice.

    Args:
        dtypes: names of torch's, or ``tf32``.
        k: of the tutorial's suites: these K instead of the listed ones.

    Raises:
        SuiteError: no such suite, an op that it does not have, or nothing is left.
    """
    if name not in SUITES:
        raise SuiteError(f"no suite {name!r}; suites: {', '.join(SUITES)}")
    suite, lists = SUITES[name], load()
    known = (*suite.ops, *suite.extra)
    for op in ops:
        if op not in known:
            raise SuiteError(f"suite {name} has no {op}, only {', '.join(known)}")
    out: list[Entry] = []
    for dtype in dtypes or (suite.dtype,):
        for op in ops or suite.ops:
            for direction in directions or suite.directions:
                items = list(suite.items(op, direction, lists))
                if k:
                    m, n, _ = items[0].sizes
                    wanted = [Item((m, n, size), "nt", "persistent-tutorial") for size in k]
                    items = wanted if direction == "fwd" else [
                        Item(sizes, how, "persistent-tutorial gradient")
                        for item in wanted for sizes, how in gradients(*item.sizes)
                    ]  # fmt: skip
                for item in items:
                    out += _entries(name, op, direction, dtype, item)
    if not out:
        raise SuiteError(f"suite {name} has no {' or '.join(directions)} rows")
    return _once(out)


def _once(found: Sequence[Entry]) -> list[Entry]:
    return list({(e.op, e.direction, e.case.key): e for e in found}.values())


_SHAPE = re.compile(r"[1-9][0-9]*(?:x[1-9][0-9]*)*")


def listed(
    text: str, ops: Sequence[str], directions: Sequence[str], dtypes: Sequence[str], layout: str = "nt"
) -> list[Entry]:
    """Entries of shapes written out: ``4096x4096x512,8192x8192x512``, sizes in the order of the op's.

    Raises:
        SuiteError: a shape that is none of the op's, or no op.
    """
    if not ops:
        raise SuiteError("shapes that are written out need --op")
    out: list[Entry] = []
    for op in ops:
        names = DIMS[kind_of(op)]
        for word in text.split(","):
            shape = word.strip().lower()
            sizes = tuple(map(int, shape.split("x"))) if _SHAPE.fullmatch(shape) else ()
            if len(sizes) != len(names) or max(sizes) > MAX_SIZE:
                raise SuiteError(f"{word!r} is no shape of {op}, which has {'x'.join(names)}, each 1 to {MAX_SIZE}")
            for dtype in dtypes or ("bfloat16",):
                for direction in directions or ("fwd",):
                    item = Item(sizes, layout if op == "matmul" else "", OWN, ids=BOTH_IDS)
                    if op == "matmul" and direction == "bwd":
                        for products, how in gradients(*sizes):
                            out += _entries(OWN, op, direction, dtype, Item(products, how, OWN))
                    elif op == "embedding" and direction == "fwd":
                        out += _entries(OWN, op, direction, dtype, Item(sizes, "", OWN))
                    else:
                        out += _entries(OWN, op, direction, dtype, item)
    return _once(out)


def from_file(path: Path, ops: Sequence[str] = (), directions: Sequence[str] = ()) -> list[Entry]:
    """Entries of a file of tritonops.record or a list, as ``python -m tritonops.calibrate --shapes`` reads it.

    Raises:
        SuiteError: nothing in it is of the ops and passes that are wanted, or it is damaged; names the place.
    """
    try:
        found = read_shapes(path)
    except PlanError as error:
        raise SuiteError(str(error)) from None
    out: list[Entry] = []
    for name, cases in found.items():
        op, direction = name.removesuffix("_backward"), "bwd" if name.endswith("_backward") else "fwd"
        if op in OPS and (not ops or op in ops) and (not directions or direction in directions):
            out += [Entry(OWN, op, direction, case) for case in cases if math.prod(case.problem.dims.values())]
    if not out:
        raise SuiteError(f"{path}: nothing in it is of {', '.join(ops or OPS)} and {' or '.join(directions or PASSES)}")
    return _once(out)
