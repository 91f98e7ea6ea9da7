"""tritonops.layer_norm and tritonops.rms_norm: validation and autocast."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .. import _checks
from ..dispatch import override
from . import transforms
from .spec import normalized_ndim

NormalizedShape = int | Sequence[int] | None

# torch registers a norm for autocast to float32 on GPUs only, rms_norm in later versions than layer_norm.
_AUTOCAST = {
    name: torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "AutocastCUDA")
    for name in ("layer_norm", "rms_norm")
}


def _check(name: str, x: torch.Tensor, eps: object, **parameters: torch.Tensor | None) -> None:
    _checks.is_tensor(name, x=x, **{k: p for k, p in parameters.items() if p is not None})
    if isinstance(eps, bool) or not isinstance(eps, int | float | torch.SymFloat):
        raise TypeError(f"tritonops.{name}(): argument 'eps' must be float, not {type(eps).__name__}")
    _checks.same_device(name, x=x, **parameters)
    _checks.strided(name, x=x, **parameters)


def _autocast(name: str, *tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    """The tensors as torch's norm gets them under autocast: on CUDA floating point, float64 excepted, in float32."""
    x = tensors[0]
    if x is None or x.device.type != "cuda" or not _AUTOCAST[name] or not torch.is_autocast_enabled("cuda"):
        return list(tensors)
    return [
        t.to(torch.float32) if t is not None and t.is_floating_point() and t.dtype is not torch.float64 else t
        for t in tensors
    ]


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    normalized_shape: NormalizedShape = None,
) -> torch.Tensor:
    """``(x - mean) / sqrt(var + eps) * weight + bias`` over the last dimensions (arXiv:1607.06450, biased variance).

    Args:
        x: any floating tensor of at least one dimension, any strides. float32, float16 and bfloat16 are served by the
            variant the dispatch table names; float64 by torch.
        weight, bias: shape `normalized_shape`; their dtypes may differ from x's.
        eps: added to the variance.
        normalized_shape: the trailing sizes of `x` to normalise over, an int or a sequence. None means weight's
            shape, else bias's, else the last dimension.

    Returns:
        A contiguous tensor of x's shape and dtype. Statistics and products are in float32, rounded once at the end.

    Differentiable any number of times in x, weight and bias; each gradient has its tensor's dtype, and sums over
    rows are in float32. Under CUDA autocast the tensors are cast to float32, as torch.nn.functional.layer_norm does.
    Deterministic; under ``use(policy="batch_invariant")`` a row's bits do not depend on the other rows.

    Raises:
        RuntimeError: shapes or devices do not fit, as torch.nn.functional.layer_norm.
        NotImplementedError: integer, complex or sparse tensors.
        TypeError: an argument of the wrong kind, named.
    """
    _check("layer_norm", x, eps, weight=weight, bias=bias)
    ndim = normalized_ndim("layer_norm", x.shape, weight, bias, normalized_shape)
    cast_x, weight, bias = _autocast("layer_norm", x, weight, bias)
    if cast_x is None:
        raise TypeError("tritonops.layer_norm(): argument 'x' must be Tensor, not NoneType")
    return transforms.layer_norm(cast_x, weight, bias, ndim, eps, override.flags)[0]


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float | None = None,
    normalized_shape: NormalizedShape = None,
) -> torch.Tensor:
    """``x / sqrt(mean(x ** 2) + eps) * weight`` over the last dimensions (arXiv:1910.07467).

    Args:
        x: as in `layer_norm`.
        weight: shape `normalized_shape`; its dtype may differ from x's.
        eps: added to the mean square. None means float32's machine epsilon (1.19e-07), float64's for float64 `x`,
            as in torch.nn.functional.rms_norm, which computes 16-bit inputs in float32.
        normalized_shape: as in `layer_norm`; None means weight's shape, else the last dimension.

    Returns:
        A contiguous tensor of x's shape and dtype, computed in float32 and rounded once.

    Gradients, autocast, determinism and errors as `layer_norm`.

    Raises:
        RuntimeError, NotImplementedError, TypeError: as `layer_norm`, naming the argument.
    """
    _check("rms_norm", x, 0.0 if eps is None else eps, weight=weight)
    ndim = normalized_ndim("rms_norm", x.shape, weight, None, normalized_shape)
    cast_x, weight = _autocast("rms_norm", x, weight)
    if cast_x is None:
        raise TypeError("tritonops.rms_norm(): argument 'x' must be Tensor, not NoneType")
    if eps is None:
        eps = torch.finfo(torch.float64 if cast_x.dtype is torch.float64 else torch.float32).eps
    return transforms.rms_norm(cast_x, weight, ndim, eps, override.flags)[0]
