"""The raw file: what is written is read, a torn line is left out, anything else that is wrong is named."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest
import torch

from tritonops.calibrate import raw
from tritonops.calibrate.case import Case
from tritonops.calibrate.raw import Appender, Measured, Paths, RawError
from tritonops.device import named_device
from tritonops.dispatch.problem import Problem
from tritonops.dispatch.variant import REGISTRY

HEADER = {
    "kind": "header", "schema": 1, "op": "matmul", "device": {"arch": "sm_90", "sms": 132, "names": ["NVIDIA H200"]},
    "made_with": {}, "kernels": {}, "variants": {}, "dropped": {}, "gate": {}, "method": {},
}  # fmt: skip


def case(op: str = "matmul", **more) -> Case:
    dims = {"batch": 1, "M": 4, "N": 8, "K": 16}
    return Case(Problem(op, dims, "bfloat16", "nt", traits={"bias": False, "out": "bfloat16"}), **more)


MEASURED = Measured(
    case(source="llama up", heldout=True, weight=3.0),
    {"vendor": (0.01234, 0.01235), "tiled/a": (0.02,)},
    {"vendor": (0.03,)},
    {"tiled/b": "raised: RuntimeError: no"},
    24,
    1,
    1980,
    512,
    48,
)  # fmt: skip


def write(path: Path, *rows: dict) -> Path:
    with Appender(path) as out:
        for row in rows:
            out.add(row)
    return path


def test_what_is_written_is_read(tmp_path) -> None:
    path = write(tmp_path / "deep" / "er" / "raw.jsonl", HEADER, MEASURED.to_json())
    got = raw.read(path)
    assert got.header == HEADER and got.measured == (MEASURED,) and got.op == "matmul"
    packed = path.with_suffix(".jsonl.gz")
    packed.write_bytes(raw.pack(path.read_bytes()))
    assert raw.read(packed) == got and raw.pack(path.read_bytes()) == packed.read_bytes()


def test_times_have_four_digits() -> None:
    row = Measured(case(), {"vendor": (0.0123456, 123.456)}).to_json()
    assert row["graph"] == {"vendor": [0.01235, 123.5]}


@pytest.mark.parametrize("cut", [1, 5, 100])
def test_a_torn_last_line_is_left_out_and_written_over(tmp_path, cut: int) -> None:
    path = write(tmp_path / "raw.jsonl", HEADER, MEASURED.to_json())
    path.write_bytes(path.read_bytes()[:-cut])
    assert raw.read(path).measured == ()
    write(path, MEASURED.to_json())
    assert raw.read(path).measured == (MEASURED,)


def test_the_last_row_of_a_case_counts(tmp_path) -> None:
    again = Measured(MEASURED.case, {"vendor": (1.0,)})
    path = write(tmp_path / "raw.jsonl", HEADER, MEASURED.to_json(), again.to_json())
    assert raw.read(path).measured == (again,)


ROW = MEASURED.to_json()


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "empty"),
        ([ROW], "line 1: no header first"),
        ([HEADER, HEADER], "line 2: a second header"),
        ([HEADER | {"schema": 2}], "schema 2, this version reads 1"),
        ([HEADER, 3], "line 2 is not a row"),
        ([HEADER, {"kind": "case"}], "line 2: KeyError"),
        ([HEADER, ROW | {"graph": 5}], "line 2: TypeError: graph"),
        ([HEADER, ROW | {"dims": {"M": 2.5}}], "line 2: TypeError: dims.M"),
        ([HEADER, ROW | {"dims": {"M": -1}}], "line 2: TypeError: dims.M"),
        ([HEADER, ROW | {"heldout": 1}], "line 2: TypeError: heldout"),
        ([HEADER, ROW | {"calls": True}], "line 2: TypeError: calls"),
        ([HEADER | {"op": None}], "line 1: op is"),
        ([HEADER | {"gate": []}], "line 1: gate is"),
        ([HEADER | {"gate": {"tiled/a": {}}}], "line 1: gate is"),
        ([HEADER | {"variants": {"tiled/a": 3}}], "line 1: variants is"),
        ([HEADER | {"device": {"arch": "sm_90", "sms": "132", "names": ["x"]}}], "line 1: device is"),
        ([HEADER | {"device": {"arch": "sm_90", "sms": 132, "names": []}}], "line 1: device is"),
        ([HEADER, ROW | {"graph": {"vendor": ["fast"]}}], "line 2: ValueError"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, lines: list, message: str) -> None:
    path = tmp_path / "raw.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(RawError, match=message) as caught:
        raw.read(path)
    assert str(path) in str(caught.value)


def test_text_and_half_a_gzip_file_are_refused(tmp_path) -> None:
    path = tmp_path / "raw.jsonl.gz"
    for data in (b"text", gzip.compress(b"x" * 1000)[:20], b""):
        path.write_bytes(data)
        with pytest.raises(RawError):
            raw.read(path)


def test_a_pipe_is_refused_and_does_not_hang(tmp_path) -> None:
    path = tmp_path / "raw.jsonl"
    os.mkfifo(path)
    with pytest.raises(RawError, match="not a regular file"):
        raw.read(path)


def test_a_case_is_told_apart_by_problem_and_ids_and_by_nothing_else() -> None:
    assert case(source="a").key == case(source="b", heldout=True, weight=2.0).key
    assert case(ids="uniform").key != case(ids="zipf1.0").key
    row = json.loads(json.dumps(MEASURED.case.to_json()))
    assert Case.from_json("matmul", row) == MEASURED.case


def test_a_case_has_no_mode_policy_or_flags_of_its_own() -> None:
    problem = Problem("matmul", {"M": 1}, "float16", mode="eager", policy="deterministic", flags=5)
    assert Case(problem).problem == Problem("matmul", {"M": 1}, "float16", mode="graph")


def test_paths(tmp_path) -> None:
    paths = Paths(tmp_path, "matmul", named_device("sm_90-132"))
    assert paths.table == tmp_path / "matmul" / "sm_90-132.json"
    assert paths.packed == tmp_path / "matmul" / "raw" / "matmul-sm_90-132.jsonl.gz"
    assert paths.source() == paths.packed
    write(paths.raw, HEADER)
    assert paths.source() == paths.raw


@pytest.mark.parametrize("op", sorted(REGISTRY))
def test_samples_on_meta_make_the_problem(op: str) -> None:
    spec = REGISTRY[op]
    shapes = {
        "matmul": ((64, 32), (32, 48)),
        "embedding": ((64,), (50, 16)),
        "embedding_backward": ((64,), (50, 16)),
    }.get(op, ((64, 32), (32,)))
    planned = Case(spec.describe(*shapes, dtype=torch.float32), ids=spec.ids[-1])
    tensors = [t for t in planned.sample(spec, "meta") if isinstance(t, torch.Tensor)]
    assert tensors and all(t.is_meta for t in tensors)
    real = [t for t in planned.sample(spec, "cpu") if isinstance(t, torch.Tensor)]
    assert [t.shape for t in real] == [t.shape for t in tensors]
