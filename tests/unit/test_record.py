"""record(): which file it writes, and when it refuses."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import tritonops
from dispatch_cases import cuda, leaf, make_table, put, section
from tritonops.device import CPU
from tritonops.dispatch import memo, record


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_distinct_problem_with_its_count_most_frequent_first(toy, tmp_path) -> None:
    path = tmp_path / "problems.jsonl"
    toy(CPU, 5)  # before: not recorded, but remembered
    with tritonops.record(path) as recorder:
        for m in (5, 7, 5, 5, 7, 9):
            toy(CPU, m, dtype="float16", layout="nt", mode="graph", traits={"out": "float32", "wide": False})
        toy(CPU, 5)
        assert not path.exists()
        assert isinstance(recorder, record.Recorder)
    toy(CPU, 5)
    common = {
        "op": "toy",
        "N": 64,
        "dtype": "float16",
        "layout": "nt",
        "aligned": True,
        "policy": "fast",
        "mode": "graph",
    }
    common["traits"] = {"out": "float32", "wide": False}
    plain = {"op": "toy", "M": 5, "N": 64, "dtype": "float32", "layout": "", "aligned": True, "policy": "fast"}
    plain |= {"mode": "eager", "traits": {}, "count": 1}
    got = rows(path)
    assert got == [
        common | {"M": 5, "count": 3}, common | {"M": 7, "count": 2}, common | {"M": 9, "count": 1}, plain
    ]  # fmt: skip
    assert list(got[0]) == [
        "op", "M", "N", "dtype", "layout", "aligned", "policy", "mode", "traits", "count"
    ]  # fmt: skip
    assert path.read_bytes().endswith(b"\n") and path.read_bytes().isascii()
    assert os.listdir(tmp_path) == ["problems.jsonl"]


def test_the_problems_of_real_ops_and_their_backwards(tmp_path) -> None:
    path = tmp_path / "problems.jsonl"
    x, w = torch.randn(6, 8, requires_grad=True), torch.randn(8, 4, requires_grad=True)
    with tritonops.record(path):
        for _ in range(2):
            tritonops.matmul(x, w).sum().backward()
    got = rows(path)
    assert sorted((r["M"], r["N"], r["K"], r["layout"][1], r["count"]) for r in got) == [
        (6, 4, 8, "n", 2), (6, 8, 4, "t", 2), (8, 4, 6, "x", 2)
    ]  # fmt: skip
    assert {r["op"] for r in got} == {"matmul"} and all(r["traits"]["out"] == "float32" for r in got)


def test_the_policy_is_recorded_and_rows_of_one_problem_are_one(toy, tmp_path) -> None:
    path = tmp_path / "p"
    with tritonops.record(path):
        with tritonops.use(policy="deterministic"):
            toy(CPU)
        with tritonops.use(exclude="one"):
            toy(CPU)
        toy(CPU)
    assert [(r["policy"], r["count"]) for r in rows(path)] == [("fast", 2), ("deterministic", 1)]


def test_a_variant_that_fails_is_one_call(toy, tables, tmp_path) -> None:
    put(tables, make_table(section(leaf("one/a", "two/a"))))
    toy.failing["one/a"] = RuntimeError("no")
    with tritonops.record(tmp_path / "p"), pytest.warns(tritonops.TritonOpsWarning):
        toy(cuda())
    assert [r["count"] for r in rows(tmp_path / "p")] == [1]


def test_nothing_recorded_is_an_empty_file(tmp_path) -> None:
    with tritonops.record(str(tmp_path / "p")):
        pass
    assert (tmp_path / "p").read_bytes() == b""


def test_an_old_file_is_replaced_in_one_step_when_the_block_ends(toy, tmp_path) -> None:
    path = tmp_path / "p"
    path.write_text("old")
    inode = path.stat().st_ino
    with tritonops.record(path):
        toy(CPU)
        assert path.read_text() == "old"
    assert path.stat().st_ino != inode and len(rows(path)) == 1


def test_an_error_in_the_block_still_writes_what_was_seen(toy, tmp_path) -> None:
    with pytest.raises(KeyError, match="mine"), tritonops.record(tmp_path / "p"):
        toy(CPU)
        raise KeyError("mine")
    assert len(rows(tmp_path / "p")) == 1 and record.active is None


def test_a_disk_that_is_full_at_the_end_is_an_error_and_ends_the_recording(toy, tmp_path, monkeypatch) -> None:
    path = tmp_path / "p"
    path.write_text("old")

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"), tritonops.record(path):
        toy(CPU)
        monkeypatch.setattr(os, "fsync", full)
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["p"] and record.active is None


def _missing(tmp_path: Path) -> Path:
    return tmp_path / "none" / "p"


def _directory(tmp_path: Path) -> Path:
    return tmp_path


def _under_a_file(tmp_path: Path) -> Path:
    (tmp_path / "f").touch()
    return tmp_path / "f" / "p"


def _fifo(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


@pytest.mark.parametrize("make", [_missing, _directory, _under_a_file, _fifo])
def test_a_path_that_cannot_be_written_is_refused_before_the_block_runs(toy, tmp_path, make) -> None:
    path = make(tmp_path)
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(OSError, match=r"record\(\): path: .* cannot be written"), tritonops.record(path):
        pytest.fail("the block ran")
    assert record.active is None and sorted(os.listdir(tmp_path)) == before
    with tritonops.record(tmp_path / "good"):
        toy(CPU)
    assert len(rows(tmp_path / "good")) == 1


def test_a_directory_without_permission_is_refused(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(OSError, match="cannot be written"), tritonops.record(tmp_path / "p"):
        pass


def test_nested_and_second_recordings_are_refused_and_the_first_goes_on(toy, tmp_path) -> None:
    errors = []

    def second() -> None:
        try:
            with tritonops.record(tmp_path / "second"):
                pass
        except RuntimeError as error:
            errors.append(str(error))

    with tritonops.record(tmp_path / "first"):
        second()
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()
        toy(CPU)
    assert errors == ["record(): another record() is active; problems are recorded process-wide"] * 2
    assert os.listdir(tmp_path) == ["first"] and len(rows(tmp_path / "first")) == 1


def test_calls_of_other_threads_are_counted_exactly(toy, tmp_path) -> None:
    def work() -> None:
        for _ in range(300):
            memo.serve(toy.spec, "key", CPU, toy.problem, (torch.ones(1),))

    with tritonops.record(tmp_path / "p"):
        threads = [threading.Thread(target=work) for _ in range(8)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(30)
    assert [r["count"] for r in rows(tmp_path / "p")] == [2400]


def test_a_call_that_runs_while_a_recording_ends_is_no_error(toy, monkeypatch) -> None:
    looks = iter([record.Recorder(), None])
    monkeypatch.setattr(memo, "record", type("Ending", (), {"active": property(lambda self: next(looks))})())
    assert toy(CPU) == "vendor"


def test_results_are_the_same_while_recording(tmp_path) -> None:
    x = torch.randn(4, 8)
    with tritonops.record(tmp_path / "p"):
        assert torch.equal(tritonops.layer_norm(x), F.layer_norm(x, (8,)))
