"""The command on a made-up GPU: stages and their files, resuming, budget, exit codes, full disks, no traceback."""

from __future__ import annotations

import errno
import functools
import hashlib
import importlib.util
import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import tritonops.calibrate
from tritonops.calibrate import __main__ as command
from tritonops.calibrate import gate, header, install, raw, stages, static, sweep
from tritonops.calibrate.progress import Progress
from tritonops.calibrate.raw import Measured
from tritonops.device import DeviceInfo
from tritonops.dispatch import table
from tritonops.dispatch.variant import REGISTRY

GPU = DeviceInfo("cuda", "sm_90", 132, 232448, 50 << 20, "NVIDIA Test", 0)
OWN = "rows/t4096-w4"
PASSED = {"passed": True, "why": "", "cases": 1, "error": 0.5}
SWEEP = sweep.sweep


class Machine:
    """A GPU on which our norm takes half of torch's time; `seen` holds (op, seconds given, resumed) of each sweep."""

    def __init__(self):
        self.seen, self.known, self.break_at = [], [], None
        self.error: BaseException | None = None
        self.now, self.case_seconds = 0.0, 0.0

    def screen(self, spec, cases, device, jobs, progress):
        own = [v for v in spec.variants() if v != "vendor"][:1]
        progress(f"{spec.name}: cases captured 1/{len(cases)}")
        entry = {"meta": {}, "options": {"num_warps": 4}, "regs": 64, "spill": 0, "text": "0" * 64}
        made = {"triton": static._compat.triton_version()}
        return static.Static(
            {v: entry for v in own},
            {},
            [["vendor", *own]] * len(cases),
            [{}] * len(cases),
            static.digest(cases),
            made,
            {},
        )

    def gate(self, spec, cases, screened, where, progress, *, known, jobs):
        self.known.append(dict(known))
        return {v: dict(PASSED) for v in ("vendor", *screened.variants)} | known

    def bench(self, spec, case, candidates):
        self.now += self.case_seconds
        if self.error is not None and self.break_at == len(self.benched):
            raise self.error
        self.benched.append(case.key)
        return Measured(case, {v: (1.0 if v == "vendor" else 0.5,) * 20 for v in candidates}, calls=10)

    def sweep(self, spec, *args, deadline, resume, **more):
        self.seen.append((spec.name, deadline - self.now, resume))
        self.benched: list[str] = []
        return SWEEP(spec, *args, deadline=deadline, resume=resume, bench=self.bench, clock=lambda: self.now, **more)


@pytest.fixture
def machine(clean, tmp_path, monkeypatch) -> Machine:
    found = Machine()
    monkeypatch.setenv("TRITONOPS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(command, "_gpu", lambda index: GPU)
    monkeypatch.setattr(static, "screen", found.screen)
    monkeypatch.setattr(gate, "gate", found.gate)
    monkeypatch.setattr(sweep, "sweep", found.sweep)
    monkeypatch.setattr(command, "Run", functools.partial(stages.Run, clock=lambda: found.now))
    rows = [{"op": op, "M": 2**i, "N": 4096} for op in ("rms_norm", "layer_norm") for i in range(3, 14)]
    (tmp_path / "shapes.json").write_text(json.dumps(rows))
    return found


@pytest.fixture
def run(machine, tmp_path, capsys):
    def run(*arguments: str, out: bool = True) -> tuple[int, list[str], list[str]]:
        try:
            code = command.main([*arguments, *(["--out", str(tmp_path / "out")] if out else [])])
        except SystemExit as stop:
            code = stop.code
        text = capsys.readouterr()
        assert "Traceback" not in text.err
        return code, text.out.splitlines(), text.err.splitlines()

    return run


def own(tmp_path: Path, op: str = "rms_norm") -> raw.Paths:
    return raw.Paths(tmp_path / "out", op, GPU)


def shapes(tmp_path: Path) -> tuple[str, str]:
    return "--shapes", str(tmp_path / "shapes.json")


def test_everything_from_the_plan_to_the_installed_table_and_back(run, tmp_path) -> None:
    code, out, err = run("rms_norm", *shapes(tmp_path))
    paths = own(tmp_path)
    assert code == 0, err
    there = tmp_path / "cache" / "rms_norm" / "sm_90-132.json"
    assert f"rms_norm: wrote {paths.table} and {paths.packed}" in out
    assert out[-2:] == [
        f"rms_norm: installed {there}", "undo: python -m tritonops.calibrate rms_norm --uninstall",
    ]  # fmt: skip
    made = json.loads(there.read_bytes())
    assert made["provenance"]["sha256"] == hashlib.sha256(paths.packed.read_bytes()).hexdigest()
    assert not paths.raw.exists() and raw.read(paths.packed).header["method"]["shapes"] is True
    assert len(raw.read(paths.packed).measured) == 11 and "rows/" in json.dumps(made["sections"])
    code, out, _ = run("rms_norm", "--uninstall")
    packed = there.parent / "raw" / paths.packed.name
    assert (code, out) == (0, [f"rms_norm: removed {there}", f"rms_norm: removed {packed}"])
    code, out, _ = run("rms_norm", "--uninstall")
    assert (code, out) == (0, [f"nothing of sm_90-132 is installed in {tmp_path / 'cache'}"])


def test_stages_one_by_one_give_what_all_at_once_give_and_emit_repeats_byte_for_byte(run, tmp_path) -> None:
    for stage in stages.STAGES:
        more = shapes(tmp_path) if stage in ("plan", "measure") else ()
        assert run(stage, "rms_norm", *more)[0] == 0
    paths = own(tmp_path)
    before = paths.table.read_bytes(), paths.packed.read_bytes(), paths.packed.stat().st_mtime_ns
    table.parse(before[0], "t", op="rms_norm", features={"M", "N", *REGISTRY["rms_norm"].feature_names})
    paths.table.unlink()
    assert run("rms_norm", "learn", "verify", "emit")[0] == 0
    assert (paths.table.read_bytes(), paths.packed.read_bytes(), paths.packed.stat().st_mtime_ns) == before
    assert not (tmp_path / "cache" / "rms_norm").exists()


@pytest.mark.parametrize("stage, first", [
    ("static", "plan"), ("gate", "plan"), ("measure", "plan"), ("learn", "measure"), ("verify", "measure"),
    ("emit", "measure"),
])  # fmt: skip
def test_a_stage_without_the_file_before_it_names_the_stage_to_run(run, tmp_path, stage, first) -> None:
    code, out, err = run("rms_norm", stage)
    assert (code, out, len(err)) == (2, [], 1) and err[0].endswith(f"is not there; run the stage {first} first")
    assert err[0].startswith(f"rms_norm: {tmp_path / 'out'}")


def test_install_alone_wants_a_table(run, tmp_path) -> None:
    code, _, err = run("rms_norm", "plan", "--install", *shapes(tmp_path))
    assert code == 2 and err[-1].endswith("run the stage emit first")


@pytest.mark.parametrize("arguments, says", [
    (["foo"], "'foo' is no op and no stage"), (["scaled_matmul"], "scaled_matmul is not in this version"),
    (["plan", "--budget", "0"], "expected a number above 0"), (["plan", "--jobs", "x"], "expected a number above 0"),
    (["plan", "--target", "sm90"], "expected a name like 'sm_90-132'"), (["--budget", "nan"], "above 0"),
    (["measure", "--target", "sm_80-108"], "the GPU here is sm_90-132 (NVIDIA Test)"),
    (["--shapes", "/nowhere.json"], "/nowhere.json"),
])  # fmt: skip
def test_wrong_usage_is_one_sentence_and_exit_code_2(run, arguments, says) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, []) and says in err[-1]


def test_without_a_gpu_the_sentence_says_what_runs(run, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(command, "_gpu", lambda index: None)
    for arguments in ([], ["measure"], ["gate", "rms_norm", "--target", "sm_90-132"]):
        code, out, err = run(*arguments)
        assert (code, out, len(err)) == (2, [], 1) and "no NVIDIA GPU here; the stages plan, static, learn" in err[0]
    assert run("plan", "rms_norm", *shapes(tmp_path))[0] == 2
    assert run("plan", "rms_norm", *shapes(tmp_path), "--target", "sm_80-108")[0] == 0


def test_a_bar_missed_is_installed_only_when_asked(run, machine, tmp_path, monkeypatch) -> None:
    from tritonops.calibrate.verify import Report

    monkeypatch.setattr(Report, "passed", False)
    code, out, _ = run("rms_norm", *shapes(tmp_path))
    assert code == 1 and own(tmp_path).table.exists() and not (tmp_path / "cache" / "rms_norm").exists()
    assert [line for line in out if "a bar was missed" in line and "not installed" in line]
    code, out, _ = run("rms_norm", "emit", "--install")
    assert code == 1 and (tmp_path / "cache" / "rms_norm" / "sm_90-132.json").exists()


def test_what_an_op_leaves_of_the_budget_goes_to_the_next(run, machine, tmp_path) -> None:
    machine.case_seconds = 1.0
    assert run("plan", "static", "gate", "measure", *shapes(tmp_path), "--budget", "100")[0] == 0
    (first, a, _), (second, b, _) = machine.seen
    assert (first, second) == ("layer_norm", "rms_norm") and a == pytest.approx(50.0) and b == pytest.approx(89.0)


def test_a_spent_budget_is_said_and_resume_measures_the_rest(run, machine, tmp_path) -> None:
    machine.case_seconds = 1.0
    stages_, more = ("plan", "static", "gate", "measure"), shapes(tmp_path)
    code, _, err = run("rms_norm", *stages_, *more, "--budget", "4.5")
    assert code == 0 and "5 of 11 cases" in err[-1] and "--resume measures the other 6" in err[-1]
    assert run("rms_norm", "learn", "verify", "emit")[0] in (0, 1)
    code, _, err = run("rms_norm", *stages_, *more, "--resume")
    assert code == 0 and "11 of 11 cases" in err[-1] and len(machine.benched) == 6
    assert len(raw.read(own(tmp_path).raw).measured) == 11
    code, _, err = run("rms_norm", "measure", *more)
    assert any(".jsonl.previous" in line for line in err) and len(machine.benched) == 11
    assert len(raw.read(own(tmp_path).raw.with_name("rms_norm-sm_90-132.jsonl.previous")).measured) == 11


def test_an_interrupt_is_one_line_and_what_was_measured_is_kept(run, machine, tmp_path) -> None:
    machine.error, machine.break_at = KeyboardInterrupt(), 3
    code, out, err = run("rms_norm", *shapes(tmp_path))
    assert (code, out) == (130, []) and err[-1].endswith("resume with --resume")
    assert len(raw.read(own(tmp_path).raw).measured) == 3
    machine.error = None
    code, _, err = run("rms_norm", *shapes(tmp_path), "--resume")
    assert code == 0 and len(machine.benched) == 8


def test_other_kernels_are_not_resumed(run, machine, tmp_path, monkeypatch) -> None:
    assert run("rms_norm", "plan", "static", "gate", "measure", *shapes(tmp_path))[0] == 0
    monkeypatch.setattr(header, "source_hash", lambda kernel: "f" * 64)
    code, _, err = run("rms_norm", "measure", *shapes(tmp_path), "--resume")
    assert code == 2 and "cannot be continued" in err[-1] and "kernels" in err[-1]


def test_a_full_disk_is_one_sentence_that_names_the_place(run, machine, tmp_path, monkeypatch) -> None:
    add, rows = raw.Appender.add, []

    def full(self, row) -> None:
        if len(rows) == 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        rows.append(row)
        add(self, row)

    monkeypatch.setattr(raw.Appender, "add", full)
    code, out, err = run("rms_norm", *shapes(tmp_path))
    assert (code, out) == (2, []) and str(own(tmp_path).raw.parent) in err[-1] and "No space left" in err[-1]
    assert len(raw.read(own(tmp_path).raw).measured) == 3


def test_a_lost_context_keeps_every_verdict_there_is(run, machine, tmp_path, monkeypatch) -> None:
    def lost(vid):
        def judge(spec, cases, screened, where, progress, *, known, jobs):
            raise gate.ContextLost(f"{vid} broke it", {vid: PASSED | {"passed": False, "why": "illegal access"}})

        return judge

    for vid, resume in ((OWN, []), ("rows/t8192-w8", ["--resume"])):
        monkeypatch.setattr(gate, "gate", lost(vid))
        code, _, err = run("rms_norm", *shapes(tmp_path), *resume)
        assert code == 2 and f"{vid} broke it" in err[-1] and "--resume" in err[-1]
    assert {v for v, verdict in gate.read(own(tmp_path)).items() if not verdict["passed"]} == {OWN, "rows/t8192-w8"}
    monkeypatch.setattr(gate, "gate", machine.gate)
    run("rms_norm", "gate", "--resume")
    assert set(machine.known[-1]) == {OWN, "rows/t8192-w8"}


def test_a_vendor_that_failed_the_gate_ends_its_op_alone(run, machine, tmp_path, monkeypatch) -> None:
    def judge(spec, *args, **more):
        found = machine.gate(spec, *args, **more)
        return found | ({"vendor": PASSED | {"passed": False, "why": "nan"}} if spec.name == "layer_norm" else {})

    monkeypatch.setattr(gate, "gate", judge)
    code, _, err = run("all", *shapes(tmp_path))
    assert code == 2 and [op for op, *_ in machine.seen] == ["rms_norm"]
    assert any(line.startswith("layer_norm: torch's own kernel failed the gate") for line in err)
    assert own(tmp_path).table.exists()


def test_a_home_that_cannot_be_written_is_a_warning(run, machine, tmp_path, monkeypatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRITONOPS_CACHE_DIR", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(command.tempfile, "mkdtemp", lambda prefix: str(tmp_path / "instead"))
    code, out, err = run("rms_norm", *shapes(tmp_path), out=False)
    assert code == 0 and err[0].startswith("warning: ") and str(tmp_path / "instead") in err[0]
    assert any(f"TRITONOPS_TABLE_DIR={tmp_path / 'instead'}" in line for line in err)
    assert (tmp_path / "instead" / "rms_norm" / "sm_90-132.json").exists() and not any("undo" in line for line in out)
    code, _, err = run("rms_norm", "emit", "--install", "--out", str(tmp_path / "instead"), out=False)
    assert code == 2 and str(tmp_path / "file") in err[-1]


def test_the_gpu_is_the_one_of_the_index_and_nvidias(monkeypatch) -> None:
    cards = [GPU, DeviceInfo("cuda", "gfx942", 304, 65536, 0, "AMD", 1)]
    monkeypatch.setattr(command.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(command.torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(command.torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(command, "device_info", lambda device: cards[device.index])
    assert command._gpu(None) is GPU and command._gpu(0) is GPU and command._gpu(1) is None
    for index in (2, -1):
        with pytest.raises(stages.Stop, match=f"--device {index}: there are 2 GPUs"):
            command._gpu(index)


@pytest.fixture
def pictures(monkeypatch) -> SimpleNamespace:
    fake = SimpleNamespace(
        check=lambda: None, write=lambda directory, entries: fake.written.append((directory, entries))
    )
    fake.written = []
    monkeypatch.setitem(sys.modules, "tritonops.calibrate.report", fake)
    monkeypatch.setattr(tritonops.calibrate, "report", fake, raising=False)
    return fake


def test_a_report_is_of_every_op_that_was_measured(run, pictures, tmp_path) -> None:
    code, out, _ = run("all", *shapes(tmp_path), "--report", str(tmp_path / "pictures"))
    ((directory, entries),) = pictures.written
    assert (code, directory) == (0, tmp_path / "pictures") and f"wrote {directory / 'index.html'}" in out
    assert [(found.op, learned.op, report.op) for found, learned, report in entries] == [
        ("layer_norm",) * 3, ("rms_norm",) * 3,
    ]  # fmt: skip
    assert run("rms_norm", "--report", str(tmp_path / "pictures"), "verify")[0] == 0
    assert [found.op for found, *_ in pictures.written[1][1]] == ["rms_norm"]


def test_pictures_that_cannot_be_drawn_are_said_before_anything_is_measured(run, machine, pictures, tmp_path) -> None:
    pictures.check = lambda: "matplotlib is not installed"
    code, out, err = run("all", *shapes(tmp_path), "--report", str(tmp_path / "pictures"))
    assert (code, out, err) == (2, [], ["tritonops.calibrate: --report: matplotlib is not installed"])
    assert not machine.seen and not (tmp_path / "out").exists()


def test_a_place_for_pictures_that_cannot_be_made_is_said_before_anything_is_measured(
    run, machine, pictures, tmp_path
) -> None:
    (tmp_path / "file").write_text("")
    code, out, err = run("all", *shapes(tmp_path), "--report", str(tmp_path / "file" / "pictures"))
    assert (code, out, len(err)) == (2, [], 1) and str(tmp_path / "file") in err[0] and not machine.seen


def test_a_disk_that_fills_up_with_pictures_is_named_and_tables_stand(run, pictures, tmp_path) -> None:
    def full(directory, entries):
        raise OSError(errno.ENOSPC, "No space left on device")

    pictures.write = full
    code, _, err = run("rms_norm", *shapes(tmp_path), "--report", str(tmp_path / "pictures"))
    assert code == 2 and f"{tmp_path / 'pictures'}: No space left" in err[-1] and own(tmp_path).table.exists()


def test_without_numpy_nothing_is_measured_that_could_not_be_learned(run, machine, tmp_path, monkeypatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None if name == "numpy" else find(name))
    code, _, err = run("all", *shapes(tmp_path))
    assert code == 2 and "need numpy" in err[0] and not machine.seen


def test_a_gpu_whose_memory_is_full_is_one_sentence(run, machine, tmp_path) -> None:
    machine.error, machine.break_at = torch.OutOfMemoryError("CUDA out of memory. Tried"), 2
    code, _, err = run("rms_norm", *shapes(tmp_path))
    assert code == 2 and "memory is full" in err[-1] and len(raw.read(own(tmp_path).raw).measured) == 2


def test_a_table_that_is_searched_first_is_named(run, tmp_path, monkeypatch) -> None:
    assert run("rms_norm", *shapes(tmp_path))[0] == 0
    monkeypatch.setenv("TRITONOPS_TABLE_DIR", str(tmp_path / "out"))
    code, out, _ = run("rms_norm", "emit", "--install")
    assert code == 0 and f"rms_norm: but {own(tmp_path).table} (TRITONOPS_TABLE_DIR) comes first" in out


def test_a_log_gets_a_line_every_ten_seconds_with_the_last_case() -> None:
    now, log = [0.0], io.StringIO()
    progress = Progress(log, lambda: now[0])
    progress.stage("measure", "matmul", 100.0)
    for i in range(1, 26):
        now[0] = float(i)
        progress(f"matmul {i}/30 M={i}")
    progress.stage("static", "matmul")
    now[0] = 36.0
    progress("matmul: cases captured 5/9, 12 s left")
    assert log.getvalue().splitlines() == [
        "measure matmul 10/30: 90 s left, M=10", "measure matmul 20/30: 80 s left, M=20",
        "static matmul 5/9: cases captured, 12 s left",
    ]  # fmt: skip


@pytest.mark.parametrize("with_tqdm", [False, True])
def test_a_terminal_gets_one_line_that_is_cleared(monkeypatch, with_tqdm) -> None:
    from tritonops.calibrate import progress as module

    if with_tqdm:
        pytest.importorskip("tqdm")
    else:
        monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    progress = Progress(terminal, lambda: 0.0)
    progress.stage("gate", "matmul")
    for i in range(1, 4):
        progress(f"matmul: gate {i}/3")
    progress.say("done")
    shown = terminal.getvalue()
    assert (
        "gate matmul" in shown
        and shown.count("\n") == 1
        and shown.endswith("\rdone\n" if with_tqdm else "\x1b[Kdone\n")
    )


def test_a_second_run_in_one_folder_is_refused(run, tmp_path) -> None:
    (tmp_path / "out").mkdir()
    with install.alone(tmp_path / "out"):
        code, out, err = run("rms_norm", *shapes(tmp_path))
    assert (code, out) == (2, []) and f"another run is at work in {tmp_path / 'out'}" in err[-1]
    assert list((tmp_path / "out").iterdir()) == []


def test_static_under_the_interpreter_is_refused(run, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    code, _, err = run("rms_norm", "plan", "static", *shapes(tmp_path))
    assert code == 2 and "TRITON_INTERPRET" in err[-1] and not own(tmp_path).static.exists()


def test_static_that_compiles_nothing_is_no_result(run, machine, tmp_path, monkeypatch) -> None:
    def nothing(spec, cases, *rest):
        dropped = {v: {"does not compile: [Errno 30] Read-only file system": len(cases)} for v in spec.variants()}
        return static.Static({}, dropped, [["vendor"]] * len(cases), [{}] * len(cases), static.digest(cases))

    monkeypatch.setattr(static, "screen", nothing)
    code, _, err = run("rms_norm", "plan", "static", *shapes(tmp_path))
    assert code == 2 and "none of its Triton kernels compiles for sm_90" in err[-1] and "Read-only" in err[-1]
    assert not own(tmp_path).static.exists()


def test_emit_keeps_the_measurements_that_a_shorter_run_replaces(run, machine, tmp_path) -> None:
    assert run("rms_norm", *shapes(tmp_path))[0] == 0
    packed = own(tmp_path).packed
    whole = packed.read_bytes()
    (tmp_path / "shapes.json").write_text('[{"op": "rms_norm", "M": 8, "N": 4096}]')
    assert run("rms_norm", *shapes(tmp_path))[0] == 0
    assert packed.read_bytes() != whole == packed.with_name(f"{packed.name}.previous").read_bytes()


@pytest.mark.parametrize("how", ["truncated", "other raw file", "other device"])
def test_install_refuses_what_does_not_belong_together(run, tmp_path, how: str) -> None:
    assert run("rms_norm", "plan", "static", "gate", "measure", "emit", *shapes(tmp_path))[0] == 0
    paths = own(tmp_path)
    if how == "truncated":
        paths.table.write_bytes(paths.table.read_bytes()[:-40])
    elif how == "other raw file":
        paths.packed.write_bytes(raw.pack(b"other"))
    else:
        paths.table.write_bytes(paths.table.read_bytes().replace(b'"sms": 132', b'"sms": 114'))
    code, out, _ = run("rms_norm", "plan", "--install", *shapes(tmp_path))
    assert code == 2 and not any("installed" in line for line in out)
    assert not (tmp_path / "cache" / "rms_norm" / "sm_90-132.json").exists()


@pytest.mark.parametrize("text", ["", "~/here"])
def test_out_is_a_folder_and_a_tilde_is_home(run, tmp_path, monkeypatch, capsys, text: str) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    code, _, err = run("rms_norm", "plan", *shapes(tmp_path), f"--out={text}", out=False)
    assert (code == 2 and "expected a folder" in err[-1]) if not text else (tmp_path / "home" / "here").is_dir()


def test_own_shapes_that_stand_alone_do_not_replace_a_table_that_knows_more(
    run, machine, tmp_path, monkeypatch
) -> None:
    assert run("rms_norm", *shapes(tmp_path))[0] == 0
    there = tmp_path / "cache" / "rms_norm" / "sm_90-132.json"
    whole = there.read_bytes()
    monkeypatch.setattr(sweep._compat, "torch_version", lambda: "9.9.0")
    (tmp_path / "shapes.json").write_text('[{"op": "rms_norm", "M": 8, "N": 4096}]')
    code, out, _ = run("rms_norm", *shapes(tmp_path))
    assert code == 0 and there.read_bytes() == whole
    assert any(line.startswith("rms_norm: not installed, as it knows your shapes alone") for line in out)
    assert run("rms_norm", *shapes(tmp_path), "--install")[0] == 0 and there.read_bytes() != whole


@pytest.mark.parametrize("stage", ["static", "gate"])
def test_a_damaged_work_file_is_one_sentence(run, tmp_path, stage: str) -> None:
    assert run("rms_norm", "plan", "static", "gate", *shapes(tmp_path))[0] == 0
    path = getattr(own(tmp_path), stage)
    value = json.loads(path.read_bytes())
    for key in list(value):
        path.write_text(json.dumps(value | {key: 7}))
        code, _, err = run("rms_norm", "measure", *shapes(tmp_path))
        assert code == 2 and err[-1].startswith("rms_norm: "), (key, err)


def test_without_triton_there_is_nothing_to_compile(run, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(command._compat, "has_triton", lambda: False)
    code, _, err = run("rms_norm", "plan", "static", *shapes(tmp_path))
    assert code == 2 and "need triton" in err[-1]
