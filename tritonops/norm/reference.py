"""The exact norms and gradients in float64, and how far from them a float32 computation may be."""

from __future__ import annotations

import math

import torch

from . import operands

_FLOAT32_UNIT = 2.0**-24


def _rows(x: torch.Tensor, ndim: int) -> torch.Tensor:
    return x.detach().to(torch.float64).reshape(operands.sizes(x.shape, ndim))


def _vector(parameter: torch.Tensor | None) -> torch.Tensor | float:
    return 1.0 if parameter is None else parameter.detach().to(torch.float64).reshape(-1)


def _statistics(x: torch.Tensor, eps: float, center: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(mean [M, 1], rstd [M, 1], normalised rows [M, N]); mean is 0 without `center`."""
    mean = x.mean(1, keepdim=True) if center else x.new_zeros((x.shape[0], 1))
    centred = x - mean
    rstd = (centred.square().mean(1, keepdim=True) + eps).rsqrt()
    return mean, rstd, centred * rstd


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, ndim: int, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(y of x's shape, mean (M,), rstd (M,)) in float64: y = (x - mean) * rstd * weight + bias.

    rstd = 1 / sqrt(var + eps) with the biased variance (Ba, Kiros, Hinton 2016, arXiv:1607.06450).
    """
    mean, rstd, normalised = _statistics(_rows(x, ndim), eps, True)
    y = normalised * _vector(weight)
    if bias is not None:
        y = y + _vector(bias)
    return y.reshape(x.shape), mean.reshape(-1), rstd.reshape(-1)


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, ndim: int, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(y of x's shape, rstd (M,)) in float64: y = x * rstd * weight, rstd = 1 / sqrt(mean(x**2) + eps)."""
    _, rstd, normalised = _statistics(_rows(x, ndim), eps, False)
    return (normalised * _vector(weight)).reshape(x.shape), rstd.reshape(-1)


def _backward(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, ndim: int, eps: float, center: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    _, rstd, normalised = _statistics(_rows(x, ndim), eps, center)
    dy = _rows(dy, ndim)
    g = dy * _vector(weight)
    dx = g - normalised * (normalised * g).mean(1, keepdim=True)
    if center:
        dx = dx - g.mean(1, keepdim=True)
    parameter_shape = x.shape[x.dim() - ndim :]
    return (
        (dx * rstd).reshape(x.shape),
        (dy * normalised).sum(0).reshape(parameter_shape),
        dy.sum(0).reshape(parameter_shape),
    )


def layer_norm_backward(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, ndim: int, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dx, dw, db) in float64, with mean and rstd taken from x; all three, whatever is asked for.

    With n = (x - mean) * rstd and g = dy * weight: dx = rstd * (g - mean(g) - n * mean(n * g)), means over a row;
    dw = sum over rows of dy * n, db = sum over rows of dy.
    """
    return _backward(dy, x, weight, ndim, eps, True)


def rms_norm_backward(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, ndim: int, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(dx, dw) in float64: with n = x * rstd and g = dy * weight, dx = rstd * (g - n * mean(n * g))."""
    return _backward(dy, x, weight, ndim, eps, False)[:2]


def _ratio(a: torch.Tensor, b: torch.Tensor) -> float:
    above, below = float(torch.linalg.vector_norm(a)), float(torch.linalg.vector_norm(b))
    return max(above / below if below > 0 else above, 1.0)


def condition(x: torch.Tensor, ndim: int, eps: float) -> float:
    """Largest |mean| * rstd of a row: by how much rounding the mean to float32 is magnified in (x - mean) * rstd."""
    mean, rstd, _ = _statistics(_rows(x, ndim), eps, True)
    return float((mean.abs() * rstd).max()) if mean.numel() else 0.0


def cancellation(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, ndim: int, eps: float, center: bool
) -> tuple[float, float, float]:
    """How much smaller dx, dw and db are than what they are added up from, so that their relative errors grow.

    For dx the norm of rstd * g over its own (one column under RMSNorm, two under LayerNorm: almost all cancels); for
    dw and db the root sum of squares of the terms over the sum. At least 1; where a gradient is exactly zero, the
    norm of the terms alone, for errors are absolute there.
    """
    rows, dy64 = _rows(x, ndim), _rows(dy, ndim)
    _, rstd, normalised = _statistics(rows, eps, center)
    dx, dw, db = (t.reshape(-1) for t in _backward(dy, x, weight, ndim, eps, center))
    return (
        _ratio(rstd * dy64 * _vector(weight), dx),
        _ratio((dy64 * normalised).square().sum(0).sqrt(), dw),
        _ratio(dy64.square().sum(0).sqrt(), db),
    )


def float32_error(terms: int, condition: float = 0.0, cancellation: float = 1.0) -> float:
    """Relative Frobenius error that float32 arithmetic may make before the result is rounded to its dtype.

    Three products and a quotient round with 2**-24 each, a sum of `terms` numbers in a tree of depth log2(terms)
    with one more per level (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., section 4.2), and a
    float32 mean shifts a normalised row by `condition` roundings; `cancellation` times all that.
    """
    return _FLOAT32_UNIT * (4 + math.log2(max(terms, 1)) + condition) * cancellation


def tolerated_error(dtype: torch.dtype, terms: int, condition: float = 0.0, cancellation: float = 1.0) -> float:
    """Relative Frobenius error of a result of `dtype` that was computed in float32 and rounded once.

    The unit roundoff of `dtype` for the rounding, and float32_error for what precedes it; for float64 the same in
    units of 2**-53.
    """
    error = float32_error(terms, condition, cancellation)
    return error * 2.0**-29 if dtype is torch.float64 else torch.finfo(dtype).eps / 2 + error
