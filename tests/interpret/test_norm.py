"""Every variant of the norms and their backwards that Triton's interpreter runs, against the float64 oracle."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable

import pytest
import torch

import tritonops
from tritonops import launch
from tritonops.device import INTERPRETER
from tritonops.dispatch.select import illegal
from tritonops.dispatch.variant import REGISTRY, Choice
from tritonops.norm import op as ops
from tritonops.norm import operands, reference, spec, vendor
from tritonops.testing import relative_error

EPS = 1e-5
DTYPES = (torch.float32, torch.float16)


def _randn(*shape: int) -> torch.Tensor:
    return 0.5 * torch.randn(shape) - 0.7


# name -> (an operand of the layout, number of normalised dimensions)
CASES: dict[str, tuple[Callable[[], torch.Tensor], int]] = {
    "ragged": (lambda: _randn(37, 33), 1),
    "aligned": (lambda: _randn(64, 128), 1),
    "many-rows": (lambda: _randn(1500, 6), 1),
    "one-column": (lambda: _randn(50, 1), 1),
    "two-columns": (lambda: _randn(50, 2), 1),
    "one-row": (lambda: _randn(1, 100), 1),
    "one": (lambda: _randn(1, 1), 1),
    "rank-1": (lambda: _randn(48), 1),
    "rank-4": (lambda: _randn(2, 3, 5, 24), 1),
    "two-dims": (lambda: _randn(6, 5, 3, 7), 2),
    "all-dims": (lambda: _randn(4, 6), 2),
    "size-1-dims": (lambda: _randn(5, 1, 3, 1).as_strided((5, 1, 3, 1), (3, 77, 1, 99)), 3),
    "wide": (lambda: _randn(5, 1500), 1),
    "transposed": (lambda: _randn(40, 24).t(), 1),
    "lead-transposed": (lambda: _randn(3, 4, 20).transpose(0, 1), 1),
    "dims-transposed": (lambda: _randn(7, 4, 6).transpose(1, 2), 2),
    "sliced-columns": (lambda: _randn(20, 100)[:, 10:43], 1),
    "sliced-rows": (lambda: _randn(41, 33)[::3], 1),
    "strided-columns": (lambda: _randn(9, 80)[:, ::2], 1),
    "overlapping-rows": (lambda: _randn(200).as_strided((20, 40), (8, 1)), 1),
    "equal-rows": (lambda: _randn(1, 50).expand(30, 50), 1),
    "equal-blocks": (lambda: _randn(5, 33).expand(4, 5, 33), 1),
    "channels-last": (lambda: _randn(2, 3, 4, 5).to(memory_format=torch.channels_last), 1),
    "mean-2000": (lambda: 2000 + torch.randn(64, 4), 1),
}
EMPTY = [((0, 8), 1), ((5, 0), 1), ((0, 0), 1), ((2, 0, 8), 1), ((3, 4, 0), 2), ((0,), 1)]


def _ids(op: str) -> list[str]:
    return [v.id for v in tritonops.variants(op) if v.family != "liger"]


def _operand(case: str, dtype: torch.dtype, centred: bool = False) -> torch.Tensor:
    """A tensor of the case's layout; `centred` takes the mean away, as is usual for a gradient."""
    t = CASES[case][0]()
    flat = t.as_strided((t.untyped_storage().nbytes() // t.element_size(),), (1,), 0)
    if centred:
        flat = flat - flat.mean() + 0.1
    return flat.to(dtype).as_strided(t.shape, t.stride(), t.storage_offset())


def _parameter(x: torch.Tensor, ndim: int, dtype: torch.dtype | None) -> torch.Tensor | None:
    return None if dtype is None else torch.randn(x.shape[x.dim() - ndim :]).to(dtype)


def _check_error(got: torch.Tensor, oracle: torch.Tensor, theirs: torch.Tensor, float32_error: float) -> None:
    """At most 1.05 times the vendor's error, and one rounding, each up to what float32 arithmetic may add."""
    assert got.dtype is theirs.dtype
    error = relative_error(got, oracle)
    torchs = relative_error(theirs, oracle)  # on one thread torch adds many rows one after the other
    assert error <= 1.05 * torchs + float32_error
    assert error <= max(torchs, torch.finfo(got.dtype).eps / 2) + float32_error


class Forward:
    """One forward problem: inputs, oracle, vendor's result, and what may differ."""

    def __init__(self, op: str, x, weight, bias, ndim: int, eps: float = EPS):
        self.op, self.x = op, x
        center = op == "layer_norm"
        self.args = (x, weight, bias, ndim, eps) if center else (x, weight, ndim, eps)
        self.problem = spec.problem(
            spec.key(op, (x,), weight, bias, None if bias is None else bias.dtype, ndim, "", 0, False)
        )
        self.oracle = getattr(reference, op)(*self.args)
        self.vendor = getattr(vendor, op)(None, *self.args)
        n = self.problem.dims["N"]
        conditions = [reference.condition(x, ndim, eps) if center else 0.0] * len(self.oracle)
        self.errors = [reference.float32_error(n, c) for c in conditions]
        if center:  # a mean near zero is a sum that cancels
            rows = x.double().reshape(operands.sizes(x.shape, ndim))
            spread = float(rows.square().mean(1).sum().sqrt() / self.oracle[1].norm().clamp_min(1e-30))
            self.errors[1] = reference.float32_error(n, 0.0, max(spread, 1.0))

    def check(self, got: tuple[torch.Tensor, ...]) -> None:
        assert got[0].shape == self.x.shape and got[0].dtype is self.x.dtype and got[0].is_contiguous()
        for g, oracle, theirs, slack in zip(got, self.oracle, self.vendor, self.errors, strict=True):
            _check_error(g, oracle, theirs, slack)


class Backward:
    """One backward problem; mean and rstd are the vendor's, rounded to float32."""

    def __init__(self, op: str, dy, x, weight, bias_dtype, ndim: int, mask=None, eps: float = EPS):
        self.op, self.x, self.weight = op, x, weight
        center = op == "layer_norm_backward"
        mask = mask or [True] * (3 if center else 2)
        self.wanted = operands.wanted(mask, weight is not None, *([bias_dtype is not None] if center else []))
        parameters = (weight, None) if center else (weight,)
        _, *stats = getattr(vendor, op.removesuffix("_backward"))(None, x, *parameters, ndim, eps)
        if center:
            self.args = (dy, x, *stats, weight, bias_dtype, ndim, eps, mask)
        else:
            self.args = (dy, x, *stats, weight, ndim, eps, mask)
        self.problem = spec.problem(
            spec.key(op, (x, dy), weight, None, bias_dtype, ndim, spec.grads_of(self.wanted), 0, False)
        )
        self.oracle = getattr(reference, op)(dy, x, weight, ndim, eps)
        self.vendor = getattr(vendor, op)(None, *self.args)
        condition = reference.condition(x, ndim, eps) if center else 0.0
        m, n = self.problem.dims["M"], self.problem.dims["N"]
        cancels = reference.cancellation(dy, x, weight, ndim, eps, center)
        self.errors = [
            reference.float32_error(terms, extra, c)
            for terms, extra, c in zip((n, m, m), (condition, condition, 0.0), cancels, strict=True)
        ]
        self.dtypes = (x.dtype, None if weight is None else weight.dtype, bias_dtype)
        tail = x.shape[x.dim() - ndim :]
        self.shapes = (x.shape, tail, tail)

    def check(self, got: tuple[torch.Tensor, ...]) -> None:
        assert len(got) == len(self.wanted)
        for i, (g, wanted) in enumerate(zip(got, self.wanted, strict=True)):
            if not wanted:
                assert g.shape == (0,)
                continue
            assert g.shape == self.shapes[i] and g.dtype is self.dtypes[i] and g.is_contiguous()
            _check_error(g, self.oracle[i], self.vendor[i], self.errors[i])


def _run(case: Forward | Backward, variant: str) -> tuple[torch.Tensor, ...] | None:
    """The variant's result, or None where it says that it cannot serve."""
    record = tritonops.variants(case.op)[[v.id for v in tritonops.variants(case.op)].index(variant)]
    reason = illegal(REGISTRY[case.op], record, case.problem, INTERPRETER)
    if reason is not None:
        assert "does not fit" in reason or "would hold" in reason
        return None
    return record.run(Choice(record, case.problem, INTERPRETER, None), *case.args)


def _forward(op: str, case: str, dtype: torch.dtype, weight=True, bias=True) -> Forward:
    x, ndim = _operand(case, dtype), CASES[case][1]
    w = _parameter(x, ndim, dtype if weight is True else weight)
    b = _parameter(x, ndim, dtype if bias is True else bias) if op == "layer_norm" else None
    return Forward(op, x, w, b, ndim)


def _backward(op: str, case: str, dtype: torch.dtype, weight=True, bias=True, mask=None) -> Backward:
    x, dy, ndim = _operand(case, dtype), _operand(case, dtype, centred=True), CASES[case][1]
    w = _parameter(x, ndim, dtype if weight is True else weight)
    bias_dtype = (dtype if bias is True else bias) if op == "layer_norm_backward" else None
    return Backward(op, dy, x, w, bias_dtype, ndim, mask)


def _cells(*ops: str) -> list[tuple[str, str, str]]:
    return [(op, v, case) for op in ops for v in _ids(op) for case in CASES]


@functools.cache
def _problem(op: str, case: str, dtype: torch.dtype) -> Forward | Backward:
    return (_backward if op.endswith("_backward") else _forward)(op, case, dtype)


@pytest.mark.parametrize(("op", "variant", "case"), _cells("layer_norm", "rms_norm"))
def test_forward(op: str, variant: str, case: str) -> None:
    for dtype in DTYPES:
        problem = _problem(op, case, dtype)
        got = _run(problem, variant)
        if got is not None:
            problem.check(got)


@pytest.mark.parametrize(("op", "variant", "case"), _cells("layer_norm_backward", "rms_norm_backward"))
def test_backward(op: str, variant: str, case: str) -> None:
    for dtype in DTYPES:
        problem = _problem(op, case, dtype)
        got = _run(problem, variant)
        if got is not None:
            problem.check(got)


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm", "layer_norm_backward", "rms_norm_backward"])
def test_every_variant_serves_most_cases_and_liger_says_why_not(op: str) -> None:
    problems = [_problem(op, case, torch.float16).problem for case in CASES]
    for variant in tritonops.variants(op):
        reasons = [illegal(REGISTRY[op], variant, p, INTERPRETER) for p in problems]
        if variant.family == "liger":
            assert set(reasons) == {"Liger's kernel does not run in Triton's interpreter"}
        else:
            assert reasons.count(None) >= 7


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_one_row_fills_the_widest_tile(op: str) -> None:
    for variant in tritonops.variants(op):
        if variant.family != "rows":
            continue
        x = _randn(2, variant.meta["tile"] // 2 + 1)
        problem = Forward(op, x, torch.randn(x.shape[1]), None, 1)
        problem.check(_run(problem, variant.id))
        too_wide = Forward(op, _randn(1, variant.meta["tile"] + 1), None, None, 1)
        assert _run(too_wide, variant.id) is None


@pytest.mark.parametrize("tile", [1024, 4096, 16384])
def test_backward_with_one_row_a_tile(tile: int) -> None:
    variant = next(v for v in tritonops.variants("layer_norm_backward") if v.meta.get("tile") == tile)
    x, dy = _randn(9, tile // 2 + 1), _randn(9, tile // 2 + 1)
    problem = Backward("layer_norm_backward", dy, x, torch.randn(x.shape[1]), torch.float32, 1)
    problem.check(_run(problem, variant.id))


PARAMETERS = list(itertools.product((None, torch.float32, torch.float16), repeat=2))


@pytest.mark.parametrize(("weight", "bias"), PARAMETERS)
def test_absent_parameters_and_other_dtypes(weight, bias) -> None:
    for dtype, case in itertools.product(DTYPES, ("ragged", "two-dims")):
        problems = [_forward("layer_norm", case, dtype, weight, bias)]
        problems += [_backward("layer_norm_backward", case, dtype, weight, bias)]
        if bias is None:
            problems += [_forward("rms_norm", case, dtype, weight), _backward("rms_norm_backward", case, dtype, weight)]
        for problem in problems:
            for variant in ("vendor", *[v for v in _ids(problem.op) if "t1024" in v or "t4096-w4" in v]):
                problem.check(_run(problem, variant))


@pytest.mark.parametrize("mask", [m for m in itertools.product((True, False), repeat=3) if any(m)])
def test_masks(mask: tuple[bool, ...]) -> None:
    for op, case in itertools.product(("layer_norm_backward", "rms_norm_backward"), ("ragged", "transposed")):
        wanted = list(mask) if op.startswith("layer") else list(mask[:2])
        problem = _backward(op, case, torch.float32, mask=wanted)
        for variant in ("vendor", "rows/t1024-w4-s3-p4"):
            problem.check(_run(problem, variant))


@pytest.mark.parametrize("mask", [m for m in itertools.product((True, False), repeat=3) if any(m)])
def test_what_is_not_wanted_is_not_launched(mask: tuple[bool, ...]) -> None:
    variant = next(v for v in tritonops.variants("layer_norm_backward") if v.family == "rows")
    x, stats, w = torch.empty(40, 64, device="meta"), torch.empty(40, device="meta"), torch.empty(64, device="meta")
    problem = Backward("layer_norm_backward", _randn(4, 64), _randn(4, 64), torch.randn(64), torch.float32, 1, mask)
    choice = Choice(variant, problem.problem, INTERPRETER, None)
    with launch.capture() as launches:
        variant.run(choice, x, x, stats, stats, w, torch.float32, 1, EPS, mask)
    names = [request.kernel.__name__ for request in launches]
    want_dx, want_dw, want_db = mask
    assert names == ["norm_backward_rows_kernel"] * any(mask) + ["norm_backward_finalize_kernel"] * (want_dw or want_db)
    for request in launches:
        assert (request.meta["WANT_DW"], request.meta["WANT_DB"]) == (want_dw, want_db)
    if launches:
        assert launches[0].meta["WANT_DX"] == want_dx
        assert (launches[0].args[0] is None) == (not (want_dx or want_dw))


@pytest.mark.parametrize(("shape", "ndim"), EMPTY)
def test_empty_inputs_launch_nothing(shape: tuple[int, ...], ndim: int) -> None:
    for dtype in DTYPES:
        x = torch.empty(shape, dtype=dtype)
        w = torch.ones(shape[len(shape) - ndim :], dtype=dtype)
        m, _ = operands.sizes(shape, ndim)
        with launch.capture() as launches:
            y, *stats = ops.execute_layer_norm(x, w, w, ndim, EPS, 0)
            z, *rms = ops.execute_rms_norm(x, w, ndim, EPS, 0)
            dx, *gradients = ops.execute_layer_norm_backward(x, x, *stats, w, dtype, ndim, EPS, [True] * 3, 0)
            dz, *rms_gradients = ops.execute_rms_norm_backward(x, x, *rms, w, ndim, EPS, [True] * 2, 0)
        assert not launches
        assert all(t.shape == shape and t.dtype is dtype for t in (y, z, dx, dz))
        assert all(s.shape == (m,) and s.isfinite().all() for s in (*stats, *rms))
        assert len(gradients) == 2 and len(rms_gradients) == 1
        assert all(g.shape == w.shape and g.dtype is dtype and g.eq(0).all() for g in (*gradients, *rms_gradients))


def test_nothing_wanted_launches_nothing() -> None:
    x, stats = torch.randn(5, 8), torch.ones(5)
    with launch.capture() as launches:
        got = ops.execute_layer_norm_backward(x, x, stats, stats, None, None, 1, EPS, [False, True, True], 0)
        got += ops.execute_rms_norm_backward(x, x, stats, None, 1, EPS, [False, True], 0)
    assert not launches and [g.numel() for g in got] == [0] * 5


def test_expanded_gradient_of_a_sum() -> None:
    x, w = _randn(70, 33), torch.randn(33)
    for dy in (torch.ones(()).expand(70, 33), torch.ones(33).expand(70, 33), torch.randn(70, 1).expand(70, 33)):
        problem = Backward("layer_norm_backward", dy, x, w, torch.float32, 1)
        for variant in _ids(problem.op):
            got = _run(problem, variant)
            if got is not None:
                problem.check(got)


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_rows_keep_their_bits_in_any_batch(op: str) -> None:
    for variant, n in itertools.product([v for v in _ids(op) if v != "vendor"], (33, 128)):
        x, w = _randn(70, n), torch.randn(n)
        whole = _run(Forward(op, x, w, None, 1), variant)
        if whole is None:
            continue
        for rows in (slice(0, 1), slice(3, 20), slice(69, 70)):
            part = _run(Forward(op, x[rows], w, None, 1), variant)
            assert all(torch.equal(p, q[rows]) for p, q in zip(part, whole, strict=True))


def test_input_gradients_keep_their_bits_in_any_batch() -> None:
    x, dy, w = _randn(70, 33), _randn(70, 33), torch.randn(33)
    for variant in [v for v in _ids("layer_norm_backward") if v != "vendor"]:
        whole = _run(Backward("layer_norm_backward", dy, x, w, None, 1), variant)
        for rows in (slice(0, 1), slice(3, 20), slice(69, 70)):
            part = _run(Backward("layer_norm_backward", dy[rows], x[rows], w, None, 1), variant)
            assert torch.equal(part[0], whole[0][rows])


@pytest.mark.parametrize("n", [3, 33, 100])
def test_constant_rows_normalise_to_the_bias(n: int) -> None:
    bias = torch.randn(n)
    for value in (0.1, 1e4 / 3, 1e12 / 3, 1e30 / 3):
        problem = Forward("layer_norm", torch.full((5, n), value), torch.randn(n), bias, 1)
        for variant in [v for v in _ids("layer_norm") if v != "vendor"]:
            got = _run(problem, variant)
            if got is not None:
                assert torch.equal(got[0], bias.expand(5, n))
                assert torch.allclose(got[2], torch.full((5,), EPS**-0.5))


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_a_bad_row_spoils_no_other() -> None:
    x, dy, w = _randn(20, 33), _randn(20, 33), torch.randn(33)
    x[7, 3], x[11, 0] = float("nan"), float("inf")
    good = torch.tensor([i not in (7, 11) for i in range(20)])
    for op in ("layer_norm", "rms_norm"):
        clean = Forward(op, x[good], w, None, 1)
        back = Backward(f"{op}_backward", dy, x, w, None, 1, [True] + [False] * (2 if op == "layer_norm" else 1))
        clean_back = Backward(f"{op}_backward", dy[good], x[good], w, None, 1)
        for variant in [v for v in _ids(op) if v != "vendor"]:
            got = _run(Forward(op, x, w, None, 1), variant)
            if got is not None:
                assert torch.equal(got[0][good], _run(clean, variant)[0])
                assert got[0][7].isnan().all() and not got[0][11].isfinite().all()
        for variant in [v for v in _ids(back.op) if v != "vendor"]:
            got = _run(back, variant)
            if got is not None:
                assert torch.equal(got[0][good], _run(clean_back, variant)[0])
                assert got[0][7].isnan().all()


def test_row_offsets_beyond_int32() -> None:
    # 4 GiB of address space, of which a few pages are touched; the stride itself fits 32 bits.
    big = torch.empty(2**31 + 64, dtype=torch.float16).as_strided((3, 64), (2**30, 1))
    big.copy_(_randn(3, 64))
    w = torch.randn(64)
    for problem, variant in (
        (Forward("layer_norm", big, w, w, 1), "rows/t1024-w4"),
        (Backward("layer_norm_backward", big, big, w, torch.float32, 1), "rows/t1024-w4-s3-p4"),
    ):
        problem.check(_run(problem, variant))


def test_a_small_sm_budget_takes_more_turns() -> None:
    x, dy, w = _randn(700, 33), _randn(700, 33), torch.randn(33)
    variant = next(v for v in tritonops.variants("layer_norm_backward") if v.id == "rows/t1024-w4-s3-p4")
    problem = Backward("layer_norm_backward", dy, x, w, torch.float32, 1)
    with tritonops.use(sm_budget=1):
        flags = tritonops.dispatch.override.flags
        key = spec.key(problem.op, (x, dy), w, None, torch.float32, 1, "xwb", flags, False)
        choice = Choice(variant, spec.problem(key), INTERPRETER, None)
    with launch.capture() as launches:
        variant.run(choice, *problem.args)
    assert launches[0].grid == (4,) and launches[1].args[4] == 4
    problem.check(variant.run(choice, *problem.args))


def test_more_partial_sums_than_one_block_adds_up() -> None:
    x, dy, w = _randn(1000, 200), _randn(1000, 200), torch.randn(200)
    variant = next(v for v in tritonops.variants("layer_norm_backward") if v.id == "rows/t1024-w4-s3-p4")
    problem = Backward("layer_norm_backward", dy, x, w, torch.float32, 1)
    choice = Choice(variant, problem.problem, dataclasses.replace(INTERPRETER, sms=37), None)
    with launch.capture() as launches:
        variant.run(choice, *problem.args)
    assert launches[1].args[4] == 148
    problem.check(variant.run(choice, *problem.args))


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_preferred_configurations(op: str) -> None:
    from tritonops.device import named_device

    h200 = named_device("sm_90-132")
    describe = REGISTRY[op].describe
    for n in (1, 64, 1024, 4096, 16384, 65536):
        problem = describe((4096, n), dtype=torch.bfloat16)
        first = REGISTRY[op].prefer(problem, h200)[0]
        legal = [v.id for v in tritonops.variants(op) if illegal(REGISTRY[op], v, problem, h200) is None]
        assert first in legal
    back = REGISTRY[f"{op}_backward"]
    wanted = {1024: "rows/t4096-w4-s3-p2", 4096: "rows/t8192-w8-s3-p1", 8192: "rows/t8192-w8-s3-p1"}
    for n, best in wanted.items():
        assert back.prefer(back.describe((32768, n), (n,), dtype=torch.bfloat16), h200)[0] == best
    with tritonops.use(policy="batch_invariant"):
        few, many = (back.describe((m, 1024), (1024,), dtype=torch.bfloat16) for m in (1, 32768))
        assert back.prefer(few, h200) == back.prefer(many, h200)
    assert back.prefer(back.describe((8, 64), (64,), dtype=torch.bfloat16), h200)[0] == "rows/t1024-w4-s3-p4"


def test_limits_are_said() -> None:
    from tritonops.device import named_device

    h200, l40 = named_device("sm_90-132"), named_device("sm_89-142")
    spec_ = REGISTRY["layer_norm_backward"]
    wide = spec_.describe((64, 16385), (16385,), dtype=torch.bfloat16)
    rows = [v for v in tritonops.variants("layer_norm_backward") if v.family == "rows"]
    assert all("does not fit" in v.requires(wide, h200) for v in rows)
    double = spec_.describe((64, 64), (64,), dtype=torch.float64)
    assert all("float64" in v.requires(double, h200) for v in rows)
    fp32 = spec_.describe((64, 64), (64,), dtype=torch.float32)
    big = next(v for v in rows if v.id == "rows/t8192-w8-s3-p1")
    assert big.requires(fp32, h200) is None and "shared memory" in big.requires(fp32, l40)
    many = REGISTRY["layer_norm"].describe((2**32, 4096), dtype=torch.bfloat16)
    one = next(v for v in tritonops.variants("layer_norm") if v.id == "rows/t4096-w4")
    assert "2**31 - 1" in one.requires(many, h200)
