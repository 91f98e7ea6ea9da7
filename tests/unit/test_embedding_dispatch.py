"""What a choice of an embedding variant depends on, and the operands that make up a problem."""

from __future__ import annotations

import pytest
import torch

import tritonops
from tritonops import launch
from tritonops.device import INTERPRETER, named_device
from tritonops.dispatch.select import choose, illegal
from tritonops.dispatch.variant import REGISTRY
from tritonops.embedding.op import describe, describe_backward, padding_row

OPS = ("embedding", "embedding_backward")
H200 = named_device("sm_90-132")


def _problem(op: str, tokens: int = 4096, rows: int = 1000, columns: int = 768, padding_idx=None, **more):
    dtype = more.pop("dtype", torch.bfloat16)
    return REGISTRY[op].describe((tokens,), (rows, columns), padding_idx, dtype=dtype, **more)


@pytest.mark.parametrize("op", OPS)
def test_describe_says_what_a_call_has(op: str) -> None:
    weight, indices = torch.randn(9, 12, dtype=torch.float16), torch.zeros(2, 5, dtype=torch.int32)
    problem = REGISTRY[op].describe(indices, weight, -2, scale_grad_by_freq=True)
    assert problem.op == op and problem.dims == {"T": 10, "D": 12, "V": 9} and problem.dtype == "float16"
    assert problem.traits == {"index": "int32", "scale_grad_by_freq": True, "padding": True}
    assert not problem.aligned  # rows of 24 bytes
    assert problem == REGISTRY[op].describe(indices.to("meta"), weight.to("meta"), -2, scale_grad_by_freq=True)


def test_alignment_is_that_of_pointer_rows_and_columns() -> None:
    ids = torch.zeros(3, dtype=torch.int64)
    flat = torch.zeros(4 * 32 + 1, dtype=torch.float32)
    aligned = {
        "rows of 128 bytes": (flat[:128].view(4, 32), True),
        "pointer off by one element": (flat[1:].view(4, 32), False),
        "rows of 30 elements": (flat[:120].view(4, 30), False),
        "every second column": (flat[:128].view(4, 32)[:, ::2], False),
        "one row of 30 elements": (flat[:30].view(1, 30), True),
        "one column, rows of 128 bytes": (flat[:128].view(4, 32)[:, :1], True),
    }
    assert {k: describe(ids, w).aligned for k, (w, _) in aligned.items()} == {k: a for k, (_, a) in aligned.items()}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("columns", [64, 33, 1])
@pytest.mark.parametrize("more", [{}, {"padding_idx": 3}, {"scale_grad_by_freq": True}, {"dtype": torch.float32}])
def test_samples_make_up_their_problem(op: str, columns: int, more: dict) -> None:
    spec = REGISTRY[op]
    problem = _problem(op, 10, 7, columns, **more)
    for device in ("cpu", "meta"):
        rows, indices, *rest = spec.sample(problem, device)
        weight = rows if op == "embedding" else torch.empty(rest[0], rows.shape[-1], dtype=rows.dtype, device="meta")
        padding = rest[-2] if rest[-2] >= 0 else None
        again = spec.describe(indices, weight, padding, scale_grad_by_freq=rest[-1])
        assert (again.dims, again.dtype, again.traits) == (problem.dims, problem.dtype, problem.traits)
        assert op != "embedding" or again.aligned == problem.aligned
        if device == "cpu":
            assert int(indices.min()) >= 0 and int(indices.max()) < 7


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("columns", [1, 16, 300, 768, 4096, 20000])
@pytest.mark.parametrize("tokens", [0, 1, 16384])
def test_preference_names_own_variants_once(op: str, columns: int, tokens: int) -> None:
    spec = REGISTRY[op]
    ranked = list(spec.prefer(_problem(op, tokens, 1000, columns), H200))
    assert len(ranked) == len(set(ranked)) and set(ranked) < set(spec.variants())
    assert {r.partition("/")[0] for r in ranked} == ({"gather"} if op == "embedding" else {"atomic", "liger"})


@pytest.mark.parametrize(
    ("tokens", "columns", "forward", "backward"),
    [
        (16384, 4096, "gather/4x1024-w4", "atomic/16x256-w4"),
        (16384, 768, "gather/16x256-w4", "atomic/16x256-w4"),
        (16384, 32, "gather/64x32-w4", "atomic/64x32-w4"),
        (16384, 300, "gather/64x64-w4", "atomic/64x64-w4"),
        (8, 4096, "gather/1x1024-w4", "atomic/16x256-w4"),
    ],
)
def test_the_tile_fits_the_width(tokens: int, columns: int, forward: str, backward: str) -> None:
    assert REGISTRY["embedding"].prefer(_problem("embedding", tokens, 1000, columns), H200)[0] == forward
    problem = _problem("embedding_backward", tokens, 1000, columns)
    assert REGISTRY["embedding_backward"].prefer(problem, H200)[0] == backward


def test_atomics_are_not_eligible_where_bits_must_repeat() -> None:
    spec = REGISTRY["embedding_backward"]
    for policy in ("deterministic", "batch_invariant"):
        with tritonops.use(policy=policy):
            problem = _problem("embedding_backward")
        for vid, variant in spec.variants().items():
            reason = illegal(spec, variant, problem, H200)
            assert reason is None if vid == "vendor" else "not deterministic" in str(reason)
        assert choose(spec, problem, H200).variant == "vendor"


def test_batch_invariant_choice_does_not_depend_on_the_tokens() -> None:
    with tritonops.use(policy="batch_invariant", exclude="vendor"):
        problems = [_problem("embedding", t, columns=4096) for t in (1, 64, 100000)]
    (chosen,) = {choose(REGISTRY["embedding"], p, H200).variant for p in problems}
    assert chosen.startswith("gather/")


def test_liger_says_why_it_does_not_serve() -> None:
    spec = REGISTRY["embedding_backward"]
    for variant in [v for v in spec.variants().values() if v.family == "liger"]:
        padded = illegal(spec, variant, _problem("embedding_backward", padding_idx=1), H200)
        assert padded == "Liger's kernel adds the gradients of padding tokens too"
        far = illegal(spec, variant, _problem("embedding_backward", tokens=2**20, columns=2048), H200)
        assert far == "Liger's kernel computes offsets into dy in int32"
        assert "scale_grad_by_freq" in str(
            illegal(spec, variant, _problem("embedding_backward", scale_grad_by_freq=True), H200)
        )


def test_a_missing_or_changed_liger_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    from tritonops.embedding import liger

    class Changed:
        arg_names = ("grad_output_ptr", "indices_ptr")

    problem = _problem("embedding_backward")
    monkeypatch.setattr("tritonops._compat.has_liger", lambda: False)
    launch.liger_reason.cache_clear()
    assert liger.requires(problem, INTERPRETER) == "liger-kernel is not installed"
    monkeypatch.setattr("tritonops._compat.has_liger", lambda: True)
    for load, words in [(lambda name: Changed, "other parameters"), (lambda name: 1 / 0, "ZeroDivisionError")]:
        monkeypatch.setattr("tritonops.launch.kernel", load)
        launch.liger_reason.cache_clear()
        assert words in str(liger.requires(problem, INTERPRETER))
    launch.liger_reason.cache_clear()


def test_padding_row() -> None:
    assert [padding_row(p, 5) for p in (None, 0, 4, -1, -5)] == [-1, 0, 4, 4, 0]
    assert padding_row(0, 0) == 0  # as torch
    for bad in (5, -6):
        with pytest.raises(AssertionError, match="within num_embeddings"):
            padding_row(bad, 5)


def test_vendor_is_deterministic_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's CUDA kernel may use atomics unless its switch is on; the switch is put back."""
    from tritonops.embedding import vendor

    assert not torch.are_deterministic_algorithms_enabled()
    with vendor._deterministic(True):
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()
    with pytest.raises(ZeroDivisionError), vendor._deterministic(True):
        raise ZeroDivisionError
    assert not torch.are_deterministic_algorithms_enabled()
    with vendor._deterministic(False):
        assert not torch.are_deterministic_algorithms_enabled()


def test_backward_problem_takes_the_forwards_arguments() -> None:
    weight, indices = torch.randn(9, 12), torch.zeros(2, 5, dtype=torch.int64)
    problem = describe_backward(indices, weight, -1)
    assert problem.op == "embedding_backward" and problem.dims == {"T": 10, "D": 12, "V": 9}
    text = str(tritonops.explain("embedding_backward", indices, weight, -1, device="sm_90-132"))
    assert "embedding_backward T=10 D=12 V=9, float32, aligned" in text
