"""One entry with timers that say what they are told: rows, verdicts, accuracy, failures."""

from __future__ import annotations

import json
import math

import pytest
import torch

from bench_cases import Fake, FakeMachine, FakeTorch, gaussian, one
from benchmarks import accuracy, bench, rows
from benchmarks.entries import of_suite
from benchmarks.providers import Refused
from tritonops.calibrate import measure
from tritonops.calibrate.telemetry import Monitor, Reading

FIELDS = [
    "suite", "op", "pass", "shape", "dtype", "layout", "ids", "provider", "variant", "mode", "ms", "ci95", "rounds",
    "clock_mhz", "fraction", "tflops", "error", "error_torch", "failed", "heldout",
]  # fmt: skip


def measured(providers, entry=None, machine=None, mode="graph", **more):
    found = bench.measure(entry or one(), [FakeTorch(), *providers], machine or FakeMachine(), mode, **more)
    return {row["provider"]: row for row in found}


def test_a_row_has_the_fields_of_a_result_file() -> None:
    row = measured([Fake(ms=0.5)], copy_tbps=4.0)["fake"]
    assert list(row)[: len(FIELDS)] == FIELDS
    assert row["shape"] == {"M": 64, "N": 64, "K": 64} and row["layout"] == "nt" and row["ids"] is None
    assert (row["ms"], row["ci95"], row["rounds"], row["failed"]) == (0.5, [0.5, 0.5], 20, None)
    assert row["tflops"] == pytest.approx(2 * 64**3 / 0.5e-3 / 1e12, rel=1e-3)
    assert row["fraction"] == pytest.approx(3 * 64 * 64 * 4 / 0.5e-3 / 4e12, rel=1e-2)
    assert (row["speedup"], row["speedup_ci95"], row["verdict"]) == (2.0, [2.0, 2.0], "win")
    json.dumps(row, allow_nan=False)


def test_bytes_are_those_of_the_design() -> None:
    cases = [("8x64", "layer_norm", "bwd", 3 * 8 * 64 * 4), ("8x64", "rms_norm", "fwd", 2 * 8 * 64 * 4),
             ("8x16x32", "embedding", "bwd", (8 * 16 + 32 * 16) * 4)]  # fmt: skip
    for text, op, direction, moved in cases:
        found = bench.measure(one(text, op, direction), [FakeTorch(0.25)], FakeMachine(), "graph", copy_tbps=1.0)[0]
        assert found["tflops"] is None and found["fraction"] == pytest.approx(moved / 0.25e-3 / 1e12, rel=1e-2)


def test_torch_comes_first_and_has_no_verdict() -> None:
    found = bench.measure(one(), [Fake(), FakeTorch()], FakeMachine(), "graph")
    assert [r["provider"] for r in found] == ["torch", "fake"]
    assert found[0]["verdict"] is None and found[0]["error"] == found[0]["error_torch"] > 0
    with pytest.raises(ValueError, match="torch"):
        bench.measure(one(), [Fake()], FakeMachine(), "graph")


def test_verdicts_by_interval() -> None:
    found = measured([Fake("faster", 0.9), Fake("slower", 1.1), Fake("same", 1.0)])
    assert {name: row["verdict"] for name, row in found.items()} == {
        "torch": None, "faster": "win", "slower": "loss", "same": "tie",
    }  # fmt: skip
    assert rows.verdict(1.01, 1.2, 5) == "tie" and rows.verdict(1.01, 1.2, 6) == "win"
    assert rows.verdict(1.0, 1.2, 20) == "tie" and rows.verdict(0.8, 0.99, 20) == "loss"


def test_five_percent_is_detected_and_never_reversed() -> None:
    """Bar 3, with times that scatter by 2 % each."""
    verdicts = [
        measured([Fake(ms=1.05)], one("8x8x8"), FakeMachine(gaussian(seed, 0.02)))["fake"]["verdict"]
        for seed in range(200)
    ]
    assert verdicts.count("loss") >= 0.95 * 200 and "win" not in verdicts


def test_equals_are_told_apart_no_more_often_than_stated() -> None:
    """Bar 2: the same provider twice, 400 rows; 5 % and three standard deviations of their number."""
    wrong = sum(
        measured([Fake(ms=1.0)], one("8x8x8"), FakeMachine(gaussian(1000 + seed, 0.03)))["fake"]["verdict"] != "tie"
        for seed in range(400)
    )
    expected = rows.FALSE_POSITIVES * 400
    assert 0 < wrong <= expected + 3 * math.sqrt(expected * (1 - rows.FALSE_POSITIVES))


@pytest.mark.parametrize("first", ["a", "z"])
def test_ben_03_a_clock_that_rises_favours_nobody(first) -> None:
    """triton-lang/triton#2306: one kernel under two names, while the clock rises by 30 % over the first 30 timings."""
    count = iter(range(10**6))
    machine = FakeMachine(lambda: 1.3 - 0.3 * min(next(count), 30) / 30)
    found = measured([Fake(first), Fake("a" if first == "z" else "z")], machine=machine)
    assert abs(found["a"]["ms"] - found["z"]["ms"]) / found["a"]["ms"] < 0.03
    assert {found[name]["verdict"] for name in "az"} == {"tie"}


def test_every_provider_is_timed_in_every_round() -> None:
    found = measured([Fake("fast", 0.3), Fake("slow", 50.0)])
    assert [r["rounds"] for r in found.values()] == [20, 20, 20]


def test_ben_07_a_row_that_waits_for_the_host_is_marked() -> None:
    """triton-lang/triton#10149: a tiny problem's eager time is the host's."""
    tiny = Fake(ms={"graph": 0.003, "eager": 0.04})
    long = Fake("long", ms={"graph": 0.9, "eager": 0.9})
    even = Fake("even", ms={"graph": 0.1, "eager": 0.11})
    found = measured([tiny, long, even])
    assert found["fake"]["launch_bound"] is True and found["fake"]["ms"] < found["fake"]["ms_eager"] == 0.04
    assert found["even"]["launch_bound"] is False and found["even"]["ms_eager"] == 0.11
    assert found["long"]["launch_bound"] is False and "ms_eager" not in found["long"]
    eager = measured([tiny, even], mode="eager")["fake"]
    assert eager["launch_bound"] is True and eager["ms_graph"] == 0.003 and eager["ms"] == 0.04
    host = measured([tiny], mode="host")["fake"]
    assert host["launch_bound"] is None and "ms_graph" not in host


def test_ben_02_what_the_harness_clears_lies_before_the_start_mark(monkeypatch) -> None:
    """facebookexperimental/triton#1679: through the runner's own graph timer."""
    from benchmarks.machine import CudaMachine

    log: list[str] = []
    machine = CudaMachine.__new__(CudaMachine)
    machine._flush, machine._place = lambda: log.append("clear"), None

    class Event:
        def __init__(self, enable_timing):
            self.name = "start" if sum(e.startswith("event") for e in log) % 2 == 0 else "stop"
            log.append(f"event {self.name}")

        def record(self):
            log.append(self.name)

        def synchronize(self):
            pass

        def elapsed_time(self, end):
            return 10.0

    class Graph:
        def capture_begin(self, **_):
            pass

        def capture_end(self):
            pass

        def replay(self):
            log.append("run")

    class Stream:
        def wait_stream(self, other):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    for name, value in {"CUDAGraph": Graph, "Event": Event, "Stream": Stream, "current_stream": Stream,
                        "stream": lambda s: s, "graph_pool_handle": lambda: 0}.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    timer = machine.timer("graph", lambda x: x, [(1,), (2,)], 10)
    log.clear()
    assert [timer() for _ in range(4)] == [1.0] * 4
    assert log == ["clear", "start", "run", "stop"] * 4
    assert isinstance(machine.timer("eager", lambda x: x, [(1,)], 10), measure.EagerTimer)
    assert isinstance(machine.timer("host", lambda x: x, [(1,)], 10), measure.HostTimer)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("out of resource\nshared memory"),
        AssertionError(),
        KeyError("x"),
        Refused("cannot"),
        torch.OutOfMemoryError("does not fit"),
    ],  # fmt: skip
)
def test_a_provider_that_raises_is_a_row_with_its_reason(error) -> None:
    found = measured([Fake("bad", error=error), Fake("good")])
    row = found["bad"]
    assert row["ms"] is None and row["rounds"] == 0 and row["verdict"] is None
    expected = {"RuntimeError": "raised: RuntimeError: shared memory", "AssertionError": "raised: AssertionError: ",
                "KeyError": "raised: KeyError: 'x'", "Refused": "cannot",
                "OutOfMemoryError": "raised: OutOfMemoryError: does not fit"}  # fmt: skip
    assert row["failed"] == expected[type(error).__name__]
    assert found["good"]["verdict"] == "tie" and found["good"]["failed"] is None


def test_a_provider_that_fails_later_than_its_check_is_a_row_too() -> None:
    calls = iter(range(100))

    def flaky(out, args):
        if next(calls):
            raise RuntimeError("not permitted when stream is capturing")
        return out

    row = measured([Fake(wrong=flaky)])["fake"]
    assert row["ms"] is None and row["failed"] == (
        "cannot be timed in mode graph: RuntimeError: not permitted when stream is capturing"
    )
    assert row["error"] is not None


def test_a_wrong_provider_is_shown_as_failing_and_still_timed() -> None:
    row = measured([Fake(ms=0.5, wrong=lambda out, args: out * 1.01)])["fake"]
    assert row["failed"].startswith("output 0: relative error 1.00e-02; ") and row["error"] == pytest.approx(0.01, 1e-3)
    assert row["ms"] == 0.5 and row["verdict"] == "win"


def test_memory_left_unwritten_is_seen(monkeypatch) -> None:
    def unwritten(out, args):
        mine = torch.empty_like(out)
        mine[:-1] = out[:-1]
        return mine

    # What the provider allocates itself, whatever the memory held before.
    monkeypatch.setattr(accuracy.outputs, "poison_free_memory", lambda *_: None)
    row = measured([Fake(wrong=unwritten)])["fake"]
    assert row["failed"] == "output 0 is not finite" and row["error"] is None


def test_free_memory_is_filled_before_each_result(monkeypatch) -> None:
    filled = []
    monkeypatch.setattr(accuracy.outputs, "poison_free_memory", lambda where, like: filled.append(len(like)))
    measured([Fake("a"), Fake("b")])
    assert filled == [0, 1, 1]


def test_calls_are_made_without_autograd() -> None:
    modes = []
    measured([Fake(wrong=lambda out, args: modes.append(torch.is_grad_enabled()) or out)])
    assert modes and not any(modes)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [(lambda out, args: out[:-1], "output 0 is not of torch's shape (64, 64)"),
     (lambda out, args: None, "output 0 is not of torch's shape (64, 64)"),
     (lambda out, args: (args[0].zero_(), out)[1], "it changed its inputs")],
)  # fmt: skip
def test_other_wrong_results(wrong, why) -> None:
    found = measured([Fake("a", wrong=wrong), Fake("b")])
    assert found["a"]["failed"] == why and found["b"]["failed"] is None


def test_a_wider_result_than_torchs_is_judged_by_its_error() -> None:
    row = measured([Fake(wrong=lambda out, args: args[0].double() @ args[1].double())], one(dtype="bfloat16"))["fake"]
    assert row["failed"] is None and row["error"] < 1e-6 < row["error_torch"]


def test_every_output_of_a_backward_is_judged() -> None:
    entry = one("8x64", "layer_norm", "bwd")
    row = measured([Fake(wrong=lambda out, args: (out[0], out[1], out[2] * 1.1))], entry)["fake"]
    assert row["failed"].startswith("output 2: relative error 1.00e-01")
    assert measured([Fake(wrong=lambda out, args: out[:2])], entry)["fake"]["failed"] == "2 outputs, torch has 3"


def test_where_torch_fails_nobody_is_compared() -> None:
    class Broken(FakeTorch):
        def call(self, case):
            raise RuntimeError("no kernel")

    machine = FakeMachine()
    found = bench.measure(one(), [Broken(), Fake()], machine, "graph")
    assert machine.log == ["case"] and found[1]["error"] is None
    assert [r["failed"] for r in found] == [
        "raised: RuntimeError: no kernel", "torch, what it is compared with: raised: RuntimeError: no kernel"
    ]  # fmt: skip
    assert all(r["ms"] is None for r in found)


def test_an_entry_that_does_not_fit_is_a_row(monkeypatch) -> None:
    def sample(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 40 GiB")

    monkeypatch.setattr(type(one().case), "sample", sample)
    found = measured([Fake()])
    assert {r["failed"] for r in found.values()} == {
        "does not fit: OutOfMemoryError: CUDA out of memory. Tried to allocate 40 GiB"
    }


def test_fp8_rows_say_so_and_nothing_runs() -> None:
    entry = of_suite("tutorial09-8k", dtypes=("float8_e4m3fn",), k=(512,))[0]
    machine = FakeMachine()
    found = measured([Fake()], entry, machine)
    assert {r["failed"] for r in found.values()} == {"fp8 is not in this version"} and machine.log == []
    assert found["fake"]["dtype"] == "float8_e4m3fn"


def test_clocks_and_throttled_rounds() -> None:
    class Hot(Monitor):
        n = 0

        def read(self):
            self.n += 1
            return Reading(1500 + self.n, 600, 80, "power brake" if self.n in (3, 4) else None)

    machine = FakeMachine()
    machine.monitor = Hot()
    row = measured([Fake()], machine=machine)["fake"]
    assert row["rounds"] == 20 and 1505 <= row["clock_mhz"] <= 1522
