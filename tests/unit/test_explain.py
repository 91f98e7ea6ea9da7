"""explain() and variants(): for tensors, meta tensors and shapes, on devices that are here and that are not."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

import tritonops
from dispatch_cases import cuda, leaf, make_table, pretend, put, section
from tritonops import VariantUnavailable
from tritonops.device import CPU
from tritonops.dispatch import memo, store
from tritonops.dispatch.select import Decision

A100 = "sm_80-108"


def test_tensors_meta_tensors_and_shapes_make_the_same_problem() -> None:
    a, b = torch.empty(6, 8, dtype=torch.float16), torch.empty(16, 8, dtype=torch.float16).t()
    problems = [
        tritonops.explain("matmul", a, b, device=A100).problem,
        tritonops.explain(tritonops.matmul, a.to("meta"), b.to("meta"), device=A100).problem,
        tritonops.explain("matmul", (6, 8), (8, 16), dtype=torch.float16, layout="nt", device=A100).problem,
        tritonops.explain("matmul", [6, 8], torch.Size([8, 16]), dtype=torch.float16, layout="nt", device=A100).problem,
    ]
    assert all(p == problems[0] for p in problems)
    assert problems[0].describe() == "matmul batch=1 M=6 N=16 K=8, float16, nt, aligned, eager, fast"
    assert (problems[0].traits["out"], problems[0].traits["bias"]) == ("float16", False)


@pytest.mark.parametrize(
    ("op", "arguments", "keywords", "described"),
    [
        ("matmul", ((3, 6, 8), (8, 16)), {}, "matmul batch=1 M=18 N=16 K=8, float16, nn, aligned, eager, fast"),
        ("matmul", ((3, 6, 8), (3, 8, 4)), {"layout": "tn"},
         "matmul batch=3 M=6 N=4 K=8, float16, tn, misaligned, eager, fast"),
        ("layer_norm", ((3, 6, 8), (8,), (8,)), {}, "layer_norm M=18 N=8, float16, aligned, eager, fast"),
        ("layer_norm_backward", ((6, 8), (8,)), {}, "layer_norm_backward M=6 N=8, float16, aligned, eager, fast"),
        ("rms_norm", ((6, 8),), {}, "rms_norm M=6 N=8, float16, aligned, eager, fast"),
        ("rms_norm_backward", ((6, 9),), {}, "rms_norm_backward M=6 N=9, float16, misaligned, eager, fast"),
        ("embedding", ((2, 3), (100, 8)), {}, "embedding T=6 D=8 V=100, float16, aligned, eager, fast"),
        ("embedding_backward", ((2, 3), (100, 8), 7), {},
         "embedding_backward T=6 D=8 V=100, float16, aligned, eager, fast"),
    ],
)  # fmt: skip
def test_every_op_is_explained_from_shapes_for_a_gpu_that_is_not_here(op, arguments, keywords, described) -> None:
    got = tritonops.explain(op, *arguments, dtype=torch.float16, device="sm_90-132", **keywords)
    assert got.op == op and got.problem.describe() == described
    assert (got.device.arch, got.device.sms, got.device.name, got.device.index) == ("sm_90", 132, "", -1)
    assert got.variant == "vendor" and str(got).startswith(f"{described} on sm_90-132: vendor [")
    with tritonops.use(exclude="vendor"):
        ours = tritonops.explain(op, *arguments, dtype=torch.float16, device="sm_90-132", **keywords)
    assert ours.variant in {v.id for v in tritonops.variants(op)} - {"vendor"}


def test_nothing_runs_and_nothing_is_remembered(toy) -> None:
    tritonops.explain("toy", 4, 4, device="sm_90-132")
    tritonops.explain("matmul", torch.ones(2, 2), torch.ones(2, 2))
    assert toy.calls == [] and len(memo._memo) == 0


def test_the_device_is_the_tensors_else_the_one_named(toy, monkeypatch) -> None:
    a = torch.ones(2, 2)
    assert tritonops.explain("matmul", a, a).device == CPU
    assert tritonops.explain("matmul", a, a, device="sm_90-132").device.arch == "sm_90"
    assert tritonops.explain("matmul", a, a, device=torch.device("cpu")).device == CPU
    if not torch.cuda.is_available():
        assert tritonops.explain("matmul", (2, 2), (2, 2), dtype=torch.float32).device == CPU
    gpu = cuda("NVIDIA Mine")
    pretend(monkeypatch, gpu)
    store._warned.add("absent NVIDIA Mine sm_90-132")
    assert tritonops.explain("matmul", a, a).device == gpu
    assert tritonops.explain("matmul", (2, 2), b=a, dtype=torch.float32).device == gpu
    assert str(tritonops.explain("matmul", a, a)).startswith("matmul batch=1 M=2 N=2 K=2, float32, nn, ")


@pytest.mark.parametrize(
    "device",
    [
        "sm_90", "sm_90-", "sm_90-0", "sm_9-132", "sm_090-132", "sm_90-132 ", "sm_90-99999", "sm_\u0669\u0660-132",
        "sm90-132", "gfx942-304", "h200", "", "cuda:-1",
    ],
)  # fmt: skip
def test_a_device_that_does_not_exist_is_named_in_the_error(device) -> None:
    with pytest.raises(ValueError, match="^device: .*'sm_90-132'") as caught:
        tritonops.explain("matmul", (2, 2), (2, 2), dtype=torch.float32, device=device)
    assert repr(device) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_a_gpu_where_there_is_none_is_a_value_error() -> None:
    for device in ("cuda", "cuda:0", torch.device("cuda", 1)):
        with pytest.raises(ValueError, match=r"device: .* is not here \(.*\); a GPU that is not can be named"):
            tritonops.explain("matmul", (2, 2), (2, 2), dtype=torch.float32, device=device)


@pytest.mark.parametrize("op", ["mm", "", None, 5, torch.mm, ["matmul"], tritonops.use])
def test_an_unknown_op_is_named_with_those_there_are(op) -> None:
    with pytest.raises(ValueError, match=r"^op: unknown op .*; ops are .*embedding.*layer_norm.*matmul"):
        tritonops.explain(op, (2, 2))
    with pytest.raises(ValueError, match="^op: unknown op"):
        tritonops.variants(op)


def test_a_shape_without_a_dtype_is_named() -> None:
    for op, arguments in (("matmul", ((2, 2), (2, 2))), ("layer_norm", ((2, 2),)), ("embedding", ((2,), (2, 2)))):
        with pytest.raises(TypeError, match="'dtype' must be given where"):
            tritonops.explain(op, *arguments)


def test_a_forced_variant_that_cannot_serve_raises_the_reason() -> None:
    with tritonops.use(variant="tma_persistent"), pytest.raises(VariantUnavailable, match="needs tensor descriptors"):
        tritonops.explain("matmul", (64, 64), (64, 64), dtype=torch.float16, device=A100)
    with tritonops.use(variant="tma_persistent"):
        got = tritonops.explain("matmul", (64, 64), (64, 64), dtype=torch.float16, device="sm_90-132")
    assert got.rule == "forced" and got.variant.startswith("tma_persistent/")
    assert "  because use(variant=...) names tma_persistent" in str(got).splitlines()


def test_a_decision_is_data(toy, tables) -> None:
    tree = {"f": "M", "le": 4, "yes": leaf("picky/a", "one/a"), "no": leaf("vendor")}
    path = put(tables, make_table(section(tree, {"M": [2, 9]})))
    got = tritonops.explain("toy", 4, 8, device="sm_90-132")
    assert isinstance(got, Decision) and dataclasses.is_dataclass(got)
    fields = {f.name: getattr(got, f.name) for f in dataclasses.fields(got)}
    problem, gpu = fields.pop("problem"), fields.pop("device")
    assert (problem.dims, problem.op, gpu.table_name) == ({"M": 4, "N": 8}, "toy", "sm_90-132")
    assert fields == {
        "op": "toy", "variant": "one/a", "rule": "table", "reason": f"{path} says so on 3 measured shapes",
        "ranking": ("picky/a", "one/a", "vendor", "two/a"), "path": ("M = 4 <= 4",), "table": str(path),
        "provenance": {"kind": "measured", "raw": "raw/toy.jsonl.gz"}, "evidence": {"shapes": 3},
        "rejected": (("picky/a", "takes whole tiles of 128 rows"),), "stale": (), "unknown": (),
    }  # fmt: skip
    assert json.loads(json.dumps(fields)) is not None
    with pytest.raises(dataclasses.FrozenInstanceError):
        got.variant = "vendor"
    assert str(got).splitlines() == [
        "toy M=4 N=8, float32, aligned, eager, fast on sm_90-132: one/a [table]",
        f"  because {path} says so on 3 measured shapes",
        "  table path: M = 4 <= 4",
        "  evidence: shapes=3",
        "  not picky/a: takes whole tiles of 128 rows",
    ]


def test_variants_are_listed_by_name_or_function() -> None:
    listed = tritonops.variants("matmul")
    assert listed[0].id == "vendor" and len({v.id for v in listed}) == len(listed) >= 20
    assert tritonops.variants(tritonops.matmul) == listed
    listed.clear()
    assert tritonops.variants("matmul")


def test_linear_is_explained_as_the_product_it_is() -> None:
    x, w = torch.randn(7, 16), torch.randn(5, 16)
    for op in ("linear", tritonops.linear):
        got = tritonops.explain(op, x, w, torch.randn(5))
        assert got.op == "matmul" and got.problem.layout == "nt" and got.problem.traits["bias"]
    assert [v.id for v in tritonops.variants("linear")] == [v.id for v in tritonops.variants("matmul")]


def test_another_librarys_function_of_the_same_name_is_not_ours() -> None:
    with pytest.raises(ValueError, match="unknown op"):
        tritonops.explain(torch.nn.functional.layer_norm, torch.randn(2, 3), (3,))


def test_a_named_device_is_not_judged_by_what_is_installed_here(monkeypatch) -> None:
    from tritonops import _compat

    monkeypatch.setattr(_compat, "has_triton", lambda: False)
    with tritonops.use(exclude="vendor"):
        got = tritonops.explain(
            "matmul", (4096, 128), (128, 4096), dtype=torch.float16, layout="nt", device="sm_80-108"
        )
    assert got.variant == "persistent/128x128x64-g8-w4-s3-p2"


def test_a_refusal_names_the_problem_that_was_asked_about() -> None:
    with tritonops.use(policy="batch_invariant"), pytest.raises(tritonops.VariantUnavailable, match="M=4 N=8 K=16"):
        tritonops.explain("matmul", (4, 16), (16, 8), dtype=torch.float64, device="sm_90-132")


def test_errors_survive_a_pickle() -> None:
    import pickle

    error = pickle.loads(pickle.dumps(tritonops.TableError("f.json", "op", "is wrong")))
    assert (error.file, error.field, error.problem) == ("f.json", "op", "is wrong")
