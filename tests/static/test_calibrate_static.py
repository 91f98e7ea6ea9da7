"""The static stage: what is compiled once, where it lies, what is dropped and why, and what does not stop it."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.static import kernels, test_toolchain
from tritonops import launch
from tritonops.calibrate import compiling, gate, ragged, static
from tritonops.calibrate.case import Case
from tritonops.calibrate.raw import Paths
from tritonops.device import CPU, named_device
from tritonops.dispatch import variant
from tritonops.dispatch.problem import Problem
from tritonops.dispatch.variant import REGISTRY, VENDOR, OpSpec, Variant
from tritonops.toolchain import AssemblerError, compile_request
from tritonops.toolchain.assembler import own_assembler
from tritonops.toolchain.compile import specialization

DEVICE = named_device("sm_90-132")
NORM = REGISTRY["rms_norm"]
ROOT = Path(__file__).parents[2]

jit_key = test_toolchain.jit_key


def norm_case(m: int, n: int, dtype: str = "bfloat16") -> Case:
    x = torch.empty(m, n, dtype=getattr(torch, dtype), device="meta")
    return Case(NORM.describe(x, x[0]))


# The key


@pytest.mark.parametrize("name", test_toolchain.REQUESTS)
def test_the_key_tells_apart_what_the_jit_does(name: str) -> None:
    requests = {n: make() for n, make in test_toolchain.REQUESTS.items()}
    mine = specialization(requests[name], DEVICE)
    assert mine == specialization(test_toolchain.REQUESTS[name](), DEVICE)
    assert [n for n, other in requests.items() if specialization(other, DEVICE) == mine] == [name]


@pytest.mark.parametrize("op", ["matmul", "rms_norm_backward", "embedding_backward"])
def test_one_key_is_one_binary_and_two_are_two(op: str) -> None:
    """Triton's own cache key, which compiling gives, is a function of the key, and the other way round."""
    spec = REGISTRY[op]
    shapes = {
        "matmul": [((m, 64), (64, 64)) for m in (1, 16, 33, 48, 64)],
        "rms_norm_backward": [((m, n), n) for m in (1, 17, 64) for n in (64, 65)],
        "embedding_backward": [((t,), (50, d)) for t in (1, 17, 64) for d in (64, 65)],
    }[op]
    vid = {"matmul": "tiled/32x64x32-g8-w4-s3", "rms_norm_backward": "rows/t1024-w4-s3-p4",
           "embedding_backward": "atomic/64x32-w4"}[op]  # fmt: skip
    keys: dict[str, set[str]] = {}
    for first, second in shapes:
        problem = spec.describe(first, second, dtype=torch.float16)
        for request in compiling.requests_of(spec.variants()[vid], problem, DEVICE, spec.sample(problem, "meta")):
            keys.setdefault(specialization(request, DEVICE), set()).add(compile_request(request, DEVICE).key)
    assert all(len(found) == 1 for found in keys.values())
    assert len(set().union(*keys.values())) == len(keys) < 2 * len(shapes)


def test_a_kernel_that_is_none_has_no_key() -> None:
    request = launch.LaunchRequest(print, (1,), (), {}, launch.options(4))
    with pytest.raises(TypeError, match="not a @triton.jit function"):
        specialization(request, DEVICE)


# The whole stage, in processes


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    return tmp_path / "triton"


CASES = [norm_case(64, 512), norm_case(65, 512), norm_case(4096, 500, "float16")]


def test_the_jit_finds_what_the_workers_compiled(cache, jit_key, monkeypatch) -> None:
    said: list[str] = []
    found = static.screen(NORM, CASES, DEVICE, 2, said.append)
    assert found.cost["captures"] == 27 and 9 < found.cost["compilations"] <= 18
    assert said[-1].startswith(f"rms_norm: compiled {found.cost['compilations']}/{found.cost['compilations']}")
    before = {p.name for p in cache.iterdir()}
    from triton.backends.nvidia.compiler import CUDABackend

    def compiles(*_: Any) -> None:
        raise AssertionError("the JIT compiles again")

    monkeypatch.setattr(CUDABackend, "make_cubin", compiles)
    keys = set()
    for case in CASES:
        for v in NORM.variants().values():
            for request in compiling.requests_of(v, case.problem, DEVICE, case.sample(NORM, "meta")):
                keys.add(jit_key(request, 90))
    assert len(keys) == found.cost["compilations"] and {p.name for p in cache.iterdir()} == before


def test_processes_give_what_one_gives_in_an_order_that_is_given(cache) -> None:
    several, alone = (static.screen(NORM, CASES, DEVICE, jobs) for jobs in (2, 1))
    assert (several.variants, several.dropped, several.candidates) == (alone.variants, alone.dropped, alone.candidates)
    order = list(NORM.variants())
    for ids in several.candidates:
        assert ids[0] == VENDOR and ids[1:] == [v for v in order if v in ids[1:]]
    assert several.candidates[0] == several.candidates[1] and list(several.variants) == [VENDOR, *order[1:]]
    first = several.variants[order[1]]
    assert several.variants[VENDOR] == {"meta": {}, "options": {}}
    assert first["meta"] == {"tile": 512} or 16 <= first["regs"] <= 255 and first["spill"] == 0


def test_the_entries_are_a_tables(cache) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads((ROOT / "dispatch_tables" / "schema.json").read_text())
    entries = {"$defs": schema["$defs"], **schema["properties"]["variants"]}
    backward = REGISTRY["layer_norm_backward"]
    x = torch.empty(512, 4096, dtype=torch.bfloat16, device="meta")
    found = static.screen(backward, [Case(backward.describe(x, x[0], x[0]))], DEVICE, 2)
    jsonschema.validate(found.variants, entries)
    if "liger/own" in found.variants:
        assert found.variants["liger/own"]["options"]["num_warps"] == 8, "Liger's own rule, not the variant's options"
    padded = REGISTRY["matmul"]
    case = Case(padded.describe((64, 63), (63, 65), dtype=torch.float16))
    few = static.screen(padded, [case], DEVICE, 2)
    jsonschema.validate(few.variants, entries)
    assert few.variants["padded/vendor"] == {"meta": {}, "options": {}}


# Planted variants


class Planted:
    """An op of planted launches; not registered, so one process."""

    def __init__(self) -> None:
        self.listed: list[Variant] = [Variant(VENDOR, lambda choice, *args: None)]

    def plant(self, vid: str, make: Callable[[Problem], list[launch.LaunchRequest]], **more: Any) -> None:
        def run(choice, *args):
            for r in make(choice.problem):
                launch.launch(r.kernel, r.grid, r.args, r.meta, r.options)

        fields: dict[str, Any] = {"kernel": "tests.static.kernels:dot_kernel"}
        self.listed.append(Variant(vid, run, **fields | more))

    def __call__(self, sizes=(64,), **more: Any) -> static.Static:
        variant._LOADED.pop("planted", None)
        spec = OpSpec(
            "planted",
            lambda: self.listed,
            ("M",),
            lambda problem, device: [],
            lambda *a: Problem("planted", {"M": 1}, "float16"),
            lambda problem, device: (),
        )
        cases = [Case(Problem("planted", {"M": m}, "float16")) for m in sizes]
        return static.screen(spec, cases, more.pop("device", DEVICE), 1, **more)


@pytest.fixture
def planted():
    yield Planted()
    variant._LOADED.pop("planted", None)


def dot(**facts: Any) -> Callable[[Problem], list[launch.LaunchRequest]]:
    return lambda problem: [test_toolchain.dot(**facts)]


def test_a_collapse_and_too_much_shared_memory_are_dropped(planted) -> None:
    planted.plant("good/a", dot())
    planted.plant("collapse/a", lambda problem: [test_toolchain.collapsing(maxnreg=32)])
    planted.plant("huge/a", dot(m=256, n=256, k=256, stages=4))
    planted.plant("second/a", lambda problem: [test_toolchain.dot(m=32), test_toolchain.collapsing(maxnreg=32)])
    found = planted((64, 128))
    assert found.candidates == [[VENDOR, "good/a"]] * 2 and set(found.variants) == {VENDOR, "good/a"}
    for vid in ("collapse/a", "second/a"):
        ((why, count),) = found.dropped[vid].items()
        assert why.startswith("register collapse: 32 registers") and count == 2
    ((why, count),) = found.dropped["huge/a"].items()
    assert "shared memory" in why and count == 2


def test_the_same_code_is_measured_once(planted) -> None:
    planted.plant("one/a", dot())
    planted.plant("one/b", dot(level=5))  # the assembler's default
    planted.plant("other/grid", lambda problem: [launch.LaunchRequest(**vars(test_toolchain.dot()) | {"grid": (2,)})])
    planted.plant("other/tile", dot(m=128))
    planted.plant("twice/a", lambda problem: [test_toolchain.dot()] * 2)
    planted.plant("other/argument", lambda problem: [_with_k(528)])
    planted.plant("some/times", lambda problem: [test_toolchain.dot(m=problem.dims["M"])])
    found = planted((64, 32))
    assert found.dropped == {"one/b": {"same code as one/a": 2}, "some/times": {"same code as one/a": 1}}
    assert found.twins == [{"one/b": "one/a", "some/times": "one/a"}, {"one/b": "one/a"}]
    rest = [VENDOR, "one/a", "other/grid", "other/tile", "twice/a", "other/argument"]
    assert found.candidates == [rest, [*rest, "some/times"]]
    assert found.variants["one/a"]["text"] == found.variants["twice/a"]["text"] == _text(test_toolchain.dot())
    assert found.variants["some/times"]["text"] == _text(test_toolchain.dot(m=32)) != found.variants["one/a"]["text"]


def _with_k(k: int) -> launch.LaunchRequest:
    request = test_toolchain.dot()
    return launch.LaunchRequest(request.kernel, request.grid, (*request.args[:3], k), request.meta, request.options)


def _text(request: launch.LaunchRequest) -> str:
    return hashlib.sha256(compile_request(request, DEVICE).text_hash.encode()).hexdigest()


def test_a_twin_of_what_is_dropped_is_not_dropped_for_that(planted) -> None:
    planted.plant("collapse/a", lambda problem: [test_toolchain.collapsing(maxnreg=32)])
    planted.plant("collapse/b", lambda problem: [test_toolchain.collapsing(maxnreg=32)])
    found = planted()
    assert (
        all("register collapse" in why for whys in found.dropped.values() for why in whys) and len(found.dropped) == 2
    )


def test_what_is_recorded_covers_all_cases_and_the_first_options(planted) -> None:
    sizes = {64: (32, 2), 128: (128, 3)}

    def make(problem: Problem) -> list[launch.LaunchRequest]:
        m, stages = sizes[problem.dims["M"]]
        return [test_toolchain.atomic("relaxed"), test_toolchain.dot(m=m, stages=stages)]

    planted.plant("both/a", make, meta={"tile": (1, 2)})
    found = planted((64, 128))
    requests = [r for size in sizes for r in make(Problem("planted", {"M": size}, "float16"))]
    compiled = [compile_request(r, DEVICE) for r in requests]
    entry = found.variants["both/a"]
    assert entry["options"]["num_stages"] == 2 and entry["meta"] == {"tile": [1, 2]}
    assert entry["regs"] == max(c.resources.registers for c in compiled)
    texts = sorted({c.text_hash for c in compiled})
    assert len(texts) == 3 and entry["text"] == hashlib.sha256("\n".join(texts).encode()).hexdigest()
    assert found.cost["compilations"] == 3 and found.cost["captures"] == 2


@pytest.mark.parametrize(
    "error", [RuntimeError("PassManager::run failed"), KeyError("x"), NotImplementedError(), MemoryError()], ids=repr
)
@pytest.mark.parametrize("where", ["compile", "measure", "run"])
def test_any_error_drops_the_one_candidate(planted, monkeypatch, error: Exception, where: str) -> None:
    """TUN-05 of the public reports: what fails in the compiler is not the resource error that a tuner catches."""

    def broken(*args: Any, **kwargs: Any) -> Any:
        request_or_source = args[0]
        kernel = getattr(request_or_source, "fn", None) or getattr(request_or_source, "kernel", None)
        if kernel is kernels.atomic_kernel or kernel == "atomic_kernel":
            raise error
        return original(*args, **kwargs)

    def raising(problem: Problem) -> list[launch.LaunchRequest]:
        raise error

    if where == "compile":
        import triton

        original = triton.compile
        monkeypatch.setattr(triton, "compile", broken)
    elif where == "measure":
        original = compiling.measure
        monkeypatch.setattr(compiling, "measure", broken)
    planted.plant("bad/a", raising if where == "run" else lambda problem: [test_toolchain.atomic("relaxed")])
    planted.plant("good/a", dot())
    found = planted((64, 128))
    assert found.candidates == [[VENDOR, "good/a"]] * 2 and "bad/a" not in found.variants
    ((why, count),) = found.dropped["bad/a"].items()
    assert count == 2 and type(error).__name__ in why and "\n" not in why


def test_a_kernel_that_does_not_compile_is_dropped_in_one_line(planted) -> None:
    planted.plant(
        "bad/a",
        lambda problem: [
            launch.LaunchRequest(
                kernels.broken_kernel, (1,), (test_toolchain.empty(64),), {"BLOCK": 64}, launch.options(4)
            )
        ],
    )
    ((why, _),) = planted().dropped["bad/a"].items()
    assert why.startswith("does not compile: ") and "no_such_name" in why and "\n" not in why


def test_an_unusable_assembler_stops_the_stage(planted, monkeypatch, tmp_path) -> None:
    planted.plant("good/a", dot())
    for variable in ("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH"):
        monkeypatch.setenv(variable, str(tmp_path / "missing"))
    with pytest.raises(AssemblerError, match="missing"):
        planted()


def test_only_a_cuda_device_will_do(planted) -> None:
    with pytest.raises(ValueError, match="not for 'cpu'"):
        planted(device=CPU)


def test_illegal_variants_are_neither_candidates_nor_dropped(planted) -> None:
    planted.plant("picky/a", dot(), requires=lambda p, d: None if p.dims["M"] == 64 else "takes 64 rows")
    planted.plant("tma/a", dot(m=32), needs=frozenset({"tma"}))
    found = planted((64, 128), device=named_device("sm_80-108"))
    assert found.candidates == [[VENDOR, "picky/a"], [VENDOR]] and found.dropped == {}


def test_empty_cases_and_variants_that_launch_nothing_stay(planted) -> None:
    planted.plant("none/a", lambda problem: [])
    planted.plant("none/b", lambda problem: [])
    found = planted()
    assert found.candidates == [[VENDOR, "none/a", "none/b"]] and "text" not in found.variants["none/a"]
    assert planted(()).candidates == [] and planted(()).cost["compilations"] == 0


# Workers that die, hang, or have no assembler


@pytest.fixture
def assembler_that(monkeypatch, tmp_path):
    """An assembler that does something else where a kernel has one warp, as rows/t512-w1 alone has."""

    def make(what: str) -> Path:
        own = own_assembler(90).path
        script = tmp_path / "ptxas"
        script.write_text(
            "#!/bin/bash\n"
            f'for word in "$@"; do [[ $word == *.ptx ]] && grep -q "reqntid 32$" "$word" && {{ {what}; }}; done\n'
            f'exec {own} "$@"\n'
        )
        script.chmod(0o755)
        monkeypatch.setenv("TRITON_PTXAS_PATH", str(script))
        monkeypatch.setenv("TRITON_PTXAS_BLACKWELL_PATH", str(script))
        return tmp_path

    return make


FEW = [norm_case(64, 512)]


def test_a_worker_that_is_killed_costs_its_candidate(assembler_that) -> None:
    directory = assembler_that("echo $PPID >> $0.killed; kill -9 $PPID; exit 1")
    found = static.screen(NORM, FEW, DEVICE, 2)
    assert found.dropped == {"rows/t512-w1": {"does not compile: the compiler's process died (SIGKILL)": 1}}
    assert found.candidates == [[VENDOR, *(v for v in NORM.variants() if v not in (VENDOR, "rows/t512-w1"))]]
    killed = (directory / "ptxas.killed").read_text().split()
    assert len(killed) == 2, "it is given one more chance, as another may have taken the memory"


def test_one_that_is_killed_once_is_tried_again(assembler_that) -> None:
    assembler_that("[[ -e $0.once ]] || { touch $0.once; kill -9 $PPID; exit 1; }")
    found = static.screen(NORM, FEW, DEVICE, 2)
    assert found.dropped == {} and found.candidates == [list(NORM.variants())]


def test_a_compile_that_hangs_is_killed_with_its_assembler(assembler_that) -> None:
    directory = assembler_that("echo $$ > $0.pid; exec sleep 1000")
    started = time.monotonic()
    found = static.screen(NORM, FEW, DEVICE, 2, timeout=15)
    assert 15 <= time.monotonic() - started < 120
    assert found.dropped == {"rows/t512-w1": {"does not compile: it takes longer than 15 s": 1}}
    assert len(found.candidates[0]) == len(NORM.variants()) - 1
    pid = int((directory / "ptxas.pid").read_text())
    status = Path(f"/proc/{pid}/status")
    assert not status.exists() or "State:\tZ" in status.read_text()


def test_an_assembler_that_fails_in_a_worker_stops_the_stage(assembler_that) -> None:
    assembler_that("echo 'ptxas fatal   : Unsupported .version 8.7; current version is 8.0' >&2; exit 255")
    with pytest.raises(AssemblerError, match=r"does not work with Triton.*it knows PTX up to 8.0") as caught:
        static.screen(NORM, FEW, DEVICE, 2)
    assert caught.value.path.endswith("ptxas")


def test_workers_that_cannot_start_are_an_error_and_not_a_reason() -> None:
    job = compiling.Job("rows/t512-w1", FEW[0].problem, 0)
    stranger = SimpleNamespace(name="no_such_op")
    with pytest.raises(RuntimeError, match=r"ended while it started \(exit status 1\)"):
        compiling.build_all(stranger, [job, job], DEVICE, 2)


@pytest.fixture
def workers(monkeypatch) -> list[int]:
    """Process ids of all workers that are started."""
    pids: list[int] = []
    original = compiling._Worker.__init__

    def start(worker: compiling._Worker, *args: Any) -> None:
        original(worker, *args)
        pids.append(worker.process.pid or 0)

    monkeypatch.setattr(compiling._Worker, "__init__", start)
    return pids


def _alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_no_worker_outlives_the_stage(workers) -> None:
    static.screen(NORM, FEW, DEVICE, 2)
    assert len(workers) == 2 and _alive(workers) == []


def test_ctrl_c_leaves_no_worker(workers) -> None:
    def interrupt(text: str) -> None:
        if "compiled" in text:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        static.screen(NORM, FEW, DEVICE, 2, interrupt)
    assert len(workers) == 2 and _alive(workers) == []


def test_progress_about_once_a_second_with_what_is_left() -> None:
    said: list[str] = []
    now = [100.0]
    tick = compiling.Ticker("op: compiled", 40, said.append, lambda: now[0])
    for done in range(41):
        tick(done)
        now[0] += 0.25
    assert said[0] == "op: compiled 4/40, 9 s left" and said[-1] == "op: compiled 40/40, 0 s left"
    assert len(said) == 10 and said[4] == "op: compiled 20/40, 5 s left"


# What the gate compiles before it runs


def _trial(problem: Problem) -> ragged.Trial:
    return ragged.Trial(problem, "")


def test_the_gates_launches_are_compiled_beforehand(cache, jit_key) -> None:
    todo = [(_trial(c.problem), [VENDOR, "rows/t512-w1", "rows/t4096-w4"]) for c in FEW]
    assert gate._compile(NORM, todo, DEVICE, 2, lambda text: None) == {}
    compiled = sum(1 for p in cache.rglob("*.cubin"))
    for vid in todo[0][1][1:]:
        request, *_ = compiling.requests_of(
            NORM.variants()[vid], FEW[0].problem, DEVICE, NORM.sample(FEW[0].problem, "meta")
        )
        jit_key(request, 90)
    assert compiled == 2 == sum(1 for p in cache.rglob("*.cubin"))


def test_what_kills_the_compiler_is_not_run_by_the_gate(assembler_that) -> None:
    assembler_that("kill -9 $PPID; exit 1")
    todo = [(_trial(FEW[0].problem), [VENDOR, "rows/t512-w1", "rows/t4096-w4"])]
    found = gate._compile(NORM, todo, DEVICE, 2, lambda text: None)
    assert found == {(todo[0][0].key, "rows/t512-w1"): "does not compile: the compiler's process died (SIGKILL)"}


# The file


@pytest.fixture
def written(tmp_path):
    paths = Paths(tmp_path, "rms_norm", DEVICE)
    found = static.screen(NORM, FEW, DEVICE, 1)
    static.write(paths, found)
    return paths, found


def test_round_trip(written) -> None:
    paths, found = written
    assert static.read(paths) == found == static.read(paths, FEW)
    assert os.listdir(paths.static.parent) == ["rms_norm-sm_90-132.static.json"]


def test_another_plan_is_refused(written) -> None:
    paths, _ = written
    with pytest.raises(ValueError, match=r"rms_norm-sm_90-132.static.json: it is about another plan"):
        static.read(paths, CASES)


def test_another_triton_is_refused(written, monkeypatch) -> None:
    paths, _ = written
    monkeypatch.setattr(static._compat, "triton_version", lambda: "9.9.0")
    with pytest.raises(ValueError, match=r"static.json: it was made with Triton \S+, this is 9.9.0"):
        static.read(paths)


@pytest.mark.parametrize(
    "change",
    [
        {"schema": 2},
        {"op": "matmul"},
        {"device": "sm_80-108"},
        {"variants": []},
        {"variants": {"a/b": {"regs": -1}}},
        {"variants": {"a/b": {"regs": True}}},
        {"variants": {"a/b": {"meta": []}}},
        {"variants": {"a/b": {"speed": 1}}},
        {"dropped": {"a/b": {"slow": "x"}}},
        {"candidates": {}},
        {"candidates": [["rows/t512-w1"]]},
        {"candidates": [[]]},
        {"candidates": [[VENDOR, 1]]},
        {"twins": []},
        {"twins": [{"one/b": "no/candidate"}] * 2},
        {"cases": None},
        {"cost": 3},
        {"made_with": "x"},
    ],
    ids=repr,
)
def test_what_is_not_its_file_is_refused_by_name(written, change) -> None:
    paths, _ = written
    paths.static.write_text(json.dumps(json.loads(paths.static.read_text()) | change))
    with pytest.raises(ValueError, match="rms_norm-sm_90-132.static.json"):
        static.read(paths)


@pytest.mark.parametrize("key", ["variants", "dropped", "candidates", "twins", "cases", "made_with", "cost"])
def test_what_is_missing_is_named(written, key: str) -> None:
    paths, _ = written
    top = json.loads(paths.static.read_text())
    del top[key]
    paths.static.write_text(json.dumps(top))
    with pytest.raises(ValueError, match=f"static.json: {key} is missing"):
        static.read(paths)


@pytest.mark.parametrize("junk", [b"", b"{", b"\xff\xfe", b"[" * 100000, b"null", b"[]"])
def test_junk_is_refused_by_name(written, junk: bytes) -> None:
    paths, _ = written
    paths.static.write_bytes(junk)
    with pytest.raises(ValueError, match="rms_norm-sm_90-132.static.json"):
        static.read(paths)
