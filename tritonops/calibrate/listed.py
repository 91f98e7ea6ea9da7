"""A user's own shapes: a file of tritonops.record, or a list written by hand."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch

from ..dispatch.problem import MODES, POLICIES, Problem
from ..dispatch.variant import REGISTRY, OpSpec
from .candidates import KINDS
from .case import Case
from .shapes import LAYOUTS, Fields, PlanError, parse, read_text

DTYPES = ("bfloat16", "float16", "float32", "float64")
_STRIDED_LAYOUTS = tuple(a + b for a in "ntx" for b in "ntx")
_OTHER_FIELDS = ("dtype", "layout", "aligned", "policy", "mode", "traits", "count")
_MAX_COUNT = 2**53


def read_shapes(path: str | os.PathLike[str]) -> dict[str, list[Case]]:
    """Cases by op, the most frequent first, weighted by their counts; rows that differ in policy or mode are one.

    Args:
        path: a file of ``tritonops.record``, or a JSON array (or JSON lines) of objects such as
            ``{"op": "matmul", "M": 4096, "N": 4096, "K": 512}``. May be left out: ``dtype`` (bfloat16), ``layout``
            (nt), ``count`` (1), ``aligned`` and ``traits`` (those of contiguous tensors), ``batch`` (1).

    Raises:
        PlanError: the file cannot be read, is empty or damaged, or a row is not a problem of an op; names the file,
            the line or the index, and the field.
    """
    file = Path(path)
    found: dict[str, dict[str, Case]] = {}
    for where, value in _rows(file):
        f = Fields(file, where, value)
        if "op" not in f.value:
            raise f.fail("op", "missing")
        spec = REGISTRY[f.text("op", REGISTRY)]
        dims = [d for d in spec.dims if d != "batch"]
        f.only(("op", *dims), (*(d for d in spec.dims if d == "batch"), *_OTHER_FIELDS))
        f.text("policy", POLICIES, "fast")
        f.text("mode", MODES, "graph")
        count = f.size("count", high=_MAX_COUNT) if "count" in f.value else 1
        problem = problem_in(spec, f)
        cases = found.setdefault(spec.name, {})
        for ids in spec.ids if spec.name.endswith("_backward") else spec.ids[:1]:
            case = Case(problem, ids, f"{file.name} {where}", weight=float(count), own=True)
            known = cases.setdefault(case.key, case)
            if known is not case:
                cases[case.key] = dataclasses.replace(known, weight=known.weight + count)
    return {op: sorted(cases.values(), key=lambda c: -c.weight) for op, cases in found.items()}


def _rows(file: Path) -> Iterator[tuple[str, Any]]:
    text = read_text(file)
    if not text.strip():
        raise PlanError(f"{file}: empty")
    if text.lstrip().startswith("["):
        values = parse(text, file)
        if not values:
            raise PlanError(f"{file}: an empty list")
        yield from ((f"[{i}]", value) for i, value in enumerate(values))
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield f"line {number}", parse(line, file, f"line {number}")


def problem_in(spec: OpSpec, f: Fields) -> Problem:
    """The problem of a row that has the op's sizes, and may have dtype, layout, aligned and traits."""
    dims = {d: f.size(d) if d in f.value else 1 for d in spec.dims}
    dtype = f.text("dtype", DTYPES, "bfloat16")
    # Strides make other layouts than a list of sizes can say.
    layouts = (_STRIDED_LAYOUTS if "traits" in f.value else LAYOUTS) if spec.name == "matmul" else ("",)
    layout = f.text("layout", layouts, "nt" if spec.name == "matmul" else "")
    problem = Problem(spec.name, dims, dtype, layout)
    if spec.name in KINDS:
        try:
            problem = KINDS[spec.name].describe(spec, dims, getattr(torch, dtype), layout.replace("x", "n"))
        except RuntimeError:
            raise f.fail("", f"no tensors have these sizes: {dims}") from None
    aligned = f.flag("aligned", problem.aligned)
    if "traits" in f.value:
        traits = Fields(f.file, f"{f.where}: traits", f.value["traits"])
        for name, value in traits.value.items():
            _check_trait(spec, problem, traits, name, value)
        problem = dataclasses.replace(problem, layout=layout, traits={**problem.traits, **traits.value})
    elif aligned != problem.aligned and "operands_aligned" in problem.traits:
        problem = dataclasses.replace(problem, traits={**problem.traits, "operands_aligned": aligned})
    if aligned and problem.traits.get("operands_aligned") is False:
        raise f.fail("aligned", "true, but trait operands_aligned is false")
    return dataclasses.replace(problem, aligned=aligned)


def _check_trait(spec: OpSpec, problem: Problem, f: Fields, name: str, value: object) -> None:
    """One of the values that the trait may have in a problem of that op and dtype."""
    if spec.name not in KINDS:
        return
    if name not in problem.traits:
        raise f.fail(name[:60], f"{spec.name} has no such trait; it has {', '.join(problem.traits)}")
    default = problem.traits[name]
    known: Collection[object]
    if isinstance(default, bool):
        known = (False, True)
    elif name == "out":
        known = {problem.dtype, "float32"} if problem.dtype != "float64" else {"float64"}
    elif name == "precision":
        known = ("ieee", "tf32") if problem.dtype == "float32" else ("ieee",)
    elif name == "grads":
        known = [x + w + b for x in ("x", "") for w in ("w", "") for b in ("b", "")]
    elif name == "index":
        known = ("int64", "int32")
    else:
        known = (None,) if spec.name.startswith("rms_norm") and name == "bias" else (None, *DTYPES)
    if not any(type(value) is type(k) and value == k for k in known):
        shown = ", ".join(sorted(map(repr, known)))
        raise f.fail(name, f"expected one of {shown}, got {ascii(value)[:60]}")
