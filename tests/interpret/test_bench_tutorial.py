"""The benchmark's tutorial-style kernels, and forced variants, are right."""

from __future__ import annotations

import pytest

from bench_cases import FakeMachine, one
from benchmarks import bench
from benchmarks.providers import make

ENTRIES = [one("48x40x24"), one("48x40x24", direction="bwd"), one("24x96", "layer_norm"), one("24x96", "rms_norm"),
           one("24x96", "layer_norm", "bwd"), one("24x96", "rms_norm", "bwd"), one("24x40x12", "embedding"),
           one("24x40x12", "embedding", "bwd")]  # fmt: skip
FORCED = {"matmul": "tiled/32x64x32-g8-w4-s3", "layer_norm": "rows", "rms_norm": "rows", "embedding": "gather"}


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda e: f"{e.case.problem.op} {e.case.problem.layout}".strip())
def test_right_in_the_interpreter(entry, clean_dispatch) -> None:
    wish = "atomic" if entry.case.problem.op == "embedding_backward" else FORCED[entry.op]
    found = bench.measure(entry, [make("torch"), make("tutorial"), make(f"ours:{wish}")], FakeMachine(), "graph")
    assert [(r["failed"], r["ms"]) for r in found] == [(None, 1.0)] * 3
    assert found[1]["variant"] and found[2]["variant"].startswith(wish)
