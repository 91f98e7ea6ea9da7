"""Running liger-kernel's own embedding backward kernel, with its own settings or others."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import launch
from ..device import DeviceInfo
from ..dispatch.problem import Problem
from ..dispatch.variant import Choice
from .operands import check_range, float32_sums_reason

KERNEL = "liger_kernel.ops.experimental.embedding:embedding_backward_kernel"

_PARAMETERS = (
    "grad_output_ptr", "grad_weight_ptr", "indices_ptr", "n_elements", "embedding_dim", "BLOCK_SIZE_M", "BLOCK_SIZE_N",
)  # fmt: skip


def requires(problem: Problem, device: DeviceInfo) -> str | None:
    if problem.traits["padding"]:
        return "Liger's kernel adds the gradients of padding tokens too"
    if problem.dims["T"] * problem.dims["D"] >= 2**31:
        return "Liger's kernel computes offsets into dy in int32"
    return float32_sums_reason(problem, device) or launch.liger_reason(KERNEL, _PARAMETERS)


def embedding_backward(
    choice: Choice, dy: Tensor, indices: Tensor, num_embeddings: int, padding_idx: int, scale_grad_by_freq: bool
) -> Tensor:
    """Liger's kernel with its own block sizes, into float32: in 16 bits its atomics round at every addition.

    It does not check ids. They are clamped, so that one out of range, which the forward refuses, cannot make it write
    outside the gradient.
    """
    check_range(indices, num_embeddings)
    columns = dy.shape[-1]
    grad = torch.zeros((num_embeddings, columns), dtype=torch.float32, device=dy.device)
    if dy.numel() == 0 or grad.numel() == 0:
        return grad.to(dy.dtype)
    ids = indices.reshape(-1).clamp(0, num_embeddings - 1)
    if grad.numel() >= 2**31:
        ids = ids.long()
    block = launch.next_power_of_2(min(128, columns))
    launch.launch(
        launch.kernel(KERNEL),
        (launch.int_ceil_div(ids.shape[0], block), launch.int_ceil_div(columns, block)),
        (dy.reshape(ids.shape[0], columns).contiguous(), grad, ids, ids.shape[0]),
        {"embedding_dim": columns, "BLOCK_SIZE_M": block, "BLOCK_SIZE_N": block},
        choice.variant.options,
    )
    return grad.to(dy.dtype)
