"""Operands of the norms as rows: what is copied, and what is not."""

from __future__ import annotations

import pytest
import torch

from tritonops.norm import operands


@pytest.mark.parametrize(
    ("x", "ndim", "stride"),
    [
        (torch.randn(4, 5), 1, 5),
        (torch.randn(2, 3, 5), 1, 5),
        (torch.randn(2, 3, 5), 2, 15),
        (torch.randn(2, 3, 5), 3, 30),
        (torch.randn(5), 1, 5),
        (torch.randn(4, 9)[:, 2:7], 1, 9),
        (torch.randn(8, 5)[::2], 1, 10),
        (torch.randn(2, 8, 5)[:, ::2], 1, 10),
        (torch.randn(1, 5).expand(4, 5), 1, 0),
        (torch.randn(5).expand(3, 4, 5), 1, 0),
        (torch.randn(9).as_strided((1, 5), (2, 1)), 1, 5),
        (torch.randn(4, 3).as_strided((4, 1, 3), (3, 99, 1)), 2, 3),
        (torch.randn(4, 3).as_strided((4, 3, 1), (3, 1, 99)), 1, 1),
    ],
)
def test_rows_in_place(x: torch.Tensor, ndim: int, stride: int) -> None:
    assert operands.row_stride(x, ndim) == stride
    rows, got = operands.as_rows(x, ndim)
    assert rows.data_ptr() == x.data_ptr() and got == stride
    _holds(x, rows, got, ndim)


@pytest.mark.parametrize(
    ("x", "ndim"),
    [
        (torch.randn(5, 4).t(), 1),
        (torch.randn(4, 10)[:, ::2], 1),
        (torch.randn(2, 3, 5).transpose(0, 1), 1),
        (torch.randn(3, 5).expand(2, 3, 5), 1),
        (torch.randn(4, 3, 2).transpose(1, 2), 2),
        (torch.randn(4, 1).expand(4, 5), 1),
    ],
)
def test_rows_that_need_a_copy(x: torch.Tensor, ndim: int) -> None:
    assert operands.row_stride(x, ndim) is None
    rows, stride = operands.as_rows(x, ndim)
    assert rows.data_ptr() != x.data_ptr() and rows.numel() == x.numel()
    _holds(x, rows, stride, ndim)


def test_equal_rows_are_copied_once() -> None:
    for x in (torch.ones(()).expand(1000, 5), torch.randn(10)[::2].expand(20, 50, 5)):
        rows, stride = operands.as_rows(x, 1)
        assert rows.numel() == 5 and stride == 0
        _holds(x, rows, stride, 1)


def _holds(x: torch.Tensor, rows: torch.Tensor, stride: int, ndim: int) -> None:
    m, n = operands.sizes(x.shape, ndim)
    assert torch.equal(rows.as_strided((m, n), (stride, 1), rows.storage_offset()), x.reshape(m, n))


def test_sizes() -> None:
    assert operands.sizes((2, 3, 5), 1) == (6, 5)
    assert operands.sizes((2, 3, 5), 3) == (1, 30)
    assert operands.sizes((0, 3), 1) == (0, 3)


def test_wanted_drops_what_is_not_there() -> None:
    assert operands.wanted([True, True, True], True, False) == (True, True, False)
    assert operands.wanted([False, True], False) == (False, False)
