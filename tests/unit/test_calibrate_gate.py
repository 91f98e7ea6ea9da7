"""The gate on planted variants in plain torch: whatever is wrong with one, it never passes. No GPU, no Triton."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import empty as another_name_of_empty

from tritonops import _compat
from tritonops.calibrate import gate, outputs, ragged
from tritonops.calibrate.case import Case
from tritonops.calibrate.raw import Paths, encode
from tritonops.calibrate.static import Static
from tritonops.device import named_device
from tritonops.dispatch import override, variant
from tritonops.dispatch.problem import Problem
from tritonops.dispatch.select import illegal
from tritonops.dispatch.variant import REGISTRY, VENDOR, OpSpec, Variant

DEVICE = named_device("sm_90-132")


def cube(choice, x: torch.Tensor, flag: bool) -> torch.Tensor:
    return (x.float() ** 3).to(x.dtype)


def sample(problem: Problem, device: str) -> tuple[torch.Tensor, bool]:
    """Rows with a gap after each, so that there is memory beside the argument."""
    x = torch.randn(problem.dims["M"], problem.dims["N"] + 3, device=device).to(getattr(torch, problem.dtype))
    return x[:, : problem.dims["N"]], True


class Planted:
    """An op that cubes, with the variants that a test plants."""

    def __init__(self) -> None:
        self.runs: dict[str, Callable[..., Any]] = {VENDOR: cube}
        self.more: dict[str, dict[str, Any]] = {}

    def plant(self, run: Callable[..., Any], vid: str = "planted/a", **more: Any) -> None:
        self.runs[vid], self.more[vid] = run, more

    def spec(self, **more: Any) -> OpSpec:
        variant._LOADED.pop("cube", None)
        fields: dict[str, Any] = {
            "oracle": lambda problem, x, flag: (x.double() ** 3,),
            "terms": lambda problem: 1,
        }
        return OpSpec(
            "cube",
            lambda: [Variant(v, run, **self.more.get(v, {})) for v, run in self.runs.items()],
            ("M", "N"),
            lambda problem, device: [],
            lambda *a: Problem("cube", {"M": 1, "N": 1}, "float32"),
            sample,
            **fields | more,
        )

    def __call__(self, cases: list[Case] | None = None, known=None, **more: Any) -> dict[str, dict[str, Any]]:
        cases = cases or [case()]
        static = Static({}, {}, [list(self.runs)] * len(cases), [{}] * len(cases))
        return gate.gate(self.spec(**more), cases, static, "cpu", known=known)


def case(dtype: str = "float32", n: int = 64, **facts: Any) -> Case:
    return Case(Problem("cube", {"M": 4096, "N": n}, dtype, **facts))


@pytest.fixture
def planted():
    yield Planted()
    variant._LOADED.pop("cube", None)


@pytest.fixture
def verdict(planted):
    """The verdict on a planted run, the vendor's being right."""

    def judge(run: Callable[..., Any], cases: list[Case] | None = None, **more: Any) -> dict[str, Any]:
        planted.plant(run, **more)
        found = planted(cases)
        assert list(found) == [VENDOR, "planted/a"] and found[VENDOR]["passed"]
        encode(found)  # no number that JSON has not
        return found["planted/a"]

    return judge


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_an_honest_variant_passes(verdict, dtype: str) -> None:
    found = verdict(lambda choice, x, flag: (x.float() * x.float() * x.float()).to(x.dtype), [case(dtype)])
    assert found["passed"] and found["why"] == "" and found["cases"] == 2 and found["error"] <= 1


def test_so_does_one_that_fills_what_it_allocates(verdict) -> None:
    def run(choice, x, flag):
        out = torch.empty(x.shape)
        torch.pow(x, 3, out=out)
        return out

    assert verdict(run)["passed"]


def off(factor: float) -> Callable[..., Any]:
    return lambda choice, x, flag: cube(choice, x, flag) * factor


@pytest.mark.parametrize("factor", [1.01, -1.0, 0.0, 1 + 1e-5, float("nan"), float("inf")])
def test_wrong_everywhere(verdict, factor: float) -> None:
    found = verdict(off(factor))
    assert not found["passed"] and "exceeds" in found["why"] and found["error"] > 1


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e3])
def test_wrong_in_the_last_element(verdict, value: float) -> None:
    def run(choice, x, flag):
        out = cube(choice, x, flag)
        out[-1, -1] = value
        return out

    found = verdict(run)
    assert not found["passed"] and "worst at (" in found["why"]


ALLOCATE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "empty": lambda x: torch.empty(x.shape),
    "empty of another name": lambda x: another_name_of_empty(x.shape),
    "empty_like": lambda x: torch.empty_like(x, memory_format=torch.contiguous_format),
    "new_empty": lambda x: x.new_empty(x.shape),
    "empty_strided": lambda x: torch.empty_strided(x.shape, (x.shape[1], 1)),
    "new_empty_strided": lambda x: x.new_empty_strided(x.shape, (x.shape[1], 1)),
    "empty_permuted": lambda x: torch.empty_permuted(x.shape, (0, 1)),
    "numpy": lambda x: torch.from_numpy(np.empty(tuple(x.shape), dtype=np.float32)),
    "zeros": lambda x: torch.zeros(x.shape),
    "a part of a longer one": lambda x: torch.empty(x.numel() + 64)[64:].view(x.shape),
}


@pytest.mark.parametrize("allocate", ALLOCATE)
@pytest.mark.parametrize("missing", [(slice(-1, None), slice(-1, None)), (slice(None), slice(-1, None)), (0, 0)])
def test_written_in_part(verdict, allocate: str, missing) -> None:
    def run(choice, x, flag):
        if allocate != "numpy":
            # Right values in memory that is given back: what an allocator hands out next.
            for _ in range(4):
                cube(choice, x, flag)
        out = ALLOCATE[allocate](x)
        whole = cube(choice, x, flag)
        mask = torch.ones_like(whole, dtype=torch.bool)
        mask[missing] = False
        out[mask] = whole[mask]
        return out

    found = verdict(run)
    assert not found["passed"] and "worst at (" in found["why"], found


@pytest.mark.parametrize("call", [1, 2])
def test_written_in_part_in_one_call_only(verdict, call: int) -> None:
    calls = []

    def run(choice, x, flag):
        calls.append(1)
        out = torch.empty(x.shape)
        out[: None if len(calls) != call else -1] = cube(choice, x, flag)[: None if len(calls) != call else -1]
        return out

    found = verdict(run)
    assert not found["passed"] and ("second run" in found["why"]) == (call == 2)


def test_a_workspace_read_before_it_is_written(verdict) -> None:
    def run(choice, x, flag):
        partial = torch.empty(x.shape)
        partial += cube(choice, x, flag)
        return partial

    assert not verdict(run)["passed"]


def in_place(x: torch.Tensor) -> None:
    x[-1, -1] += 1e-3


def gap(x: torch.Tensor) -> None:
    torch.as_strided(x, (1,), (1,), x.storage_offset() + x.shape[1]).fill_(7.0)


def negative_zero(x: torch.Tensor) -> None:
    x.copy_(torch.where(x.abs() < 1e-2, -x, x))


@pytest.mark.parametrize("change", [in_place, gap, negative_zero, lambda x: x.t_(), lambda x: x.resize_(x.shape[0])])
@pytest.mark.parametrize("after", [True, False])
def test_changed_inputs(verdict, planted, change, after: bool) -> None:
    def run(choice, x, flag):
        out = cube(choice, x, flag) if after else None
        change(x)
        return cube(choice, x, flag) if out is None else out

    planted.plant(cube, "z/b")
    planted.plant(run)
    found = planted()
    assert found["planted/a"]["passed"] is False and "it changed its inputs" in found["planted/a"]["why"]
    assert found["z/b"]["passed"] and found["z/b"]["cases"] == 2, "the inputs of the others are sound"


def test_results_of_ones_own_memory(verdict, planted) -> None:
    kept: dict[Any, torch.Tensor] = {}

    def cached(choice, x, flag):
        out = kept.setdefault(x.shape, torch.empty(x.shape))
        out.copy_(cube(choice, x, flag))
        return out

    planted.plant(lambda choice, x, flag: x, "same/x")
    planted.plant(cached, "cached/x")
    ones = planted(oracle=lambda problem, x, flag: (x.double(),))
    assert "shares memory with an input" in ones["same/x"]["why"]
    assert "two calls returned the same memory" in planted()["cached/x"]["why"]


def noisy(choice, x, flag):
    out = cube(choice, x, flag)
    return torch.where(torch.rand_like(out) < 0.01, torch.nextafter(out, torch.full_like(out, math.inf)), out)


def test_different_bits_from_the_same_inputs(verdict) -> None:
    found = verdict(noisy)
    assert not found["passed"] and "two runs on the same inputs differ" in found["why"]


def test_which_one_that_does_not_promise_it_may_give(verdict) -> None:
    assert verdict(noisy, deterministic=False)["passed"]


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("PassManager::run failed"),
        NotImplementedError(),
        AssertionError("\nlong\ntext"),
        KeyError("x"),
        torch.OutOfMemoryError("no"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("call", [1, 2])
def test_raising(verdict, error: Exception, call: int) -> None:
    calls = []

    def run(choice, x, flag):
        calls.append(1)
        if len(calls) == call:
            raise error
        return cube(choice, x, flag)

    found = verdict(run)
    assert not found["passed"] and f"raised {type(error).__name__}" in found["why"] and "\n" not in found["why"]


UNLIKE = {
    "shape (37, 47)": lambda out: out[:, :-1].contiguous(),
    "dtype torch.float64": lambda out: out.double(),
    "2 outputs, torch has 1": lambda out: (out, out.clone()),
    "0 outputs": lambda out: (),
    "no tensor but NoneType": lambda out: None,
    "no tensor but list": lambda out: [out],
    "not contiguous": lambda out: out.t().contiguous().t(),
    "shape (0,)": lambda out: out.new_empty(0),
    "device meta": lambda out: out.to("meta"),
}


@pytest.mark.parametrize("what", UNLIKE)
def test_another_kind_of_result(verdict, what: str) -> None:
    found = verdict(lambda choice, x, flag: UNLIKE[what](cube(choice, x, flag)))
    assert not found["passed"] and what in found["why"], found


def test_gradients_that_are_not_asked_for_are_not_compared(planted) -> None:
    def vendor(choice, x, flag):
        return cube(choice, x, flag), x.new_empty(0)

    planted.runs[VENDOR] = vendor
    planted.plant(lambda choice, x, flag: (cube(choice, x, flag), x.new_empty((0, 3))), "some/a")
    planted.plant(lambda choice, x, flag: (cube(choice, x, flag), x.sum(0)), "all/a")
    found = planted(oracle=lambda problem, x, flag: (x.double() ** 3, x.double().sum(0)))
    assert found["some/a"]["passed"] and found[VENDOR]["passed"]
    assert not found["all/a"]["passed"] and "output 1 has shape" in found["all/a"]["why"]


def test_a_variant_that_fails_one_section_is_out(planted) -> None:
    planted.plant(lambda choice, x, flag: cube(choice, x, flag) * (2 if x.dtype is torch.float16 else 1))
    cases = [case("float32"), case("float16"), case("float64")]
    found = planted(cases)
    assert not found["planted/a"]["passed"] and "float16" in found["planted/a"]["why"]
    assert found[VENDOR]["passed"] and found[VENDOR]["cases"] == 6


@pytest.mark.parametrize("how", ["raises", "nan", "writes"])
def test_a_vendor_that_does_not_work_is_said_to_be_so(planted, how: str) -> None:
    def vendor(choice, x, flag):
        if choice.problem.dtype == "float16":
            if how == "raises":
                raise RuntimeError("no such kernel")
            if how == "nan":
                return cube(choice, x, flag) * float("nan")
            x.zero_()
        return cube(choice, x, flag)

    planted.runs[VENDOR] = vendor
    planted.plant(cube)
    found = planted([case("float32"), case("float16")])
    said = {"raises": "raised RuntimeError: no such kernel", "nan": "not finite", "writes": "it changed its inputs"}
    assert not found[VENDOR]["passed"] and said[how] in found[VENDOR]["why"] and "float16" in found[VENDOR]["why"]
    assert found["planted/a"] == {"passed": True, "why": "", "cases": 2, "error": found["planted/a"]["error"]}
    alone = planted([case("float16")])["planted/a"]
    assert not alone["passed"] and alone["why"].startswith("never run: ")


def test_what_cannot_run_here_is_not_passed(planted) -> None:
    planted.plant(cube, "ours/a", kernel="no_such_module:kernel")
    planted.plant(cube, "picky/a", requires=lambda problem, device: "only on Sundays")
    found = planted()
    assert found["ours/a"]["why"].startswith("never run: Triton kernels need an NVIDIA GPU")
    assert found["picky/a"] == {"passed": False, "why": "never run: only on Sundays", "cases": 0, "error": 0.0}


def test_known_failures_stand_and_do_not_run_again(planted) -> None:
    calls = []
    planted.plant(lambda choice, x, flag: calls.append(1) or cube(choice, x, flag))
    planted.plant(cube, "good/a")
    bad = {"passed": False, "why": "broke the context", "cases": 1, "error": 1e9}
    found = planted(known={"planted/a": bad, "good/a": {"passed": True, "why": "", "cases": 9, "error": 0.5}})
    assert found["planted/a"] == bad and not calls
    assert found["good/a"]["passed"] and found["good/a"]["cases"] == 2


def test_the_state_of_the_process_is_as_before(planted) -> None:
    planted.plant(cube)
    torch.manual_seed(7)
    want, _ = torch.rand(3), torch.manual_seed(7)
    before = torch.empty, override.flags, torch.is_grad_enabled(), torch.backends.cuda.matmul.allow_tf32
    first, second = planted(), planted()
    assert first == second
    assert torch.equal(torch.rand(3), want)
    assert before == (torch.empty, override.flags, torch.is_grad_enabled(), torch.backends.cuda.matmul.allow_tf32)


def test_misuse(planted) -> None:
    spec = planted.spec()
    with pytest.raises(ValueError, match="1 cases, but candidates for 2"):
        gate.gate(spec, [case()], Static({}, {}, [[VENDOR]] * 2, [{}]), "cpu")
    with pytest.raises(ValueError, match="cube has no oracle"):
        gate.gate(dataclasses.replace(spec, oracle=None), [case()], Static({}, {}, [[VENDOR]], [{}]), "cpu")


def test_progress_says_how_far_it_is(planted) -> None:
    said: list[str] = []
    gate.gate(planted.spec(), [case()], Static({}, {}, [[VENDOR]], [{}]), "cpu", said.append)
    assert said[-1].startswith("cube: gate 2/2")


class TestCheckOutput:
    """The look at a result at the real shape, beside torch's."""

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
    def test_one_rounding_is_allowed(self, dtype) -> None:
        want = torch.randn(300, 700).to(dtype)
        other = torch.nextafter(want.float(), torch.full_like(want.float(), math.inf)).to(dtype)
        one_up = (want.float() * (1 + torch.finfo(dtype).eps)).to(dtype)
        assert gate.check_output(want.clone(), want) is None
        assert gate.check_output(other, want) is None and gate.check_output(one_up, want) is None
        assert gate.check_output((want, want.sum(0)), (want, want.sum(0))) is None

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
    @pytest.mark.parametrize("size", [1, 32])
    def test_a_wrong_element_or_tile_of_a_million_is_seen(self, dtype, size: int) -> None:
        want = torch.randn(1024, 1024).to(dtype)
        want[5:37, 5:37] = 2.0
        got = want.clone()
        got[5 : 5 + size, 5 : 5 + size] = 0.5
        why = gate.check_output(got, want) or ""
        alone = size == 1 and dtype is not torch.float32
        assert ("has an element 1.50e+00 off torch's" if alone else "differs from torch's by") in why

    def test_everything_slightly_off_is_seen(self) -> None:
        want = torch.randn(100, 100).half()
        assert "differs from torch's by" in (gate.check_output((want.float() * 1.005).half(), want) or "")
        single = torch.randn(100, 100)
        assert "differs" in (gate.check_output(single * (1 + 1e-4), single) or "")

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
    @pytest.mark.parametrize("where", [0, 4999, -1])
    def test_nan_anywhere_fails(self, value: float, where: int, monkeypatch) -> None:
        monkeypatch.setattr(outputs, "_CHUNK", 1000)
        want = torch.randn(100, 100)
        got = want.clone()
        got.view(-1)[where] = value
        assert gate.check_output(got, want) == "output 0 is not finite"
        assert gate.check_output((want, got), (want, want)) == "output 1 is not finite"
        assert gate.check_output(want, got) == "output 0 of torch is not finite"

    def test_chunks_make_no_difference(self, monkeypatch) -> None:
        want = torch.randn(99, 101)
        got = want.clone()
        got[-1, -1] += 1.0
        whole = gate.check_output(got, want)
        monkeypatch.setattr(outputs, "_CHUNK", 100)
        assert whole and gate.check_output(got, want) == whole and gate.check_output(want, want.clone()) is None

    def test_other_kinds(self) -> None:
        want = torch.randn(4, 5)
        assert "shape (5, 4)" in (gate.check_output(want.t().contiguous(), want) or "")
        assert "dtype torch.float16" in (gate.check_output(want.half(), want) or "")
        assert "2 outputs" in (gate.check_output((want, want), want) or "")
        assert gate.check_output((want, want[:0]), (want, want.new_empty(0))) is None
        assert gate.check_output(torch.zeros(3), torch.zeros(3)) is None
        assert gate.check_output(torch.ones(3), torch.zeros(3)) is not None

    def test_tf32_has_its_own_measure_while_the_switch_is_on(self) -> None:
        want = torch.randn(256, 256)
        got = want * (1 + 3e-4 * torch.randn(256, 256))
        with _compat.float32_precision(True):
            assert gate.check_output(got, want) is None
            assert gate.check_output(want * 1.01, want) is not None
        with _compat.float32_precision(False):
            assert gate.check_output(got, want) is not None

    def test_no_float64_is_made(self, monkeypatch) -> None:
        made: list[torch.dtype] = []

        class Watch(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                out = func(*args, **(kwargs or {}))
                made.append(out.dtype if isinstance(out, torch.Tensor) else out[0].dtype)
                return out

        want = torch.randn(64, 64).half()
        with Watch():
            gate.check_output(want.clone(), want)
        assert set(made) <= {torch.float16, torch.float32, torch.bool} and torch.float32 in made


@pytest.mark.parametrize("setup", ["untouched", "old", "new", "mixed", "general"])
@pytest.mark.parametrize("wanted", [True, False])
def test_the_float32_switches_are_restored(setup: str, wanted: bool) -> None:
    matmul = torch.backends.cuda.matmul
    if not hasattr(torch.backends, "fp32_precision") and setup in ("new", "mixed", "general"):
        pytest.skip("this torch has the old switch only")
    if setup == "old":
        torch.set_float32_matmul_precision("high")
    if setup in ("new", "mixed"):
        matmul.fp32_precision = "tf32"
    if setup == "mixed":
        matmul.fp32_precision = "ieee"
    if setup == "general":
        torch.backends.fp32_precision = "tf32"

    def state() -> list[Any]:
        out: list[Any] = [_compat.tf32_allowed()]
        for read in (lambda: matmul.fp32_precision, lambda: matmul.allow_tf32, torch.get_float32_matmul_precision):
            try:
                out.append(read())
            except (RuntimeError, AttributeError) as error:
                out.append(type(error))
        return out

    try:
        before = state()
        with _compat.float32_precision(wanted):
            assert _compat.tf32_allowed() is wanted
            with _compat.float32_precision(not wanted):
                assert _compat.tf32_allowed() is not wanted
            assert _compat.tf32_allowed() is wanted
        assert state() == before
        with pytest.raises(KeyError), _compat.float32_precision(wanted):
            raise KeyError
        assert state() == before
    finally:
        if hasattr(torch.backends, "fp32_precision"):
            matmul.fp32_precision = torch.backends.fp32_precision = "none"
        torch.set_float32_matmul_precision("highest")


class TestRagged:
    """Small problems that a variant can serve stand for the planned ones."""

    OPS = {
        "matmul": [
            ({"batch": 1, "M": m, "N": n, "K": k}, dtype, layout, aligned, {
                "out": dtype, "bias": False, "precision": precision, "wide": False, "operands_aligned": operands})
            for m, n, k in ((4096, 8192, 4096), (1, 4096, 4096))
            for layout in ("nt", "nn", "tn")
            for dtype, precision in (
                ("bfloat16", "ieee"), ("float16", "ieee"), ("float32", "tf32"), ("float32", "ieee"))
            for aligned, operands in ((True, True), (False, True), (False, False))
        ],
        "layer_norm_backward": [
            ({"M": 4096, "N": n + (not aligned)}, dtype, "", aligned, {"weight": dtype, "bias": dtype, "grads": "xwb"})
            for n in (64, 1024, 5120, 16384)
            for dtype in ("bfloat16", "float32")
            for aligned in (True, False)
        ],
        "embedding": [
            ({"T": 4096, "D": 4096, "V": 32000}, dtype, "", aligned, {
                "index": "int64", "scale_grad_by_freq": False, "padding": False})
            for dtype in ("bfloat16", "float32")
            for aligned in (True, False)
        ],
    }  # fmt: skip

    def cases(self, op: str) -> list[Case]:
        return [
            Case(Problem(op, dims, dtype, layout, aligned, traits=traits))
            for dims, dtype, layout, aligned, traits in self.OPS[op]
        ]

    @pytest.mark.parametrize("op", OPS)
    def test_each_variant_has_some_of_them_and_all_are_what_they_say(self, op: str) -> None:
        spec = REGISTRY[op]
        for v in spec.variants().values():
            mine = [c for c in self.cases(op) if illegal(spec, v, c.problem, DEVICE) is None]
            if not mine:
                assert v.family == "liger"
                continue
            found, _ = ragged.trials(spec, v, mine, DEVICE)
            assert 1 <= len(found) <= ragged.MAX_TRIALS and len({t.key for t in found}) == len(found)
            for t in found:
                p = t.problem
                assert illegal(spec, v, p, DEVICE) is None
                assert {k for k, size in p.dims.items() if size > 2100} <= ({"N"} if "K" not in p.dims else set())
                args = spec.sample(p, "meta")
                if op == "matmul":
                    again = spec.describe(*args[:2])
                    assert (again.layout, again.aligned) == (p.layout, p.aligned), p.describe()
                    assert dict(again.dims) == dict(p.dims)
                    assert again.traits["operands_aligned"] == p.traits["operands_aligned"]
                    assert p.dims["M"] % 16 and p.dims["N"] % 64
                elif op == "embedding":
                    assert spec.describe(args[1], args[0]).aligned == p.aligned
                else:
                    assert spec.describe(args[1], args[4], torch.empty(p.dims["N"])).aligned == p.aligned
                    assert p.dims["M"] in (37, 333)
            budgets = {override.sm_budget(t.problem.flags) for t in found}
            assert len(found) == 1 or budgets == {None, 1}

    def test_dtypes_layouts_and_alignments_are_all_among_them(self) -> None:
        spec = REGISTRY["matmul"]
        found, _ = ragged.trials(spec, spec.variants()[VENDOR], self.cases("matmul"), DEVICE)
        problems = [t.problem for t in found]
        assert {p.table_dtype for p in problems} == {"bfloat16", "float16", "tf32", "float32"}
        assert {p.layout for p in problems} == {"nt", "nn", "tn"} and {p.aligned for p in problems} == {True, False}

    def test_one_that_serves_few_rows_gets_few(self) -> None:
        spec = REGISTRY["matmul"]
        few = dataclasses.replace(
            spec.variants()[VENDOR], requires=lambda p, d: None if p.dims["M"] <= 8 else "at most 8 rows"
        )
        found, _ = ragged.trials(spec, few, self.cases("matmul")[-3:], DEVICE)
        assert found and {t.problem.dims["M"] for t in found} == {5}
        none, why = ragged.trials(
            spec, dataclasses.replace(few, requires=lambda p, d: "never"), self.cases("matmul")[:1], DEVICE
        )
        assert (none, why) == ([], "never")


class TestFile:
    VERDICTS = {
        "vendor": {"passed": True, "why": "", "cases": 6, "error": 0.9},
        "tiled/a": {"passed": False, "why": "raised X", "cases": 1, "error": 1e9},
    }

    def test_round_trip(self, tmp_path) -> None:
        paths = Paths(tmp_path, "matmul", DEVICE)
        gate.write(paths, self.VERDICTS)
        assert gate.read(paths) == self.VERDICTS

    def test_missing(self, tmp_path) -> None:
        with pytest.raises(FileNotFoundError):
            gate.read(Paths(tmp_path, "matmul", DEVICE))

    @pytest.mark.parametrize(
        "change",
        [
            lambda top: [],
            lambda top: top | {"schema": 2},
            lambda top: top | {"op": "rms_norm"},
            lambda top: top | {"device": "sm_80-108"},
            lambda top: top | {"gate": []},
            lambda top: top | {"gate": {"vendor": True}},
            lambda top: top | {"gate": {"vendor": {"passed": 1, "why": "", "cases": 1, "error": 0.0}}},
            lambda top: top | {"gate": {"vendor": {"passed": True}}},
            lambda top: {},
        ],
    )
    def test_others_are_refused_by_name(self, tmp_path, change) -> None:
        paths = Paths(tmp_path, "matmul", DEVICE)
        gate.write(paths, self.VERDICTS)
        paths.gate.write_text(json.dumps(change(json.loads(paths.gate.read_text()))))
        with pytest.raises(ValueError, match="matmul-sm_90-132.gate.json"):
            gate.read(paths)

    @pytest.mark.parametrize("junk", [b"", b"{", b"\xff\xfe", b"[" * 100000, b"null"])
    def test_junk_is_refused_by_name(self, tmp_path, junk: bytes) -> None:
        paths = Paths(tmp_path, "matmul", DEVICE)
        paths.gate.parent.mkdir(parents=True)
        paths.gate.write_bytes(junk)
        with pytest.raises(ValueError, match="matmul-sm_90-132.gate.json"):
            gate.read(paths)
