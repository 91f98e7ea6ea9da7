"""Serving calls: remembered choices, variants that fail, many threads."""

from __future__ import annotations

import logging
import random
import sys
import threading
import time

import cachetools
import pytest
import torch

import tritonops
from dispatch_cases import Heard, cuda, leaf, make_table, put, section
from tritonops import VariantUnavailable
from tritonops.device import CPU
from tritonops.dispatch import memo, override, select, store

GPU = cuda()


def ranked(*ids: str, **changes):
    return make_table(section(leaf(*ids)), **changes)


# Remembering


def test_a_choice_is_made_once_for_a_key(toy, monkeypatch) -> None:
    chosen = []
    original = select.choose
    monkeypatch.setattr(select, "choose", lambda *args: chosen.append(args) or original(*args))
    for _ in range(5):
        for m in (1, 2):
            toy(CPU, m)
    assert len(chosen) == 2 and len(memo._memo) == 2
    tritonops.clear_cache()
    assert len(memo._memo) == 0
    toy(CPU, 1)
    assert len(chosen) == 3


def test_the_problem_is_built_on_a_miss_only(toy) -> None:
    built = []

    def problem():
        built.append(1)
        return toy.problem()

    for _ in range(3):
        memo.serve(toy.spec, "key", CPU, problem, (torch.ones(1),))
    assert len(built) == 1


def test_the_memo_is_bounded_and_forgets_the_oldest_first(toy, monkeypatch) -> None:
    assert memo._memo.maxsize == 8192 and isinstance(memo._memo, cachetools.FIFOCache)
    monkeypatch.setattr(memo, "_memo", cachetools.FIFOCache(maxsize=4))
    for m in (1, 2, 3, 4, 1, 1, 5):  # reading 1 again does not keep it
        toy(CPU, m)
    assert [key[2] for key in memo._memo] == [2, 3, 4, 5]
    for m in range(1000):
        toy(CPU, m)
    assert len(memo._memo) == 4


@pytest.mark.parametrize(
    "change",
    [{"n": 65}, {"dtype": "float16"}, {"layout": "t"}, {"aligned": False}, {"mode": "graph"}, {"flags": 1 << 2}],
)
def test_each_fact_has_its_own_choice(toy, change) -> None:
    toy(CPU)
    toy(CPU, **change)
    assert len(memo._memo) == 2


def test_flags_change_the_choice_at_the_next_call(toy, tables) -> None:
    put(tables, ranked("loose/a", "one/a", "vendor"))
    assert toy(GPU) == "loose/a"
    with tritonops.use(variant="one/b"):
        assert toy(GPU) == "one/b"
        with tritonops.use(exclude="loose", variant={"toy": "two"}):
            assert toy(GPU) == "two/a"
    with tritonops.use(policy="deterministic"):
        assert toy(GPU) == "one/a"
    assert toy(GPU) == "loose/a"
    torch.use_deterministic_algorithms(True)
    try:
        assert toy(GPU) == "one/a"
    finally:
        torch.use_deterministic_algorithms(False)
    assert toy(GPU) == "loose/a"


def test_decisions_are_logged_once_each(toy, monkeypatch, caplog) -> None:
    monkeypatch.setenv("TRITONOPS_LOG", "decisions")
    with caplog.at_level(logging.INFO, "tritonops"):
        for m in (1, 2, 1, 2):
            toy(CPU, m)
    assert [r.getMessage().splitlines()[0] for r in caplog.records] == [
        f"toy M={m} N=64, float32, aligned, eager, fast on CPU: vendor [no GPU]" for m in (1, 2)
    ]
    caplog.clear()
    monkeypatch.delenv("TRITONOPS_LOG")
    toy(CPU, 3)
    assert not caplog.records


def test_a_call_for_another_gpu_than_the_current_one_runs_there(toy, monkeypatch) -> None:
    entered = []

    class On:
        def __init__(self, index: int):
            self.index = index

        def __enter__(self):
            entered.append(self.index)

        def __exit__(self, *error):
            entered.append(-self.index)

    monkeypatch.setattr(torch.cuda, "device", On)
    with Heard():
        toy(cuda(index=0))
        assert entered == []
        toy(cuda(index=3))
    assert entered == [3, -3]


# Variants that fail


def _out_of_resources() -> Exception:
    from triton.runtime.errors import OutOfResources

    return OutOfResources(300000, 232448, "shared memory")


FAILURES = {
    "compiler": (lambda: RuntimeError("PassManager::run failed"), "RuntimeError: PassManager::run failed"),
    "many lines": (lambda: RuntimeError("loc(x):\n  trace\nerror: the last\n"), "RuntimeError: error: the last"),
    "long": (lambda: ValueError("x" * 9999), "ValueError: " + "x" * 200),
    "no text": (lambda: NotImplementedError(), "NotImplementedError: "),
    "assertion": (lambda: AssertionError("a tile is odd"), "AssertionError: a tile is odd"),
    "option": (lambda: KeyError("unknown option"), "KeyError: 'unknown option'"),
    "launch": (lambda: RuntimeError("Triton Error [CUDA]: invalid argument"),
               "RuntimeError: Triton Error [CUDA]: invalid argument"),
    "resources": (_out_of_resources, "OutOfResources: out of resource: shared memory, Required: 300000, "
                  "Hardware limit: 232448. Reducing block sizes or `num_stages` may help."),
}  # fmt: skip


@pytest.mark.parametrize("name", FAILURES)
def test_a_variant_that_fails_is_set_aside_with_one_warning_and_the_next_serves(toy, tables, name) -> None:
    if name == "resources":
        pytest.importorskip("triton")
    make, why = FAILURES[name]
    put(tables, ranked("one/a", "two/a", "vendor"))
    toy.failing["one/a"] = make()
    with Heard() as heard:
        for m in (1, 2, 1, 3):
            assert toy(GPU, m) == "two/a"
    assert toy.calls == ["one/a", "two/a", "two/a", "two/a", "two/a"]  # no retry
    assert heard == [
        f"tritonops.toy: variant one/a failed on NVIDIA Test ({why}); it is set aside in this process and two/a serves"
    ]
    got = tritonops.dispatch.select.choose(toy.spec, toy.problem(9), GPU)
    assert got.rejected == (("one/a", f"failed here before: {why}"),)


def test_variants_fail_one_after_another_down_to_torch(toy, tables) -> None:
    put(tables, ranked("one/a", "one/b", "two/a", "vendor"))
    for v in ("one/a", "one/b", "two/a"):
        toy.failing[v] = RuntimeError(v)
    with Heard() as heard:
        assert toy(GPU) == "vendor" and toy(GPU, 2) == "vendor"
    assert toy.calls == ["one/a", "one/b", "two/a", "vendor", "vendor"]
    assert [h.rpartition("process and ")[2] for h in heard] == ["one/b serves", "two/a serves", "vendor serves"]


def test_a_failure_drops_the_variant_from_every_remembered_choice(toy, tables) -> None:
    put(tables, ranked("one/a", "two/a"))
    for m in range(1, 6):
        assert toy(GPU, m) == "one/a"
    toy.failing["one/a"] = RuntimeError("driver")
    with Heard() as heard:
        assert [toy(GPU, m) for m in range(1, 6)] == ["two/a"] * 5
    assert toy.calls == ["one/a"] * 6 + ["two/a"] * 5 and len(heard) == 1


def test_a_failure_on_one_gpu_says_nothing_of_another(toy, tables, monkeypatch) -> None:
    put(tables, ranked("one/a", "two/a"))
    toy.failing["one/a"] = RuntimeError("here only")
    with Heard():
        assert toy(GPU) == "two/a"
    toy.failing.clear()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert toy(cuda(index=1)) == "one/a"


def test_clear_cache_gives_a_failed_variant_another_chance(toy, tables) -> None:
    put(tables, ranked("one/a", "two/a"))
    toy.failing["one/a"] = RuntimeError("cold")
    with Heard() as heard:
        assert toy(GPU) == "two/a"
        tritonops.clear_cache()
        assert toy(GPU) == "two/a"
    assert len(heard) == 1 and toy.calls == ["one/a", "two/a", "one/a", "two/a"]
    toy.failing.clear()
    tritonops.clear_cache()
    assert toy(GPU) == "one/a"


@pytest.mark.parametrize("wish", ["one/a", "one"])
def test_a_forced_variant_that_fails_raises_with_the_reason(toy, tables, wish) -> None:
    put(tables, ranked("two/a", "vendor"))
    error = toy.failing["one/a"] = RuntimeError("PassManager::run failed")
    with tritonops.use(variant=wish), Heard() as heard:
        with pytest.raises(VariantUnavailable) as caught:
            toy(GPU)
        assert str(caught.value) == (
            "tritonops.toy: the forced variant 'one/a' failed on NVIDIA Test: RuntimeError: PassManager::run failed"
        )
        assert caught.value.__cause__ is error
        assert toy.calls == ["one/a"] and heard == []
        if wish == "one/a":
            with pytest.raises(
                VariantUnavailable, match="one/a: failed here before: RuntimeError: PassManager::run failed"
            ):
                toy(GPU)
            assert toy.calls == ["one/a"]
    assert toy(GPU) == "two/a"


def test_when_everything_failed_the_reasons_are_told(toy, tables) -> None:
    put(tables, ranked("one/a"))
    toy.failing |= {"one/a": RuntimeError("first"), "two/a": RuntimeError("second")}
    with tritonops.use(exclude="vendor"), Heard(), pytest.raises(VariantUnavailable) as caught:
        toy(GPU)
    assert "one/a: failed here before: RuntimeError: first" in str(caught.value)
    assert "two/a: failed here before: RuntimeError: second" in str(caught.value)
    assert "vendor: excluded" in str(caught.value)


class _Accelerator(torch.AcceleratorError if hasattr(torch, "AcceleratorError") else RuntimeError):
    pass


CALLERS = {
    "memory": torch.OutOfMemoryError("CUDA out of memory"),
    "host memory": MemoryError(),
    "index": IndexError("index 4 is out of range for 4 rows"),
    "unavailable": VariantUnavailable("an inner op was forced"),
    "context": _Accelerator("CUDA error: device-side assert triggered"),
    "context, by Triton": RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
    "assert, by Triton": RuntimeError("Triton Error [CUDA]: device-side assert triggered"),
    "interrupt": KeyboardInterrupt(),
}


@pytest.mark.parametrize("name", CALLERS)
def test_what_another_variant_would_meet_too_passes_through_untouched(toy, tables, name) -> None:
    error = CALLERS[name]
    put(tables, ranked("one/a", "two/a", "vendor"))
    toy.failing["one/a"] = error
    with Heard() as heard:
        for _ in range(2):
            with pytest.raises(type(error)) as caught:
                toy(GPU)
            assert caught.value is error
    assert toy.calls == ["one/a", "one/a"] and heard == []
    toy.failing.clear()
    assert toy(GPU) == "one/a"


@pytest.mark.parametrize("variant", ["vendor", "plain/a"])
def test_torchs_own_errors_pass_through_untouched(toy, tables, variant) -> None:
    put(tables, ranked(variant, "one/a"))
    error = toy.failing[variant] = RuntimeError("mat1 and mat2 must have the same dtype")
    with pytest.raises(RuntimeError) as caught:
        toy(GPU)
    assert caught.value is error and toy.calls == [variant]
    assert caught.value.__context__ is None


# Threads


def _run(workers: list, seconds: float = 1.5) -> None:
    """Run the workers in a loop, each in its thread, switching as often as Python can; re-raise what they raise."""
    stop, errors = threading.Event(), []

    def loop(worker) -> None:
        try:
            while not stop.is_set():
                worker()
        except BaseException as error:
            errors.append(error)
            stop.set()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=loop, args=(w,), daemon=True) for w in workers]
        for t in threads:
            t.start()
        stop.wait(seconds)
        stop.set()
        for t in threads:
            t.join(20)
            assert not t.is_alive(), "a thread hangs"
    finally:
        sys.setswitchinterval(interval)
    if errors:
        raise errors[0]


def test_eight_threads_choosing_and_clearing(toy, tables) -> None:
    put(tables, ranked("one/a", "two/a", "vendor"))
    dice = random.Random(0)
    served = set()

    def call() -> None:
        gpu, m = dice.choice((GPU, CPU)), dice.randrange(1, 5)
        x = torch.full((2,), float(m))
        out = memo.serve(toy.spec, (gpu, m), gpu, lambda: toy.problem(m), (x,))
        assert out.tolist() == [2.0 * m] * 2
        served.add((gpu.kind, m))

    _run([call] * 6 + [tritonops.clear_cache] * 2)
    assert served == {(kind, m) for kind in ("cuda", "cpu") for m in range(1, 5)}
    assert set(toy.calls) == {"one/a", "vendor"}


class _Slippery(cachetools.FIFOCache):
    """Another thread empties the memo the moment after a key was found in it."""

    def __contains__(self, key):
        found = super().__contains__(key)
        self.clear()
        return found


def test_a_memo_emptied_between_two_looks_is_a_miss(toy, monkeypatch) -> None:
    toy(CPU)
    monkeypatch.setattr(memo, "_memo", _Slippery(maxsize=8))
    for _ in range(3):
        assert toy(CPU) == "vendor"


def test_eight_threads_failing_at_once_warn_once(toy, tables) -> None:
    put(tables, ranked("one/a", "two/a", "vendor"))
    toy.failing["one/a"] = RuntimeError("all at once")
    ready, results = threading.Barrier(8), []

    def call() -> None:
        ready.wait(10)
        out = memo.serve(toy.spec, "key", GPU, toy.problem, (torch.ones(1),))
        results.append(out.item())

    with Heard() as heard:
        threads = [threading.Thread(target=call) for _ in range(8)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(20)
    assert results == [2.0] * 8 and len(heard) == 1
    assert 1 <= toy.calls.count("one/a") <= 8 and toy.calls.count("two/a") == 8


def test_a_choice_is_made_by_one_thread_only(toy, tables, monkeypatch) -> None:
    put(tables, ranked("one/a"))
    made = []
    original = select.choose

    def slow(*args):
        made.append(1)
        time.sleep(0.05)
        return original(*args)

    monkeypatch.setattr(select, "choose", slow)
    threads = [
        threading.Thread(target=lambda: memo.serve(toy.spec, "key", GPU, toy.problem, (torch.ones(1),)))
        for _ in range(8)
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join(20)
    assert made == [1] and toy.calls == ["one/a"] * 8


def test_explaining_forcing_and_clearing_at_once(toy, tables) -> None:
    put(tables, ranked("one/a", "loose/a", "vendor"))
    bits = [override.pack(), override.pack(variant="two"), override.pack(policy="deterministic", exclude="one")]
    expected = ["one/a", "two/a", "vendor"]

    def explain() -> None:
        for flags, want in zip(bits, expected, strict=True):
            assert select.choose(toy.spec, toy.problem(flags=flags), GPU).variant == want

    _run([explain] * 4 + [tritonops.clear_cache, store.clear], 1.0)
