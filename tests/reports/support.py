"""What the public-report cases share."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F


def err(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest absolute difference."""
    return float((a.double() - b.double()).abs().max())


def ln64(x, w=None, b=None, eps: float = 1e-5) -> torch.Tensor:
    """layer_norm in float64 over weight's dimensions (default: the last)."""

    def double(t):
        return None if t is None else t.detach().double()

    return F.layer_norm(double(x), tuple(w.shape if w is not None else x.shape[-1:]), double(w), double(b), eps)


def grads(fn: Callable[..., torch.Tensor], g: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Gradients of fn at `tensors` for the incoming gradient g."""
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    return torch.autograd.grad(fn(*leaves), leaves, g)
