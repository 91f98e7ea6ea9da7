"""The float64 oracle of matmul and its error model."""

from __future__ import annotations

import math

import torch

_EPS = {torch.float64: 2.0**-52, torch.float32: 2.0**-23, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
_TF32_EPS = 2.0**-10


def oracle(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """a @ b + bias in float64."""
    out = a.double() @ b.double()
    return out if bias is None else out + bias.double()


def tolerance(dtype: torch.dtype, out_dtype: torch.dtype, k: int, *, tf32: bool = False) -> float:
    """Relative Frobenius error allowed against the oracle.

    Rounding the result once costs at most eps/2 of an element. Products of 16-bit inputs are exact in float32;
    summing k of them in float32 costs about sqrt(k) eps32 for random signs (Higham, Accuracy and Stability, 4.2).
    tf32 rounds each operand to 10 mantissa bits.
    """
    accumulate = 2.0 * math.sqrt(max(k, 1)) * (_EPS[torch.float32] if dtype != torch.float64 else _EPS[dtype])
    inputs = _TF32_EPS if tf32 else 0.0
    return 0.5 * _EPS[out_dtype] + accumulate + inputs
