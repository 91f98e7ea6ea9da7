"""What `import tritonops` costs, touches and needs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(code: str, **env: str) -> str:
    path = os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH")) if p)
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path} | env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_adds_less_than_150_ms_to_import_torch():
    # Processor time: the wall time of a machine that runs other tests beside this one says nothing.
    code = "import time, torch; t = time.process_time(); import tritonops; print(time.process_time() - t)"
    run(code)  # writes the byte code
    assert min(float(run(code)) for _ in range(5)) < 0.150


FOOTPRINT = """
import json, sys, torch
before, opened = set(sys.modules), []
sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
import tritonops
files = [f for f in opened if not f.endswith((".py", ".pyc", ".so")) and ".pyc." not in f]
print(json.dumps([sorted(set(sys.modules) - before), files, torch.cuda.is_initialized()]))
"""


def test_touches_no_optional_package_no_data_file_and_no_driver():
    new, files, cuda = json.loads(run(FOOTPRINT))
    roots = {name.partition(".")[0] for name in new}
    assert "tritonops" in roots
    assert roots.isdisjoint(
        {"triton", "liger_kernel", "sklearn", "scipy", "numpy", "jsonschema", "matplotlib", "pynvml"}
    )
    assert [f for f in files if "dispatch_tables" in f or f.endswith((".json", ".jsonl", ".gz"))] == []
    assert cuda is False


VENDOR_ONLY = """
import sys
for missing in {missing}:
    sys.modules[missing] = None  # `import` raises ModuleNotFoundError, find_spec says None
import torch, torch.nn.functional as F, tritonops
torch.manual_seed(0)
x, w, b = torch.randn(5, 7, requires_grad=True), torch.randn(7, requires_grad=True), torch.randn(7, requires_grad=True)
m, table = torch.randn(7, 3, requires_grad=True), torch.randn(9, 7, requires_grad=True)
ids = torch.tensor([1, 8, 1])
pairs = [
    (tritonops.matmul(x, m), torch.matmul(x, m), (x, m)),
    (tritonops.linear(x, m.t()), F.linear(x, m.t()), (x, m)),
    (tritonops.layer_norm(x, w, b), F.layer_norm(x, (7,), w, b), (x, w, b)),
    (tritonops.rms_norm(x, w, 1e-5), F.rms_norm(x, (7,), w, 1e-5), (x, w)),
    (tritonops.embedding(ids, table), F.embedding(ids, table), (table,)),
]
for ours, theirs, leaves in pairs:
    torch.testing.assert_close(ours, theirs)
    g = torch.randn_like(theirs)
    for a, e in zip(torch.autograd.grad(ours, leaves, g), torch.autograd.grad(theirs, leaves, g), strict=True):
        torch.testing.assert_close(a, e)
print(tritonops.explain("matmul", x, m).variant, len(pairs))
"""


@pytest.mark.parametrize("missing", [("triton",), ("liger_kernel",), ("triton", "liger_kernel", "packaging")])
def test_the_vendor_path_needs_neither_triton_nor_liger(missing: tuple[str, ...]):
    assert run(VENDOR_ONLY.format(missing=missing), TRITON_INTERPRET="0").split() == ["vendor", "5"]


def test_the_name_of_an_op_is_the_function_and_its_package_stays_importable():
    code = """
import tritonops
first = tritonops.matmul
from tritonops.matmul import variants
from tritonops.norm import variants as norm_variants
from tritonops.embedding import variants as embedding_variants
assert callable(first) and tritonops.matmul is first, tritonops.matmul
assert all(callable(f) for f in (tritonops.layer_norm, tritonops.rms_norm, tritonops.embedding, tritonops.linear))
print(type(variants).__name__, type(tritonops.embedding).__name__)
"""
    assert run(code).split() == ["module", "function"]


def test_public_names_are_all_there():
    code = (
        "import tritonops; print([n for n in tritonops.__all__ if not hasattr(tritonops, n)], len(tritonops.__all__))"
    )
    missing, count = run(code).rsplit(" ", 1)
    assert missing == "[]"
    assert int(count) >= 10
