"""tritonops.matmul and tritonops.linear: validation, batching, autocast, autograd."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from .. import _checks, _watch
from ..dispatch import override
from .op import NAME, Bias, OutDtype, execute, fold

_op = torch.ops.tritonops.matmul.default

_ACTIVATIONS = {
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    a, b, bias, _, flags = inputs
    ctx.save_for_backward(a, b)
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.flags = flags


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """grad_a = grad @ b^H, grad_b = a^H @ grad, in the operands' dtype; grad_bias sums over the rows."""
    a, b = ctx.saved_tensors
    need_a, need_b, need_bias = ctx.needs_input_grad[:3]
    g = grad.to(a.dtype)
    grad_a = product(g, b.mH, None, None, ctx.flags) if need_a else None
    grad_b = product(a.mH, g, None, None, ctx.flags) if need_b else None
    grad_bias = grad.sum(tuple(range(grad.dim() - 1))).to(ctx.bias_dtype) if need_bias else None
    return grad_a, grad_b, grad_bias, None, None


def _vmap(
    call: Callable[..., torch.Tensor], info: Any, in_dims: tuple[int | None, ...],
    a: torch.Tensor, b: torch.Tensor, bias: Bias, out_dtype: OutDtype, flags: int,
) -> tuple[torch.Tensor, int]:  # fmt: skip
    """Batches of products: rows are folded where only `a` is batched, else a batched product; a batched bias is added."""
    a = a if in_dims[0] is None else a.movedim(in_dims[0], 0)
    b = b if in_dims[1] is None else b.movedim(in_dims[1], 0)
    batched_bias = bias is not None and in_dims[2] is not None
    if in_dims[0] is None and in_dims[1] is None:
        a = a.unsqueeze(0)
    elif in_dims[1] is not None and b.dim() == 4 and in_dims[0] is None:
        a = a.unsqueeze(0)
    inner = None if batched_bias else bias
    a2, b2, shape = fold(a, b)
    out = call(a2, b2, inner, out_dtype, flags).view(shape)
    if batched_bias and bias is not None:
        rows = bias.movedim(in_dims[2], 0)
        out = out + rows.view(rows.shape[0], *[1] * (out.dim() - 2), rows.shape[1])
    return out, 0


class _Matmul(torch.autograd.Function):
    @staticmethod
    def forward(a: torch.Tensor, b: torch.Tensor, bias: Bias, out_dtype: OutDtype, flags: int) -> torch.Tensor:
        return (_op if _watch.watched() else execute)(a, b, bias, out_dtype, flags)

    setup_context = staticmethod(_setup_context)
    backward = staticmethod(_backward)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[torch.Tensor, int]:
        return _vmap(product, info, in_dims, *args)


torch.library.register_autograd("tritonops::matmul", _backward, setup_context=_setup_context)
# An operator's rule calls the operator: autograd.Function is not available inside it.
torch.library.register_vmap("tritonops::matmul", functools.partial(_vmap, _op))


def product(a: torch.Tensor, b: torch.Tensor, bias: Bias, out_dtype: OutDtype, flags: int) -> torch.Tensor:
    """The differentiable product of 2-D or 3-D operands, travelling as _watch.route says."""
    way = _watch.route(a, b, bias)
    if way == _watch.DIRECT:
        return execute(a, b, bias, out_dtype, flags)
    if way == _watch.FUNCTION:
        return _Matmul.apply(a, b, bias, out_dtype, flags)
    return _op(a, b, bias, out_dtype, flags)


def _autocast(device_type: str, *tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    """The tensors as torch.matmul gets them under autocast: floating point, float64 excepted, in its dtype."""
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return list(tensors)
    dtype = torch.get_autocast_dtype(device_type)
    return [
        t.to(dtype) if t is not None and t.is_floating_point() and t.dtype is not torch.float64 else t for t in tensors
    ]


def matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """``activation(a @ b + bias) + residual`` with torch.matmul's shapes.

    Args:
        a, b: 1-D, 2-D or batched (broadcast) operands of one dtype and device, any strides. Float16, bfloat16 and
            float32 are served by the variant the dispatch table names; every other dtype by torch.
        bias: shape (N,), the operands' dtype; added in the product's epilogue. Needs `b` of 2-D or more.
        activation: None, "relu", "silu", "gelu" (exact) or "gelu_tanh".
        residual: broadcastable to the output's shape; added last.
        out_dtype: None (the operands' dtype), or torch.float32 for 16-bit operands: the float32 sums unrounded.

    Returns:
        A contiguous tensor of torch.matmul's shape. Sums are in float32 (float32 operands: TF32 products where
        torch's float32 matmul precision allows them); each result is rounded once before the activation.

    Differentiable any number of times in a, b, bias and residual; under autocast, operands are cast as
    torch.matmul's are. Deterministic: the same variant gives the same bits, and under
    ``use(policy="batch_invariant")`` a row's bits do not depend on M or on the batch.

    Raises:
        RuntimeError: sizes, dtypes or devices do not fit, as torch.matmul.
        TypeError, ValueError: an argument of the wrong kind, named.
    """
    _checks.is_tensor(NAME, a=a, b=b)
    if bias is not None:
        _checks.is_tensor(NAME, bias=bias)
        if b.dim() < 2:
            raise RuntimeError("tritonops.matmul(): 'bias' needs 'b' of at least 2 dimensions")
    if residual is not None:
        _checks.is_tensor(NAME, residual=residual)
    if activation is not None and activation not in _ACTIVATIONS:
        raise ValueError(
            f"tritonops.matmul(): 'activation' must be None or one of {', '.join(_ACTIVATIONS)}, got {activation!r}"
        )
    _checks.same_device(NAME, a=a, b=b, bias=bias, residual=residual)
    _checks.strided(NAME, a=a, b=b, bias=bias)
    ac, bc, bias = _autocast(a.device.type, a, b, bias)
    if ac is None or bc is None:
        raise TypeError("tritonops.matmul(): 'a' and 'b' must be Tensors")
    a2, b2, shape = fold(ac, bc)
    out = product(a2, b2, bias, out_dtype, override.flags).view(shape)
    if activation is not None:
        out = _ACTIVATIONS[activation](out)
    if residual is not None:
        if torch.broadcast_shapes(out.shape, residual.shape) != out.shape:
            raise RuntimeError(
                f"tritonops.matmul(): 'residual' of shape {tuple(residual.shape)} does not broadcast to the output's "
                f"{tuple(out.shape)}"
            )
        out = out + residual
    return out


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """``activation(x @ weight.T + bias) + residual``: torch.nn.functional.linear with an epilogue.

    Args:
        x: shape (..., K).
        weight: shape (N, K), or (K,) for one output without a dimension, as torch's.
        bias: shape (N,).
        activation, residual: as in `matmul`.

    Raises:
        RuntimeError, TypeError, ValueError: as `matmul`, naming the argument.
    """
    _checks.is_tensor("linear", x=x, weight=weight)
    if weight.dim() not in (1, 2):
        raise RuntimeError(f"tritonops.linear(): 'weight' must be 1-D or 2-D, got {weight.dim()}-D")
    if weight.dim() == 1 and bias is not None:
        raise RuntimeError("tritonops.linear(): 'bias' needs a 2-D 'weight'")
    return matmul(x, weight.t() if weight.dim() == 2 else weight, bias=bias, activation=activation, residual=residual)
