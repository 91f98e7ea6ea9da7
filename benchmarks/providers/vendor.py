"""torch's own ops: the base that everything is compared with."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.nn.functional as F

from tritonops.calibrate.case import Case

from .base import Call, Provider, Refused

_aten = torch.ops.aten


def _matmul(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype | None) -> Any:
    if bias is not None:
        return torch.addmm(bias, a, b) if a.dim() == 2 else torch.baddbmm(bias, a, b)
    return torch.mm(a, b) if a.dim() == 2 else torch.bmm(a, b)


def _layer_norm(x: torch.Tensor, weight: Any, bias: Any, ndim: int, eps: float) -> torch.Tensor:
    return F.layer_norm(x, x.shape[1:], weight, bias, eps)


def _layer_norm_backward(
    dy: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, weight: Any, bias_dtype: Any, ndim: int,
    eps: float, mask: Any,
) -> Any:  # fmt: skip
    # The bias only lends its shape and dtype.
    bias = None if bias_dtype is None else weight
    return _aten.native_layer_norm_backward(dy, x, [x.shape[1]], mean[:, None], rstd[:, None], weight, bias, mask)


def _rms_norm(x: torch.Tensor, weight: Any, ndim: int, eps: float) -> torch.Tensor:
    return F.rms_norm(x, x.shape[1:], weight, eps)


def _rms_norm_backward(
    dy: torch.Tensor, x: torch.Tensor, rstd: torch.Tensor, weight: Any, ndim: int, eps: float, mask: Any
) -> Any:
    return _aten._fused_rms_norm_backward(dy, x, [x.shape[1]], rstd[:, None], weight, mask)


def _rms_norm_backward_formula(
    dy: torch.Tensor, x: torch.Tensor, rstd: torch.Tensor, weight: torch.Tensor, ndim: int, eps: float, mask: Any
) -> Any:
    wide, normalised = dy.float() * weight.float(), x.float() * rstd[:, None]
    dx = (wide - normalised * (normalised * wide).mean(1, keepdim=True)) * rstd[:, None]
    return dx.to(x.dtype), (dy.float() * normalised).sum(0).to(weight.dtype)


def _embedding(weight: torch.Tensor, ids: torch.Tensor, padding_idx: int, scale: bool) -> torch.Tensor:
    return F.embedding(ids, weight, None if padding_idx < 0 else padding_idx, scale_grad_by_freq=scale)


def _embedding_backward(dy: torch.Tensor, ids: torch.Tensor, rows: int, padding_idx: int, scale: bool) -> torch.Tensor:
    out: torch.Tensor = _aten.embedding_dense_backward(dy, ids, rows, padding_idx, scale)
    return out


CALLS: dict[str, Call] = {
    "matmul": _matmul,
    "layer_norm": _layer_norm,
    "layer_norm_backward": _layer_norm_backward,
    "rms_norm": _rms_norm,
    "rms_norm_backward": _rms_norm_backward,
    "embedding": _embedding,
    "embedding_backward": _embedding_backward,
}


class Torch(Provider):
    """Forward: torch.mm (addmm, bmm), layer_norm, rms_norm and embedding of torch.nn.functional, without autograd.

    Backward alone: aten.native_layer_norm_backward, _fused_rms_norm_backward and embedding_dense_backward on saved
    statistics, the operators that autograd calls. Off CUDA, where torch has no fused RMSNorm backward, its formula.
    """

    name = "torch"

    def poison(self) -> contextlib.AbstractContextManager[Any]:
        # Under a dispatch mode torch takes composites apart in another way.
        return contextlib.nullcontext()

    def call(self, case: Case) -> Call:
        op, traits = case.problem.op, case.problem.traits
        if op == "matmul" and traits["out"] != case.problem.dtype:
            raise Refused("torch.mm gives its operands' dtype")
        if op.startswith("layer_norm") and traits["weight"] is None and traits["bias"] is not None:
            raise Refused("torch takes the bias gradient's size from the weight, which is not there")
        if op == "rms_norm_backward" and not torch.cuda.is_available():
            return _rms_norm_backward_formula
        return CALLS[op]
