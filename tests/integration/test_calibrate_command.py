"""The calibrate command in a process of its own: stages for a GPU that is only named, ends that are one sentence."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tritonops.calibrate import plan, raw, static, sweep
from tritonops.calibrate.raw import Measured
from tritonops.device import named_device
from tritonops.dispatch.variant import REGISTRY

DEVICE = named_device("sm_90-132")
SPEC = REGISTRY["rms_norm"]
OWN = "rows/t4096-w4"


def command(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tritonops.calibrate", *arguments],
        env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip


def run(*arguments: str, **environment: str) -> tuple[int, list[str], list[str]]:
    process = command(*arguments, **environment)
    out, err = process.communicate(timeout=300)
    assert "Traceback" not in err
    return process.returncode, out.splitlines(), err.splitlines()


@pytest.mark.static
def test_planning_and_screening_for_a_gpu_that_is_not_here(tmp_path) -> None:
    arguments = (
        "static",
        "rms_norm",
        "--smoke",
        "--target",
        "sm_90-132",
        "--jobs",
        "2",
        "--out",
        str(tmp_path),
        "plan",
    )
    code, out, err = run(*arguments)
    paths = raw.Paths(tmp_path, "rms_norm", DEVICE)
    cases = plan.read(paths)
    assert (code, out, len(cases)) == (0, [], 4) and err[0] == "plan rms_norm: 4 cases"
    screened = static.read(paths, cases)
    assert re.fullmatch(rf"static rms_norm: {len(screened.variants)} variants in \d+ compilations", err[-1])
    assert {"vendor", OWN} <= set(screened.variants)
    before = paths.static.stat().st_mtime_ns
    assert run(*arguments, "--resume")[0] == 0 and paths.static.stat().st_mtime_ns == before


@pytest.mark.static
@pytest.mark.parametrize("after", [0.3, 1.5, 5.0])
def test_an_interrupt_from_the_keyboard_is_one_line(tmp_path, after) -> None:
    process = command("matmul", "plan", "static", "--target", "sm_90-132", "--jobs", "2", "--out", str(tmp_path))
    assert process.stderr is not None and process.stderr.readline().startswith("plan matmul: ")
    time.sleep(after)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in err and out == "", err
    assert err.splitlines()[-1] == "tritonops.calibrate: interrupted; what was done is kept, resume with --resume"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_bare_command_without_a_gpu_is_one_sentence_and_leaves_no_file(tmp_path) -> None:
    code, out, err = run(TRITONOPS_CACHE_DIR=str(tmp_path / "cache"))
    assert (code, out, len(err)) == (2, [], 1) and "there is no NVIDIA GPU here" in err[0]
    assert not (tmp_path / "cache").exists()


@pytest.mark.skipif(importlib.util.find_spec("numpy") is None, reason="the learner needs numpy")
def test_learning_to_emitting_and_undoing_an_installed_table_needs_no_gpu(tmp_path) -> None:
    paths = raw.Paths(tmp_path / "out", "rms_norm", DEVICE)
    cases = plan.plan(SPEC, DEVICE)[:60]
    entry = {"meta": {}, "options": {"num_warps": 4}, "regs": 64, "spill": 0, "text": "0" * 64}
    screened = SimpleNamespace(
        variants={OWN: entry}, dropped={}, candidates=[["vendor", OWN]] * len(cases), twins=[{}] * len(cases)
    )
    passed = {v: {"passed": True, "why": "", "cases": 1, "error": 0.5} for v in ("vendor", OWN)}

    def bench(spec, case, candidates) -> Measured:
        return Measured(case, {v: (1.0 if v == "vendor" else 0.5,) * 20 for v in candidates}, calls=10)

    sweep.sweep(SPEC, cases, screened, passed, DEVICE, paths, bench=bench)
    with open(paths.raw, "ab") as f:
        f.write(b'{"kind": "case", "dims"')  # a run that was killed
    common = ("rms_norm", "--target", "sm_90-132", "--out", str(tmp_path / "out"))
    cache = {"TRITONOPS_CACHE_DIR": str(tmp_path / "cache")}
    code, out, err = run(*common, "learn", "verify", "emit", "--install", **cache)
    installed = tmp_path / "cache" / "rms_norm" / "sm_90-132.json"
    assert code == 0, err
    assert out[-2:] == [
        f"rms_norm: installed {installed}",
        "undo: python -m tritonops.calibrate rms_norm --target sm_90-132 --uninstall",
    ]
    table, packed = paths.table.read_bytes(), paths.packed.read_bytes()
    assert hashlib.sha256(packed).hexdigest().encode() in table and table == installed.read_bytes()
    assert len(raw.read(paths.packed).measured) == 60 and not paths.raw.exists() and OWN.encode() in table
    paths.table.unlink()
    pictures = ("--report", str(tmp_path / "page")) if importlib.util.find_spec("matplotlib") is not None else ()
    code, out, err = run(*common, "emit", *pictures, PYTHONHASHSEED="7", **cache)
    assert code == 0, err
    if pictures:
        page = tmp_path / "page" / "index.html"
        assert out[-1] == f"wrote {page}" and page.read_text().count("data:image/png;base64,") == 4
    assert (paths.table.read_bytes(), paths.packed.read_bytes()) == (table, packed)
    code, out, _ = run("rms_norm", "--uninstall", "--target", "sm_90-132", **cache)
    assert (code, len(out)) == (0, 2) and not any(p.is_file() for p in (tmp_path / "cache").rglob("*"))
