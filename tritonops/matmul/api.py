"""tritonops.matmul and tritonops.linear: validation, batching, autocast, autograd."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from .. import _checks, _compat, _watch
from ..dispatch import override
from .op import NAME, Bias, OutDtype, execute, fold

_op = torch.ops.tritonops.matmul.default

_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
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
    # With out_dtype=float32 the gradient keeps its range: 1e-8 and 1e5 are no float16 numbers.
    grad_a = _product_like(a, grad, b.mH.to(grad.dtype), ctx.flags).to(a.dtype) if need_a else None
    grad_b = _product_like(b, a.mH.to(grad.dtype), grad, ctx.flags).to(b.dtype) if need_b else None
    grad_bias = grad.sum(tuple(range(grad.dim() - 1))).to(ctx.bias_dtype) if need_bias else None
    return grad_a, grad_b, grad_bias, None, None


def _product_like(operand: torch.Tensor, left: torch.Tensor, right: torch.Tensor, flags: int) -> torch.Tensor:
    """left @ right in the memory layout of `operand`, whose gradient it is.

    A column-major operand (a weight's transpose) gets its gradient as the adjoint of right^H @ left^H: a weight's
    gradient that is laid out otherwise is copied by autograd and sends torch's optimizers down their slow path.
    """
    if operand.stride(-2) == 1 and operand.stride(-1) != 1:
        return product(right.mH, left.mH, None, None, flags).mH.resolve_conj()
    return product(left, right, None, None, flags)


def _vmap(
    call: Callable[..., torch.Tensor],
    info: Any,
    in_dims: tuple[int | None, ...],
    a: torch.Tensor,
    b: torch.Tensor,
    bias: Bias,
    out_dtype: OutDtype,
    flags: int,
) -> tuple[torch.Tensor, int]:
    """Rows are folded where only `a` is batched, else it is a batched product; a batched bias is added after it."""
    dim_a, dim_b, dim_bias = in_dims[:3]
    a = a if dim_a is None else a.movedim(dim_a, 0)
    b = b if dim_b is None else b.movedim(dim_b, 0)
    # Where `a` brings no batch dimension it needs one to broadcast: for `b`'s, or for the bias's.
    if dim_a is None and (dim_b is None or b.dim() == 4):
        a = a.unsqueeze(0)
    a2, b2, shape = fold(a, b)
    if bias is None or dim_bias is None:
        return call(a2, b2, bias, out_dtype, flags).view(shape), 0
    out = call(a2, b2, None, out_dtype, flags).view(shape)
    rows = bias.movedim(dim_bias, 0)
    return out + rows.view(rows.shape[0], *[1] * (out.dim() - 2), rows.shape[1]), 0


class _Matmul(torch.autograd.Function):
    @staticmethod
    def forward(a: torch.Tensor, b: torch.Tensor, bias: Bias, out_dtype: OutDtype, flags: int) -> torch.Tensor:
        return _watch.implementation((a, b, bias), execute, _op)(a, b, bias, out_dtype, flags)

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
    return _watch.travel((a, b, bias), (a, b, bias, out_dtype, flags), execute, _Matmul, _op)


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
        A contiguous tensor of torch.matmul's shape. Sums are in float32; each result is rounded once before the
        activation. Products of float32 operands are TF32 only where torch's float32 matmul precision allows it and
        torch's kernel serves; the Triton variants multiply them exactly.

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
    if out_dtype is not None and not isinstance(out_dtype, torch.dtype):
        raise TypeError(f"tritonops.matmul(): argument 'out_dtype' must be torch.dtype, not {type(out_dtype).__name__}")
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
    out = _compat.reshaped(product(a2, b2, bias, out_dtype, override.flags), shape)
    if activation is not None:
        out = _ACTIVATIONS[activation](out)
    if residual is not None:
        if residual.dim() > out.dim() or any(
            have not in (1, want) for have, want in zip(residual.shape[::-1], out.shape[::-1], strict=False)
        ):
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
