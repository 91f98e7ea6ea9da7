"""What the variants share: checks of ids, and operands as the kernels take them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ..device import DeviceInfo
from ..dispatch.problem import Problem

FLOATS = ("float32", "float16", "bfloat16")


def check_range(indices: Tensor, num_embeddings: int) -> None:
    """Raise IndexError for an id outside [0, num_embeddings), where that needs no synchronisation: on the CPU."""
    if indices.device.type != "cpu" or indices.numel() == 0 or isinstance(indices, FakeTensor):
        return
    low, high = torch.aminmax(indices)
    if low < 0 or high >= num_embeddings:
        raise IndexError("index out of range in self")


def flat_ids(indices: Tensor) -> tuple[Tensor, int]:
    """Ids as [T] and their stride; a copy only where no view of them has one stride."""
    flat = indices.reshape(-1)
    return flat, flat.stride(0) if flat.shape[0] > 1 else 1


def plain_strides(x: Tensor) -> tuple[int, int]:
    """(row, column) strides of [R, C]; those of a size-1 dim, which are arbitrary, as if it were contiguous."""
    rows, columns = x.shape
    return x.stride(0) if rows > 1 else columns, x.stride(1) if columns > 1 else 1


def alignment(x: Tensor, *sizes: int) -> int:
    """Elements of `x` in the widest access, up to 16 bytes, that divides all sizes."""
    align = 16 // x.element_size()
    while any(size % align for size in sizes):
        align //= 2
    return align


def float32_sums_reason(problem: Problem, device: DeviceInfo) -> str | None:
    """Why a backward that only adds up dy in float32 cannot serve, or None."""
    if problem.dtype not in FLOATS:
        return f"sums in float32, which does not serve {problem.dtype}"
    if problem.traits["scale_grad_by_freq"]:
        return "does not count how often an id occurs, which scale_grad_by_freq needs"
    return None
