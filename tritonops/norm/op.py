"""The operators tritonops::layer_norm, rms_norm and their backwards: schemas, fakes, implementations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .. import _checks
from ..device import device_info
from ..dispatch import memo
from . import operands, spec

Tensor = torch.Tensor
Optional = torch.Tensor | None

_TAGS = (torch.Tag.pt2_compliant_tag,)

torch.library.define(
    "tritonops::layer_norm",
    "(Tensor x, Tensor? weight, Tensor? bias, int ndim, float eps, int flags) -> (Tensor, Tensor, Tensor)",
    tags=_TAGS,
)
torch.library.define(
    "tritonops::layer_norm_backward",
    "(Tensor dy, Tensor x, Tensor mean, Tensor rstd, Tensor? weight, ScalarType? bias_dtype, int ndim, float eps, "
    "bool[3] mask, int flags) -> (Tensor, Tensor, Tensor)",
    tags=_TAGS,
)
torch.library.define(
    "tritonops::rms_norm",
    "(Tensor x, Tensor? weight, int ndim, float eps, int flags) -> (Tensor, Tensor)",
    tags=_TAGS,
)
torch.library.define(
    "tritonops::rms_norm_backward",
    "(Tensor dy, Tensor x, Tensor rstd, Tensor? weight, int ndim, float eps, bool[2] mask, int flags) "
    "-> (Tensor, Tensor)",
    tags=_TAGS,
)


def _check(name: str, x: Tensor, weight: Optional, bias: Optional, ndim: int) -> None:
    """Floating tensors of one device; parameters of x's last `ndim` sizes. RuntimeError as torch's."""
    _checks.same_device(name, x=x, weight=weight, bias=bias)
    for argument, t in (("x", x), ("weight", weight), ("bias", bias)):
        if t is not None and not t.is_floating_point():
            raise NotImplementedError(f"tritonops.{name}(): not implemented for '{argument}' of dtype {t.dtype}")
    if not 1 <= ndim <= x.dim():
        raise RuntimeError(f"tritonops.{name}(): 'ndim' must be 1 to {x.dim()} (the dimensions of 'x'), got {ndim}")
    tail = x.shape[x.dim() - ndim :]
    for argument, t in (("weight", weight), ("bias", bias)):
        if t is not None and tuple(t.shape) != tuple(tail):
            raise RuntimeError(
                f"tritonops.{name}(): Expected '{argument}' to be of same shape as normalized_shape, but got "
                f"'{argument}' of shape {list(t.shape)} and normalized_shape = {list(tail)}"
            )


def _check_backward(
    name: str, dy: Tensor, x: Tensor, mean: Optional, rstd: Tensor, weight: Optional, ndim: int
) -> None:
    _check(name, x, weight, None, ndim)
    _checks.same_device(name, x=x, dy=dy, mean=mean, rstd=rstd)
    _checks.same_dtype(name, x=x, dy=dy)
    if tuple(dy.shape) != tuple(x.shape):
        raise RuntimeError(
            f"tritonops.{name}(): expected 'dy' of x's shape {list(x.shape)}, got shape {list(dy.shape)}"
        )
    m, _ = operands.sizes(x.shape, ndim)
    for argument, t in (("mean", mean), ("rstd", rstd)):
        if t is not None and (tuple(t.shape) != (m,) or t.dtype is not operands.stats_dtype(x.dtype)):
            raise RuntimeError(
                f"tritonops.{name}(): expected '{argument}' of shape [{m}] and {operands.stats_dtype(x.dtype)}, got "
                f"shape {list(t.shape)} and {t.dtype}"
            )


def _empty_stats(x: Tensor, ndim: int) -> Tensor:
    return x.new_empty((operands.sizes(x.shape, ndim)[0],), dtype=operands.stats_dtype(x.dtype))


def _empty_gradients(x: Tensor, ndim: int, mask: Sequence[bool], *dtypes: torch.dtype | None) -> Any:
    """Gradients of x and of parameters of the given dtypes (None: not there): fake ones, or sums over no rows."""
    want_x, *wanted = operands.wanted(mask, *(d is not None for d in dtypes))
    tail = x.shape[x.dim() - ndim :]
    return (
        x.new_empty(x.shape if want_x else (0,)),
        *(x.new_zeros(tail, dtype=d) if w else x.new_empty((0,)) for w, d in zip(wanted, dtypes, strict=True)),
    )


@torch.library.register_fake("tritonops::layer_norm")
def _layer_norm_fake(
    x: Tensor, weight: Optional, bias: Optional, ndim: int, eps: float, flags: int
) -> tuple[Tensor, Tensor, Tensor]:
    _check("layer_norm", x, weight, bias, ndim)
    return x.new_empty(x.shape), _empty_stats(x, ndim), _empty_stats(x, ndim)


@torch.library.register_fake("tritonops::rms_norm")
def _rms_norm_fake(x: Tensor, weight: Optional, ndim: int, eps: float, flags: int) -> tuple[Tensor, Tensor]:
    _check("rms_norm", x, weight, None, ndim)
    return x.new_empty(x.shape), _empty_stats(x, ndim)


@torch.library.register_fake("tritonops::layer_norm_backward")
def _layer_norm_backward_fake(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Optional,
    bias_dtype: torch.dtype | None,
    ndim: int,
    eps: float,
    mask: Sequence[bool],
    flags: int,
) -> tuple[Tensor, ...]:
    _check_backward("layer_norm_backward", dy, x, mean, rstd, weight, ndim)
    return _empty_gradients(x, ndim, mask, None if weight is None else weight.dtype, bias_dtype)


@torch.library.register_fake("tritonops::rms_norm_backward")
def _rms_norm_backward_fake(
    dy: Tensor, x: Tensor, rstd: Tensor, weight: Optional, ndim: int, eps: float, mask: Sequence[bool], flags: int
) -> tuple[Tensor, ...]:
    _check_backward("rms_norm_backward", dy, x, None, rstd, weight, ndim)
    return _empty_gradients(x, ndim, mask, None if weight is None else weight.dtype)


def execute_layer_norm(
    x: Tensor, weight: Optional, bias: Optional, ndim: int, eps: float, flags: int, *, compiled: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, mean, rstd) on real tensors: problem -> choice -> launch."""
    _check("layer_norm", x, weight, bias, ndim)
    if x.numel() == 0:
        return operands.empty_forward(x, ndim, eps)
    bias_dtype = None if bias is None else bias.dtype
    key = spec.key("layer_norm", (x,), weight, bias, bias_dtype, ndim, "", flags, compiled)
    arguments = (x, weight, bias, ndim, eps)
    return memo.serve(spec.LAYER_NORM, key, device_info(x.device), lambda: spec.problem(key), arguments)


def execute_rms_norm(
    x: Tensor, weight: Optional, ndim: int, eps: float, flags: int, *, compiled: bool = False
) -> tuple[Tensor, Tensor]:
    """(y, rstd) on real tensors."""
    _check("rms_norm", x, weight, None, ndim)
    if x.numel() == 0:
        y, _, rstd = operands.empty_forward(x, ndim, eps)
        return y, rstd
    key = spec.key("rms_norm", (x,), weight, None, None, ndim, "", flags, compiled)
    return memo.serve(spec.RMS_NORM, key, device_info(x.device), lambda: spec.problem(key), (x, weight, ndim, eps))


def execute_layer_norm_backward(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Optional,
    bias_dtype: torch.dtype | None,
    ndim: int,
    eps: float,
    mask: Sequence[bool],
    flags: int,
    *,
    compiled: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dw, db) on real tensors; gradients not wanted have size 0."""
    _check_backward("layer_norm_backward", dy, x, mean, rstd, weight, ndim)
    wanted = operands.wanted(mask, weight is not None, bias_dtype is not None)
    if x.numel() == 0 or not any(wanted):
        return _empty_gradients(x, ndim, wanted, None if weight is None else weight.dtype, bias_dtype)
    key = spec.key(
        "layer_norm_backward", (x, dy), weight, None, bias_dtype, ndim, spec.grads_of(wanted), flags, compiled
    )
    arguments = (dy, x, mean, rstd, weight, bias_dtype, ndim, eps, wanted)
    return memo.serve(spec.LAYER_NORM_BACKWARD, key, device_info(x.device), lambda: spec.problem(key), arguments)


def execute_rms_norm_backward(
    dy: Tensor,
    x: Tensor,
    rstd: Tensor,
    weight: Optional,
    ndim: int,
    eps: float,
    mask: Sequence[bool],
    flags: int,
    *,
    compiled: bool = False,
) -> tuple[Tensor, Tensor]:
    """(dx, dw) on real tensors; gradients not wanted have size 0."""
    _check_backward("rms_norm_backward", dy, x, None, rstd, weight, ndim)
    wanted = operands.wanted(mask, weight is not None)
    if x.numel() == 0 or not any(wanted):
        return _empty_gradients(x, ndim, wanted, None if weight is None else weight.dtype)
    key = spec.key("rms_norm_backward", (x, dy), weight, None, None, ndim, spec.grads_of(wanted), flags, compiled)
    arguments = (dy, x, rstd, weight, ndim, eps, wanted)
    return memo.serve(spec.RMS_NORM_BACKWARD, key, device_info(x.device), lambda: spec.problem(key), arguments)


def _layer_norm_impl(
    x: Tensor, weight: Optional, bias: Optional, ndim: int, eps: float, flags: int
) -> tuple[Tensor, Tensor, Tensor]:
    return execute_layer_norm(x, weight, bias, ndim, eps, flags, compiled=True)


def _rms_norm_impl(x: Tensor, weight: Optional, ndim: int, eps: float, flags: int) -> tuple[Tensor, Tensor]:
    return execute_rms_norm(x, weight, ndim, eps, flags, compiled=True)


def _layer_norm_backward_impl(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Optional,
    bias_dtype: torch.dtype | None,
    ndim: int,
    eps: float,
    mask: Sequence[bool],
    flags: int,
) -> tuple[Tensor, Tensor, Tensor]:
    return execute_layer_norm_backward(dy, x, mean, rstd, weight, bias_dtype, ndim, eps, mask, flags, compiled=True)


def _rms_norm_backward_impl(
    dy: Tensor, x: Tensor, rstd: Tensor, weight: Optional, ndim: int, eps: float, mask: Sequence[bool], flags: int
) -> tuple[Tensor, Tensor]:
    return execute_rms_norm_backward(dy, x, rstd, weight, ndim, eps, mask, flags, compiled=True)


torch.library.impl("tritonops::layer_norm", ("cpu", "cuda"), _layer_norm_impl)
torch.library.impl("tritonops::rms_norm", ("cpu", "cuda"), _rms_norm_impl)
torch.library.impl("tritonops::layer_norm_backward", ("cpu", "cuda"), _layer_norm_backward_impl)
torch.library.impl("tritonops::rms_norm_backward", ("cpu", "cuda"), _rms_norm_backward_impl)
