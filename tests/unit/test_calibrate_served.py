"""An emitted table where it serves: the store finds it and `choose` takes what `verify` scored, under every policy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import tritonops
from dispatch_cases import SOURCE_OF_ONE, SOURCE_OF_TWO, Heard, Toy, cuda, put
from learn_cases import between, grid, measured, raw_of
from tritonops.calibrate.emit import emit
from tritonops.calibrate.learn import learn
from tritonops.calibrate.raw import Measured, Raw
from tritonops.calibrate.verify import Report, verify
from tritonops.dispatch import source
from tritonops.dispatch.problem import Problem
from tritonops.dispatch.select import choose
from tritonops.dispatch.variant import REGISTRY, VENDOR, OpSpec

GPU = cuda()
NORM = REGISTRY["layer_norm_backward"]
NARROW, MIDDLE, LARGE, WIDE = (
    "rows/t1024-w4-s3-p4", "rows/t4096-w8-s3-p2", "rows/t8192-w8-s3-p1", "rows/t16384-w16-s2-p1"
)  # fmt: skip


def raw_for(spec: OpSpec, rows: list[Measured], kernels: Mapping[str, str]) -> Raw:
    """A raw file of an op, made by the Triton that is here."""
    variants = spec.variants()
    entry = {"regs": 64, "spill": 0, "text": "0" * 64}
    header = {
        **raw_of([]).header,
        "op": spec.name,
        "made_with": {**raw_of([]).header["made_with"], "ptxas": "12.8.93"},
        "kernels": {family: {"source": digest} for family, digest in kernels.items()},
        "variants": {v: {"meta": dict(variants[v].meta), "options": {}, **entry} for v in variants if v != VENDOR},
        "gate": {v: {"passed": True, "why": "", "cases": 1, "error": 0.5} for v in variants},
    }
    return Raw(header, tuple(rows))


def table_of(raw: Raw, spec: OpSpec) -> tuple[Report, bytes]:
    learned = learn(raw, spec)
    found = verify(raw, learned, spec)
    return found, emit(raw, learned, found, "raw.jsonl.gz", "0" * 64)


def with_problem(row: Measured, problem: Problem) -> Measured:
    return dataclasses.replace(row, case=dataclasses.replace(row.case, problem=problem))


def norm_gains(m: int, n: int) -> dict[str, float]:
    """Narrow rows to N = 1024, wide ones from N = 8192 where there are many of them, torch between."""
    gains = {NARROW: 1.5, MIDDLE: 0.9, LARGE: 0.8, WIDE: 1.25 if m >= 512 and n >= 8192 else 0.7}
    most = {NARROW: 1024, MIDDLE: 4096, LARGE: 8192, WIDE: 16384}
    return {v: g for v, g in gains.items() if n <= most[v]}


def norm_row(m: int, n: int, dtype: torch.dtype, by: Callable[[int, int], dict[str, float]], **case: Any) -> Measured:
    """Eagerly narrow rows gain nothing where few of them leave the host as the bottleneck."""
    gains = by(m, n)
    eager = {v: 0.8 if m <= 64 and v == NARROW else g for v, g in gains.items()}
    row = measured(m, n, gains, noise=0.02, eager=eager, dtype=str(dtype)[6:], **case)
    return with_problem(row, NORM.describe((m, n), dtype=dtype))


@pytest.fixture(scope="module")
def norm() -> tuple[Report, bytes]:
    def losing(m: int, n: int) -> dict[str, float]:
        return norm_gains(m, n) | ({NARROW: 0.7} if n <= 1024 else {})

    both = [(torch.bfloat16, norm_gains), (torch.float32, losing)]
    rows = [norm_row(m, n, dtype, norm_gains) for dtype, _ in both for m, n in grid()]
    rows += [norm_row(m, n // 8 * 8, dtype, by, heldout=True) for dtype, by in both for m, n in between(40)]
    kernel = NORM.variants()[NARROW].kernel
    assert kernel is not None
    return table_of(raw_for(NORM, rows, {"rows": source.source_hash(kernel)}), NORM)


@pytest.fixture
def served(clean: None, norm: tuple[Report, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Report:
    put(tmp_path / "tables", norm[1], GPU, NORM.name)
    monkeypatch.setenv("TRITONOPS_TABLE_DIR", str(tmp_path / "tables"))
    return norm[0]


def test_what_serves_a_held_out_case_is_what_was_scored(served: Report) -> None:
    seen: dict[str, set[str]] = {"bfloat16": set(), "float32": set()}
    with Heard() as heard:
        for s in served.scores:
            assert s.heldout and len(s.rows) == 40 and bool(s.refused) is (s.when["dtype"] == "float32")
            for row in s.served:
                problem = dataclasses.replace(row.sample.measured.case.problem, mode=s.when["mode"])
                decision = choose(NORM, problem, GPU)
                assert decision.rule == "table" and decision.evidence["heldout"] == s.evidence()
                assert decision.variant == row.choice
                seen[s.when["dtype"]] |= {decision.variant}
    assert seen == {"bfloat16": {NARROW, WIDE, VENDOR}, "float32": {WIDE, VENDOR}}  # its narrow leaf lost
    assert heard == []


def test_graph_and_eager_calls_of_one_shape_are_served_each_by_its_own_section(served: Report) -> None:
    problem = NORM.describe((32, 600), dtype=torch.bfloat16)
    found = [choose(NORM, dataclasses.replace(problem, mode=mode), GPU).variant for mode in ("graph", "eager")]
    assert found == [NARROW, VENDOR]


def test_beyond_the_measured_sizes_and_types_torch_serves(served: Report) -> None:
    for shape, dtype in (((16, 400), torch.bfloat16), ((9000, 512), torch.bfloat16), ((16, 512), torch.float64)):
        assert choose(NORM, NORM.describe(shape, dtype=dtype), GPU).variant == VENDOR
    assert (
        choose(NORM, NORM.describe((64, 512), dtype=torch.float16), GPU).variant == VENDOR
    )  # not measured: no section


def test_a_backward_row_says_so(norm: tuple[Report, bytes]) -> None:
    rows = norm[0].rows()
    assert {(r["op"], r["pass"], r["layout"], r["ids"], r["tflops"]) for r in rows} == {
        ("layer_norm", "bwd", None, None, None)
    }
    assert {r["dtype"] for r in rows} == {"bfloat16", "float32"} and {r["provider"] for r in rows} == {"torch", "ours"}
    first = next(r for r in rows if r["dtype"] == "float32")
    m, n = first["shape"]["M"], first["shape"]["N"]
    assert first["fraction"] == pytest.approx(3 * m * n * 4 / (first["ms"] * 1e-3) / 4e12, rel=0.01)


def test_a_product_has_its_rate_and_no_fraction() -> None:
    spec = REGISTRY["matmul"]
    vid = next(v for v in spec.variants() if v.startswith("tiled/"))

    def product(m: int, **case: Any) -> Measured:
        row = measured(m, 512, {vid: 1.5}, **case)
        return with_problem(row, spec.describe((1, m, 256), (1, 256, 512), dtype=torch.bfloat16, layout="nt"))

    rows = [product(m) for m in (64, 128, 256)] + [product(100, heldout=True)]
    found, _ = table_of(raw_for(spec, rows, {"tiled": "0" * 64}), spec)
    torchs, ours = (r for r in found.rows() if r["mode"] == "graph")
    assert ours["shape"] == {"M": 100, "N": 512, "K": 256} and ours["layout"] == "nt" and ours["variant"] == vid
    assert ours["fraction"] is None and ours["pass"] == "fwd"
    assert ours["tflops"] == pytest.approx(2 * 100 * 512 * 256 / ours["ms"] / 1e9, rel=1e-3)
    assert torchs["ms"] / ours["ms"] == pytest.approx(1.5, rel=0.03)


# loose/a is not deterministic, steady/a is batch-invariant
@pytest.mark.parametrize(
    ("learned", "heldout", "first"),
    [
        ({"loose/a": 2.0, "one/a": 1.4, "steady/a": 0.8}, {"loose/a": 2.0}, "loose/a"),
        ({"loose/a": 0.9, "one/a": 0.6, "two/a": 0.5, "steady/a": 0.4}, {"loose/a": 0.9}, VENDOR),
        ({"loose/a": 2.0, "one/a": 1.4, "steady/a": 0.3}, {"loose/a": 0.5}, VENDOR),
    ],
    ids=["ours", "torch's", "refused"],
)
def test_something_measured_of_ours_serves_every_policy_without_torch(
    toy: Toy, tables: Path, learned: dict[str, float], heldout: dict[str, float], first: str
) -> None:
    toy.prefer = []  # nothing but the table knows of any
    rows = [
        with_problem(row, Problem("toy", row.case.problem.dims, "float32", aligned=aligned))
        for aligned in (True, False)
        for row in (
            *(measured(m, 512, learned) for m in (16, 64, 256, 1024, 4096, 8192)),
            *(measured(m, 512, heldout, heldout=True) for m in (100, 500)),
        )
    ]
    _, data = table_of(raw_for(toy.spec, rows, {"one": SOURCE_OF_ONE, "two": SOURCE_OF_TWO}), toy.spec)
    put(tables, data, GPU)

    def chosen(m: int, policy: str, *exclude: str) -> str:
        with tritonops.use(policy=policy, exclude=exclude):
            return choose(toy.spec, toy.problem(m, 512), GPU).variant

    for m in (16, 300, 8192):
        assert chosen(m, "fast") == first
        assert chosen(m, "fast", "vendor") == "loose/a"
        assert chosen(m, "deterministic", "vendor") == "one/a"
        assert chosen(m, "batch_invariant", "vendor") == "steady/a"
