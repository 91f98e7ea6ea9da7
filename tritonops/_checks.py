"""Argument checks shared by the ops; errors are torch's kind and name the arguments."""

from __future__ import annotations

from typing import Any

import torch


def is_tensor(op: str, **arguments: Any) -> None:
    """TypeError unless every argument is a tensor."""
    for name, value in arguments.items():
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"tritonops.{op}(): argument '{name}' must be Tensor, not {type(value).__name__}")


def same_device(op: str, **tensors: torch.Tensor | None) -> None:
    """RuntimeError naming both devices unless all tensors given are on one."""
    first: tuple[str, torch.Tensor] | None = None
    for name, t in tensors.items():
        if t is None:
            continue
        if first is None:
            first = (name, t)
        elif t.device != first[1].device:
            raise RuntimeError(
                f"tritonops.{op}(): Expected all tensors to be on the same device, but '{first[0]}' is on "
                f"{first[1].device} and '{name}' is on {t.device}"
            )


def same_dtype(op: str, **tensors: torch.Tensor | None) -> None:
    """RuntimeError naming both dtypes unless all tensors given have one."""
    first: tuple[str, torch.Tensor] | None = None
    for name, t in tensors.items():
        if t is None:
            continue
        if first is None:
            first = (name, t)
        elif t.dtype != first[1].dtype:
            raise RuntimeError(
                f"tritonops.{op}(): expected '{first[0]}' and '{name}' to have the same dtype, but got "
                f"{first[1].dtype} and {t.dtype}"
            )


def strided(op: str, **tensors: torch.Tensor | None) -> None:
    """NotImplementedError for sparse, quantised or otherwise unstrided tensors."""
    for name, t in tensors.items():
        if t is not None and (t.layout is not torch.strided or t.is_quantized):
            raise NotImplementedError(f"tritonops.{op}(): '{name}' must be a dense strided tensor, not {t.layout}")
