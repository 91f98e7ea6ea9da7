"""The timing itself on a GPU: scale, agreement of a kernel with itself, tf32, what a case's measurement contains."""

from __future__ import annotations

import random
from statistics import median

import pytest
import torch

from tritonops import _compat
from tritonops.calibrate import measure, sweep
from tritonops.calibrate.case import Case
from tritonops.calibrate.race import Stage, race
from tritonops.calibrate.telemetry import monitor
from tritonops.device import device_info
from tritonops.dispatch.variant import REGISTRY, VENDOR, Choice, Variant

pytestmark = pytest.mark.gpu
ROUNDS = (Stage(12, 8, float("inf")),)


@pytest.fixture
def timers():
    flush = measure.Flush(torch.device("cuda"), 64 << 20)

    def make(call, *args, calls=10):
        call(*args)
        torch.cuda.synchronize()
        return measure.GraphTimer(call, [args], calls, flush, measure.Place())

    return make


def middle(timer) -> float:
    return median(timer() for _ in range(9))


def test_twice_the_work_takes_twice_the_time(timers) -> None:
    x = torch.randn(1 << 27, device="cuda")
    ratio = middle(timers(torch.abs, x)) / middle(timers(torch.abs, x[: 1 << 26]))
    assert ratio == pytest.approx(2, rel=0.05)


def test_one_kernel_under_two_names_differs_by_under_3_percent(timers) -> None:
    a = torch.randn(2048, 2048, device="cuda").to(torch.bfloat16)
    contenders = {name: timers(torch.mm, a, a) for name in ("vendor", "b")}
    times = race(
        contenders, base="vendor", stages=ROUNDS, rng=random.Random(0), monitor=monitor(torch.cuda.current_device())
    ).times
    assert median(x / y for x, y in zip(times["vendor"], times["b"], strict=True)) == pytest.approx(1, abs=0.03)


def test_ben_07_a_graph_hides_the_host_that_eager_shows(timers) -> None:
    """triton-lang/triton#10149: for tiny problems only the launch is measured unless many are in one region."""
    a = torch.randn(256, 256, device="cuda").to(torch.bfloat16)
    graph, eager = middle(timers(torch.mm, a, a, calls=64)), measure.EagerTimer(torch.mm, [(a, a)])()
    assert graph < 0.7 * eager


def test_the_ceilings_are_those_of_a_gpu() -> None:
    copy, product = measure.ceilings(torch.device("cuda"), 64 << 20)
    assert 0.1 < copy < 20 and 10 < product < 10_000


def test_float32_precision_reaches_the_product() -> None:
    a, b = (torch.randn(512, 512, device="cuda") for _ in range(2))
    exact = a.double() @ b.double()
    with _compat.float32_precision(True):
        coarse = (a @ b - exact).norm() / exact.norm()
    with _compat.float32_precision(False):
        fine = (a @ b - exact).norm() / exact.norm()
    assert fine < 1e-5 < coarse < 1e-2


def planted(op: str, run) -> Variant:
    variant = Variant("planted/a", run)
    REGISTRY[op].variants()["planted/a"] = variant
    return variant


@pytest.fixture
def bench():
    yield sweep.CudaBench(device_info(torch.device("cuda", torch.cuda.current_device())))
    REGISTRY["rms_norm"].variants().pop("planted/a", None)


def case() -> Case:
    spec, x = REGISTRY["rms_norm"], torch.empty(2048, 1024, dtype=torch.bfloat16, device="meta")
    return Case(spec.describe(x, x[0]))


def test_a_case_has_times_of_every_candidate_and_eager_ones_of_the_best(bench) -> None:
    spec = REGISTRY["rms_norm"]
    got = bench(spec, case(), [VENDOR, "rows/t2048-w4", "rows/t8192-w8"])
    assert set(got.graph) == {VENDOR, "rows/t2048-w4", "rows/t8192-w8"} and got.failed == {}
    assert len(got.graph[VENDOR]) >= 8 and all(0.0005 < t < 1 for times in got.graph.values() for t in times)
    assert VENDOR in got.eager and len(got.eager) == 2 and min(got.eager[VENDOR]) >= 0.9 * min(got.graph[VENDOR])
    assert got.calls >= 10


@pytest.mark.parametrize(
    ("how", "reason"),
    [("wrong", "differs"), ("nan", ""), ("short", ""), ("raise", "raised: KeyError"), ("sync", "captured")],
)
def test_a_candidate_that_fails_at_the_real_shape_is_left_out_with_its_reason(bench, how: str, reason: str) -> None:
    spec = REGISTRY["rms_norm"]
    vendor = spec.variants()[VENDOR]

    def run(choice: Choice, x, *rest):
        y, rstd = vendor.run(choice, x, *rest)
        if how == "raise":
            raise KeyError("no")
        if how == "sync":
            float(y.sum())
        if how == "short":
            return y[:-1], rstd
        if how == "nan":
            y[-1, -1] = float("nan")
        if how == "wrong":
            y[: y.shape[0] // 2] *= 1.5
        return y, rstd

    planted("rms_norm", run)
    got = bench(spec, case(), [VENDOR, "planted/a", "rows/t2048-w4"])
    assert set(got.graph) == {VENDOR, "rows/t2048-w4"} and set(got.failed) == {"planted/a"}
    assert reason in got.failed["planted/a"]


def test_nvml_knows_the_clock_where_it_is_installed() -> None:
    pytest.importorskip("pynvml")
    watch = monitor(torch.cuda.current_device())
    reading = watch.read()
    assert watch.known and watch.driver() and reading.clock_mhz and 0 < (reading.temperature_c or 0) < 120
