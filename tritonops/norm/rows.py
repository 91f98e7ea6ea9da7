"""Running the `rows` kernels: tiles of whole rows, one program a tile forward, persistent programs backward."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .. import launch
from ..device import DeviceInfo
from ..dispatch.problem import Problem
from ..dispatch.variant import Choice
from . import operands

FORWARD = "tritonops.norm.rows_forward:norm_forward_rows_kernel"
BACKWARD = "tritonops.norm.rows_backward:norm_backward_rows_kernel"
FINALIZE = "tritonops.norm.finalize:norm_backward_finalize_kernel"

# More rows in a tile only spill: 3136 bytes a thread for 65536 rows of one element (sm_90, Triton 3.6).
_MAX_TILE_ROWS = 1024

_ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2}


def tile_rows(tile: int, n: int) -> int:
    """Rows of `n` columns, padded to a power of two, that a tile of `tile` elements holds."""
    return max(1, tile // launch.next_power_of_2(n))


def _shared_requires(problem: Problem, tile: int) -> str | None:
    dtypes = {"x": problem.dtype, "weight": problem.traits.get("weight"), "bias": problem.traits.get("bias")}
    for what, dtype in dtypes.items():
        if dtype is not None and dtype not in _ITEMSIZE:
            return f"{what} is {dtype}; the rows kernels compute in float32 and take float32, float16 and bfloat16"
    n = problem.dims["N"]
    if launch.next_power_of_2(n) > tile:
        return f"a row of {n} elements does not fit a tile of {tile}"
    rows = tile_rows(tile, n)
    if rows > _MAX_TILE_ROWS:
        return f"a tile of {tile} elements would hold {rows} rows of {n}; at most {_MAX_TILE_ROWS}"
    programs = launch.int_ceil_div(problem.dims["M"], rows)
    if programs >= 2**31:
        return f"{problem.dims['M']} rows of {n} need {programs} programs of this tile; a grid has at most 2**31 - 1"
    return None


def forward_requires(problem: Problem, device: DeviceInfo, tile: int) -> str | None:
    return _shared_requires(problem, tile)


def backward_requires(problem: Problem, device: DeviceInfo, tile: int, stages: int) -> str | None:
    reason = _shared_requires(problem, tile)
    if reason is None and device.kind == "cuda":
        # x, dy, mean and rstd in stages - 1 buffers each; 4 KiB for the reductions.
        rows = tile_rows(tile, problem.dims["N"])
        shared = max(stages - 1, 1) * 2 * (tile * _ITEMSIZE[problem.dtype] + rows * 4) + 4096
        if shared > device.shared_bytes:
            return f"needs {shared} bytes of shared memory, {device.arch} has {device.shared_bytes}"
    return reason


def _forward(
    choice: Choice,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    ndim: int,
    eps: float,
    center: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    m, n = operands.sizes(x.shape, ndim)
    y = x.new_empty(x.shape)
    mean = torch.empty(m if center else 0, dtype=torch.float32, device=x.device)
    rstd = torch.empty(m, dtype=torch.float32, device=x.device)
    rows, stride = operands.as_rows(x, ndim)
    tile_m = tile_rows(choice.variant.meta["tile"], n)
    launch.launch(
        launch.kernel(FORWARD),
        (launch.int_ceil_div(m, tile_m),),
        (
            rows,
            None if weight is None else weight.contiguous(),
            None if bias is None else bias.contiguous(),
            y,
            mean if center else None,
            rstd,
            m,
            n,
            stride,
            eps,
        ),
        {
            "ROWS": tile_m,
            "BLOCK_N": launch.next_power_of_2(n),
            "CENTER": center,
            "HAS_WEIGHT": weight is not None,
            "HAS_BIAS": bias is not None,
        },
        choice.variant.options,
    )
    return y, mean, rstd


def _backward(
    choice: Choice,
    dy: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    bias_dtype: torch.dtype | None,
    ndim: int,
    mask: Sequence[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    m, n = operands.sizes(x.shape, ndim)
    want_dx, want_dw, want_db = operands.wanted(mask, weight is not None, bias_dtype is not None)
    dw_dtype = weight.dtype if weight is not None and want_dw else None
    db_dtype = bias_dtype if want_db else None
    parameter_shape = x.shape[x.dim() - ndim :]
    dx = x.new_empty(x.shape if want_dx else 0)
    dw = x.new_empty(parameter_shape, dtype=dw_dtype) if want_dw else x.new_empty(0)
    db = x.new_empty(parameter_shape, dtype=db_dtype) if want_db else x.new_empty(0)

    meta, options = choice.variant.meta, choice.variant.options
    tile_m, block_n = tile_rows(meta["tile"], n), launch.next_power_of_2(n)
    programs = min(meta["programs_per_sm"] * operands.sms(choice), launch.int_ceil_div(m, tile_m))
    part_w = torch.empty((programs, n), dtype=torch.float32, device=x.device) if want_dw else None
    part_b = torch.empty((programs, n), dtype=torch.float32, device=x.device) if want_db else None
    x_rows, stride_x = operands.as_rows(x, ndim)
    dy_rows, stride_dy = operands.as_rows(dy, ndim)
    # With 16-byte accesses a row this wide spans the whole program, so a thread holds all rows of its columns.
    columns_in_thread = block_n >= 32 * options["num_warps"] * (16 // x.element_size())
    launch.launch(
        launch.kernel(BACKWARD),
        (programs,),
        (
            x_rows if want_dx or want_dw else None,
            dy_rows,
            weight.contiguous() if weight is not None and want_dx else None,
            mean.contiguous() if mean is not None and (want_dx or want_dw) else None,
            rstd.contiguous() if want_dx or want_dw else None,
            dx if want_dx else None,
            part_w,
            part_b,
            m,
            n,
            stride_x,
            stride_dy,
        ),
        {
            "ROWS": tile_m,
            "BLOCK_N": block_n,
            "STAGES": meta["stages"],
            "SUM_ROWS": 1 if columns_in_thread else tile_m,
            "CENTER": mean is not None,
            "HAS_WEIGHT": weight is not None,
            "WANT_DX": want_dx,
            "WANT_DW": want_dw,
            "WANT_DB": want_db,
        },
        options,
    )
    if want_dw or want_db:
        _finalize(part_w, part_b, dw, db, programs, n)
    return dx, dw, db


def _finalize(
    part_w: torch.Tensor | None,
    part_b: torch.Tensor | None,
    dw: torch.Tensor,
    db: torch.Tensor,
    programs: int,
    n: int,
) -> None:
    block_n = 32
    launch.launch(
        launch.kernel(FINALIZE),
        (launch.int_ceil_div(n, block_n),),
        (part_w, part_b, None if part_w is None else dw, None if part_b is None else db, programs, n),
        {"BLOCK_P": 64, "BLOCK_N": block_n, "WANT_DW": part_w is not None, "WANT_DB": part_b is not None},
        launch.options(4),
    )


def layer_norm(
    choice: Choice, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, ndim: int, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _forward(choice, x, weight, bias, ndim, eps, True)


def rms_norm(
    choice: Choice, x: torch.Tensor, weight: torch.Tensor | None, ndim: int, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    y, _, rstd = _forward(choice, x, weight, None, ndim, eps, False)
    return y, rstd


def layer_norm_backward(
    choice: Choice,
    dy: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    bias_dtype: torch.dtype | None,
    ndim: int,
    eps: float,
    mask: Sequence[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _backward(choice, dy, x, mean, rstd, weight, bias_dtype, ndim, mask)


def rms_norm_backward(
    choice: Choice,
    dy: torch.Tensor,
    x: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    ndim: int,
    eps: float,
    mask: Sequence[bool],
) -> tuple[torch.Tensor, torch.Tensor]:
    dx, dw, _ = _backward(choice, dy, x, None, rstd, weight, None, ndim, (*mask, False))
    return dx, dw
