"""The table that is written: valid, reproducible, only what is used, losers given to the vendor."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from learn_cases import FACTS, SPEC, between, grid, leaves, measured, raw_of, shuffled, speeds, synthetic
from tritonops.calibrate import raw as raw_file
from tritonops.calibrate.emit import emit
from tritonops.calibrate.learn import learn
from tritonops.calibrate.raw import Raw
from tritonops.calibrate.verify import verify
from tritonops.device import named_device
from tritonops.dispatch import table
from tritonops.dispatch.problem import Problem
from tritonops.dispatch.select import ranked_by_table
from tritonops.dispatch.store import Loaded
from tritonops.dispatch.variant import VENDOR

SCHEMA = Path(__file__).parents[2] / "dispatch_tables" / "schema.json"
SHA = hashlib.sha256(b"raw").hexdigest()


def emitted(raw: Raw) -> bytes:
    learned = learn(raw, SPEC)
    return emit(raw, learned, verify(raw, learned, SPEC), "toy-sm_90-132.jsonl.gz", SHA)


def parsed(data: bytes) -> table.Table:
    features = {*SPEC.dims, *SPEC.feature_names}
    return table.parse(data, "emitted", op=SPEC.name, features=features, known=set(SPEC.variants()))


@pytest.mark.parametrize("kind", ["learned", "refused", "cross-validated"])
def test_valid_by_parser_and_schema_and_in_the_one_textual_form(kind: str) -> None:
    rows = [measured(m, n, speeds(m, n), dtype=d) for d in ("float16", "float32") for m, n in grid()]
    bad = [measured(100, 600, {"small/a": 0.7, "twin/a": 0.7}, heldout=True)]
    data = emitted({"learned": synthetic(), "refused": Raw(synthetic().header, (*synthetic().measured, *bad)),
                    "cross-validated": raw_of(rows)}[kind])  # fmt: skip
    if kind != "learned":
        assert f'"{kind}'.encode() in data
    made = parsed(data)
    assert (made.arch, made.sms, made.names) == ("sm_90", 132, ("NVIDIA Test",))
    assert table.dump(json.loads(data)) == data
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text())).validate(json.loads(data))


def test_provenance_device_and_versions_are_those_of_the_header() -> None:
    raw = synthetic()
    value = json.loads(emitted(raw))
    assert value["provenance"] == {"kind": "measured", "raw": "raw/toy-sm_90-132.jsonl.gz", "sha256": SHA}
    assert value["device"] == FACTS and value["made_with"] == raw.header["made_with"]
    assert value["default"] == [VENDOR]


def test_only_what_a_leaf_names_is_listed() -> None:
    value = json.loads(emitted(synthetic()))
    used = {v for s in value["sections"] for leaf in leaves(s["tree"]) for v in leaf["use"]} - {VENDOR}
    assert set(value["variants"]) == used == {*value["variants"]}
    assert set(value["kernels"]) == {v.partition("/")[0] for v in used}
    nothing = json.loads(emitted(raw_of([measured(m, n, {}) for m, n in grid()])))
    assert nothing["variants"] == nothing["kernels"] == {}


def test_sections_are_in_the_order_of_their_keys_and_carry_their_evidence() -> None:
    rows = [measured(m, n, speeds(m, n), dtype=d) for m, n in grid() for d in ("float32", "bfloat16")]
    value = json.loads(emitted(raw_of([*rows, measured(100, 700, speeds(100, 700), heldout=True)])))
    assert [(s["when"]["dtype"], s["when"]["mode"]) for s in value["sections"]] == [
        ("bfloat16", "eager"), ("bfloat16", "graph"), ("float32", "eager"), ("float32", "graph")
    ]  # fmt: skip
    for s in value["sections"]:
        assert s["evidence"]["shapes"] == 36 == sum(leaf["n"] for leaf in leaves(s["tree"]))
        assert {"shapes", "geomean_oracle", "worst_oracle", "geomean_vendor", "worst_vendor", "noise"} <= set(
            s["evidence"]["heldout"]
        )
    assert value["sections"][1]["evidence"]["heldout"]["shapes"] == 1


def test_what_all_rows_have_in_common_is_on_record() -> None:
    rows = [measured(m, n, speeds(m, n), traits={"bias": False, "rows": m}) for m, n in grid()]
    assert json.loads(emitted(raw_of(rows)))["sections"][0]["evidence"]["traits"] == {"bias": False}


def test_a_leaf_that_loses_on_held_out_shapes_is_the_vendors_and_the_others_stay() -> None:
    rows = [measured(m, n, speeds(m, n)) for m, n in grid()]
    held = [measured(m, 512, {"small/a": 0.7, "twin/a": 0.7}, heldout=True) for m in (40, 100)]
    graph = json.loads(emitted(raw_of([*rows, *held])))["sections"][1]
    first = {leaf["use"][0]: leaf for leaf in leaves(graph["tree"])}
    assert first.keys() == {VENDOR, "wide/a"} and len(first[VENDOR]["use"]) > 1
    assert sum(leaf["n"] for leaf in leaves(graph["tree"])) == 36
    scored = graph["evidence"]["heldout"]
    assert scored["refused"].startswith(("0.69", "0.70", "geomean 0.69", "geomean 0.70"))
    assert scored["geomean_vendor"] < 1  # of what was refused
    assert scored["served"]["geomean_vendor"] == scored["served"]["worst_vendor"] == 1


def test_a_whole_section_that_loses_is_one_leaf() -> None:
    rows = [measured(m, n, {"small/a": 1.3}) for m, n in grid()]
    held = [measured(m, 600, {"small/a": 0.7}, heldout=True) for m in (40, 100)]
    tree = json.loads(emitted(raw_of([*rows, *held])))["sections"][1]["tree"]
    assert tree["use"][0] == VENDOR and tree["n"] == 36 and "gain" not in tree


def test_run_time_chooses_by_the_table_what_was_learned() -> None:
    loaded = Loaded(parsed(emitted(synthetic())))
    for mode in ("graph", "eager"):
        for (m, n), want in (((64, 512), {"small/a", "twin/a"}), ((4096, 512), {VENDOR}), ((4096, 8192), {"wide/a"}),
                             ((4096, 16385), {VENDOR})):  # fmt: skip
            problem = Problem(SPEC.name, {"M": m, "N": n}, "bfloat16", mode=mode)
            assert ranked_by_table(SPEC, problem, named_device("sm_90-132"), loaded).ids[0] in want, (m, n)


@pytest.mark.parametrize("seed", range(3))
def test_the_same_bytes_whatever_the_order_of_rows_and_candidates(seed: int) -> None:
    raw = synthetic(0.05)
    # Through the file's form first: it keeps 4 digits of a time.
    assert emitted(shuffled(raw, seed)) == emitted(shuffled(raw, seed + 10))


def test_a_refusal_has_the_same_bytes_in_any_order() -> None:
    """It names a case, whose sizes the file may hold in another order."""
    rows = [measured(m, n, speeds(m, n)) for m, n in grid()]
    bad = measured(100, 600, {"small/a": 0.7, "twin/a": 0.7}, heldout=True)
    good = [measured(m, n, speeds(m, n), heldout=True) for m, n in between(20)]
    first = emitted(raw_of([*rows, *good, bad]))
    assert b"of torch's speed on learned_toy M=100 N=600" in first
    turned = {"N": 600, "M": 100}
    case = dataclasses.replace(bad.case, problem=dataclasses.replace(bad.case.problem, dims=turned))
    assert emitted(raw_of([dataclasses.replace(bad, case=case), *reversed(good), *rows])) == first


_PROGRAM = """
import hashlib, sys
from learn_cases import shuffled, synthetic
from test_calibrate_emit import emitted
print(hashlib.sha256(emitted(shuffled(synthetic(0.05), int(sys.argv[1])))).hexdigest())
"""


def test_the_same_bytes_in_every_process() -> None:
    folder = Path(__file__).parent
    path = os.pathsep.join(map(str, (folder, folder.parent, folder.parents[1])))
    digests = [
        subprocess.run(
            [sys.executable, "-c", _PROGRAM, seed], env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path},
            capture_output=True, check=True, text=True, timeout=120,
        ).stdout.strip()
        for seed in ("1", "20")
    ]  # fmt: skip
    assert digests == [hashlib.sha256(emitted(shuffled(synthetic(0.05), 3))).hexdigest()] * 2


def test_the_same_bytes_from_the_file_plain_and_packed(tmp_path: Path) -> None:
    raw = synthetic(0.03)
    lines = b"".join(raw_file.encode(row) for row in (raw.header, *(m.to_json() for m in raw.measured)))
    (tmp_path / "a.jsonl").write_bytes(lines)
    (tmp_path / "a.jsonl.gz").write_bytes(raw_file.pack(lines))
    plain, packed = (emitted(raw_file.read(tmp_path / name)) for name in ("a.jsonl", "a.jsonl.gz"))
    assert plain == packed and parsed(plain).sections


def test_floats_have_four_digits_at_most() -> None:
    def numbers(value: Any) -> list[float]:
        if isinstance(value, dict):
            return [n for v in value.values() for n in numbers(v)]
        if isinstance(value, list):
            return [n for v in value for n in numbers(v)]
        return [value] if isinstance(value, float) else []

    sections = json.loads(emitted(synthetic(0.03)))["sections"]
    found = numbers(sections)
    assert len(found) > 10 and all(n == float(f"{n:.4g}") for n in found)


def test_an_op_without_rows_gives_a_table_without_sections() -> None:
    made = parsed(emitted(raw_of([])))
    assert made.sections == () and made.default == (VENDOR,)
