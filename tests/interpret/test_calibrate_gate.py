"""The gate on the real kernels in Triton's interpreter: they pass, and what is planted in them does not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tritonops.calibrate import gate, ragged
from tritonops.calibrate.case import Case
from tritonops.calibrate.static import Static
from tritonops.dispatch import variant
from tritonops.dispatch.problem import Problem
from tritonops.dispatch.variant import REGISTRY, VENDOR, Choice

F16, F32 = torch.float16, torch.float32


def problems(op: str) -> list[Problem]:
    describe = REGISTRY[op].describe
    if op == "matmul":
        return [
            describe((512, 512), (512, 512), dtype=F16, layout="nt"),
            describe((512, 511), (511, 509), dtype=F16, layout="nn"),
            describe((512, 512), (512, 512), dtype=F32, layout="tn", bias=True),
        ]
    if op.startswith("embedding"):
        return [describe((4096,), (1000, width), dtype=dtype) for width, dtype in ((512, F16), (511, F32))]
    out = []
    for width, dtype in ((256, F16), (255, F32)):
        x = torch.empty(512, width, dtype=dtype, device="meta")
        out.append(describe(x, x[0], x[0]) if op.startswith("layer") else describe(x, x[0]))
    return out


VARIANTS = {
    "matmul": (
        "tiled/32x64x32-g8-w4-s3", "persistent/64x128x64-g8-w4-s4-p2", "tma_persistent/128x128x32-g8-w8-s4-p1-sub",
        "padded/tma-128x128x32-g8-w8-s4-p1-sub", "padded/vendor",
    ),
    "layer_norm": ("rows/t1024-w4", "rows/t8192-w8"),
    "layer_norm_backward": ("rows/t1024-w4-s3-p4", "rows/t8192-w8-s3-p1"),
    "rms_norm": ("rows/t2048-w4",),
    "rms_norm_backward": ("rows/t4096-w4-s3-p2",),
    "embedding": ("gather/16x256-w4",),
    "embedding_backward": ("atomic/16x256-w4",),
}  # fmt: skip


def judge(op: str, variants: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    cases = [Case(p, ids=REGISTRY[op].ids[-1]) for p in problems(op)]
    candidates = [[VENDOR, *variants]] * len(cases)
    return gate.gate(REGISTRY[op], cases, Static({}, {}, candidates, [{}] * len(candidates)), "cpu")


@pytest.mark.parametrize("op", VARIANTS)
def test_the_kernels_pass(op: str) -> None:
    found = judge(op, VARIANTS[op])
    assert {vid: verdict["why"] for vid, verdict in found.items()} == dict.fromkeys((VENDOR, *VARIANTS[op]), "")
    for vid, verdict in found.items():
        assert verdict["passed"] and 1 <= verdict["cases"] <= ragged.MAX_TRIALS * len(found), vid
        assert 0 <= verdict["error"] <= 1


def test_what_the_interpreter_cannot_run_is_not_passed() -> None:
    spec = REGISTRY["matmul"]
    case = Case(spec.describe((512, 512), (512, 512), dtype=torch.bfloat16))
    vid = VARIANTS["matmul"][0]
    found = gate.gate(spec, [case], Static({}, {}, [[VENDOR, vid]], [{}]), "cpu")
    assert found[VENDOR]["passed"] and not found[vid]["passed"]
    assert found[vid]["why"] == "never run: Triton's interpreter computes bfloat16 wrongly"


def no_last_row(run: Callable[..., Any], choice: Choice, *args: Any) -> Any:
    """The kernel on one row less: the last row of the output stays as it was allocated."""
    a, *rest = args
    out = torch.empty(choice.problem.dims["M"], choice.problem.dims["N"], dtype=a.dtype)
    dims = {**choice.problem.dims, "M": choice.problem.dims["M"] - 1}
    fewer = dataclasses.replace(choice, problem=dataclasses.replace(choice.problem, dims=dims))
    out[:-1] = run(fewer, a[:-1], *rest)
    return out


def no_last_step(run: Callable[..., Any], choice: Choice, *args: Any) -> Any:
    """The last product of each sum is left out."""
    a, b, *rest = args
    dims = {**choice.problem.dims, "K": choice.problem.dims["K"] - 1}
    shorter = dataclasses.replace(choice, problem=dataclasses.replace(choice.problem, dims=dims))
    return run(shorter, a[:, :-1], b[:-1], *rest)


def into_the_input(run: Callable[..., Any], choice: Choice, *args: Any) -> Any:
    out = run(choice, *args)
    args[0][-1, -1] += 1
    return out


@pytest.mark.parametrize(
    "plant, why",
    [(no_last_row, "got nan"), (no_last_step, "exceeds"), (into_the_input, "it changed its inputs")],
    ids=["no last row", "no last step", "into the input"],
)
def test_what_is_planted_does_not_pass(monkeypatch, plant, why: str) -> None:
    spec, vid = REGISTRY["matmul"], VARIANTS["matmul"][0]
    real = spec.variants()[vid]

    def run(choice: Choice, *args: Any) -> Any:
        return plant(real.run, choice, *args)

    monkeypatch.setitem(variant._LOADED["matmul"], vid, dataclasses.replace(real, run=run))
    cases = [Case(p) for p in problems("matmul")[:1]]
    found = gate.gate(spec, cases, Static({}, {}, [[VENDOR, vid]], [{}]), "cpu")
    assert found[VENDOR]["passed"] and not found[vid]["passed"] and why in found[vid]["why"], found


def test_an_output_of_a_kernel_that_stops_short_is_nan(monkeypatch) -> None:
    """A grid that is one tile short leaves memory that only the poison tells from a result."""
    from tritonops import launch

    spec, vid = REGISTRY["rms_norm"], "rows/t1024-w4"
    original = launch.launch
    monkeypatch.setattr(launch, "launch", lambda kernel, grid, *rest: original(kernel, (grid[0] - 1, *grid[1:]), *rest))
    cases = [Case(p) for p in problems("rms_norm")]
    found = gate.gate(spec, cases, Static({}, {}, [[VENDOR, vid]] * len(cases), [{}] * len(cases)), "cpu")
    assert found[VENDOR]["passed"] and not found[vid]["passed"] and "got nan" in found[vid]["why"], found
