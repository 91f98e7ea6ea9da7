"""Gradients, second derivatives and vmap rules of the norm operators.

The operators and the autograd.Functions of the eager path share each rule; every rule calls layer_norm, rms_norm and
their gradients below, which travel as _watch.route says, so that transforms nest.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import _watch
from . import op, operands

Tensor = torch.Tensor
Optional = torch.Tensor | None
Dtype = torch.dtype | None
Grads = tuple[Optional, ...]

_ops = torch.ops.tritonops


def _lead_sum(t: Tensor, ndim: int, keep: int = 0) -> Tensor:
    """Sum over all dimensions but the first `keep` and the last `ndim`."""
    dims = tuple(range(keep, t.dim() - ndim))
    return t.sum(dims) if dims else t


def _per_row(stats: Tensor, x: Tensor, ndim: int) -> Tensor:
    """mean or rstd, one value a row, shaped to broadcast against x."""
    return stats.reshape(*x.shape[: x.dim() - ndim], *[1] * ndim)


def _formula(
    dy: Tensor, x: Tensor, weight: Optional, ndim: int, eps: float, center: bool, mask: Sequence[bool]
) -> tuple[Tensor, ...]:
    """The wanted ones of (dx, dw, db), in differentiable torch operations, statistics taken from x.

    Sources as in reference.py. Computed in float32 (float64), unrounded.
    """
    wide = operands.stats_dtype(x.dtype)
    dy, x = dy.to(wide), x.to(wide)
    last = tuple(range(-ndim, 0))
    if center:
        x = x - x.mean(last, keepdim=True)
    rstd = (x.square().mean(last, keepdim=True) + eps).rsqrt()
    normalised = x * rstd
    g = dy if weight is None else dy * weight.to(wide)
    out = []
    if mask[0]:
        dx = g - normalised * (normalised * g).mean(last, keepdim=True)
        out.append((dx - g.mean(last, keepdim=True) if center else dx) * rstd)
    if mask[1]:
        out.append(_lead_sum(dy * normalised, ndim))
    if mask[2:] and mask[2]:
        out.append(_lead_sum(dy, ndim))
    return tuple(out)


def _second(
    ctx: Any, dy: Tensor, x: Tensor, weight: Optional, center: bool, cotangents: Sequence[Optional]
) -> tuple[Optional, Optional, Optional]:
    """Gradients of dy, x and weight, given those of the wanted (dx, dw, db)."""
    mask = [m and c is not None for m, c in zip(ctx.mask, cotangents, strict=True)]
    if not any(mask):
        return None, None, None
    wide = operands.stats_dtype(x.dtype)
    given = tuple(c.to(wide) for c, m in zip(cotangents, mask, strict=True) if m and c is not None)

    def formula(*tensors: Tensor) -> tuple[Tensor, ...]:
        w = tensors[2] if weight is not None else None
        return _formula(tensors[0], tensors[1], w, ctx.ndim, ctx.eps, center, mask)

    inputs = (dy, x) if weight is None else (dy, x, weight)
    grads: Grads = torch.func.vjp(formula, *inputs)[1](given)
    return grads[0], grads[1], grads[2] if weight is not None else None


def _wanted(grads: Sequence[Tensor], mask: Sequence[bool]) -> Grads:
    return tuple(g if m else None for g, m in zip(grads, mask, strict=True))


# layer_norm


def _layer_norm_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, ctx.ndim, ctx.eps, ctx.flags = inputs
    _, mean, rstd = output
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, weight, mean, rstd)


def _layer_norm_backward(ctx: Any, dy: Optional, *_: Optional) -> Grads:
    if dy is None:
        return (None,) * 6
    x, weight, mean, rstd = ctx.saved_tensors
    mask = list(ctx.needs_input_grad[:3])
    grads = layer_norm_gradients(dy, x, mean, rstd, weight, ctx.bias_dtype, ctx.ndim, ctx.eps, mask, ctx.flags)
    return (*_wanted(grads, mask), None, None, None)


def _layer_norm_backward_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    dy, x, _, _, weight, bias_dtype, ctx.ndim, ctx.eps, mask, _ = inputs
    ctx.mask = operands.wanted(mask, weight is not None, bias_dtype is not None)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(dy, x, weight)


def _layer_norm_second(ctx: Any, *cotangents: Optional) -> Grads:
    """mean and rstd are functions of x here: they get no gradient of their own, x gets all of it."""
    dy, x, weight = ctx.saved_tensors
    grad_dy, grad_x, grad_weight = _second(ctx, dy, x, weight, True, cotangents)
    return grad_dy, grad_x, None, None, grad_weight, None, None, None, None, None


# rms_norm


def _rms_norm_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, ctx.ndim, ctx.eps, ctx.flags = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, weight, output[1])


def _rms_norm_backward(ctx: Any, dy: Optional, *_: Optional) -> Grads:
    if dy is None:
        return (None,) * 5
    x, weight, rstd = ctx.saved_tensors
    mask = list(ctx.needs_input_grad[:2])
    grads = rms_norm_gradients(dy, x, rstd, weight, ctx.ndim, ctx.eps, mask, ctx.flags)
    return (*_wanted(grads, mask), None, None, None)


def _rms_norm_backward_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    dy, x, _, weight, ctx.ndim, ctx.eps, mask, _ = inputs
    ctx.mask = operands.wanted(mask, weight is not None)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(dy, x, weight)


def _rms_norm_second(ctx: Any, *cotangents: Optional) -> Grads:
    dy, x, weight = ctx.saved_tensors
    grad_dy, grad_x, grad_weight = _second(ctx, dy, x, weight, False, cotangents)
    return grad_dy, grad_x, None, grad_weight, None, None, None, None


# vmap: the batch dimension goes first and joins the rows; batched parameters are applied outside the kernel, in the
# dtype of the statistics, with one rounding. `norm` is the call that a rule makes: an operator's rule calls the
# operator (autograd.Function is not available inside it), the Function's the routed one.


def _front(t: Optional, dim: int | None) -> Optional:
    return t if t is None or dim is None else t.movedim(dim, 0)


def _batched(t: Tensor, dim: int | None, size: int) -> Tensor:
    return t.movedim(dim, 0) if dim is not None else t.unsqueeze(0).expand(size, *t.shape)


def _affine(y: Tensor, parameter: Optional, dim: int | None, ndim: int, combine: Callable[..., Tensor]) -> Tensor:
    """y (batch, ..., *tail) with a parameter (*tail) or a batch of them combined into it."""
    if parameter is None:
        return y
    if dim is not None:
        parameter = parameter.movedim(dim, 0)
        parameter = parameter.reshape(parameter.shape[0], *[1] * (y.dim() - ndim - 1), *parameter.shape[1:])
    return combine(y, parameter.to(y.dtype))


def _vmap_forward(
    size: int, x: Tensor, weight: Optional, bias: Optional, in_dims: Sequence[int | None], ndim: int,
    call: Callable[..., tuple[Tensor, ...]],
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:  # fmt: skip
    """`call(x, weight, bias)` for a batch; in_dims of x, weight and bias."""
    x_dim, w_dim, b_dim = in_dims
    x = _batched(x, x_dim, size)
    if w_dim is None and b_dim is None:
        y, *stats = call(x, weight, bias)
    else:
        y, *stats = call(x.to(operands.stats_dtype(x.dtype)), None, None)
        y = _affine(y, weight, w_dim, ndim, torch.mul)
        y = _affine(y, bias, b_dim, ndim, torch.add).to(x.dtype)
    return (y, *(s.reshape(size, -1) for s in stats)), (0,) * (1 + len(stats))


def _vmap_backward(
    size: int, dy: Tensor, x: Tensor, mean: Optional, rstd: Tensor, weight: Optional, bias_dtype: Dtype,
    in_dims: Sequence[int | None], ndim: int, mask: Sequence[bool], call: Callable[..., Tensor],
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:  # fmt: skip
    """dx of the whole batch at once by `call(dy, x, mean, rstd, weight)`; dw and db of each element by sums.

    in_dims of dy, x, mean, rstd and weight.
    """
    want_x, *want = operands.wanted(mask, weight is not None, *([bias_dtype is not None] if len(mask) == 3 else []))
    w_dim = in_dims[4]
    dy, x = _batched(dy, in_dims[0], size), _batched(x, in_dims[1], size)
    rstd = _batched(rstd, in_dims[3], size).reshape(-1)
    mean = None if mean is None else _batched(mean, in_dims[2], size).reshape(-1)
    wide = operands.stats_dtype(x.dtype)
    nothing = x.new_empty((size, 0))
    out = [nothing] * len(mask)
    if want_x and w_dim is None:
        out[0] = call(dy, x, mean, rstd, weight)
    elif want_x:
        out[0] = call(_affine(dy.to(wide), weight, w_dim, ndim, torch.mul), x.to(wide), mean, rstd, None).to(x.dtype)
    if want[0] and weight is not None:
        normalised = x.to(wide) if mean is None else x.to(wide) - _per_row(mean, x, ndim)
        normalised = normalised * _per_row(rstd, x, ndim)
        out[1] = _lead_sum(dy.to(wide) * normalised, ndim, keep=1).to(weight.dtype)
    if want[1:] and want[1]:
        out[2] = _lead_sum(dy.to(wide), ndim, keep=1).to(bias_dtype)
    return tuple(out), (0,) * len(out)


def _layer_norm_vmap(
    norm: Callable[..., Any], info: Any, in_dims: tuple[int | None, ...],
    x: Tensor, weight: Optional, bias: Optional, ndim: int, eps: float,
    flags: int,
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:  # fmt: skip
    def call(x: Tensor, weight: Optional, bias: Optional) -> tuple[Tensor, ...]:
        return norm(x, weight, bias, ndim, eps, flags)

    return _vmap_forward(info.batch_size, x, weight, bias, in_dims[:3], ndim, call)


def _rms_norm_vmap(
    norm: Callable[..., Any],
    info: Any,
    in_dims: tuple[int | None, ...],
    x: Tensor,
    weight: Optional,
    ndim: int,
    eps: float,
    flags: int,
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    def call(x: Tensor, weight: Optional, bias: Optional) -> tuple[Tensor, ...]:
        return norm(x, weight, ndim, eps, flags)

    return _vmap_forward(info.batch_size, x, weight, None, (*in_dims[:2], None), ndim, call)


def _layer_norm_backward_vmap(
    norm: Callable[..., Any], info: Any, in_dims: tuple[int | None, ...],
    dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Optional,
    bias_dtype: Dtype, ndim: int, eps: float, mask: Sequence[bool], flags: int,
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:  # fmt: skip
    def call(dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Optional) -> Tensor:
        only_x = [True, False, False]
        return norm(dy, x, mean, rstd, weight, None, ndim, eps, only_x, flags)[0]

    return _vmap_backward(info.batch_size, dy, x, mean, rstd, weight, bias_dtype, in_dims[:5], ndim, mask, call)


def _rms_norm_backward_vmap(
    norm: Callable[..., Any], info: Any, in_dims: tuple[int | None, ...],
    dy: Tensor, x: Tensor, rstd: Tensor, weight: Optional, ndim: int,
    eps: float, mask: Sequence[bool], flags: int,
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:  # fmt: skip
    def call(dy: Tensor, x: Tensor, mean: Optional, rstd: Tensor, weight: Optional) -> Tensor:
        return norm(dy, x, rstd, weight, ndim, eps, [True, False], flags)[0]

    dims = (*in_dims[:2], None, *in_dims[2:4])
    return _vmap_backward(info.batch_size, dy, x, None, rstd, weight, None, dims, ndim, mask, call)


def _function(
    name: str,
    forward: Callable[..., Any],
    routed: Callable[..., Any],
    setup: Callable[..., Any],
    backward: Callable[..., Any],
    vmap: Callable[..., Any],
) -> Any:
    """The autograd.Function of a rule set; the same rules are registered for the operator `name`."""
    operator = getattr(_ops, name).default

    def call(*arguments: Any) -> Any:
        tensors = [a for a in arguments if isinstance(a, Tensor)]
        return _watch.implementation(tensors, forward, operator)(*arguments)

    torch.library.register_autograd(f"tritonops::{name}", backward, setup_context=setup)
    torch.library.register_vmap(f"tritonops::{name}", functools.partial(vmap, operator))

    def routed_vmap(*arguments: Any) -> Any:
        return vmap(routed, *arguments)

    parts = {"forward": call, "setup_context": setup, "backward": backward, "vmap": routed_vmap}
    return type(f"_{name}", (torch.autograd.Function,), {k: staticmethod(f) for k, f in parts.items()})


def layer_norm(
    x: Tensor, weight: Optional, bias: Optional, ndim: int, eps: float, flags: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The differentiable (y, mean, rstd)."""
    arguments = (x, weight, bias, ndim, eps, flags)
    return _watch.travel((x, weight, bias), arguments, op.execute_layer_norm, _LayerNorm, _ops.layer_norm.default)


def rms_norm(x: Tensor, weight: Optional, ndim: int, eps: float, flags: int) -> tuple[Tensor, Tensor]:
    """The differentiable (y, rstd)."""
    arguments = (x, weight, ndim, eps, flags)
    return _watch.travel((x, weight), arguments, op.execute_rms_norm, _RMSNorm, _ops.rms_norm.default)


def layer_norm_gradients(
    dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Optional, bias_dtype: Dtype, ndim: int, eps: float,
    mask: Sequence[bool], flags: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The differentiable (dx, dw, db)."""
    return _watch.travel(
        (dy, x, weight, mean, rstd),
        (dy, x, mean, rstd, weight, bias_dtype, ndim, eps, mask, flags),
        op.execute_layer_norm_backward,
        _LayerNormBackward,
        _ops.layer_norm_backward.default,
    )


def rms_norm_gradients(
    dy: Tensor, x: Tensor, rstd: Tensor, weight: Optional, ndim: int, eps: float, mask: Sequence[bool], flags: int
) -> tuple[Tensor, Tensor]:
    """The differentiable (dx, dw)."""
    return _watch.travel(
        (dy, x, weight, rstd),
        (dy, x, rstd, weight, ndim, eps, mask, flags),
        op.execute_rms_norm_backward,
        _RMSNormBackward,
        _ops.rms_norm_backward.default,
    )


_LayerNorm = _function(
    "layer_norm", op.execute_layer_norm, layer_norm, _layer_norm_setup, _layer_norm_backward, _layer_norm_vmap
)
_LayerNormBackward = _function(
    "layer_norm_backward",
    op.execute_layer_norm_backward,
    layer_norm_gradients,
    _layer_norm_backward_setup,
    _layer_norm_second,
    _layer_norm_backward_vmap,
)
_RMSNorm = _function("rms_norm", op.execute_rms_norm, rms_norm, _rms_norm_setup, _rms_norm_backward, _rms_norm_vmap)
_RMSNormBackward = _function(
    "rms_norm_backward",
    op.execute_rms_norm_backward,
    rms_norm_gradients,
    _rms_norm_backward_setup,
    _rms_norm_second,
    _rms_norm_backward_vmap,
)
