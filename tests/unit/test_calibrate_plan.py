"""The plan: its lists, its quotas, what is held out, its order; and a user's own shapes."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

import tritonops
from tritonops.calibrate import candidates, shapes
from tritonops.calibrate import plan as planning
from tritonops.calibrate.candidates import Candidate, Section
from tritonops.calibrate.case import Case
from tritonops.calibrate.plan import PlanError, plan, quotas, read, read_shapes, write
from tritonops.calibrate.raw import Paths
from tritonops.calibrate.samples import pool_of
from tritonops.calibrate.spread import Spread, log
from tritonops.device import named_device
from tritonops.dispatch import store
from tritonops.dispatch.problem import Problem
from tritonops.dispatch.variant import REGISTRY, VENDOR

ROOT = Path(__file__).parents[2]
LISTS = ROOT / "dispatch_tables" / "shapes"
H200, A100 = named_device("sm_90-132"), named_device("sm_80-108")
OPS = (
    "matmul", "layer_norm", "layer_norm_backward", "rms_norm", "rms_norm_backward", "embedding", "embedding_backward",
)  # fmt: skip
PLANS: dict[str, list[Case]] = {}


@pytest.fixture(params=OPS)
def op(request: pytest.FixtureRequest) -> str:
    return request.param


def planned(op: str) -> list[Case]:
    if op not in PLANS:
        PLANS[op] = plan(REGISTRY[op], H200)
    return PLANS[op]


def section(case: Case) -> Section:
    p = case.problem
    return Section(p.table_dtype, p.layout, p.aligned)


def sizes(case: Case) -> tuple[int, ...]:
    return tuple(case.problem.dims.values())


def shapes_of(cases: list[Case]) -> list[Case]:
    """One case of each shape: the first of its ids."""
    return [c for c in cases if c.ids in ("", "uniform")]


def tensors(values: Any):
    return [v for v in values if isinstance(v, torch.Tensor)]


# The numbers asked for, and what each case is


def test_matmul_has_its_numbers() -> None:
    by = Counter((c.problem.table_dtype, c.problem.layout, c.problem.aligned, c.heldout) for c in planned("matmul"))
    assert by["bfloat16", "nt", True, False] == 50 and by["bfloat16", "nt", True, True] == 18
    assert by["bfloat16", "tn", True, False] == 40 and by["float16", "nn", True, True] == 3
    assert by["tf32", "nt", False, False] == 12 and by["float32", "nn", False, True] == 1
    assert len(by) == 48 and by.total() == 421


def test_every_section_has_its_quota(op) -> None:
    got = Counter((section(c), c.heldout) for c in shapes_of(planned(op)))
    want = {(s, held): q[held] for s, q in quotas(op).items() for held in (False, True)}
    assert got == want and min(want.values()) >= 1


def test_ids_of_lookups_and_their_backward() -> None:
    assert {c.ids for c in planned("embedding")} == {"uniform"}
    backward = planned("embedding_backward")
    pairs = list(zip(backward[::2], backward[1::2], strict=True))
    assert len(pairs) == 54 == len(planned("embedding"))
    for one, two in pairs:
        assert (one.ids, two.ids) == ("uniform", "zipf1.0") and dataclasses.replace(two, ids="uniform") == one
    assert {c.ids for op in OPS[:5] for c in planned(op)} == {""}


def test_a_case_is_what_describe_and_sample_make_of_it(op) -> None:
    spec = REGISTRY[op]
    for c in shapes_of(planned(op)):
        args = c.sample(spec, "meta")
        if op == "matmul":
            assert args[2] is None and args[3] is None
            again = spec.describe(*args[:2])
        elif op.startswith("embedding"):
            assert args[1].shape == (c.problem.dims["T"],)
            v, d = c.problem.dims["V"], c.problem.dims["D"]
            again = spec.describe(args[1], args[0] if op == "embedding" else torch.empty(v, d, dtype=args[0].dtype))
            assert args[0].shape[-1] == d
        else:
            x = next(t for t in tensors(args) if t.dim() == 2)
            parameters = [(c.problem.dims["N"],)] * (2 if op.startswith("layer") else 1)
            again = spec.describe(x, *parameters, dtype=x.dtype)
            assert x.shape == (c.problem.dims["M"], c.problem.dims["N"])
        precision = {"precision": c.problem.traits["precision"]} if op == "matmul" else {}
        assert Case(dataclasses.replace(again, traits={**again.traits, **precision})).problem == c.problem


def test_every_case_is_within_its_limits_and_legal_for_the_vendor(op) -> None:
    spec = REGISTRY[op]
    vendor = spec.variants()[VENDOR]
    for c in planned(op):
        assert vendor.requires(c.problem, H200) is None
        d, item = c.problem.dims, getattr(torch, c.problem.dtype).itemsize
        if op == "matmul":
            assert 2 * d["M"] * d["N"] * d["K"] < 6e12 and d["batch"] == 1
            size = (d["M"] * d["K"] + d["K"] * d["N"] + d["M"] * d["N"]) * item
        elif "D" in d:
            size = (d["T"] * d["D"] + d["V"] * d["D"]) * item + 8 * d["T"]
        else:
            assert d["M"] * d["N"] * item < 2**31
            size = d["M"] * d["N"] * item * (3 if op.endswith("backward") else 2)
        assert size < 6 * 2**30
        assert c.weight == 1.0 and c.source and (c.problem.mode, c.problem.policy) == ("graph", "fast")


def test_precision_is_the_sections_whatever_torch_is_set_to(monkeypatch) -> None:
    monkeypatch.setattr(tritonops._compat, "tf32_allowed", lambda: True)
    assert [c.key for c in plan(REGISTRY["matmul"], H200)] == [c.key for c in planned("matmul")]
    by = Counter((c.problem.dtype, c.problem.traits["precision"]) for c in planned("matmul"))
    assert set(by) == {("bfloat16", "ieee"), ("float16", "ieee"), ("float32", "ieee"), ("float32", "tf32")}


def test_misaligned_norms_do_not_divide_by_16_bytes() -> None:
    rows = [(c.problem, c.problem.dims["N"] * getattr(torch, c.problem.dtype).itemsize) for c in planned("layer_norm")]
    assert all(p.aligned == (length % 16 == 0) for p, length in rows)
    assert sum(p.dims["N"] % 2 for p, _ in rows if not p.aligned) >= 5


# What is held out


def test_no_held_out_sizes_are_trained_on_in_any_dtype_layout_or_role(op) -> None:
    held = {tuple(sorted(sizes(c))) for c in planned(op) if c.heldout}
    trained = {tuple(sorted(sizes(c))) for c in planned(op) if not c.heldout}
    assert len(held) >= 10 and len(trained) >= 30 and not held & trained


def test_no_layer_of_a_held_out_model_is_trained_on() -> None:
    models = {m.name for m in shapes.load().models if m.heldout}
    assert models == {"qwen2.5-7b", "qwen2.5-32b", "mistral-7b", "deepseek-v3", "command-a"}
    for op in OPS:
        for c in planned(op):
            name = c.source.split()[0]
            assert c.heldout or name not in models
            assert not c.heldout or name in models | {"fill", "rows", "gpt2", "odd"}
    # mistral-7b has the layers of mixtral-8x7b and llama-3.1-8b: one token of them is nowhere trained on.
    for n, k in ((6144, 4096), (28672, 4096), (4096, 14336), (32000, 4096)):
        assert (1, 1, n, k) not in [sizes(c) for c in planned("matmul") if not c.heldout]


def test_the_three_misaligned_products_are_held_out_and_measured_first() -> None:
    cases = [c for c in planned("matmul") if c.heldout and section(c) == Section("bfloat16", "nt", False)]
    assert [sizes(c)[1:] for c in cases[:3]] == [(4100, 4100, 4104), (4096, 50257, 768), (8192, 4095, 4097)]


def test_most_held_out_layers_are_of_models(op) -> None:
    held = [c for c in shapes_of(planned(op)) if c.heldout and c.problem.aligned]
    assert sum(c.source != "fill" for c in held) >= 0.65 * len(held)


def test_held_out_cases_lie_where_training_measured(op) -> None:
    def pool(c: Case) -> Section:
        return dataclasses.replace(section(c), dtype=pool_of(c.problem.table_dtype))

    hulls: dict[Section, list[tuple[int, ...]]] = defaultdict(list)
    for c in planned(op):
        if not c.heldout:
            hulls[pool(c)].append(sizes(c))
    for c in planned(op):
        low, high = (tuple(map(end, zip(*hulls[pool(c)], strict=True))) for end in (min, max))
        inside = all(a <= b <= z for a, b, z in zip(low, sizes(c), high, strict=True))
        # Small sections do not span the products that are listed for all dtypes.
        assert inside or c.source in ("rows of 8208 and of 8200 bytes", "odd N and K") and c.problem.dtype != "bfloat16"


def test_pooled_dtypes_measure_different_shapes(op) -> None:
    half, brain = (
        {(*sizes(c), c.problem.layout) for c in planned(op) if not c.heldout and c.problem.dtype == dtype}
        for dtype in ("float16", "bfloat16")
    )
    assert half and not half & brain


# Order


def test_a_prefix_is_balanced_between_sections_and_held_out(op) -> None:
    cases = shapes_of(planned(op))
    total = Counter((section(c), c.heldout) for c in cases)
    for length in range(1, len(cases) + 1):
        got = Counter((section(c), c.heldout) for c in cases[:length])
        for stream, count in total.items():
            assert abs(got[stream] - count * length / len(cases)) < 2.1
    for length in range(60, len(cases) + 1):
        training = sum(not c.heldout for c in cases[:length])
        assert 1.8 <= training / (length - training) <= 5.2


def test_a_tenth_of_a_large_section_spans_its_hull() -> None:
    cases = [c for c in planned("matmul") if not c.heldout and section(c) == Section("bfloat16", "nt", True)]
    ends = [(min(axis), max(axis)) for axis in zip(*map(sizes, cases), strict=True)]
    assert [(min(axis), max(axis)) for axis in zip(*map(sizes, cases[:6]), strict=True)] == ends
    assert ends == [(1, 1), (1, 1048576), (16, 256000), (16, 57344)]


def test_large_sections_mix_models_sweeps_and_fill() -> None:
    cases = [c for c in planned("matmul") if not c.heldout and section(c) == Section("bfloat16", "nt", True)]
    kinds = Counter(
        "fill" if c.source == "fill" else "sweep" if c.source.startswith(("triton", "persistent")) else "other"
        for c in cases
    )
    assert kinds["fill"] >= 8 and kinds["sweep"] >= 8 and kinds["other"] >= 25
    passes = Counter(c.source.split()[-1] for c in planned("matmul") if c.problem.table_dtype == "bfloat16")
    assert min(passes[p] for p in ("forward", "dgrad", "wgrad")) >= 20
    assert {c.problem.layout for c in planned("matmul") if c.source.endswith("wgrad")} == {"tn"}


def spread(*points: tuple[int, ...], groups: str = "") -> Spread:
    names = {"m": "model", "f": "fill", "": "model"}
    found = [Candidate(p, names[g], "") for p, g in zip(points, groups or [""] * len(points), strict=True)]
    return Spread(found, [tuple(map(log, p)) for p in points])


def test_the_ends_come_first_then_the_farthest() -> None:
    s = spread((16, 16), (1, 64), (2, 2), (1024, 1), (1000, 70), (8, 9), (1024, 4096))
    s.span(9)
    # (1024, 1) and (1024, 4096) have two ends each, and the first stands before; then M = 1 and N = 4096 are open, and
    # (1024, 4096) is 12 octaves from the first, (1, 64) 10.3.
    assert [c.sizes for c in s.chosen] == [(1024, 1), (1024, 4096), (1, 64)]
    # Octaves to the nearest: (1000, 70) 5.1, (2, 2) 4.5, (16, 16) 3.6, (8, 9) 3.5.
    s.extend(5, ("model",))
    assert [c.sizes for c in s.chosen[3:]] == [(1000, 70), (2, 2)]
    s.extend(99, ("model",))
    assert len({c.sizes for c in s.chosen}) == len(s.chosen) == 7


def test_random_sizes_do_not_widen_the_hull_and_turns_are_kept() -> None:
    s = spread((2, 2), (9, 9), (1, 1), (100, 100), (4, 4), (5, 3), groups="mmffmm")
    s.span(4)
    assert [c.sizes for c in s.chosen] == [(2, 2), (9, 9)]
    s.extend(6, ("fill", "model"))
    assert [c.group for c in s.chosen[2:]] == ["fill", "model", "fill", "model"]
    assert s.chosen[2].sizes == (100, 100)


def test_logarithms_are_exact_and_in_sixteenths() -> None:
    assert [log(n) for n in (0, 1, 3, 2**20 - 1)] == [0, 16, 32, 320]
    assert [log(n - 1) for n in (46340, 46341, 65535)] == [248, 249, 256]


def test_the_same_on_every_device_and_in_every_process() -> None:
    """And in every Python: the digest changes with the lists or the choice, never with the machine."""
    assert [c.key for c in plan(REGISTRY["layer_norm"], A100)] == [c.key for c in planned("layer_norm")]
    code = (
        "import hashlib, json; from tritonops.calibrate.plan import plan; from tritonops.device import named_device\n"
        "import tritonops; from tritonops.dispatch.variant import REGISTRY\n"
        f"rows = [[*c.problem.dims.values(), c.problem.table_dtype, c.problem.layout, c.problem.aligned, c.ids,"
        f" c.source, c.heldout] for op in {OPS!r} for c in plan(REGISTRY[op], named_device('sm_90-132'))]\n"
        "print(len(rows), hashlib.sha256(json.dumps(rows).encode()).hexdigest())"
    )
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONHASHSEED": seed, "TRITONOPS_CACHE_DIR": "/nowhere", "TRITONOPS_TABLE_DIR": ""},
        )  # fmt: skip
        for seed in ("1", "4711")
    ]
    first, second = (run.communicate(timeout=60)[0] for run in runs)
    here = [
        [*sizes(c), c.problem.table_dtype, c.problem.layout, c.problem.aligned, c.ids, c.source, c.heldout]
        for op in OPS for c in planned(op)
    ]  # fmt: skip
    digest = hashlib.sha256(json.dumps(here).encode()).hexdigest()
    assert first == second == f"{len(here)} {digest}\n"
    assert (len(here), digest) == (1206, DIGEST)


DIGEST = "4eb0feff57e29ce16c8935e64a1955e474053abf01c4b076f0d97155e9cb1e8b"


def test_keys_are_unique_and_an_op_without_lists_is_named(op, toy) -> None:
    assert len({c.key for c in planned(op)}) == len(planned(op))
    with pytest.raises(ValueError, match=r"no shapes are listed for op 'toy', only for embedding, .*matmul"):
        plan(toy.spec, H200)


# The lists


def test_the_layers_of_some_models() -> None:
    models = {m.name: m for m in shapes.load().models}
    assert len(models) == 30 and sum(m.heldout for m in models.values()) == 5
    assert models["llama-3.1-70b"].linears == (
        ("qkv", 10240, 8192), ("o", 8192, 8192), ("mlp.gate_up", 57344, 8192), ("mlp.down", 8192, 28672),
        ("lm_head", 128256, 8192),
    )  # fmt: skip
    # As in DeepGEMM's tests.
    deepseek = {(n, k) for _, n, k in models["deepseek-v3"].linears}
    assert {(2112, 7168), (24576, 1536), (32768, 512), (7168, 16384), (4096, 7168), (7168, 2048)} < deepseek
    assert {n for _, n in models["deepseek-v3"].norms} == {7168, 1536, 512}
    # As in vLLM's benchmarks.
    assert models["command-a"].linears[:4] == (
        ("qkv", 14336, 12288), ("o", 12288, 12288), ("mlp.gate_up", 73728, 12288), ("mlp.down", 12288, 36864),
    )  # fmt: skip
    assert models["falcon-7b"].linears[0] == ("qkv", 4672, 4544) and models["falcon-7b"].norm == "layer"
    assert models["qwen3-30b-a3b"].norms == (("norm", 2048), ("qk_norm", 128))
    assert all(name != "lm_head" for name, _, _ in models["gpt2"].linears)
    assert models["gpt2"].embedding == (50257, 768)


def test_the_sweeps() -> None:
    rows = {s.name: s.rows for s in shapes.load().sweeps}
    assert (
        rows["persistent-tutorial 4096"][0] == (4096, 4096, 128)
        and (4096, 4096, 8192) in rows["persistent-tutorial 4096"]
    )
    assert len(rows["tritonbench gemm squares"]) == 31 and len(rows["tritonbench layer_norm"]) == 30
    assert len(rows["tritonbench gemm llama"]) == 12 * 15 and len(rows["tritonbench gemm splitk"]) == 16
    assert rows["tritonbench embedding 4096"][-1] == (16384, 4096, 131072)


def test_every_source_is_an_address_and_files_are_small() -> None:
    for name in shapes.FILES:
        data = json.loads((LISTS / name).read_text())
        (rows,) = (v for k, v in data.items() if k != "schema")
        assert {r["source"].partition("://")[0] for r in rows} <= {"https", "own"}
        assert (LISTS / name).stat().st_size < 10_000 and (LISTS / name).read_bytes().isascii()


@pytest.fixture
def lists(tmp_path, monkeypatch) -> Path:
    """A copy of the lists where they are looked for first."""
    directory = tmp_path / "shapes"
    directory.mkdir()
    for name in shapes.FILES:
        (directory / name).write_bytes((LISTS / name).read_bytes())
    monkeypatch.setenv("TRITONOPS_TABLE_DIR", str(tmp_path))
    return directory


def test_lists_are_found_like_tables_are(lists, monkeypatch, tmp_path) -> None:
    assert shapes.find("models.json") == lists / "models.json"
    (lists / "models.json").unlink()
    assert shapes.find("models.json") == LISTS / "models.json"
    monkeypatch.setattr(store, "_PACKAGE", tmp_path / "installed" / "tritonops")
    monkeypatch.setenv("TRITONOPS_CACHE_DIR", str(tmp_path / "cache"))
    packaged = tmp_path / "installed" / "tritonops" / "dispatch_tables" / "shapes" / "models.json"
    with pytest.raises(PlanError, match=f"models.json: not found; looked for .*{re.escape(str(packaged))}"):
        shapes.find("models.json")
    packaged.parent.mkdir(parents=True)
    packaged.write_text("{}")
    assert shapes.find("models.json") == packaged


MODEL: dict[str, Any] = {
    "name": "m", "source": "https://x", "hidden": 64, "intermediate": 128, "heads": 4, "kv_heads": 2, "head_dim": 16,
    "vocab": 1000, "norm": "rms", "heldout": False,
}  # fmt: skip
SWEEP: dict[str, Any] = {"name": "s", "source": "own", "op": "matmul", "rows": [[4, [8, 16], 32]]}


def put(path: Path, key: str, *rows: Any, **top: Any) -> None:
    path.write_text(json.dumps({"schema": 1, key: list(rows), **top}))


def test_what_a_small_model_and_sweep_give(lists) -> None:
    put(lists / "models.json", "models", MODEL)
    put(lists / "sweeps.json", "sweeps", SWEEP)
    got = shapes.load()
    assert got.models[0].linears == (
        ("qkv", 128, 64), ("o", 64, 64), ("mlp.gate_up", 256, 64), ("mlp.down", 64, 128), ("lm_head", 1000, 64),
    )  # fmt: skip
    assert got.sweeps[0].rows == ((4, 8, 32), (4, 16, 32)) and got.sweeps[0].layouts == ("nn", "nt", "tn", "tt")
    pool = candidates.gather("matmul", Section("bfloat16", "tn", True), got, False)
    assert ("m qkv wgrad", (128, 64, 2048)) in [(c.source, c.sizes) for c in pool]
    assert all(c.sizes[2] >= 128 for c in pool if c.group == "model")
    pool = candidates.gather("matmul", Section("bfloat16", "nn", True), got, False)
    assert ("m mlp.down dgrad", (8, 128, 64)) in [(c.source, c.sizes) for c in pool]


def test_training_leaves_out_what_is_held_out_in_any_role(lists) -> None:
    """A sweep and a model that would be trained on, if no other list had the same sizes."""
    put(lists / "models.json", "models", MODEL, MODEL | {"name": "kept", "heldout": True})
    put(lists / "sweeps.json", "sweeps", SWEEP | {"rows": [[808, 2408, 1608], [816, 2416, 1616]]})
    put(lists / "misaligned.json", "sweeps", SWEEP | {"layout": "nt", "rows": [[1608, 808, 2408]], "heldout": True})
    cases = plan(REGISTRY["matmul"], H200)
    found = Counter((tuple(sorted(sizes(c)[1:])), c.heldout) for c in cases)
    assert found[(808, 1608, 2408), True] == 4 and found[(808, 1608, 2408), False] == 0
    assert found[(816, 1616, 2416), False] == 12
    assert [c for c in cases if c.source.startswith("m ") and sizes(c)[1] == 1] == []
    assert [c for c in cases if c.source.startswith("kept ") and sizes(c)[1] == 1] != []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": 0}, r"models\[0\]: hidden: expected 1 to 16777216, got 0"),
        ({"heads": True}, r"models\[0\]: heads: expected an integer, got True"),
        ({"vocab": 4.5}, r"models\[0\]: vocab: expected an integer, got 4.5"),
        ({"norm": "batch"}, r"models\[0\]: norm: expected one of 'rms', 'layer', got 'batch'"),
        ({"heldout": "no"}, r"models\[0\]: heldout: expected true or false, got 'no'"),
        ({"source": "a friend"}, r"models\[0\]: source: expected an https address, or own"),
        ({"layers": 3}, r"models\[0\]: 'layers': unknown; expected name, "),
        ({"name": None}, r"models\[0\]: name: expected a text, got None"),
        ({"intermediate": -1}, r"models\[0\]: intermediate: expected 1 to"),
        ({"linears": {"q": [1]}}, r"models\[0\].linears: 'q': expected \[N, K\], got \[1\]"),
        ({"linears": {"q": [1, "a"]}}, r"models\[0\].linears: q: expected an integer, got 'a'"),
        ({"linears": []}, r"models\[0\].linears: expected an object, got list"),
        ({"norm_widths": 64}, r"models\[0\]: norm_widths: expected a list that is not empty, got 64"),
        ({"gated": 1}, r"models\[0\]: gated: expected true or false, got 1"),
    ],
)
def test_a_damaged_model_is_named(lists, change, message) -> None:
    put(lists / "models.json", "models", MODEL | change)
    with pytest.raises(PlanError, match=f"^{re.escape(str(lists / 'models.json'))}: {message}"):
        plan(REGISTRY["matmul"], H200)


@pytest.mark.parametrize("field", [k for k in MODEL if k != "intermediate"])
def test_a_field_that_a_model_lacks_is_named(lists, field) -> None:
    put(lists / "models.json", "models", MODEL, {k: v for k, v in MODEL.items() if k != field})
    with pytest.raises(PlanError, match=rf"models.json: models\[1\]: {field}: missing"):
        shapes.load()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"op": "softmax"}, r"sweeps\[0\]: op: expected one of 'matmul', 'norm', 'embedding', got 'softmax'"),
        ({"layout": "xy"}, r"sweeps\[0\]: layout: expected one of 'nn', .* got 'xy'"),
        ({"op": "norm", "layout": "nt"}, r"sweeps\[0\]: layout: norm has none"),
        ({"rows": []}, r"sweeps\[0\]: rows: expected a list that is not empty"),
        ({"rows": [[1, 2]]}, r"sweeps\[0\]: rows\[0\]: expected \[M, N, K\], got \[1, 2\]"),
        ({"rows": [[1, 2, 3], [1, 2, [3, 0]]]}, r"sweeps\[0\]: rows\[1\]: expected 1 to 2147483648, got 0"),
        ({"rows": [[1, 2, []]]}, r"sweeps\[0\]: rows\[0\]: expected an integer, got \[\]"),
        ({"heldout": 0}, r"sweeps\[0\]: heldout: expected true or false, got 0"),
    ],
)
@pytest.mark.parametrize("name", ["sweeps.json", "misaligned.json"])
def test_a_damaged_sweep_is_named(lists, name, change, message) -> None:
    put(lists / name, "sweeps", SWEEP | change)
    with pytest.raises(PlanError, match=f"{name}: {message}"):
        shapes.load()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[" * 10000, "not JSON: maximum recursion"),
        ("[]", r"\(top\): expected an object, got list"),
        ('{"schema": 2, "models": [1]}', "schema: this version reads 1, the file has 2"),
        ('{"schema": 1, "models": {}}', "models: expected a list"),
        ('{"schema": 1, "models": [], "more": 1}', "'more': unknown"),
        ('{"schema": 1}', "models: missing"),
        ('{"schema": 1, "models": [7]}', r"models\[0\]: expected an object, got int"),
        ('{"schema": NaN}', "not JSON: NaN is not a number of JSON"),
    ],
)
def test_a_damaged_list_is_named(lists, text, message) -> None:
    (lists / "models.json").write_text(text)
    with pytest.raises(PlanError, match=f"models.json: {message}"):
        shapes.load()


# A user's own shapes


@pytest.fixture
def listed(tmp_path):
    def make(*rows: Any, lines: bool = False) -> Path:
        path = tmp_path / "mine.json"
        path.write_text("".join(json.dumps(r) + "\n" for r in rows) if lines else json.dumps(list(rows)))
        return path

    return make


MINE: dict[str, Any] = {"op": "matmul", "M": 4096, "N": 4096, "K": 512}


@pytest.mark.parametrize("lines", [False, True])
def test_a_list_by_hand_and_its_defaults(listed, lines) -> None:
    rows = [
        MINE, {"op": "matmul", "M": 1, "N": 8, "K": 24, "dtype": "float32", "layout": "nn", "count": 32},
        {"op": "rms_norm", "M": 5, "N": 7}, {"op": "layer_norm_backward", "M": 5, "N": 64, "count": 2},
        {"op": "embedding", "T": 5, "D": 8, "V": 9}, {"op": "matmul", "batch": 3, "M": 8, "N": 8, "K": 8},
    ]  # fmt: skip
    got = read_shapes(listed(*rows, lines=lines))
    assert {op: len(cases) for op, cases in got.items()} == {
        "matmul": 3, "rms_norm": 1, "layer_norm_backward": 1, "embedding": 1
    }  # fmt: skip
    few, first, batched = got["matmul"]
    place = ("line 2", "line 1") if lines else ("[1]", "[0]")
    assert (few.weight, few.source) == (32.0, f"mine.json {place[0]}") and few.problem.dtype == "float32"
    described = REGISTRY["matmul"].describe((4096, 512), (512, 4096), dtype=torch.bfloat16, layout="nt")
    assert first == Case(described, source=f"mine.json {place[1]}", own=True) and first.weight == 1.0
    assert batched.problem == Case(
        REGISTRY["matmul"].describe((3, 8, 8), (3, 8, 8), dtype=torch.bfloat16, layout="nt")
    ).problem  # fmt: skip
    (rms,), (backward,) = got["rms_norm"], got["layer_norm_backward"]
    assert rms.problem.traits == {"weight": "bfloat16", "bias": None} and not rms.problem.aligned
    assert backward.problem.traits == {"weight": "bfloat16", "bias": "bfloat16", "grads": "xwb"}
    assert got["embedding"][0].ids == "uniform"
    assert not any(c.heldout for cases in got.values() for c in cases)


def test_both_ids_of_an_embeddings_backward_and_no_backward_of_its_own(listed) -> None:
    got = read_shapes(listed({"op": "embedding_backward", "T": 5, "D": 8, "V": 9, "count": 7}))
    assert [(c.ids, c.weight) for c in got["embedding_backward"]] == [("uniform", 7.0), ("zipf1.0", 7.0)]
    assert list(got) == ["embedding_backward"]


def test_rows_that_differ_in_policy_or_mode_are_one(listed) -> None:
    rows = [
        MINE | {"K": 64}, MINE | {"mode": "eager", "count": 2}, MINE | {"mode": "graph", "count": 3},
        MINE | {"policy": "deterministic", "count": 5},
    ]  # fmt: skip
    got = read_shapes(listed(*rows))["matmul"]
    assert [(c.problem.dims["K"], c.weight, c.source) for c in got] == [
        (512, 10.0, "mine.json [1]"), (64, 1.0, "mine.json [0]")
    ]  # fmt: skip
    assert {(c.problem.policy, c.problem.mode) for c in got} == {("fast", "graph")}


def test_traits_and_alignment_by_hand(listed) -> None:
    got = read_shapes(
        listed(
            MINE | {"dtype": "float32", "traits": {"precision": "tf32", "bias": True}},
            MINE | {"aligned": False}, MINE | {"layout": "xn", "traits": {"operands_aligned": False}, "aligned": False},
        )
    )["matmul"]  # fmt: skip
    assert got[0].problem.table_dtype == "tf32" and got[0].problem.traits["bias"] is True
    assert not got[1].problem.aligned and got[1].problem.traits["operands_aligned"] is False
    assert got[1].problem == Case(REGISTRY["matmul"].describe(*got[1].sample(REGISTRY["matmul"], "meta")[:2])).problem
    assert got[2].problem.layout == "xn"


WRONG_TRAITS = {"traits": {"weight": "bfloat16", "bias": None}}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (7, "expected an object, got int"),
        ({}, "op: missing"),
        (MINE | {"op": "linear"}, "op: expected one of .*'matmul', .* got 'linear'"),
        (MINE | {"op": ["matmul"]}, r"op: expected a text, got \['matmul'\]"),
        ({"op": "matmul", "M": 1, "N": 2}, "K: missing"),
        (MINE | {"T": 4}, "'T': unknown; expected op, M, N, K, batch, "),
        ({"op": "rms_norm", "M": 1, "N": 2, "batch": 1}, "'batch': unknown"),
        (MINE | {"M": 4.0}, "M: expected an integer, got 4.0"),
        (MINE | {"M": "4"}, "M: expected an integer, got '4'"),
        (MINE | {"M": True}, "M: expected an integer, got True"),
        (MINE | {"M": None}, "M: expected an integer, got None"),
        (MINE | {"N": 0}, "N: expected 1 to 2147483648, got 0"),
        (MINE | {"K": -5}, "K: expected 1 to 2147483648, got -5"),
        (MINE | {"batch": 2**31 + 1}, "batch: expected 1 to 2147483648, got 2147483649"),
        (MINE | {"M": 10**4000}, "M: expected 1 to 2147483648, got an integer of 13288 bits"),
        (MINE | {d: 2**31 for d in "MNK"} | {"batch": 2**31}, "no tensors have these sizes"),
        (MINE | {"dtype": "int8"}, "dtype: expected one of 'bfloat16', .* got 'int8'"),
        (MINE | {"dtype": 16}, "dtype: expected a text, got 16"),
        (MINE | {"layout": "xn"}, "layout: expected one of 'nn', 'nt', 'tn', 'tt', got 'xn'"),
        ({"op": "rms_norm", "M": 1, "N": 2, "layout": "nt"}, "layout: expected one of '', got 'nt'"),
        (MINE | {"policy": "slow"}, "policy: expected one of 'fast', .* got 'slow'"),
        (MINE | {"mode": "lazy"}, "mode: expected one of 'eager', 'graph', got 'lazy'"),
        (MINE | {"aligned": 1}, "aligned: expected true or false, got 1"),
        (MINE | {"count": 0}, "count: expected 1 to"),
        (MINE | {"count": True}, "count: expected an integer, got True"),
        (MINE | {"count": 1.5}, "count: expected an integer, got 1.5"),
        (MINE | {"traits": []}, "traits: expected an object, got list"),
        (MINE | WRONG_TRAITS, "traits: weight: matmul has no such trait; it has out, bias, "),
        (MINE | {"traits": {"bias": 1}}, "traits: bias: expected one of False, True, got 1"),
        (MINE | {"traits": {"out": "float16"}}, "traits: out: expected one of 'bfloat16', 'float32', got 'float16'"),
        (MINE | {"traits": {"precision": "tf32"}}, "traits: precision: expected one of 'ieee', got 'tf32'"),
        (MINE | {"traits": {"operands_aligned": False}}, "aligned: true, but trait operands_aligned is false"),
        (
            {"op": "rms_norm", "M": 1, "N": 2, "traits": {"bias": "float32"}},
            "traits: bias: expected one of None, got 'float32'",
        ),
        (
            {"op": "layer_norm_backward", "M": 1, "N": 2, "traits": {"grads": "y"}},
            "traits: grads: expected one of '', 'b', .*, got 'y'",
        ),
        (
            {"op": "embedding", "T": 1, "D": 2, "V": 3, "traits": {"index": "int8"}},
            "traits: index: expected one of 'int32', 'int64', got 'int8'",
        ),
    ],
)
def test_a_row_that_is_no_problem_is_named(listed, row, message) -> None:
    path = listed(MINE, row)
    with pytest.raises(PlanError, match=rf"^{re.escape(str(path))}: \[1\]: {message}"):
        read_shapes(path)
    path = listed(MINE, row, lines=True)
    with pytest.raises(PlanError, match=rf"^{re.escape(str(path))}: line 2: {message}"):
        read_shapes(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty"),
        (" \n\n", "empty"),
        ("[]", "an empty list"),
        ("[1,", "not JSON"),
        ("M=4 N=4", "line 1: not JSON"),
        (json.dumps(MINE) + "\n{", "line 2: not JSON"),
        ("[" * 10000, "not JSON"),
        ('{"op": "rms_norm", "M": Infinity, "N": 4}', "line 1: not JSON: Infinity is not a number of JSON"),
    ],
)
def test_a_file_that_is_no_list_is_named(tmp_path, text, message) -> None:
    path = tmp_path / "mine.json"
    path.write_text(text)
    with pytest.raises(PlanError, match=f"^{re.escape(str(path))}: {message}"):
        read_shapes(path)


def test_files_that_cannot_be_read_are_named(tmp_path) -> None:
    with pytest.raises(PlanError, match="none.json: cannot be read: No such file or directory"):
        read_shapes(tmp_path / "none.json")
    with pytest.raises(PlanError, match="cannot be read: Is a directory"):
        read_shapes(tmp_path)
    (tmp_path / "b").write_bytes(b'{"op": "\xff"}')
    with pytest.raises(PlanError, match="b: not JSON: not UTF-8 text at byte 8"):
        read_shapes(tmp_path / "b")
    assert issubclass(PlanError, ValueError)


def test_what_record_writes_is_read(tmp_path, clean_dispatch) -> None:
    path = tmp_path / "recorded.jsonl"
    x, w = torch.randn(6, 8, requires_grad=True), torch.randn(8, 4, requires_grad=True)
    table, ids = torch.randn(10, 7, requires_grad=True), torch.tensor([[1, 2, 9]], dtype=torch.int32)
    with tritonops.record(path):
        for _ in range(3):
            tritonops.matmul(x, w).sum().backward()
        tritonops.layer_norm(x, torch.ones(8, requires_grad=True), None, 1e-5).sum().backward()
        with tritonops.use(policy="deterministic"):
            tritonops.layer_norm(x, torch.ones(8), None, 1e-5)
        tritonops.embedding(ids, table).sum().backward()
    got = read_shapes(path)
    assert sorted((sizes(c), c.problem.layout, c.weight) for c in got["matmul"]) == [
        ((1, 6, 4, 8), "nn", 3.0), ((1, 6, 8, 4), "xt", 3.0), ((1, 8, 4, 6), "tx", 3.0)
    ]  # fmt: skip
    assert [(c.weight, c.problem.traits) for c in got["layer_norm"]] == [(2.0, {"weight": "float32", "bias": None})]
    assert [c.problem.traits["grads"] for c in got["layer_norm_backward"]] == ["xw"]
    (lookup,) = got["embedding"]
    assert (sizes(lookup), lookup.problem.traits["index"], lookup.problem.aligned) == ((3, 7, 10), "int32", False)
    assert [c.ids for c in got["embedding_backward"]] == ["uniform", "zipf1.0"]
    for op, cases in got.items():
        for c in cases:
            assert tensors(c.sample(REGISTRY[op], "meta"))


# The plan's file


def test_a_plan_is_read_as_it_was_written(op, tmp_path) -> None:
    paths = Paths(tmp_path / "deep", op, H200)
    write(paths, planned(op))
    first = paths.plan.read_bytes()
    assert read(paths) == planned(op)
    write(paths, read(paths))
    assert paths.plan.read_bytes() == first and first.isascii()
    assert os.listdir(paths.plan.parent) == [paths.plan.name]
    assert len(first.splitlines()) == len(planned(op)) + 2


def test_a_users_plan_is_read_as_it_was_written(listed, tmp_path) -> None:
    cases = read_shapes(listed(MINE | {"count": 3, "layout": "xt", "traits": {"out": "float32"}, "aligned": False}))
    paths = Paths(tmp_path, "matmul", H200)
    write(paths, cases["matmul"])
    assert read(paths) == cases["matmul"] and cases["matmul"][0].weight == 3.0


def test_a_plan_of_an_op_that_no_lists_are_kept_for(toy, tmp_path) -> None:
    paths = Paths(tmp_path, "toy", H200)
    cases = [Case(Problem("toy", {"M": m, "N": 8}, "float32"), source="own") for m in (1, 2)]
    write(paths, cases)
    assert read(paths) == cases


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"op": "rms_norm"}, "op: expected 'matmul', got 'rms_norm'"),
        ({"device": "sm_80-108"}, "device: expected 'sm_90-132', got 'sm_80-108'"),
        ({"schema": True}, "schema: expected 1, got True"),
        ({"cases": []}, "cases: expected a list that is not empty"),
        ({"cases": None}, "cases: expected a list"),
        ({"more": 1}, "'more': unknown"),
        (("dims", {"batch": 1, "M": 1, "N": 8}), r"cases\[1\]: dims: K: missing"),
        (("dims", {"batch": 1, "M": 1, "N": 8, "K": 0}), r"cases\[1\]: K: expected 1 to"),
        (("dims", 4), r"cases\[1\]: dims: expected an object, got int"),
        (("dtype", "int8"), r"cases\[1\]: dtype: expected one of"),
        (("layout", "zz"), r"cases\[1\]: layout: expected one of"),
        (("aligned", None), r"cases\[1\]: aligned: expected true or false"),
        (("traits", {"index": "int64"}), r"cases\[1\]: traits: index: matmul has no such trait"),
        (("ids", "zipf1.0"), r"cases\[1\]: ids: expected one of '', got 'zipf1.0'"),
        (("source", 3), r"cases\[1\]: source: expected a text, got 3"),
        (("heldout", 0), r"cases\[1\]: heldout: expected true or false, got 0"),
        (("weight", 0), r"cases\[1\]: weight: expected a positive number, got 0"),
        (("weight", True), r"cases\[1\]: weight: expected a positive number, got True"),
        (("extra", 1), r"cases\[1\]: 'extra': unknown"),
    ],
)
def test_a_damaged_plan_is_named(tmp_path, change, message) -> None:
    paths = Paths(tmp_path, "matmul", H200)
    write(paths, planned("matmul")[:3])
    data = json.loads(paths.plan.read_text())
    if isinstance(change, dict):
        data |= change
    else:
        data["cases"][1][change[0]] = change[1]
    paths.plan.write_text(json.dumps(data))
    with pytest.raises(PlanError, match=f"^{re.escape(str(paths.plan))}: {message}"):
        read(paths)


def test_a_plan_that_is_not_there_or_torn_or_repeats_itself_is_named(tmp_path) -> None:
    paths = Paths(tmp_path, "matmul", H200)
    with pytest.raises(PlanError, match="plan.json: cannot be read: No such file"):
        read(paths)
    write(paths, planned("matmul")[:2])
    whole = paths.plan.read_bytes()
    paths.plan.write_bytes(whole[:-20])
    with pytest.raises(PlanError, match="plan.json: not JSON"):
        read(paths)
    write(paths, planned("matmul")[:1] * 2)
    with pytest.raises(PlanError, match=r"cases\[1\]: occurs twice"):
        read(paths)


def test_a_failed_write_leaves_the_old_plan(tmp_path, monkeypatch) -> None:
    paths = Paths(tmp_path, "matmul", H200)
    write(paths, planned("matmul")[:2])
    old = paths.plan.read_bytes()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        write(paths, planned("matmul")[:3])
    assert paths.plan.read_bytes() == old and os.listdir(paths.plan.parent) == [paths.plan.name]


def test_public_names() -> None:
    assert planning.__all__ == ["PlanError", "plan", "quotas", "read", "read_shapes", "write"]
