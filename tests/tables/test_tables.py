"""Every shipped table: valid by schema and parser, legal on its device, with its evidence, in step with the code."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import tritonops
from dispatch_cases import SOURCE_OF_ONE, Heard, leaf, make_table, section
from tritonops.calibrate import raw
from tritonops.calibrate.emit import emit
from tritonops.calibrate.learn import learn
from tritonops.calibrate.verify import geomean, verify
from tritonops.device import named_device
from tritonops.dispatch import source, store, table
from tritonops.dispatch.select import choose
from tritonops.dispatch.variant import REGISTRY, OpSpec

ROOT = Path(__file__).parents[2] / "dispatch_tables"
FILES = sorted(p for p in ROOT.glob("*/*.json") if p.parent.name in REGISTRY)


def _id(path: Path) -> str:
    return str(path.relative_to(ROOT))


def out_of_step(made: table.Table, spec: OpSpec) -> list[str]:
    """What a table keeps of the code that has changed, or was never there.

    A measured table holds the source hash of every kernel that its trees name, as an older measurement of a changed
    kernel proves nothing. A published one was measured on others' kernels and holds none.
    """
    variants, wrong = spec.variants(), []
    used = {v for s in made.sections for found in table.leaves(s.tree) for v in found.use} | set(made.default)
    families = {variants[v].family: variants[v].kernel for v in used if variants[v].kernel}
    for family, kernel in families.items():
        if made.published:
            continue
        if family not in made.kernels:
            wrong.append(f"kernels lacks {family!r}")
        elif made.kernels[family] != source.source_hash(str(kernel)):
            wrong.append(f"kernels.{family}.source is not the kernel's any more: measure again, the hash follows")
    for vid, entry in made.variants.items():
        for kept, now in (("meta", variants[vid].meta), ("options", variants[vid].options)):
            if kept == "options" and variants[vid].meta.get("warps") == 0:  # Liger's own rule sets them by width
                continue
            changed = [k for k, v in entry.get(kept, {}).items() if now.get(k) != v]
            wrong += [f"variants.{vid}.{kept}.{k} is now {now.get(k)}" for k in changed]
    return wrong


def test_there_are_tables_and_every_file_is_one() -> None:
    assert FILES
    others = {_id(p) for p in ROOT.rglob("*") if p.is_file()} - {_id(p) for p in FILES}
    assert {o for o in others if not re.fullmatch(r"schema\.json|shapes/[\w-]+\.json|[\w]+/raw/[\w.-]+", o)} == set()


@pytest.mark.parametrize("path", FILES, ids=_id)
def test_valid_by_parser_and_schema_and_written_in_its_one_form(path: Path) -> None:
    spec, device = REGISTRY[path.parent.name], named_device(path.stem)
    made = store.read(path, spec)
    assert (made.op, made.arch, made.sms) == (spec.name, device.arch, device.sms)
    assert path == store.table_path(ROOT, spec.name, device)
    assert table.dump(json.loads(path.read_bytes())) == path.read_bytes()
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.Draft202012Validator(json.loads((ROOT / "schema.json").read_text())).validate(made.raw)


@pytest.mark.parametrize("path", FILES, ids=_id)
def test_in_step_with_the_code(path: Path) -> None:
    spec = REGISTRY[path.parent.name]
    assert out_of_step(store.read(path, spec), spec) == []


@pytest.mark.parametrize("path", FILES, ids=_id)
def test_carries_its_evidence(path: Path) -> None:
    made = store.read(path, REGISTRY[path.parent.name])
    if made.published:
        assert made.provenance["source"].startswith("https://") and len(made.provenance["note"]) > 100
        assert made.kernels == {} and "triton" not in made.made_with
    else:
        raw = (path.parent / made.provenance["raw"]).read_bytes()
        assert hashlib.sha256(raw).hexdigest() == made.provenance["sha256"]
        assert {"triton", "ptxas", "torch", "driver", "date", "command"} <= made.made_with.keys()
    for part in made.sections:
        assert part.evidence["shapes"] == sum(found.n for found in table.leaves(part.tree))
        assert part.hull and {"dtype", "aligned"} <= part.when.keys()


def _corners(made: table.Table, part: table.Section, spec: OpSpec) -> list[dict[str, int]]:
    low = {d: part.hull[d][0] if d in part.hull else 1 for d in spec.dims}
    high = {d: part.hull[d][1] if d in part.hull else 1 for d in spec.dims}
    return [low, high, low | {spec.dims[-1]: high[spec.dims[-1]]}, high | {spec.dims[-1]: low[spec.dims[-1]]}]


@pytest.mark.parametrize("path", FILES, ids=_id)
def test_the_first_choice_of_each_leaf_is_legal_on_its_device(path: Path) -> None:
    """At the corners of the hull: within shared memory, alignment, architecture."""
    spec, device = REGISTRY[path.parent.name], named_device(path.stem)
    made = store.read(path, spec)
    for part in made.sections:
        for found in table.leaves(part.tree):
            for dims in _corners(made, part, spec):
                problem = _problem(spec, dims, part.when)
                legal = [spec.variants()[v].requires(problem, device) is None for v in found.use]
                assert any(legal), (found, dims)


def _problem(spec: OpSpec, dims: dict[str, int], when: Any):
    dtype = torch.float32 if when["dtype"] == "tf32" else getattr(torch, when["dtype"])
    if spec.name == "matmul":
        a, b = (dims["batch"], dims["M"], dims["K"]), (dims["batch"], dims["K"], dims["N"])
        return spec.describe(a, b, dtype=dtype, layout=when.get("layout", "nn"))
    if "T" in dims:
        return spec.describe((dims["T"],), (dims["V"], dims["D"]), dtype=dtype)
    return spec.describe((dims["M"], dims["N"]), dtype=dtype)


MEASURED = [p for p in FILES if json.loads(p.read_bytes())["provenance"]["kind"] == "measured"]


@pytest.mark.parametrize("path", MEASURED, ids=_id)
def test_a_measured_table_follows_from_its_raw_file_byte_for_byte(path: Path) -> None:
    """`learn`, `verify` and `emit` give the shipped table again, on the CPU, and README shows its score."""
    spec = REGISTRY[path.parent.name]
    packed = path.parent / json.loads(path.read_bytes())["provenance"]["raw"]
    found = raw.read(packed)
    learned = learn(found, spec)
    digest = hashlib.sha256(packed.read_bytes()).hexdigest()
    report = verify(found, learned, spec)
    assert emit(found, learned, report, packed.name, digest) == path.read_bytes()
    readme = Path(__file__).parents[2] / "README.md"
    if readme.exists():
        assert _score_in_words(report) in readme.read_text()


def _score_in_words(report: Any) -> str:
    rows = report.as_served("graph")
    sections = [s for s in report.scores if s.when["mode"] == "graph"]
    vendor, oracle = (
        geomean([value(row) for row in rows]) for value in (lambda r: r.gain.value, lambda r: r.of_oracle)
    )
    worst = min(row.gain.value for row in rows)
    refused = sum(bool(s.refused) for s in sections)
    return f"| `{report.op}` | {len(rows)} | {vendor:.2f} | {worst:.2f} | {oracle:.2f} | {refused} of {len(sections)} |"


def test_a_measured_table_out_of_step_is_found(toy, monkeypatch) -> None:
    def check(**changes: Any) -> list[str]:
        made = make_table(section(leaf("one/a", "two/a", "vendor")), **changes)
        parsed = table.parse(json.dumps(made).encode(), "t", op="toy", features={"M"}, known=set(toy.spec.variants()))
        return out_of_step(parsed, toy.spec)

    assert check() == []
    assert check(kernels={"one": {"source": SOURCE_OF_ONE}}) == ["kernels lacks 'two'"]
    changed = {"one": {"source": "0" * 64}, "two": {"source": "2" * 64}}
    assert check(kernels=changed) == [
        "kernels.one.source is not the kernel's any more: measure again, the hash follows"
    ]
    assert check(kernels={}, provenance={"kind": "published", "source": "a thesis"}) == []
    kept = {"one/a": {"meta": {"BLOCK": 8}}, "two/a": {"options": {"num_warps": 4}}}
    assert check(variants=kept) == [
        "variants.one/a.meta.BLOCK is now None", "variants.two/a.options.num_warps is now None"
    ]  # fmt: skip


# matmul/sm_80-108.json: triton-lang/triton#5174

PERSISTENT, TILED = "persistent/128x128x64-g8-w4-s3-p2", "tiled/128x256x64-g8-w8-s3"


def _on_a100(m: int, k: int, *, n: int | None = None, layout: str = "nt", dtype=torch.float16, **arguments: Any):
    shapes = ((m, k), (k, n or m))
    return tritonops.explain("matmul", *shapes, dtype=dtype, layout=layout, device="sm_80-108", **arguments)


@pytest.fixture
def shipped(monkeypatch, tmp_path):
    """The shipped tables alone, whatever this user has calibrated."""
    tritonops.clear_cache()
    monkeypatch.delenv("TRITONOPS_TABLE_DIR", raising=False)
    monkeypatch.setenv("TRITONOPS_CACHE_DIR", str(tmp_path))
    yield
    tritonops.clear_cache()


@pytest.mark.parametrize(
    ("m", "k", "variant", "path"),
    [
        (4096, 128, PERSISTENT, "K = 128 <= 256"),
        (8192, 256, PERSISTENT, "K = 256 <= 256"),
        (4096, 264, TILED, "K = 264 > 256"),
        (4096, 384, TILED, "K = 384 > 256"),
        (8192, 512, TILED, "K = 512 > 256"),
        (6000, 8192, TILED, "K = 8192 > 256"),
    ],
)
def test_a100_without_torch_both_sides_of_the_threshold_are_chosen(shipped, m, k, variant, path) -> None:
    with tritonops.use(exclude="vendor"):
        got = _on_a100(m, k)
    assert (got.variant, got.rule, got.path) == (variant, "published table", (path,))
    assert got.rejected == (("vendor", "excluded by use(exclude=...)"),)
    assert got.table == str(ROOT / "matmul" / "sm_80-108.json")
    assert got.provenance["source"] == "https://github.com/triton-lang/triton/issues/5174"
    assert got.evidence["shapes"] == 64 and got.stale == ()


@pytest.mark.parametrize(("m", "k"), [(4096, 128), (8192, 8192), (64, 64), (100_000, 256)])
def test_a100_torch_serves_and_the_reason_is_told(shipped, m, k) -> None:
    got = _on_a100(m, k)
    assert (got.variant, got.rule) == ("vendor", "published table")
    assert got.reason == (
        "torch comes first: https://github.com/triton-lang/triton/issues/5174 ranks our own variants only"
    )
    assert got.unknown[0] == "how our variants compare with torch here: the table is published, not measured"


@pytest.mark.parametrize(
    ("m", "k", "variant", "unknown"),
    [
        (4096, 64, PERSISTENT, "K=64 is outside [128, 8192]"),
        (1024, 512, TILED, "M=1024 is outside [4096, 8192], N=1024 is outside [4096, 8192]"),
        (8192, 16384, TILED, "K=16384 is outside [128, 8192]"),
    ],
)
def test_a100_outside_the_sweep_the_nearest_edge_serves_and_says_so(shipped, m, k, variant, unknown) -> None:
    with tritonops.use(exclude="vendor"):
        got = _on_a100(m, k)
    assert got.variant == variant and got.unknown[1] == f"nothing was measured here: {unknown}"


@pytest.mark.parametrize(
    "facts", [{"layout": "nn"}, {"layout": "tn"}, {"dtype": torch.bfloat16}, {"dtype": torch.float32}]
)
def test_a100_what_was_not_swept_has_no_section(shipped, facts) -> None:
    got = _on_a100(4096, 128, **facts)
    assert (got.variant, got.rule, got.path) == ("vendor", "table default", ())
    assert "has no section for" in got.reason


def test_a100_a_card_of_the_other_memory_size_is_told_and_served_alike(shipped, monkeypatch) -> None:

    monkeypatch.setattr(store, "_warned", set())
    small = dataclasses.replace(named_device("sm_80-108"), name="NVIDIA A100-SXM4-40GB", index=0)
    spec = REGISTRY["matmul"]
    with Heard() as heard, tritonops.use(exclude="vendor"):
        assert choose(spec, _on_a100(4096, 128).problem, small).variant == PERSISTENT
    assert len(heard) == 1 and "was made on NVIDIA A100-SXM4-80GB, this is NVIDIA A100-SXM4-40GB" in heard[0]


def test_a100_the_grid_of_the_reported_best_is_216_programs(shipped) -> None:
    from tritonops import launch
    from tritonops.dispatch.variant import Choice

    if not tritonops._compat.has_triton():
        pytest.skip("triton is not installed")
    spec = REGISTRY["matmul"]
    with tritonops.use(exclude="vendor"):
        got = _on_a100(4096, 128)
    choice = Choice(spec.variants()[got.variant], got.problem, got.device, got)
    with launch.capture() as requests:
        choice.variant.run(choice, *spec.sample(got.problem, "meta"))
    assert (
        requests[0].grid == (216,) and requests[0].options["num_warps"] == 4 and requests[0].options["num_stages"] == 3
    )
