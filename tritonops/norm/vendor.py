"""torch's own norms: the fused CUDA kernels where all dtypes agree, else float32 and one rounding at the end.

On the CPU 16-bit norms are computed in float32: torch's CPU kernels round the statistics to 16 bits. float64 stays so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .. import _compat
from ..dispatch.variant import Choice
from . import operands

Norm = tuple[torch.Tensor, ...]


def _compute_dtype(x: torch.Tensor, *parameters: torch.dtype | None) -> torch.dtype:
    dtypes = {x.dtype, *(p for p in parameters if p is not None)}
    if len(dtypes) == 1 and x.device.type != "cpu":
        return x.dtype
    return torch.float64 if torch.float64 in dtypes else torch.float32


def _vector(parameter: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    return None if parameter is None else parameter.reshape(-1).to(dtype)


def _dtype(parameter: torch.Tensor | None) -> torch.dtype | None:
    return None if parameter is None else parameter.dtype


def _fused_rms_norm(name: str, x: torch.Tensor) -> Any:
    # torch 2.8 and later; on other devices than a GPU it is a composite that rounds between its steps.
    return getattr(torch.ops.aten, name, None) if x.device.type == "cuda" else None


def layer_norm(
    choice: Choice, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, ndim: int, eps: float
) -> Norm:
    """(y, mean, rstd) of torch.native_layer_norm over rows: see variants.py."""
    m, n = operands.sizes(x.shape, ndim)
    dtype, stats = _compute_dtype(x, _dtype(weight), _dtype(bias)), operands.stats_dtype(x.dtype)
    with _compat.no_autocast(x.device.type):
        y, mean, rstd = torch.native_layer_norm(
            x.reshape(m, n).to(dtype), [n], _vector(weight, dtype), _vector(bias, dtype), eps
        )
    return (
        _compat.reshaped(y.to(x.dtype).contiguous(), x.shape),
        _compat.reshaped(mean, (m,)).to(stats),
        _compat.reshaped(rstd, (m,)).to(stats),
    )


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
) -> Norm:
    """(dx, dw, db) of aten.native_layer_norm_backward.

    Always on M x N: torch's CUDA kernel writes out of bounds for several normalised dimensions and more than
    65536 rows (pytorch/pytorch#192016).
    """
    m, n = operands.sizes(x.shape, ndim)
    want_dx, want_dw, want_db = operands.wanted(mask, weight is not None, bias_dtype is not None)
    dx, dw, db = x.new_empty(x.shape if want_dx else 0), x.new_empty(0), x.new_empty(0)
    dtype = _compute_dtype(x, _dtype(weight), bias_dtype)
    wide = operands.stats_dtype(dtype)
    parameter, parameter_shape = _vector(weight, dtype), x.shape[x.dim() - ndim :]
    dy = dy.reshape(m, n)
    fused_db = want_db and parameter is not None
    with _compat.no_autocast(x.device.type):
        if want_dx or want_dw or fused_db:
            # The bias only lends its shape and dtype, so the weight stands in for it.
            got = torch.ops.aten.native_layer_norm_backward(
                dy.to(dtype), x.reshape(m, n).to(dtype), [n],
                mean.reshape(m, 1).to(wide), rstd.reshape(m, 1).to(wide), parameter,
                parameter if fused_db else None, [want_dx, want_dw, fused_db],
            )  # fmt: skip
            if want_dx:
                dx = _compat.reshaped(got[0].to(x.dtype).contiguous(), x.shape)
            if want_dw:
                dw = _compat.reshaped(got[1].to(_dtype(weight)), parameter_shape)
            if fused_db:
                db = _compat.reshaped(got[2].to(bias_dtype), parameter_shape)
        if want_db and not fused_db:
            # torch takes the bias gradient's size from the weight and fails without one.
            db = _compat.reshaped(dy.sum(0, dtype=wide).to(bias_dtype), parameter_shape)
    return dx, dw, db


def rms_norm(choice: Choice, x: torch.Tensor, weight: torch.Tensor | None, ndim: int, eps: float) -> Norm:
    """(y, rstd) of aten._fused_rms_norm on CUDA, else of its formula."""
    m, n = operands.sizes(x.shape, ndim)
    dtype, stats = _compute_dtype(x, _dtype(weight)), operands.stats_dtype(x.dtype)
    fused = _fused_rms_norm("_fused_rms_norm", x)
    with _compat.no_autocast(x.device.type):
        if fused is not None:
            y, rstd = fused(x.reshape(m, n).to(dtype), [n], _vector(weight, dtype), eps)
        else:
            wide = operands.stats_dtype(dtype)
            x_wide, parameter = x.reshape(m, n).to(wide), _vector(weight, wide)
            rstd = torch.rsqrt(x_wide.square().mean(1, keepdim=True) + eps)
            y = x_wide * rstd if parameter is None else x_wide * rstd * parameter
    return _compat.reshaped(y.to(x.dtype).contiguous(), x.shape), _compat.reshaped(rstd, (m,)).to(stats)


def rms_norm_backward(
    choice: Choice,
    dy: torch.Tensor,
    x: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    ndim: int,
    eps: float,
    mask: Sequence[bool],
) -> Norm:
    """(dx, dw) of aten._fused_rms_norm_backward on CUDA, else of its formula."""
    m, n = operands.sizes(x.shape, ndim)
    want_dx, want_dw = operands.wanted(mask, weight is not None)
    dx, dw = x.new_empty(x.shape if want_dx else 0), x.new_empty(0)
    dtype = _compute_dtype(x, _dtype(weight))
    fused = _fused_rms_norm("_fused_rms_norm_backward", x)
    dy, x2, rstd = dy.reshape(m, n), x.reshape(m, n), rstd.reshape(m, 1)
    with _compat.no_autocast(x.device.type):
        if fused is not None:
            parameter = _vector(weight, dtype)
            got_dx, got_dw = fused(dy.to(dtype), x2.to(dtype), [n], rstd, parameter, [want_dx, want_dw])
        else:
            wide = operands.stats_dtype(dtype)
            parameter, dy = _vector(weight, wide), dy.to(wide)
            normalised = x2.to(wide) * rstd
            if want_dx:
                g = dy if parameter is None else dy * parameter
                got_dx = (g - normalised * (normalised * g).mean(1, keepdim=True)) * rstd
            if want_dw:
                got_dw = (dy * normalised).sum(0)
    if want_dx:
        dx = _compat.reshaped(got_dx.to(x.dtype).contiguous(), x.shape)
    if want_dw:
        dw = _compat.reshaped(got_dw.to(_dtype(weight)), x.shape[x.dim() - ndim :])
    return dx, dw
