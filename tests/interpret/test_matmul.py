"""Every matmul variant under Triton's interpreter, against the float64 oracle."""

from __future__ import annotations

import pytest
import torch

import tritonops
from matmul_cases import CASES
from tritonops.device import INTERPRETER
from tritonops.dispatch import memo
from tritonops.dispatch.select import illegal
from tritonops.dispatch.variant import REGISTRY
from tritonops.matmul.op import describe
from tritonops.matmul.reference import oracle, tolerance

SPEC = REGISTRY["matmul"]
IDS = [v.id for v in tritonops.variants("matmul")]
# Big tiles cost the interpreter seconds; a family's smaller tiles run every case, its big ones these.
SOME = ("ragged-nn", "ragged-tt", "tiles-nt", "one-row-aligned", "row-stride-130-bytes", "sliced-columns")


def _error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm() / want.norm().clamp_min(1e-300))


def _runs(variant: str, case: str) -> bool:
    return case in SOME or not any(size in variant for size in ("128x256", "128x128", "16x128x128"))


def _cells() -> list[tuple[str, str]]:
    return [(v, c) for v in IDS for c in CASES if _runs(v, c)]


@pytest.mark.parametrize(("variant", "case"), _cells())
def test_variant_matches_oracle(variant: str, case: str) -> None:
    for dtype in (torch.float32, torch.float16):
        a, b = CASES[case](dtype, "cpu")
        bias = torch.randn(b.shape[-1]).to(dtype)
        reason = illegal(SPEC, SPEC.variants()[variant], describe(a, b, bias=bias), INTERPRETER)
        with tritonops.use(variant={"matmul": variant}):
            if reason is not None:
                with pytest.raises(tritonops.VariantUnavailable, match="cannot serve"):
                    tritonops.matmul(a, b, bias=bias)
                continue
            got = tritonops.matmul(a, b, bias=bias)
            plain = tritonops.matmul(a, b)
        assert got.is_contiguous() and got.dtype is dtype
        limit = tolerance(dtype, dtype, a.shape[-1])
        assert _error(got, oracle(a, b, bias)) <= limit
        assert _error(plain, oracle(a, b)) <= limit


@pytest.mark.parametrize("variant", IDS)
def test_variant_is_legal_for_some_cases(variant: str) -> None:
    legal = [
        case
        for case, make in CASES.items()
        if illegal(SPEC, SPEC.variants()[variant], describe(*make(torch.float16, "cpu")), INTERPRETER) is None
    ]
    assert len(legal) >= 5
    assert any(_runs(variant, case) for case in legal)


@pytest.mark.parametrize("variant", [v for v in IDS if v.endswith("64x64x64-g8-w4-s4") or "64x128" in v])
def test_float32_output_of_16_bit_inputs_is_not_rounded(variant: str) -> None:
    a, b = CASES["tiles-nn"](torch.float16, "cpu")
    with tritonops.use(variant={"matmul": variant}):
        got = tritonops.matmul(a, b, out_dtype=torch.float32)
    assert got.dtype is torch.float32
    assert _error(got, oracle(a, b)) <= 2e-6


@pytest.mark.parametrize(("layout_a", "layout_b"), [("n", "n"), ("t", "t")])
def test_int64_offsets_match_int32(layout_a: str, layout_b: str, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = CASES[f"ragged-{layout_a}{layout_b}"](torch.float32, "cpu")
    for family in ("tiled", "persistent", "padded"):
        with tritonops.use(variant={"matmul": family}):
            narrow = tritonops.matmul(a, b)
            tritonops.clear_cache()
            monkeypatch.setattr("tritonops.launch.offsets_exceed_int32", lambda *tensors: True)
            wide = tritonops.matmul(a, b)
            monkeypatch.undo()
            tritonops.clear_cache()
        assert torch.equal(narrow, wide)


def test_a_persistent_grid_covers_more_tiles_than_programs() -> None:
    a, b = torch.randn(700, 16), torch.randn(16, 140)
    with tritonops.use(variant={"matmul": "persistent/64x128x64-g8-w4-s4-p2"}, sm_budget=2):
        assert _error(tritonops.matmul(a, b), oracle(a, b)) <= tolerance(torch.float32, torch.float32, 16)


@pytest.mark.parametrize("layout", ["nn", "nt", "tn"])
def test_batch_invariant_policy_gives_every_batch_one_variant(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """That the bits agree is for the GPU to show (tests/gpu): numpy's own product depends on the tile's layout."""
    served = []
    decide = memo.select.choose
    monkeypatch.setattr(memo.select, "choose", lambda *args: served.append(decide(*args)) or served[-1])
    a = torch.randn(70, 96) if layout[0] == "n" else torch.randn(96, 70).t()
    b = torch.randn(96, 33) if layout[1] == "n" else torch.randn(33, 96).t()
    tritonops.clear_cache()
    with tritonops.use(policy="batch_invariant"):
        for rows in (slice(0, 70), slice(0, 1), slice(3, 20), slice(69, 70), slice(0, 64)):
            got = tritonops.matmul(a[rows], b)
            assert _error(got, oracle(a[rows], b)) <= tolerance(torch.float32, torch.float32, 96)
        tritonops.matmul(a.expand(2, 70, 96), b.expand(2, 96, 33))
    assert len(served) >= 5 and len({d.variant for d in served}) == 1
    assert served[0].variant.startswith("tiled/")


def test_gradients_run_on_triton_kernels() -> None:
    a, b = torch.randn(37, 50, requires_grad=True), torch.randn(50, 41, requires_grad=True)
    g = torch.randn(37, 41)
    with tritonops.use(variant="tiled"):
        grad_a, grad_b = torch.autograd.grad(tritonops.matmul(a, b), (a, b), g)
    assert _error(grad_a, g.double() @ b.detach().double().t()) <= tolerance(torch.float32, torch.float32, 41)
    assert _error(grad_b, a.detach().double().t() @ g.double()) <= tolerance(torch.float32, torch.float32, 37)
