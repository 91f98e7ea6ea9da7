"""Running liger-kernel's own LayerNorm backward kernel, with its own settings or others."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .. import _compat, launch
from ..device import DeviceInfo
from ..dispatch.problem import Problem
from ..dispatch.variant import Choice
from . import operands

KERNEL = "liger_kernel.ops.layer_norm:_layer_norm_backward_kernel"
MAX_COLUMNS = 65536

_PARAMETERS = (
    "X_ptr", "stride_x", "W_ptr", "Mean_ptr", "stride_mean", "RSTD_ptr", "stride_rstd", "DX_ptr", "stride_dx",
    "DW_ptr", "stride_dw", "DB_ptr", "stride_db", "DY_ptr", "stride_dy", "n_rows", "n_cols",
    "rows_per_program", "BLOCK_SIZE", "COMPUTE_DW", "COMPUTE_DB",
)  # fmt: skip


def own_warps(n: int) -> int:
    """Liger's number of warps for a row of `n` columns (liger_kernel.ops.utils.calculate_settings, 0.8.5)."""
    block = launch.next_power_of_2(n)
    return 32 if block >= 32768 else 16 if block >= 8192 else 8 if block >= 2048 else 4


def requires(problem: Problem, device: DeviceInfo) -> str | None:
    traits = problem.traits
    if device.kind == "interpreter":
        return "Liger's kernel does not run in Triton's interpreter"
    if problem.dtype not in ("float32", "float16", "bfloat16"):
        return f"Liger's kernel computes in float32, not in {problem.dtype}"
    if traits.get("weight") is None or traits.get("bias") is None:
        return "Liger's kernel needs a weight and a bias"
    if not problem.dtype == traits["weight"] == traits["bias"]:
        return f"dtypes differ: x {problem.dtype}, weight {traits['weight']}, bias {traits['bias']}"
    if "x" not in traits["grads"]:
        return "Liger's kernel always computes the gradient of x, which is not asked for"
    if problem.dims["N"] > MAX_COLUMNS:
        return f"Liger's kernel takes at most {MAX_COLUMNS} columns"
    return launch.liger_reason(KERNEL, _PARAMETERS)


def layer_norm_backward(
    choice: Choice,
    dy: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor,
    bias_dtype: torch.dtype,
    ndim: int,
    eps: float,
    mask: Sequence[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One program a streaming multiprocessor, float32 partial sums added up by torch, as Liger's own host code does."""
    m, n = operands.sizes(x.shape, ndim)
    dx, parameter_shape = x.new_empty(x.shape), x.shape[x.dim() - ndim :]
    want_dw, want_db = mask[1], mask[2]
    programs = operands.sms(choice)
    part_w = torch.empty((programs, n), dtype=torch.float32, device=x.device) if want_dw else None
    part_b = torch.empty((programs, n), dtype=torch.float32, device=x.device) if want_db else None
    x_rows, stride_x = operands.as_rows(x, ndim)
    dy_rows, stride_dy = operands.as_rows(dy, ndim)
    meta = choice.variant.meta
    launch.launch(
        launch.kernel(KERNEL),
        (programs,),
        (x_rows, stride_x, weight.contiguous(), mean.contiguous(), 1, rstd.contiguous(), 1, dx, n,
         part_w, n, part_b, n, dy_rows, stride_dy, m, n),
        {
            "rows_per_program": launch.int_ceil_div(m, programs),
            "BLOCK_SIZE": launch.next_power_of_2(n),
            "COMPUTE_DW": want_dw,
            "COMPUTE_DB": want_db,
        },
        launch.options(meta["warps"] or own_warps(n), 3, cap=meta["cap"]),
    )  # fmt: skip
    return (
        dx,
        x.new_empty(0) if part_w is None else _compat.reshaped(part_w.sum(0).to(weight.dtype), parameter_shape),
        x.new_empty(0) if part_b is None else _compat.reshaped(part_b.sum(0).to(bias_dtype), parameter_shape),
    )
