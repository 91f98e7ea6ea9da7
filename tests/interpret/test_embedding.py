"""Every embedding variant under Triton's interpreter, against the exact lookup and the float64 gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import tritonops
from tritonops import launch
from tritonops._compat import has_liger
from tritonops.device import INTERPRETER
from tritonops.dispatch.select import illegal
from tritonops.dispatch.variant import REGISTRY, Choice
from tritonops.embedding import liger, variants, vendor
from tritonops.embedding.op import describe, describe_backward
from tritonops.embedding.reference import (
    embedding_backward_reference,
    embedding_reference,
    error_bound,
    relative_error,
)

FORWARD, BACKWARD = REGISTRY["embedding"], REGISTRY["embedding_backward"]
FORWARD_IDS = [v.id for v in tritonops.variants("embedding")]
# Liger's kernel is tested where it is installed.
OWN_IDS = [
    v.id for v in tritonops.variants("embedding_backward") if v.id != "vendor" and (has_liger() or v.family != "liger")
]
DTYPES = (torch.float32, torch.float16)
# The combinations of table and id dtype: all where a case is "ragged", these two elsewhere.
SOME = ((torch.float32, torch.int64), (torch.float16, torch.int32))
ALL = tuple((t, i) for t in DTYPES for i in (torch.int64, torch.int32))


def _backward_cells(cases: Iterable[str]) -> list[tuple[str, str]]:
    """(variant, case); Liger's configurations differ in options that the interpreter ignores, so one runs them all."""
    ids = ["vendor", *OWN_IDS]
    return [(v, c) for v in ids for c in cases if not v.startswith("liger") or v == "liger/w4" or c == "aligned"]


def _reason(spec, variant: str, problem) -> str | None:
    return illegal(spec, spec.variants()[variant], problem, INTERPRETER)


def _lookup(variant: str, weight: Tensor, indices: Tensor) -> Tensor:
    problem = describe(indices, weight)
    assert _reason(FORWARD, variant, problem) is None
    v = FORWARD.variants()[variant]
    return v.run(Choice(v, problem, INTERPRETER, None), weight, indices, -1, False)


def _gradient(
    variant: str, dy: Tensor, indices: Tensor, rows: int, padding_idx: int = -1, scale: bool = False
) -> Tensor | None:
    """None where the variant says a reason against the call."""
    table = torch.empty((rows, dy.shape[-1]), dtype=dy.dtype, device="meta")
    pad = None if padding_idx < 0 else padding_idx
    problem = describe_backward(indices, table, pad, scale_grad_by_freq=scale)
    if _reason(BACKWARD, variant, problem) is not None:
        return None
    v = BACKWARD.variants()[variant]
    return v.run(Choice(v, problem, INTERPRETER, None), dy, indices, rows, padding_idx, scale)


def _inside_nan(x: Tensor) -> Tensor:
    """`x` as the middle of a buffer of NaN, so that a read outside shows."""
    buffer = torch.full((x.shape[0] + 4, x.shape[1] + 6), float("nan"), dtype=x.dtype)
    buffer[2:-2, 3:-3] = x
    return buffer[2:-2, 3:-3]


def _ids(rows: int, *shape: int) -> Tensor:
    return torch.randint(rows, shape)


# name -> (weight, indices)
LOOKUPS: dict[str, Callable[[torch.dtype], tuple[Tensor, Tensor]]] = {
    "ragged": lambda t: (torch.randn(37, 45).to(t), _ids(37, 7, 11)),
    "aligned": lambda t: (torch.randn(16, 64).to(t), _ids(16, 70)),
    "even": lambda t: (torch.randn(9, 300).to(t), _ids(9, 3, 3)),
    "wide": lambda t: (torch.randn(5, 1100).to(t), _ids(5, 6)),
    "inside-nan": lambda t: (_inside_nan(torch.randn(11, 21).to(t)), _ids(11, 13)),
    "transposed": lambda t: (torch.randn(33, 10).to(t).t(), _ids(10, 9)),
    "columns-sliced": lambda t: (torch.randn(12, 60).to(t)[:, 5:45:2], _ids(12, 8)),
    "rows-sliced": lambda t: (torch.randn(24, 17).to(t)[1::2], _ids(12, 8)),
    "rows-expanded": lambda t: (torch.randn(1, 17).to(t).expand(12, 17), _ids(12, 8)),
    "misaligned": lambda t: (torch.randn(1 + 6 * 32).to(t)[1:].view(6, 32), _ids(6, 8)),
    "one-row": lambda t: (torch.randn(1, 40).to(t), torch.zeros(5, dtype=torch.int64)),
    "one-row-odd-stride": lambda t: (torch.randn(40).to(t).as_strided((1, 40), (7, 1)), torch.zeros(5).long()),
    "one-column": lambda t: (torch.randn(6, 3).to(t)[:, 1:2], _ids(6, 5)),
    "one-token": lambda t: (torch.randn(6, 24).to(t), torch.tensor([5])),
    "no-dimension": lambda t: (torch.randn(6, 24).to(t), torch.tensor(4)),
    "ids-sliced": lambda t: (torch.randn(6, 24).to(t), _ids(6, 30)[::3]),
    "ids-a-column": lambda t: (torch.randn(6, 24).to(t), _ids(6, 9, 4)[:, 2]),
    "ids-transposed": lambda t: (torch.randn(6, 24).to(t), _ids(6, 4, 5).t()),
    "ids-expanded": lambda t: (torch.randn(6, 24).to(t), _ids(6, 1).expand(9)),
    "ids-expanded-rows": lambda t: (torch.randn(6, 24).to(t), _ids(6, 3).expand(4, 3)),
    "ids-sorted": lambda t: (torch.randn(50, 8).to(t), torch.arange(50)),
}


@pytest.mark.parametrize("case", LOOKUPS)
@pytest.mark.parametrize("variant", FORWARD_IDS)
def test_lookup_copies(variant: str, case: str) -> None:
    for dtype, index in ALL if case == "ragged" else SOME:
        weight, indices = LOOKUPS[case](dtype)
        got = _lookup(variant, weight, _as(indices, index))
        assert got.is_contiguous() and got.dtype is dtype and torch.equal(got, embedding_reference(weight, indices))


def _as(indices: Tensor, dtype: torch.dtype) -> Tensor:
    """`indices` in a dtype, with their strides."""
    if indices.dtype is dtype:
        return indices
    out = torch.zeros(indices.untyped_storage().nbytes() // 8, dtype=dtype)
    out.copy_(torch.empty(0, dtype=torch.int64).set_(indices.untyped_storage(), 0, out.shape))
    return out.as_strided(indices.shape, indices.stride(), indices.storage_offset())


@pytest.mark.parametrize("variant", FORWARD_IDS)
def test_lookup_of_nothing(variant: str) -> None:
    for rows, columns, shape in [(4, 3, (0,)), (4, 3, (2, 0, 3)), (4, 0, (5,)), (0, 3, (0,)), (0, 0, (0, 2))]:
        got = _lookup(variant, torch.randn(rows, columns), torch.zeros(shape, dtype=torch.int64))
        assert got.shape == (*shape, columns) and got.is_contiguous()


def _dy(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape).to(dtype)


# name -> (dy, indices, V)
GRADIENTS: dict[str, Callable[[torch.dtype], tuple[Tensor, Tensor, int]]] = {
    "ragged": lambda t: (_dy(t, 7, 11, 45), _ids(37, 7, 11), 37),
    "aligned": lambda t: (_dy(t, 70, 64), _ids(16, 70), 16),
    "even": lambda t: (_dy(t, 3, 3, 300), _ids(9, 3, 3), 9),
    "wide": lambda t: (_dy(t, 6, 600), _ids(5, 6), 5),
    "inside-nan": lambda t: (_inside_nan(_dy(t, 13, 21)), _ids(11, 13), 11),
    "few-rows": lambda t: (_dy(t, 90, 20), _ids(3, 90), 3),
    "one-row": lambda t: (_dy(t, 40, 20), torch.zeros(40, dtype=torch.int64), 1),
    "one-column": lambda t: (_dy(t, 20, 3)[:, 1:2], _ids(4, 20), 4),
    "one-token": lambda t: (_dy(t, 1, 24), torch.tensor([2]), 4),
    "one-token-odd-stride": lambda t: (_dy(t, 24).as_strided((1, 24), (7, 1)), torch.tensor([2]), 4),
    "no-dimension": lambda t: (_dy(t, 24), torch.tensor(2), 4),
    "transposed": lambda t: (_dy(t, 18, 30).t(), _ids(5, 30), 5),
    "sliced": lambda t: (_dy(t, 40, 50)[::2, 3:43:2], _ids(5, 20), 5),
    "not-flat": lambda t: (_dy(t, 6, 5, 16).transpose(0, 1), _ids(5, 5, 6), 5),
    "ids-sliced": lambda t: (_dy(t, 10, 24), _ids(6, 30)[::3], 6),
    "ids-transposed": lambda t: (_dy(t, 5, 4, 24), _ids(6, 4, 5).t(), 6),
}


@pytest.mark.parametrize(("variant", "case"), _backward_cells(GRADIENTS))
def test_gradient_matches_oracle(variant: str, case: str) -> None:
    for dtype, index in ALL if case == "ragged" else SOME:
        dy, indices, rows = GRADIENTS[case](dtype)
        exact = embedding_backward_reference(dy, indices, rows, -1, False)
        bound = error_bound(relative_error(_gradient("vendor", dy, indices, rows), exact))
        got = _gradient(variant, dy, _as(indices, index), rows)
        assert got is not None and got.is_contiguous() and got.dtype is dtype and got.shape == exact.shape
        assert relative_error(got, exact) <= bound


# One value for all, one row for all tokens, one column for all columns.
EXPANDED = {"scalar": torch.ones(1, 1), "row": torch.arange(3.0)[None], "column": torch.ones(1000, 1)}


@pytest.mark.parametrize(("variant", "case"), _backward_cells(EXPANDED))
def test_a_thousand_equal_ids_sum_exactly_from_an_expanded_gradient(variant: str, case: str) -> None:
    want = torch.zeros(4, 3)
    want[2] = EXPANDED[case].expand(1000, 3).sum(0)
    for dtype in DTYPES:
        dy = EXPANDED[case].to(dtype).expand(1000, 3)
        assert 0 in dy.stride()
        got = _gradient(variant, dy, torch.full((1000,), 2), 4)
        assert got is not None and torch.equal(got, want.to(dtype))


def test_an_expanded_gradient_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(variants, "launch", lambda kernel, grid, args, meta, options: seen.append(args[0]))
    dy = torch.ones(()).expand(2, 5, 3)
    _gradient("atomic/16x256-w4", dy, _ids(4, 2, 5), 4)
    assert seen[0].data_ptr() == dy.data_ptr() and seen[0].stride() == (0, 0)


@pytest.mark.parametrize("variant", ["vendor", *OWN_IDS])
def test_padding_tokens_are_skipped(variant: str) -> None:
    for padding in (0, 3, 8):
        dy, indices = torch.randn(4, 10, 33), _ids(9, 4, 10)
        indices[:, 3:7] = padding
        dy[indices == padding] = float("nan")
        got = _gradient(variant, dy, indices, 9, padding)
        if got is None:
            assert variant.startswith("liger")
            continue
        exact = embedding_backward_reference(dy.nan_to_num(nan=0.0), indices, 9, padding, False)
        assert torch.count_nonzero(got[padding]) == 0
        assert relative_error(got, exact) <= error_bound(2e-8)


@pytest.mark.parametrize("variant", ["vendor", *OWN_IDS])
def test_frequencies_divide_or_are_refused(variant: str) -> None:
    dy, indices = torch.randn(40, 12), _ids(5, 40)
    got = _gradient(variant, dy, indices, 7, 1, True)
    if variant == "vendor":
        assert got is not None
        assert relative_error(got, embedding_backward_reference(dy, indices, 7, 1, True)) <= 2e-7
    else:
        assert got is None


@pytest.mark.parametrize("variant", ["vendor", *OWN_IDS])
def test_gradient_of_nothing(variant: str) -> None:
    for rows, columns, shape in [(4, 3, (0,)), (4, 3, (2, 0, 3)), (4, 0, (5,)), (0, 3, (0,)), (0, 0, (0, 2))]:
        for dtype in DTYPES:
            dy = torch.randn(*shape, columns).to(dtype)
            got = _gradient(variant, dy, torch.zeros(shape, dtype=torch.int64), rows)
            assert got is not None and got.dtype is dtype
            assert torch.equal(got, torch.zeros(rows, columns, dtype=dtype))


@pytest.mark.parametrize("variant", FORWARD_IDS)
@pytest.mark.parametrize("bad", [-1, -4, 4, 2**31 - 1])
def test_ids_out_of_range_are_refused_before_a_launch(variant: str, bad: int) -> None:
    for dtype in (torch.int64, torch.int32):
        for columns in (3, 0):
            with launch.capture() as launched, pytest.raises(IndexError, match="^index out of range in self$"):
                _lookup(variant, torch.randn(4, columns), torch.tensor([[1, bad]], dtype=dtype))
            assert launched == []


@pytest.mark.parametrize("variant", ["vendor", *OWN_IDS])
@pytest.mark.parametrize("bad", [-1, 4, 2**40])
def test_the_gradient_refuses_ids_out_of_range(variant: str, bad: int) -> None:
    with launch.capture() as launched, pytest.raises(IndexError, match="^index out of range in self$"):
        _gradient(variant, torch.randn(2, 3), torch.tensor([1, bad]), 4)
    assert launched == []


def test_kernels_touch_nothing_outside_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where ids cannot be read on the host, on a GPU, the kernels themselves keep inside."""
    for module in (variants, liger, vendor):
        monkeypatch.setattr(module, "check_range", lambda indices, rows: None)
    weight, ids = _inside_nan(torch.randn(4, 5)), torch.tensor([1, -1, 3, 4, 2**40, -(2**40)])
    want = torch.zeros(6, 5)
    want[0], want[2] = weight[1], weight[3]
    for variant in FORWARD_IDS:
        if variant != "vendor":
            assert torch.equal(_lookup(variant, weight, ids), want)
    dy = torch.randn(6, 5)
    for variant in OWN_IDS:
        got = _gradient(variant, dy, ids, 4)
        assert got is not None
        assert torch.equal(got[1], dy[0]) and torch.equal(got[2], torch.zeros(5))
        if variant.startswith("atomic"):
            assert torch.equal(got[3], dy[2]) and torch.equal(got[0], torch.zeros(5))


@pytest.mark.parametrize("variant", ["gather/16x256-w4", "gather/1x1024-w4"])
def test_offsets_into_the_table_exceed_int32(variant: str, tmp_path: Path) -> None:
    weight = _far_rows(tmp_path)
    ids = torch.tensor([32, 33, 0], dtype=torch.int32)
    assert torch.equal(_lookup(variant, weight, ids), weight[ids.long()])


@pytest.mark.parametrize("variant", ["atomic/16x256-w4", "atomic/8x512-w4"])
def test_offsets_into_dy_exceed_int32(variant: str, tmp_path: Path) -> None:
    dy, ids = _far_rows(tmp_path), torch.arange(34) % 3
    got = _gradient(variant, dy, ids, 3)
    assert got is not None and torch.equal(got.double(), embedding_backward_reference(dy, ids, 3, -1, False))


def _far_rows(folder: Path) -> Tensor:
    """[34, 5] float16 with 2**26 elements from row to row, over a sparse file."""
    path, stride = folder / "rows", 2**26
    with path.open("wb") as file:
        file.truncate((33 * stride + 5) * 2)
    x = torch.from_file(str(path), shared=True, size=33 * stride + 5, dtype=torch.float16).as_strided(
        (34, 5), (stride, 1)
    )
    x.copy_(torch.arange(34.0 * 5).view(34, 5))
    return x


def test_reasons_name_what_is_not_supported() -> None:
    table = torch.empty(8, 4, device="meta")
    for variant in OWN_IDS:
        family = variant.partition("/")[0]
        double = _reason(BACKWARD, variant, describe_backward((5,), table.double()))
        assert double is not None and "float64" in double
        frequency = _reason(BACKWARD, variant, describe_backward((5,), table, scale_grad_by_freq=True))
        assert frequency is not None and "scale_grad_by_freq" in frequency
        padded = _reason(BACKWARD, variant, describe_backward((5,), table, 1))
        assert (padded is not None and "padding" in padded) if family == "liger" else padded is None
        long = _reason(BACKWARD, variant, describe_backward((2**29,), table))
        assert (long is not None and "int32" in long) if family == "liger" else long is None
    for variant in FORWARD_IDS:
        reason = _reason(FORWARD, variant, describe((5,), table.double()))
        assert reason is None if variant == "vendor" else "float64" in str(reason)


@pytest.mark.parametrize("dtype", DTYPES)
def test_public_call_runs_on_triton_kernels(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = []
    run = variants.launch
    monkeypatch.setattr(
        variants, "launch", lambda kernel, *args: launched.append(kernel.__name__) or run(kernel, *args)
    )
    weight = torch.randn(9, 20).to(dtype).requires_grad_()
    indices = torch.tensor([[1, 2, 8], [8, 0, 8]])
    out = tritonops.embedding(indices, weight, -1)
    assert torch.equal(out, weight.detach()[indices])
    out.sum().backward()
    want = torch.zeros(9, 20, dtype=dtype)
    want[:3] = 1
    assert weight.grad is not None and torch.equal(weight.grad, want)
    assert launched == ["embedding_gather_kernel", "embedding_backward_atomic_kernel"]
