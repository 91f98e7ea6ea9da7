"""The doctor: every fact on a machine with or without a GPU, tables and their faults, exit codes, no traceback."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tritonops
from tritonops import _env, doctor
from tritonops.device import DeviceInfo
from tritonops.dispatch.source import source_hash
from tritonops.dispatch.variant import REGISTRY

NAME = "NVIDIA H200"


def table(**changes) -> dict:
    """A valid measured matmul table for sm_90-132, with the given top-level fields replaced."""
    return {
        "schema": 1,
        "op": "matmul",
        "device": {"arch": "sm_90", "sms": 132, "names": [NAME]},
        "made_with": {"tritonops": "0.1.0"},
        "provenance": {"kind": "measured", "raw": "raw/matmul-sm_90-132.jsonl.gz", "sha256": "0" * 64},
        "kernels": {"tiled": {"source": source_hash("tritonops.matmul.tiled:matmul_tiled_kernel")}},
        "variants": {},
        "sections": [],
        "default": ["vendor"],
    } | changes


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The one directory that tables come from."""
    monkeypatch.setenv("TRITONOPS_TABLE_DIR", str(tmp_path))
    monkeypatch.setattr(doctor.store, "places", lambda: [("TRITONOPS_TABLE_DIR", tmp_path)])
    (tmp_path / "matmul").mkdir()
    return tmp_path


def write(place: Path, content: dict | bytes, name: str = "sm_90-132") -> None:
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    (place / "matmul" / f"{name}.json").write_bytes(data)


def run(capsys, *arguments: str) -> tuple[int, str]:
    code = doctor.main(arguments)
    return code, capsys.readouterr().out


def test_the_command_runs_in_a_process_of_its_own(root):
    done = subprocess.run(
        [sys.executable, "-m", "tritonops.doctor", "--device", "sm_90-132"],
        capture_output=True,
        text=True,
        cwd=root,
        env={**os.environ, "TRITONOPS_NO_SUCH": "x", "TRITONOPS_LOG": "decisions"},
    )
    assert (done.returncode, done.stderr) == (0, "")
    for line in (
        rf"  tritonops     {re.escape(tritonops.__version__)} ",
        rf"  python        {sys.version.split()[0]} ",
        r"  torch         \d+\.\d+",
        r"  triton        ",
        r"  driver        ",
        r"  liger-kernel  ",
        r"  TRITONOPS_LOG = 'decisions'",
        r"  TRITONOPS_NO_SUCH = 'x': no such variable, it has no effect",
        r"tables for sm_90-132",
    ):
        assert re.search(f"^{line}", done.stdout, re.MULTILINE), (line, done.stdout)


def test_every_variable_is_shown_set_or_not(capsys, monkeypatch):
    for name in _env.VARIABLES:
        if name.startswith("TRITONOPS_"):
            monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TRITONOPS_CACHE_DIR", "/nowhere")
    _, out = run(capsys, "--device", "sm_90-132")
    assert "TRITONOPS_CACHE_DIR = '/nowhere'" in out
    assert "TRITONOPS_TABLE_DIR is not set (directory searched first" in out
    assert all(name in out for name in _env.VARIABLES)


def test_a_good_table_is_used(capsys, place):
    write(place, table())
    code, out = run(capsys, "--strict", "--device", "sm_90-132")
    assert code == 0
    assert f"matmul: used (TRITONOPS_TABLE_DIR), measured on {NAME}: {place / 'matmul' / 'sm_90-132.json'}" in out
    assert "stale" not in out and "neighbour" not in out and "rejected" not in out


def test_every_op_is_listed(capsys, place):
    _, out = run(capsys, "--device", "sm_90-132")
    assert [line.split(":")[0].strip() for line in out.splitlines() if "no table that can serve" in line] == list(
        REGISTRY
    )


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "sm_90-132.json"),
        (b'{"schema": 1, "op": "matm', "sm_90-132.json"),
        (b"\xff\xfe\x00", "sm_90-132.json"),
        (table(schema=99), "schema"),
        (table(op="embedding"), "op"),
        (table(default=["no_such/variant"]), "default"),
        (table(device={"arch": "sm_80", "sms": 108, "names": [NAME]}), "device"),
        (b"[" * 100_000, "sm_90-132.json"),
        (b" " * (5 << 20), "sm_90-132.json"),
    ],
)  # fmt: skip
def test_a_damaged_table_is_rejected_with_its_field_and_strict_fails(capsys, place, content, says):
    write(place, content)
    code, out = run(capsys, "--strict", "--device", "sm_90-132")
    rejected = [line for line in out.splitlines() if "matmul: rejected (TRITONOPS_TABLE_DIR)" in line]
    assert code == 1 and len(rejected) == 1 and says in rejected[0]
    assert run(capsys, "--device", "sm_90-132")[0] == 0


def test_without_a_device_every_table_file_is_looked_at(capsys, place, monkeypatch):
    monkeypatch.setattr(doctor, "_present", lambda: [])
    write(place, table())
    write(place, b"{", "sm_80-108")
    write(place, b"{", "sm_x-1")
    code, out = run(capsys, "--strict")
    assert code == 1
    assert re.findall(r"^tables for (\S+)", out, re.MULTILINE) == ["sm_80-108", "sm_90-132"]
    (place / "matmul" / "sm_80-108.json").unlink()
    assert run(capsys, "--strict")[0] == 0


def test_stale_tables_are_told_with_the_reason(capsys, place):
    write(place, table(kernels={"tiled": {"source": "0" * 64}}, made_with={"tritonops": "0.1.0", "triton": "2.0.0"}))
    code, out = run(capsys, "--strict", "--device", "sm_90-132")
    assert code == 0
    assert "stale: kernel 'tiled' has changed since it was measured" in out
    if tritonops._compat.has_triton():
        assert "stale: made with triton 2.0.0" in out


def test_a_neighbour_is_told(capsys, place, monkeypatch):
    card = DeviceInfo("cuda", "sm_90", 132, 232448, 50 << 20, "NVIDIA H100 80GB HBM3", 0)
    monkeypatch.setattr(doctor, "_present", lambda: [card])
    write(place, table())
    _, out = run(capsys)
    assert "cuda:0 NVIDIA H100 80GB HBM3, sm_90-132, 232448 bytes shared, 50 MiB L2" in out
    assert "neighbour: this is NVIDIA H100 80GB HBM3" in out


def test_a_driver_that_fails_is_no_traceback(capsys, monkeypatch):
    def broken() -> int:
        raise RuntimeError("CUDA driver initialization failed")

    monkeypatch.setattr(doctor.torch.cuda, "device_count", broken)
    code, out = run(capsys)
    assert code == 0 and "  no GPU" in out


def test_a_wrong_device_name_is_an_argument_error(capsys):
    with pytest.raises(SystemExit) as exit_:
        doctor.main(["--device", "H200"])
    assert exit_.value.code == 2
    assert "expected a name like 'sm_90-132'" in capsys.readouterr().err


def test_an_unusable_assembler_is_one_line(capsys, monkeypatch, tmp_path):
    pytest.importorskip("triton")
    fake = tmp_path / "old_ptxas"
    fake.write_text('#!/bin/sh\necho "ptxas fatal : Unsupported .version 8.6; current version is 8.5" >&2; exit 255\n')
    fake.chmod(0o755)
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(fake))
    code, out = run(capsys, "--device", "sm_80-108")
    lines = [line for line in out.splitlines() if str(fake) in line]
    assert code == 0 and len(lines) >= 1
    assert re.search(
        r"ptxas sm_80\s+unusable: the assembler .*old_ptxas \(version unknown\).*whose own is \d+\.\d+\.\d+", lines[0]
    )
