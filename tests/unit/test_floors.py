"""The house rules that a machine can check."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "tritonops"
SOURCES = sorted(PACKAGE.rglob("*.py"))
TREES = {p: ast.parse(p.read_text(encoding="utf-8")) for p in SOURCES}


def _is_jit(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef) and any(
        ast.unparse(d).partition("(")[0].rpartition(".")[2] == "jit" for d in node.decorator_list
    )


KERNELS = {p: [n for n in t.body if _is_jit(n)] for p, t in TREES.items()}
KERNEL_FILES = [p for p, found in KERNELS.items() if found]
HOST_FILES = [p for p in SOURCES if p not in KERNEL_FILES]


def _id(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


@pytest.mark.skipif(importlib.util.find_spec("importlinter") is None, reason="import-linter is not installed")
def test_imports_point_downward_only(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()", "--no-cache"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"[1-9]\d* kept, 0 broken", done.stdout)


def test_kernel_files_were_found():
    assert len(KERNEL_FILES) >= 5


@pytest.mark.parametrize("path", KERNEL_FILES, ids=_id)
def test_a_kernel_file_imports_only_triton(path: Path):
    helpers = {f".{p.stem}" for p in KERNEL_FILES if p.parent == path.parent}
    imports = {
        "." * n.level + (n.module or "") if isinstance(n, ast.ImportFrom) else a.name
        for n in ast.walk(TREES[path])
        if isinstance(n, ast.Import | ast.ImportFrom)
        for a in n.names
    }
    assert {i for i in imports if i.split(".")[0] not in ("__future__", "triton")} <= helpers


@pytest.mark.parametrize("path", KERNEL_FILES, ids=_id)
def test_a_kernel_file_is_short_and_its_names_fit(path: Path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 200
    # Long names pushed cache paths over the limit of Windows: pytorch/pytorch#187283, triton-lang/triton-windows#3.
    assert max(len(k.name) for k in KERNELS[path]) <= 60


@pytest.mark.parametrize("path", SOURCES, ids=_id)
def test_imports_inside_the_package_are_relative(path: Path):
    names = [
        n.module if isinstance(n, ast.ImportFrom) else n.names[0].name
        for n in ast.walk(TREES[path])
        if isinstance(n, ast.Import) or (isinstance(n, ast.ImportFrom) and n.level == 0)
    ]
    assert [n for n in names if n and n.partition(".")[0] == "tritonops"] == []


@pytest.mark.parametrize("path", SOURCES, ids=_id)
def test_nothing_that_newer_tritons_refuse_or_that_tunes_in_a_call(path: Path):
    code = ast.unparse(TREES[path])
    assert re.findall(r"make_block_ptr|\btl\.advance|triton\.autotune|triton\.heuristics", code) == []


@pytest.mark.parametrize("path", HOST_FILES, ids=_id)
def test_host_functions_are_annotated_and_do_not_assert(path: Path):
    bare = []
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            a = node.args
            given = [*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, (a.vararg, a.kwarg))]
            missing = [x.arg for x in given if x.annotation is None and x.arg not in ("self", "cls")]
            if missing or (node.returns is None and node.name != "__init__"):
                bare.append(f"{node.name}: {missing or 'return'}")
        assert not isinstance(node, ast.Assert), f"line {node.lineno}: raise an error that names the argument"
    assert bare == []


@pytest.mark.parametrize("path", SOURCES, ids=_id)
def test_a_module_does_one_job_in_at_most_400_lines(path: Path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 400


@pytest.mark.parametrize("path", HOST_FILES, ids=_id)
def test_importing_a_host_module_imports_no_optional_package(path: Path):
    if "calibrate" in path.parts or "toolchain" in path.parts:
        pytest.skip("runs as a command, never at import tritonops")
    at_import = [n for n in TREES[path].body if isinstance(n, ast.Import | ast.ImportFrom)]
    names = {(n.module or "") if isinstance(n, ast.ImportFrom) else a.name for n in at_import for a in n.names}
    optional = {"triton", "liger_kernel", "sklearn", "scipy", "pynvml", "tqdm", "matplotlib", "jsonschema", "numpy"}
    assert {n for n in names if n.partition(".")[0] in optional} == set()


def test_table_file_names_are_short_and_portable():
    names = [p.name for p in (ROOT / "dispatch_tables").rglob("*") if p.is_file()]
    assert names
    assert [n for n in names if not re.fullmatch(r"[A-Za-z0-9_.-]{1,60}", n)] == []
