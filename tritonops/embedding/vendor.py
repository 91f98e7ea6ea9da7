"""torch's own embedding lookup and its backward."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from ..dispatch.variant import Choice
from .operands import check_range

_HALF = (torch.float16, torch.bfloat16)


def embedding_vendor(
    choice: Choice, weight: Tensor, indices: Tensor, padding_idx: int, scale_grad_by_freq: bool
) -> Tensor:
    check_range(indices, weight.shape[0])
    return torch.embedding(weight, indices, padding_idx, scale_grad_by_freq).contiguous()


def embedding_backward_vendor(
    choice: Choice, dy: Tensor, indices: Tensor, num_embeddings: int, padding_idx: int, scale_grad_by_freq: bool
) -> Tensor:
    """On the CPU 16-bit gradients are summed in float32 and rounded once: torch's kernel rounds every addition, so
    that a bfloat16 sum of ones stops at 256."""
    check_range(indices, num_embeddings)
    dtype = dy.dtype
    if dy.device.type == "cpu" and dtype in _HALF:
        dy = dy.float()
    with _deterministic(dy.is_cuda and choice.problem.policy != "fast"):
        grad = torch.ops.aten.embedding_dense_backward(dy, indices, num_embeddings, padding_idx, scale_grad_by_freq)
    return grad.to(dtype)


@contextlib.contextmanager
def _deterministic(wanted: bool) -> Iterator[None]:
    """torch's switch, on for one call: without it torch 2.11 and newer sum long runs with atomics (pytorch#172454)."""
    if not wanted or torch.are_deterministic_algorithms_enabled():
        yield
        return
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
