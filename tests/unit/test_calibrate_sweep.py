"""The measuring stage on a made-up bench: budget, resuming, kill -9, a full disk, moved versions, a lost context."""

from __future__ import annotations

import errno
import hashlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import tritonops
from tritonops.calibrate import emit, header, learn, raw, sweep, verify
from tritonops.calibrate.case import Case
from tritonops.calibrate.raw import Measured, Paths
from tritonops.device import named_device
from tritonops.dispatch.variant import REGISTRY

SPEC = REGISTRY["rms_norm"]
DEVICE = named_device("sm_90-132")
OWN = "rows/t4096-w4"
TWIN = "rows/t1024-w4"


def case(m: int, n: int = 4096) -> Case:
    shape = torch.empty(m, n, dtype=torch.bfloat16, device="meta")
    return Case(SPEC.describe(shape, shape[0]), source="test")


CASES = [case(2**i) for i in range(12)]
GATE = {v: {"passed": True, "why": "", "cases": 1, "error": 0.5} for v in ("vendor", OWN, TWIN, "rows/t8192-w8")}


def static(cases=CASES) -> SimpleNamespace:
    entry = {"meta": {"tile": 4096}, "options": {"num_warps": 4}, "regs": 64, "spill": 0, "text": "0" * 64}
    return SimpleNamespace(
        variants={OWN: entry},
        dropped={},
        candidates=[["vendor", OWN, "rows/t8192-w8"]] * len(cases),
        twins=[{TWIN: OWN, "rows/t16384-w8": OWN}] * len(cases),
    )


class Bench:
    """Takes note of what it is asked; `breaking` maps a variant to the error that it breaks the context with."""

    def __init__(self, breaking: str | None = None):
        self.asked: list[tuple[str, tuple[str, ...]]] = []
        self.breaking = breaking

    def __call__(self, spec, case, candidates) -> Measured:
        self.asked.append((case.key, tuple(candidates)))
        if self.breaking in candidates and case == CASES[3]:
            lost = Measured(case, {}, failed={self.breaking: "raised: illegal memory access"})
            raise sweep.ContextLost(lost, f"{self.breaking} broke the CUDA context")
        return Measured(case, {v: (1.0, 2.0) for v in candidates}, calls=10)


def run(paths: Paths, bench, cases=CASES, gated=GATE, **more) -> int:
    return sweep.sweep(SPEC, cases, static(cases), gated, DEVICE, paths, bench=bench, **more)


@pytest.fixture
def paths(tmp_path) -> Paths:
    return Paths(tmp_path, "rms_norm", DEVICE)


def test_all_cases_end_up_on_file_with_what_they_were_measured_by(paths) -> None:
    bench = Bench()
    assert run(paths, bench) == 0
    got = raw.read(paths.raw)
    assert [m.case for m in got.measured] == CASES and got.op == "rms_norm"
    assert got.measured[0].graph == {v: (1.0, 2.0) for v in ("vendor", OWN, TWIN, "rows/t8192-w8")}
    assert got.header["device"]["arch"] == "sm_90" and got.header["device"]["names"] == ["sm_90-132"]
    assert set(got.header["kernels"]) == {"rows"} and len(got.header["kernels"]["rows"]["source"]) == 64
    made = got.header["made_with"]
    assert made["tritonops"] == tritonops.__version__ and made["torch"] == torch.__version__ and made["ptxas"]


def test_a_variant_that_failed_the_gate_is_never_measured(paths) -> None:
    bench = Bench()
    run(paths, bench, gated=GATE | {OWN: {"passed": False, "why": "wrong", "cases": 1, "error": 9.0}})
    assert {candidates for _, candidates in bench.asked} == {("vendor", "rows/t8192-w8")}
    assert raw.read(paths.raw).header["gate"][OWN]["passed"] is False


def test_the_deadline_leaves_the_rest_and_resume_takes_it_up(paths) -> None:
    ticks = iter(range(100))
    first, second = Bench(), Bench()
    assert run(paths, first, deadline=4.5, clock=lambda: next(ticks)) == len(CASES) - 5
    assert run(paths, second, resume=True) == 0
    assert [k for k, _ in first.asked] == [c.key for c in CASES[:5]]
    assert [k for k, _ in second.asked] == [c.key for c in CASES[5:]]
    assert [m.case for m in raw.read(paths.raw).measured] == CASES


def test_a_file_that_is_there_is_not_written_over(paths) -> None:
    run(paths, Bench())
    before = paths.raw.read_bytes()
    with pytest.raises(FileExistsError, match="rms_norm-sm_90-132.jsonl"):
        run(paths, Bench())
    assert paths.raw.read_bytes() == before


def test_resume_with_nothing_there_starts(paths) -> None:
    assert run(paths, Bench(), resume=True) == 0
    paths.raw.write_bytes(b"")
    assert run(paths, Bench(), resume=True) == 0 and len(raw.read(paths.raw).measured) == len(CASES)


@pytest.mark.parametrize("cut", [1, 20, 200])
def test_a_line_cut_off_is_measured_again(paths, cut: int) -> None:
    run(paths, Bench())
    whole = paths.raw.read_bytes()
    paths.raw.write_bytes(whole[:-cut])
    bench = Bench()
    assert run(paths, bench, resume=True) == 0
    assert [k for k, _ in bench.asked] == [CASES[-1].key] and paths.raw.read_bytes() == whole


def test_measurements_by_another_version_are_not_continued(paths, monkeypatch) -> None:
    ticks = iter(range(100))
    run(paths, Bench(), deadline=2.5, clock=lambda: next(ticks))
    before = paths.raw.read_bytes()
    monkeypatch.setattr(sweep._compat, "triton_version", lambda: "9.9.0")
    with pytest.raises(raw.RawError, match=r"triton: \S+ then, 9\.9\.0 now"):
        run(paths, Bench(), resume=True)
    monkeypatch.undo()
    monkeypatch.setattr(header, "source_hash", lambda kernel: "f" * 64)
    with pytest.raises(raw.RawError, match="kernels"):
        run(paths, Bench(), resume=True)
    assert paths.raw.read_bytes() == before


def test_a_kernel_that_breaks_the_context_is_left_out_of_that_case_on_resume(paths) -> None:
    with pytest.raises(sweep.ContextLost, match=OWN):
        run(paths, Bench(breaking=OWN))
    assert len(raw.read(paths.raw).measured) == 4
    bench = Bench(breaking=OWN)
    assert run(paths, bench, resume=True) == 0
    assert bench.asked[0] == (CASES[3].key, ("vendor", "rows/t8192-w8")) and bench.asked[1][1][1] == OWN
    again = {m.case.key: m for m in raw.read(paths.raw).measured}[CASES[3].key]
    assert again.failed == {OWN: "raised: illegal memory access"} and set(again.graph) == {"vendor", "rows/t8192-w8"}


@pytest.mark.parametrize("after", range(3))
def test_a_full_disk_keeps_what_was_measured(paths, monkeypatch, after: int) -> None:
    left = [after]

    def fsync(fd: int) -> None:
        if not left[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        left[0] -= 1

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match="No space left"):
        run(paths, Bench())
    monkeypatch.undo()
    assert paths.raw.read_bytes().count(b"\n") == after
    assert run(paths, Bench(), resume=True) == 0
    assert [m.case for m in raw.read(paths.raw).measured] == CASES


CHILD = """
import sys, time
from pathlib import Path
from unit import test_calibrate_sweep as t
class Slow(t.Bench):
    def __call__(self, spec, case, candidates):
        time.sleep(0.01)
        out = super().__call__(spec, case, candidates)
        print(len(self.asked), flush=True)
        return out
cases = [t.case(m) for m in range(1, 2000)]
t.run(t.Paths(Path(sys.argv[1]), "rms_norm", t.DEVICE), Slow(), cases)
"""


@pytest.mark.parametrize("seconds", [0.05, 0.173, 0.31])
def test_kill_9_loses_at_most_the_case_in_flight(paths, seconds: float) -> None:
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(root), str(root / "tests")])}
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(paths.out)], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert child.stdout is not None and child.stdout.readline() == "1\n"
    time.sleep(seconds)
    child.send_signal(signal.SIGKILL)
    reported = 1 + child.stdout.read().count("\n")
    child.wait()
    cases = [case(m) for m in range(1, 2000)]
    found = raw.read(paths.raw).measured
    assert reported - 1 <= len(found) <= reported + 1 and [m.case for m in found] == cases[: len(found)]
    bench = Bench()
    assert run(paths, bench, cases[: len(found) + 3], resume=True) == 0
    assert [k for k, _ in bench.asked] == [c.key for c in cases[len(found) : len(found) + 3]]


def test_a_case_that_does_not_fit_is_put_on_file_and_not_tried_again(paths) -> None:
    class Small(Bench):
        def __call__(self, spec, case, candidates) -> Measured:
            if case == CASES[2]:
                self.asked.append((case.key, tuple(candidates)))
                return Measured(case, {}, failed={"vendor": "does not fit: OutOfMemoryError: no"})
            return super().__call__(spec, case, candidates)

    first, second = Small(), Small()
    assert run(paths, first) == run(paths, second, resume=True) == 0
    assert len(first.asked) == len(CASES) and second.asked == []
    assert [bool(m.graph) for m in raw.read(paths.raw).measured] == [i != 2 for i in range(len(CASES))]


@pytest.fixture
def serving(paths, tmp_path, monkeypatch):
    """Measurements of eleven cases whose table serves the device, and the paths of a run on a user's own shapes."""
    monkeypatch.setenv("TRITONOPS_TABLE_DIR", str(tmp_path / "tables"))
    base = Paths(tmp_path / "tables", "rms_norm", DEVICE)
    run(base, Bench(), CASES[:11])
    data = raw.pack(base.raw.read_bytes())
    base.packed.write_bytes(data)
    learned = learn.learn(raw.read(base.packed), SPEC)
    report = verify.verify(raw.read(base.packed), learned, SPEC)
    base.table.write_bytes(
        emit.emit(raw.read(base.packed), learned, report, base.packed.name, hashlib.sha256(data).hexdigest())
    )
    base.raw.unlink()
    return base


OWN_CASES = [Case(CASES[11].problem, own=True, weight=7.0), Case(CASES[3].problem, own=True)]


def test_a_users_own_shapes_join_what_the_table_that_serves_was_made_from(serving, paths) -> None:
    bench, said = Bench(), []
    assert run(paths, bench, OWN_CASES, shapes=True, progress=said.append) == 0
    got = raw.read(paths.raw)
    assert [k for k, _ in bench.asked] == [c.key for c in OWN_CASES] and "rms_norm: 11 cases join yours" in said
    assert len(got.measured) == 12 and got.header["method"]["base"]["cases"] == 11
    assert {m.case.key: m.case.own for m in got.measured} == {c.key: c in (CASES[3], CASES[11]) for c in CASES}
    assert run(paths, Bench(), OWN_CASES, shapes=True, resume=True) == 0


@pytest.mark.parametrize("how", ["absent", "other versions", "other raw file", "no raw file", "other kernels"])
def test_own_shapes_stand_alone_where_there_is_nothing_to_join(serving, paths, monkeypatch, how: str) -> None:
    if how == "absent":
        serving.table.unlink()
    elif how == "other versions":
        monkeypatch.setattr(sweep._compat, "triton_version", lambda: "9.9.0")
    elif how == "other raw file":
        serving.packed.write_bytes(raw.pack(b"other"))
    elif how == "no raw file":
        serving.packed.unlink()
    else:
        monkeypatch.setattr(header, "source_hash", lambda kernel: "f" * 64)
    said: list[str] = []
    assert run(paths, Bench(), OWN_CASES, shapes=True, progress=said.append) == 0
    assert len(raw.read(paths.raw).measured) == 2 and said[0].startswith("rms_norm: yours alone, as ")


def test_what_is_the_same_code_has_the_times_of_what_was_measured(paths) -> None:
    run(paths, bench := Bench())
    assert not any(TWIN in asked for _, asked in bench.asked)
    for m in raw.read(paths.raw).measured:
        assert m.graph[TWIN] == m.graph[OWN] and "rows/t16384-w8" not in m.graph  # the latter has no verdict


def test_a_variant_without_a_verdict_is_not_measured(paths) -> None:
    bench = Bench()
    run(paths, bench, gated={"vendor": GATE["vendor"], OWN: GATE[OWN] | {"passed": "no"}})
    assert {candidates for _, candidates in bench.asked} == {("vendor",)}
