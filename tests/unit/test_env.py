"""Every environment variable, and that they are read when asked."""

from __future__ import annotations

import os
import pathlib
import re
import tempfile
from pathlib import Path

import pytest

from tritonops import _env

NAMES = ["TRITONOPS_TABLE_DIR", "TRITONOPS_CACHE_DIR", "TRITONOPS_LOG", "TRITON_INTERPRET", "XDG_CACHE_HOME"]


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("value", "want"),
    [(None, False), ("", False), ("0", False), ("false", False), ("off", False), ("2", False), ("1", True),
     ("true", True), ("TRUE", True), ("on", True), ("yes", True), ("y", True)],
)  # fmt: skip
def test_interpret_is_tritons_switch_read_as_triton_reads_it(monkeypatch, value, want) -> None:
    if value is not None:
        monkeypatch.setenv("TRITON_INTERPRET", value)
    assert _env.interpret() is want
    knobs = pytest.importorskip("triton").knobs
    assert knobs.runtime.interpret is want


@pytest.mark.parametrize(
    ("value", "want"), [(None, False), ("", False), ("decisions", True), ("x,decisions", True), ("decisionsx", False)]
)
def test_log_decisions(monkeypatch, value, want) -> None:
    if value is not None:
        monkeypatch.setenv("TRITONOPS_LOG", value)
    assert _env.log_decisions() is want


def test_table_dir(monkeypatch) -> None:
    assert _env.table_dir() is None
    monkeypatch.setenv("TRITONOPS_TABLE_DIR", "")
    assert _env.table_dir() is None
    monkeypatch.setenv("TRITONOPS_TABLE_DIR", "/x/y")
    assert _env.table_dir() == Path("/x/y")


def test_cache_dir_is_the_variable_then_xdg_then_home(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert _env.cache_dir() == tmp_path / ".cache" / "tritonops"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/cache")  # to be ignored, says the specification
    assert _env.cache_dir() == tmp_path / ".cache" / "tritonops"
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert _env.cache_dir() == Path("/xdg/tritonops")
    monkeypatch.setenv("TRITONOPS_CACHE_DIR", "mine")
    assert _env.cache_dir() == Path("mine")
    monkeypatch.setenv("TRITONOPS_CACHE_DIR", "")
    assert _env.cache_dir() == Path("/xdg/tritonops")


def test_cache_dir_without_a_home_is_temporary_and_the_users_own(monkeypatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(pathlib.Path, "home", homeless)
    assert _env.cache_dir() == Path(tempfile.gettempdir()) / f"tritonops-{os.getuid()}"


def test_no_directory_is_made_by_asking(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    _env.cache_dir()
    monkeypatch.setenv("TRITONOPS_TABLE_DIR", str(tmp_path / "t"))
    _env.table_dir()
    assert list(tmp_path.iterdir()) == []


def test_every_variable_is_listed_and_read_here_and_nowhere_else() -> None:
    package = Path(_env.__file__).parent
    assert set(_env.VARIABLES) == {n for n in NAMES if n != "XDG_CACHE_HOME"}
    read = {}
    for path in package.rglob("*.py"):
        for name in re.findall(r"environ(?:\.get)?[\[(]\s*\"(\w+)\"", path.read_text(encoding="utf-8")):
            read.setdefault(name, set()).add(path.relative_to(package).parts[0])
    assert {n: w for n, w in read.items() if n in NAMES} == {n: {"_env.py"} for n in NAMES}
    assert {n for n in read if n.startswith("TRITONOPS_")} <= set(_env.VARIABLES)
