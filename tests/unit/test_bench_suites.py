"""Suites and lists: what they hold, in which dtype and layout, and what is refused."""

from __future__ import annotations

import json

import pytest

from benchmarks import entries, suites
from benchmarks.entries import SuiteError, from_file, listed, of_suite
from benchmarks.providers.base import shape_key
from benchmarks.providers.compiled import NAMED
from benchmarks.providers.quack import Quack
from tritonops.calibrate.shapes import load


def sizes(found):
    return [tuple(e.sizes.values()) for e in found]


def test_the_tutorial_sweeps_are_those_of_the_shape_lists() -> None:
    for name, published, m in (("tutorial09-4k", "persistent-tutorial 4096", 4096),
                               ("tutorial09-8k", "persistent-tutorial 8192", 8192)):  # fmt: skip
        found = of_suite(name)
        sweep = next(s for s in load().sweeps if s.name == published)
        assert sizes(found) == list(sweep.rows) and {e.sizes["M"] for e in found} == {m}
        assert {(e.direction, e.case.problem.dtype, e.case.problem.layout) for e in found} == {("fwd", "float16", "nt")}


def test_the_tutorial_takes_a_range_of_k_with_both_ends() -> None:
    found = of_suite("tutorial09-8k", k=range(512, 2049, 512))
    assert sizes(found) == [(8192, 8192, k) for k in (512, 1024, 1536, 2048)]
    assert [e.sizes["K"] for e in of_suite("tutorial09-4k", k=(128,))] == [128]


def test_fp8_rows_say_that_it_is_not_in_this_version() -> None:
    found = of_suite("tutorial09-8k", dtypes=("float8_e4m3fn",), k=(512,))
    assert [(e.case.problem.dtype, e.refused) for e in found] == [("float8_e4m3fn", "fp8 is not in this version")]
    assert of_suite("tutorial09-8k", k=(512,))[0].refused == ""


def test_tritonbench_layer_norm_has_both_passes_of_thirty_widths() -> None:
    found = of_suite("tritonbench-layer-norm")
    for direction in ("fwd", "bwd"):
        rows = [e for e in found if e.direction == direction]
        assert sizes(rows) == [(4096, n) for n in range(1024, 15873, 512)]
    assert {e.case.problem.op for e in found} == {"layer_norm", "layer_norm_backward"}
    rms = of_suite("tritonbench-layer-norm", ("rms_norm",), ("bwd",))
    assert {e.case.problem.op for e in rms} == {"rms_norm_backward"} and len(rms) == 30


def test_tritonbench_embedding_and_gemm() -> None:
    found = of_suite("tritonbench-embedding", directions=("bwd",))
    assert sizes(found) == [(16384, d, 1 << v) for d in (768, 4096) for v in range(10, 18)]
    assert {e.case.ids for e in found} == {"uniform"}
    gemm = of_suite("tritonbench-gemm")
    assert {e.case.problem.layout for e in gemm} == {"nn", "nt"}
    assert all(e.case.problem.layout == "nt" for e in gemm if e.sizes["M"] >= 1 << 20)
    assert (256, 256, 256) in sizes(gemm) and (16, 16, 32768) in sizes(gemm)


def test_llm_is_of_held_out_models_alone_and_has_gradients() -> None:
    found = of_suite("llm")
    assert all(e.case.heldout for e in found)
    learned = [m.name for m in load().models if not m.heldout]
    assert not [e for e in found if e.case.source.split(" ")[0] in learned]
    matmul = {(e.direction, e.case.problem.layout) for e in found if e.op == "matmul"}
    assert matmul == {("fwd", "nt"), ("bwd", "nn"), ("bwd", "tn")}
    assert {(e.op, e.direction) for e in found} == {(op, p) for op in suites.OPS for p in suites.PASSES}
    assert {e.case.ids for e in found if e.op == "embedding" and e.direction == "bwd"} == {"uniform", "zipf1.0"}
    assert {e.sizes["M"] for e in found if e.op == "rms_norm"} == {320, 3072}
    # mistral-7b: down [4096, 14336], its forward and both gradients.
    assert {(3072, 4096, 14336), (3072, 14336, 4096), (4096, 14336, 3072)} <= set(sizes(found))


def test_misaligned_decode_cliffs() -> None:
    found = of_suite("misaligned")
    assert (4100, 4100, 4104) in sizes(found) and (4096, 50257, 768) in sizes(found)
    assert {e.case.problem.layout for e in found if e.direction == "bwd"} == {"nn", "tn"}
    assert sum(not e.case.problem.aligned for e in found) > 0.7 * len(found)
    decode = of_suite("decode", ("matmul",))
    assert {e.sizes["M"] for e in decode} == set(suites.DECODE_ROWS) and {e.direction for e in decode} == {"fwd"}
    cliffs = of_suite("cliffs")
    assert {(4096, 4608), (4096, 8704), (8192, 32768)} <= set(sizes(cliffs))
    assert all(e.direction == "fwd" for e in cliffs if e.op == "matmul")
    assert len(of_suite("overhead")) == 7 and set(sizes(of_suite("overhead"))) == {(64,) * 3, (64,) * 2}


@pytest.mark.parametrize("name", suites.SUITES)
def test_no_suite_has_an_entry_twice_and_every_one_is_a_problem(name) -> None:
    found = of_suite(name)
    assert len({json.dumps(e.facts()) for e in found}) == len(found) > 0
    assert {e.suite for e in found} == {name}


def test_named_shapes_are_in_the_suites_and_few() -> None:
    """torch.compile's max-autotune and Quack take 10 to 60 s a shape."""
    known = {shape_key(e.case.problem) for name in suites.SUITES for e in of_suite(name)}
    known |= {shape_key(e.case.problem) for name in ("tritonbench-layer-norm", "cliffs")
              for e in of_suite(name, ("rms_norm",))}  # fmt: skip
    assert len(NAMED) == 12 and known >= NAMED
    assert Quack.named is not None and known >= Quack.named
    for op in ("matmul", "layer_norm", "rms_norm"):
        assert 1 <= sum(n.startswith((f"{op} ", f"{op}_backward ")) for n in Quack.named) <= 20


def test_shapes_written_out() -> None:
    found = listed("4096x4096x512, 64x32x16", ("matmul",), (), ())
    assert sizes(found) == [(4096, 4096, 512), (64, 32, 16)]
    assert {(e.suite, e.case.problem.dtype, e.case.problem.layout) for e in found} == {("own", "bfloat16", "nt")}
    back = listed("64x32x16", ("matmul",), ("bwd",), ("float16",), "nn")
    assert [(tuple(e.sizes.values()), e.case.problem.layout) for e in back] == [((64, 16, 32), "nn"),
                                                                               ((32, 16, 64), "tn")]  # fmt: skip
    norms = listed("8x64", ("layer_norm", "rms_norm"), ("fwd", "bwd"), ("float32", "bfloat16"))
    assert len(norms) == 8
    ids = [(e.direction, e.case.ids) for e in listed("8x16x32", ("embedding",), ("fwd", "bwd"), ())]
    assert ids == [("fwd", "uniform"), ("bwd", "uniform"), ("bwd", "zipf1.0")]


@pytest.mark.parametrize("text", ["64x64", "64", "64x64x64x64", "axbxc", "0x64x64", "64x64x", "", "64*64*64",
                                  f"{2**31 + 1}x1x1", "-64x64x64", "64x64x64,,64x64x64"])  # fmt: skip
def test_a_shape_that_is_none_of_the_op_is_refused(text) -> None:
    with pytest.raises(SuiteError, match="matmul, which has MxNxK"):
        listed(text, ("matmul",), (), ())


def test_what_a_suite_does_not_have_is_refused() -> None:
    with pytest.raises(SuiteError, match="suite tritonbench-embedding has no matmul, only embedding"):
        of_suite("tritonbench-embedding", ("matmul",))
    with pytest.raises(SuiteError, match="no suite 'llms'; suites: tutorial09-4k"):
        of_suite("llms")
    with pytest.raises(SuiteError, match="suite decode has no bwd rows"):
        of_suite("decode", directions=("bwd",))
    with pytest.raises(SuiteError, match="need --op"):
        listed("64x64", (), (), ())


def test_a_file_is_read_as_calibrate_reads_it(tmp_path) -> None:
    path = tmp_path / "mine.json"
    rows = [{"op": "matmul", "M": 64, "N": 32, "K": 16}, {"op": "layer_norm_backward", "M": 8, "N": 64},
            {"op": "embedding_backward", "T": 8, "D": 16, "V": 32, "dtype": "float32"}]  # fmt: skip
    path.write_text(json.dumps(rows))
    found = from_file(path)
    assert [(e.op, e.direction, e.case.own) for e in found] == [
        ("matmul", "fwd", True), ("layer_norm", "bwd", True), ("embedding", "bwd", True), ("embedding", "bwd", True)
    ]  # fmt: skip
    assert [e.op for e in from_file(path, ("layer_norm",))] == ["layer_norm"]
    with pytest.raises(SuiteError, match="nothing in it is of rms_norm"):
        from_file(path, ("rms_norm",))
    path.write_text('[{"op": "matmul", "M": 0, "N": 1, "K": 1}]')
    with pytest.raises(SuiteError, match=r"mine.json: \[0\]: M: expected 1 to"):
        from_file(path)


def test_the_facts_of_an_entry() -> None:
    entry = of_suite("tritonbench-embedding", directions=("bwd",))[0]
    assert entry.facts() == {
        "suite": "tritonbench-embedding", "op": "embedding", "pass": "bwd",
        "shape": {"T": 16384, "D": 768, "V": 1024}, "dtype": "bfloat16", "layout": None, "ids": "uniform",
    }  # fmt: skip
    assert listed("2x3x4", ("matmul",), (), ("tf32",))[0].facts()["dtype"] == "tf32"
    assert entries.listed("2x3x4", ("matmul",), (), ())[0].describe() == "matmul fwd bfloat16 nt M=2 N=3 K=4"
