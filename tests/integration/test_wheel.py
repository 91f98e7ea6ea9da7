"""What the wheel and the source distribution carry."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(importlib.util.find_spec("hatchling") is None, reason="hatchling is not installed")


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", target], cwd=ROOT, check=True, capture_output=True
    )
    return target


def _tables() -> set[str]:
    return {str(p.relative_to(ROOT)) for p in (ROOT / "dispatch_tables").rglob("*.json")}


def test_wheel_carries_the_package_its_marker_and_every_table(dist: Path):
    (wheel,) = dist.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    sources = {str(p.relative_to(ROOT)) for p in (ROOT / "tritonops").rglob("*.py")}
    assert "dispatch_tables/matmul/sm_80-108.json" in _tables()
    assert {f"tritonops/{t}" for t in _tables()} <= names
    assert sources | {"tritonops/py.typed"} <= names
    assert {n.partition("/")[0] for n in names if ".dist-info" not in n} == {"tritonops"}


def test_wheel_declares_what_the_run_time_path_needs(dist: Path):
    (wheel,) = dist.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode())
    required = {r.split(";")[0].strip(): r for r in metadata.get_all("Requires-Dist") if "extra ==" not in r}
    assert set(required) == {"torch>=2.8", "cachetools>=5.5", "triton>=3.4", "liger-kernel", "packaging"}
    assert "linux" in required["triton>=3.4"]
    assert "linux" in required["liger-kernel"]
    assert metadata["Requires-Python"] == ">=3.11"
    assert set(metadata.get_all("Provides-Extra")) == {"calibrate", "bench", "test", "dev"}


def test_source_distribution_builds_the_same_wheel(dist: Path, tmp_path: Path):
    (source,) = dist.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.iterdir()
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel"], cwd=unpacked, check=True, capture_output=True
    )
    (wheel,), (rebuilt,) = dist.glob("*.whl"), (unpacked / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as a, zipfile.ZipFile(rebuilt) as b:
        assert {i.filename: i.CRC for i in a.infolist()} == {i.filename: i.CRC for i in b.infolist()}


def test_a_table_loads_from_the_installed_wheel(dist: Path, tmp_path: Path):
    (wheel,) = dist.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = """
import torch, tritonops
e = tritonops.explain("matmul", (4096, 256), (256, 4096), dtype=torch.float16, device="sm_80-108")
print(tritonops.__file__); print(e.table)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert [line.startswith(str(tmp_path)) for line in done.stdout.splitlines()] == [True, True]
