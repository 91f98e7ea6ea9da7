"""Saying which variant would serve a call, and why, without running it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..device import DeviceInfo, device_info, named_device
from .problem import Problem
from .select import Decision, choose
from .variant import REGISTRY, OpSpec, Variant


def _find(op: Any) -> tuple[OpSpec, Callable[..., Problem]]:
    name = op
    package = (__package__ or "").partition(".")[0]
    if callable(op) and str(getattr(op, "__module__", "")).partition(".")[0] == package:
        name = getattr(op, "__name__", op)
    if isinstance(name, str):
        for spec in REGISTRY.values():
            if name == spec.name:
                return spec, spec.describe
            if name in spec.aliases:
                return spec, spec.aliases[name]
    known = sorted([*REGISTRY, *(alias for spec in REGISTRY.values() for alias in spec.aliases)])
    raise ValueError(f"op: unknown op {op!r}; ops are {', '.join(known)}")


def spec_of(op: Any) -> OpSpec:
    """The OpSpec that serves an op's name or public function. Raises ValueError naming the ops there are."""
    return _find(op)[0]


def explain(op: Any, *args: Any, device: str | torch.device | None = None, **kwargs: Any) -> Decision:
    """Which variant serves a call, which rule chose it, on what evidence, and what is not known.

    Nothing is compiled or launched. ``print(explain(...))`` is the readable paragraph; the fields are data.

    Args:
        op: an op's name ("matmul", "layer_norm", "layer_norm_backward", ...) or its public function.
        *args, **kwargs: the arguments of the call. A tensor may be a real one, a meta tensor, or a shape (a tuple of
            ints) with ``dtype=`` given. A backward op takes the arguments of its forward.
        device: ``"sm_90-132"`` (architecture and SM count; no GPU is needed) or a torch device. Default: the device
            of the tensors, or the current GPU for shapes.

    Raises:
        ValueError, TypeError: naming the argument.
        VariantUnavailable: ``use(variant=...)`` forces a variant that cannot serve this call.
    """
    spec, describe = _find(op)
    problem = describe(*args, **kwargs)
    return choose(spec, problem, _device(device, (*args, *kwargs.values())))


def _device(device: str | torch.device | None, args: tuple[Any, ...]) -> DeviceInfo:
    if isinstance(device, str) and device.startswith("sm_"):
        return named_device(device)
    if device is not None:
        try:
            return device_info(torch.device(device))
        except (RuntimeError, AssertionError) as error:
            why = str(error).strip().partition("\n")[0]
            raise ValueError(
                f"device: {device!r} is not here ({why}); a GPU that is not can be named, for example 'sm_90-132'"
            ) from None
    for a in args:
        if isinstance(a, torch.Tensor) and a.device.type in ("cuda", "cpu"):
            return device_info(a.device)
    return device_info(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def variants(op: Any) -> list[Variant]:
    """The variants of an op, given its name or public function."""
    return list(spec_of(op).variants().values())
