"""The operands of the norms as M rows of N columns, and what an empty problem returns."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ..dispatch import override
from ..dispatch.variant import Choice


def sms(choice: Choice) -> int:
    """Streaming multiprocessors that a persistent grid may fill."""
    budget = override.sm_budget(choice.problem.flags)
    return choice.device.sms if budget is None else min(budget, choice.device.sms)


def sizes(shape: Sequence[int], ndim: int) -> tuple[int, int]:
    """(M, N): product of the leading dimensions and of the last `ndim`."""
    lead = len(shape) - ndim
    return math.prod(shape[:lead]), math.prod(shape[lead:])


def stats_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of mean and rstd: float32, float64 for a float64 input."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def row_stride(x: torch.Tensor, ndim: int) -> int | None:
    """Elements between two rows of `x` if its rows are contiguous and equally spaced, else None.

    Strides of dimensions of size 1 are ignored; one row or none counts as spaced by its own length.
    """
    lead = x.dim() - ndim
    n = 1
    for size, stride in zip(reversed(x.shape[lead:]), reversed(x.stride()[lead:]), strict=True):
        if size != 1 and stride != n:
            return None
        n *= size
    spacing = following = None
    for size, stride in zip(reversed(x.shape[:lead]), reversed(x.stride()[:lead]), strict=True):
        if size == 1:
            continue
        if spacing is None:
            spacing = stride
        elif stride != following:
            return None
        following = stride * size
    return n if spacing is None else spacing


def as_rows(x: torch.Tensor, ndim: int) -> tuple[torch.Tensor, int]:
    """A tensor whose memory holds the rows of `x`, and the stride between them; copies only where it must.

    Rows that are all the same memory (an expanded gradient) stay so: at most one row is copied.
    """
    stride = row_stride(x, ndim)
    if stride is not None:
        return x, stride
    lead = x.dim() - ndim
    if all(s == 0 or n == 1 for n, s in zip(x.shape[:lead], x.stride()[:lead], strict=True)):
        first = x[(0,) * lead].contiguous()
        return first, 0 if any(n != 1 for n in x.shape[:lead]) else first.numel()
    return x.contiguous(), sizes(x.shape, ndim)[1]


def wanted(mask: Sequence[bool], *present: bool) -> tuple[bool, ...]:
    """`mask` (dx, then parameters) without the gradients of parameters that are not there."""
    return (mask[0], *(m and p for m, p in zip(mask[1:], present, strict=True)))


def empty_forward(x: torch.Tensor, ndim: int, eps: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(y, mean, rstd) where M or N is 0: rows of nothing have mean 0 and variance 0."""
    m, _ = sizes(x.shape, ndim)
    mean = torch.zeros(m, dtype=stats_dtype(x.dtype), device=x.device)
    return x.new_empty(x.shape), mean, torch.full_like(mean, eps).rsqrt()
