"""The planning stage: which cases are measured, in an order of which any prefix covers and balances the whole."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from ..device import DeviceInfo
from ..dispatch.problem import Problem
from ..dispatch.table import write_atomically
from ..dispatch.variant import REGISTRY, OpSpec
from .candidates import KINDS, NORMS, Candidate, Section, Sizes, fill, gather, problem_of
from .case import Case
from .listed import problem_in, read_shapes
from .raw import Paths
from .samples import pool_of
from .shapes import Fields, PlanError, load, parse, read_text
from .spread import Point, Spread, log

__all__ = ["PlanError", "plan", "quotas", "read", "read_shapes", "write"]

SCHEMA = 1

# (training, held-out) cases of each section.
Quota = tuple[int, int]
_MATMUL: dict[tuple[str, bool], tuple[Quota, Quota, Quota]] = {  # nt, nn, tn
    ("bfloat16", True): ((50, 18), (40, 13), (40, 13)),
    ("float16", True): ((8, 4), (6, 3), (6, 3)),
    ("bfloat16", False): ((40, 7), (24, 5), (24, 5)),
    ("float16", False): ((3, 2), (3, 1), (3, 1)),
    ("tf32", True): ((5, 2), (5, 2), (5, 2)),
    ("tf32", False): ((12, 2), (8, 2), (8, 2)),
    ("float32", True): ((5, 2), (5, 2), (5, 2)),
    ("float32", False): ((10, 1), (5, 1), (5, 1)),
}
_LAYER_NORM: dict[tuple[str, bool], Quota] = {
    ("bfloat16", True): (64, 13),
    ("float16", True): (14, 4),
    ("float32", True): (45, 10),
    ("bfloat16", False): (20, 4),
    ("float16", False): (4, 2),
    ("float32", False): (14, 3),
}
_NORM: dict[tuple[str, bool], Quota] = {
    ("bfloat16", True): (40, 13),
    ("float16", True): (12, 4),
    ("float32", True): (30, 10),
    ("bfloat16", False): (12, 4),
    ("float16", False): (4, 2),
    ("float32", False): (8, 3),
}
_EMBEDDING: dict[tuple[str, bool], Quota] = {
    ("bfloat16", True): (13, 6),
    ("float16", True): (4, 2),
    ("float32", True): (9, 4),
    ("bfloat16", False): (4, 2),
    ("float16", False): (3, 1),
    ("float32", False): (4, 2),
}

# Which pool the next case of a section comes from; one that is empty is passed over.
_TRAINING_TURNS = ("model", "listed", "fill", "model", "sweep")
_HELDOUT_TURNS = ("model", "model", "model", "fill", "listed", "sweep")
# Candidates that take part in the choice: with 3500 of them a matmul section took 20 times as long.
_POOL = 600
_FILL = 6
# Features that follow others: every planned product has batch 1, and waves100 is tiles128 over the number of SMs.
_REDUNDANT = ("batch", "waves100")


def quotas(op: str) -> dict[Section, Quota]:
    """Numbers of training and held-out shapes by section."""
    if op not in KINDS:
        raise ValueError(f"plan: no shapes are listed for op {op!r}, only for {', '.join(sorted(KINDS))}")
    if op == "matmul":
        return {
            Section(dtype, layout, aligned): quota
            for (dtype, aligned), by_layout in _MATMUL.items()
            for layout, quota in zip(("nt", "nn", "tn"), by_layout, strict=True)
        }
    table = _LAYER_NORM if op == "layer_norm" else _NORM if op in NORMS else _EMBEDDING
    return {Section(dtype, "", aligned): quota for (dtype, aligned), quota in table.items()}


def ids_of(spec: OpSpec) -> tuple[str, ...]:
    """The distributions that each shape is measured with: a lookup is timed on uniform ids alone."""
    return spec.ids if spec.name.endswith("_backward") else spec.ids[:1]


def plan(spec: OpSpec, device: DeviceInfo) -> list[Case]:
    """The cases of an op, the same on every machine.

    Sections, and training and held-out cases, are interleaved in proportion to their quotas, and within a section the
    shapes come in farthest-point order, so that a budget may cut the tail anywhere. Cases of one shape that differ in
    their ids stand next to each other.

    Raises:
        PlanError: a shape list is missing or damaged.
        ValueError: no shapes are listed for the op.
    """
    wanted, lists = quotas(spec.name), load()
    kept = {
        section: gather(spec.name, section, lists, True) + fill(spec.name, section, _FILL * heldout, True)
        for section, (_, heldout) in wanted.items()
    }
    # Not only the shapes that will be chosen, but all that might be: models that are held out are never measured.
    closed = {_product(c.sizes) for candidates in kept.values() for c in candidates}
    streams: list[list[Case]] = []
    # float16 and bfloat16 are learned from together, so the second of them measures what the first has not.
    pooled: dict[Section, list[tuple[Candidate, Point]]] = {}
    for section, (training, heldout) in wanted.items():
        pool = pooled.setdefault(dataclasses.replace(section, dtype=pool_of(section.dtype)), [])
        found = gather(spec.name, section, lists, False) + fill(spec.name, section, _FILL * training, False)
        spread = _spread(spec, device, section, [c for c in found if _product(c.sizes) not in closed])
        for _, point in pool:
            spread.avoid(point)
        if not pool:
            spread.span(training)
        spread.extend(training, _TRAINING_TURNS)
        pool += zip(spread.chosen, spread.chosen_points(), strict=True)
        streams.append([_case(spec, section, c, False) for c in spread.chosen])
        hull = [(min(values), max(values)) for values in zip(*(c.sizes for c, _ in pool), strict=True)]
        # Outside of what was measured no table claims anything; the listed ones are verified all the same.
        spread = _spread(spec, device, section, [c for c in kept[section] if c.group == "listed" or _in(hull, c)])
        for i in [i for i, c in enumerate(spread.candidates) if c.group == "listed"][:heldout]:
            spread.take(i)
        spread.extend(heldout, _HELDOUT_TURNS)
        streams.append([_case(spec, section, c, True) for c in spread.chosen])
    shapes = sorted(
        (Fraction(2 * i + 1, 2 * len(stream)), -len(stream), number, i)
        for number, stream in enumerate(streams)
        for i in range(len(stream))
    )
    return [dataclasses.replace(streams[number][i], ids=ids) for _, _, number, i in shapes for ids in ids_of(spec)]


def _product(sizes: Sizes) -> Sizes:
    """The same for a product and for the two of its gradients, whose sizes are those of the product in other roles."""
    return tuple(sorted(sizes))


def _case(spec: OpSpec, section: Section, c: Candidate, heldout: bool) -> Case:
    problem = problem_of(spec, section, c.sizes)
    found = Section(problem.table_dtype, problem.layout, problem.aligned)
    if found != section:
        raise RuntimeError(f"plan: {spec.name} {c.sizes} was planned for {section} and belongs to {found}")
    return Case(problem, source=c.source, heldout=heldout)


def _in(hull: Sequence[tuple[int, int]], c: Candidate) -> bool:
    return all(low <= size <= high for size, (low, high) in zip(c.sizes, hull, strict=True))


def _spread(spec: OpSpec, device: DeviceInfo, section: Section, candidates: Sequence[Candidate]) -> Spread:
    """Over the candidates, less most of the many that are layers and sweeps and have no extreme size."""
    extremes = [{min(values), max(values)} for values in zip(*(c.sizes for c in candidates), strict=True)]
    rng = random.Random(f"{spec.name} {section.dtype} {section.layout} {section.aligned}")
    drawn = {i for _, i in sorted((rng.random(), i) for i in range(len(candidates)))[:_POOL]}
    pool = [
        c
        for i, c in enumerate(candidates)
        if i in drawn
        or c.group in ("listed", "fill")
        or any(size in ends for size, ends in zip(c.sizes, extremes, strict=True))
    ]
    return Spread(pool, [_point(spec, device, problem_of(spec, section, c.sizes)) for c in pool])


def _point(spec: OpSpec, device: DeviceInfo, problem: Problem) -> tuple[int, ...]:
    features = spec.all_features(problem, device)
    return tuple(log(value) for name, value in features.items() if name not in _REDUNDANT)


def write(paths: Paths, cases: Sequence[Case]) -> None:
    """Write a plan, one case a line, in one step.

    Raises:
        OSError: it cannot be written.
    """
    head = json.dumps({"schema": SCHEMA, "op": paths.op, "device": paths.device.table_name}, ensure_ascii=True)
    rows = ",\n ".join(json.dumps(c.to_json(), ensure_ascii=True, allow_nan=False) for c in cases)
    write_atomically(paths.plan, f'{head[:-1]}, "cases": [\n {rows}\n]}}\n'.encode("ascii"))


def read(paths: Paths) -> list[Case]:
    """The plan that `write` has written.

    Raises:
        PlanError: it cannot be read, is damaged, or is for another op or device; names the file and the field.
    """
    path = paths.plan
    top = Fields(path, "", parse(read_text(path), path))
    top.only(("schema", "op", "device", "cases"))
    for field, value in (("schema", SCHEMA), ("op", paths.op), ("device", paths.device.table_name)):
        if top.value[field] != value or isinstance(top.value[field], bool):
            raise top.fail(field, f"expected {value!r}, got {ascii(top.value[field])[:60]}")
    spec, cases = REGISTRY[paths.op], dict[str, Case]()
    for i, value in enumerate(top.items("cases")):
        f = Fields(path, f"cases[{i}]", value)
        case = _read_case(spec, f)
        if case.key in cases:
            raise f.fail("", "occurs twice")
        cases[case.key] = case
    return list(cases.values())


def _read_case(spec: OpSpec, f: Fields) -> Case:
    f.only(("dims", "dtype", "layout", "aligned", "traits", "ids", "source", "heldout", "weight"), ("own",))
    dims = Fields(f.file, f"{f.where}: dims", f.value["dims"])
    dims.only(spec.dims)
    row: Mapping[str, Any] = {k: v for k, v in f.value.items() if k in ("dtype", "layout", "aligned", "traits")}
    problem = problem_in(spec, Fields(f.file, f.where, {**dims.value, **row}))
    weight = f.value["weight"]
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < 2**53:
        raise f.fail("weight", f"expected a positive number, got {ascii(weight)[:60]}")
    return Case(
        problem,
        f.text("ids", spec.ids),
        f.text("source"),
        f.flag("heldout"),
        float(weight),
        "own" in f.value and f.flag("own"),
    )
