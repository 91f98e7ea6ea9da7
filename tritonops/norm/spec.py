"""What dispatch knows of the norms: key, problem, features, samples and the four op records."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .. import _compat
from ..device import DeviceInfo
from ..dispatch import override
from ..dispatch.problem import Problem, dtype_name
from ..dispatch.variant import OpSpec, register
from . import operands, variants

# Everything a choice may depend on, as a flat tuple: see `problem` for the names.
Key = tuple[Any, ...]


def _aligned(n: int, ndim: int, rows: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor | None]) -> bool:
    """Whether every row and parameter starts at a multiple of 16 bytes, outputs and copies included."""
    if n * rows[0].element_size() % 16:
        return False
    for t in rows:
        stride = operands.row_stride(t, ndim)
        if stride is not None and (t.data_ptr() | stride * t.element_size()) % 16:
            return False
    return all(p is None or p.data_ptr() % 16 == 0 for p in parameters)


def key(
    name: str,
    rows: Sequence[torch.Tensor],
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    bias_dtype: torch.dtype | None,
    ndim: int,
    grads: str,
    flags: int,
    compiled: bool,
) -> Key:
    """The memo key of a call; `rows` are x, and dy of a backward."""
    x = rows[0]
    m, n = operands.sizes(x.shape, ndim)
    return (
        name,
        x.device,
        x.dtype,
        None if weight is None else weight.dtype,
        bias_dtype,
        m,
        n,
        _aligned(n, ndim, rows, (weight, bias)),
        grads,
        override.effective(flags),
        compiled or _compat.capturing(x.device),
    )


def problem(key: Key) -> Problem:
    name, _, dtype, weight, bias, m, n, aligned, grads, flags, graph = key
    traits = {
        "weight": None if weight is None else dtype_name(weight),
        "bias": None if bias is None else dtype_name(bias),
    }
    if name.endswith("_backward"):
        traits["grads"] = grads
    return Problem(
        name,
        {"M": m, "N": n},
        dtype_name(dtype),
        "",
        aligned,
        override.policy(flags),
        "graph" if graph else "eager",
        traits,
        flags,
    )


def grads_of(mask: Sequence[bool]) -> str:
    """Which gradients are computed: letters of x, w(eight) and b(ias)."""
    return "".join(letter for letter, wanted in zip("xwb", mask, strict=False) if wanted)


def normalized_ndim(
    name: str,
    shape: Sequence[int],
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    normalized_shape: int | Sequence[int] | None,
) -> int:
    """Number of normalised dimensions of an input of `shape`.

    None means weight's shape, else bias's, else the last dimension. RuntimeError with torch's wording for a shape
    that the input does not end with, TypeError for what is no shape.
    """
    if normalized_shape is None:
        given: Sequence[Any] = weight.shape if weight is not None else bias.shape if bias is not None else shape[-1:]
    elif isinstance(normalized_shape, int | torch.SymInt):
        given = (normalized_shape,)
    else:
        try:
            given = tuple(normalized_shape)
        except TypeError:
            raise TypeError(
                f"tritonops.{name}(): argument 'normalized_shape' must be an int or a sequence of ints, not "
                f"{type(normalized_shape).__name__}"
            ) from None
    if len(given) == 0:
        raise RuntimeError(
            f"tritonops.{name}(): Expected 'normalized_shape' to be at least 1-dimensional, but got {list(given)} "
            f"for 'x' of shape {list(shape)}"
        )
    if len(given) > len(shape) or tuple(shape[len(shape) - len(given) :]) != tuple(given):
        stars = ", ".join(["*", *map(str, given)])
        source = "normalized_shape" if normalized_shape is not None else "weight" if weight is not None else "bias"
        raise RuntimeError(
            f"tritonops.{name}(): Given normalized_shape={list(given)} (from '{source}'), expected 'x' with shape "
            f"[{stars}], but got input of size{list(shape)}"
        )
    return len(given)


def _as_tensor(value: Any, name: str, dtype: torch.dtype | None) -> torch.Tensor | None:
    if value is None or isinstance(value, torch.Tensor):
        return value
    if dtype is None:
        raise TypeError(f"tritonops.explain(): 'dtype' must be given where '{name}' is a shape")
    shape = (value,) if isinstance(value, int) else tuple(int(s) for s in value)
    return torch.empty(shape, dtype=dtype, device="meta")


def _describe(
    name: str,
    x: Any,
    weight: Any,
    bias: Any,
    normalized_shape: int | Sequence[int] | None,
    dtype: torch.dtype | None,
    weight_dtype: torch.dtype | None,
) -> Problem:
    x_t = _as_tensor(x, "x", dtype)
    if x_t is None:
        raise TypeError("tritonops.explain(): 'x' must be a tensor or a shape")
    parameter_dtype = weight_dtype or dtype or x_t.dtype
    w, b = _as_tensor(weight, "weight", parameter_dtype), _as_tensor(bias, "bias", parameter_dtype)
    ndim = normalized_ndim(name, x_t.shape, w, b, normalized_shape)
    backward = name.endswith("_backward")
    grads = grads_of((True, w is not None, b is not None)) if backward else ""
    b_dtype = None if b is None else b.dtype
    # The gradient of y is taken to lie as x does.
    return problem(key(name, (x_t,), w, None if backward else b, b_dtype, ndim, grads, override.flags, False))


def _layer_norm_describe(name: str) -> Any:
    def describe(
        x: Any,
        weight: Any = None,
        bias: Any = None,
        eps: float = 1e-5,
        normalized_shape: int | Sequence[int] | None = None,
        *,
        dtype: torch.dtype | None = None,
        weight_dtype: torch.dtype | None = None,
    ) -> Problem:
        return _describe(name, x, weight, bias, normalized_shape, dtype, weight_dtype)

    return describe


def _rms_norm_describe(name: str) -> Any:
    def describe(
        x: Any,
        weight: Any = None,
        eps: float | None = None,
        normalized_shape: int | Sequence[int] | None = None,
        *,
        dtype: torch.dtype | None = None,
        weight_dtype: torch.dtype | None = None,
    ) -> Problem:
        return _describe(name, x, weight, None, normalized_shape, dtype, weight_dtype)

    return describe


def sample(problem: Problem, device: str) -> tuple[Any, ...]:
    """Op arguments that make up a problem: random on a real device, unallocated on "meta"."""
    m, n = problem.dims["M"], problem.dims["N"]
    dtype = getattr(torch, problem.dtype)
    # A misaligned problem whose rows would be aligned starts each row one element past a 16-byte unit.
    gap = 0 if problem.aligned or n * dtype.itemsize % 16 else 1

    def random(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        if device == "meta":
            return torch.empty(shape, dtype=dtype, device=device)
        return torch.randn(shape, device=device).to(dtype)

    def parameter(trait: str) -> torch.Tensor | None:
        name = problem.traits.get(trait)
        return None if name is None else random(n, dtype=getattr(torch, name))

    x, weight, bias = random(m, n + gap)[:, :n], parameter("weight"), parameter("bias")
    center, eps = problem.op.startswith("layer_norm"), 1e-5
    if not problem.op.endswith("_backward"):
        return (x, weight, bias, 1, eps) if center else (x, weight, 1, eps)
    stats = operands.stats_dtype(dtype)
    wide = x.to(stats)
    mean = wide.mean(1) if center else None
    rstd = ((wide if mean is None else wide - mean[:, None]).square().mean(1) + eps).rsqrt()
    dy = random(m, n + gap)[:, :n]
    mask = [letter in problem.traits["grads"] for letter in ("xwb" if center else "xw")]
    if mean is None:
        return dy, x, rstd, weight, 1, eps, mask
    return dy, x, mean, rstd, weight, None if bias is None else bias.dtype, 1, eps, mask


def oracle(problem: Problem, *args: Any) -> tuple[torch.Tensor, ...]:
    from . import reference

    if problem.op == "layer_norm":
        return reference.layer_norm(*args)
    if problem.op == "rms_norm":
        return reference.rms_norm(*args)
    if problem.op == "layer_norm_backward":
        dy, x, _, _, weight, _, ndim, eps, _ = args
        return reference.layer_norm_backward(dy, x, weight, ndim, eps)
    dy, x, _, weight, ndim, eps, _ = args
    return reference.rms_norm_backward(dy, x, weight, ndim, eps)


def terms(problem: Problem) -> int:
    """A row, or for the parameters' gradients all rows."""
    return max(problem.dims.values()) if problem.op.endswith("_backward") else problem.dims["N"]


def features(problem: Problem, device: DeviceInfo) -> Mapping[str, int]:
    """N_low: N minus its highest power of two, 0 for a power of two."""
    n = problem.dims["N"]
    return {"N_low": n - (1 << (n.bit_length() - 1)) if n else 0}


def invariant(problem: Problem) -> Problem:
    """The same N and dtypes at one row count and without alignment, so that every batch gets one variant."""
    return dataclasses.replace(problem, dims={**problem.dims, "M": 4096}, aligned=False)


def _spec(name: str, describe: Any) -> OpSpec:
    backward = name.endswith("_backward")
    return register(
        OpSpec(
            name,
            getattr(variants, name),
            ("M", "N"),
            variants.prefer_backward if backward else variants.prefer_forward,
            describe,
            sample,
            features,
            ("N_low",),
            invariant,
            oracle=oracle,
            terms=terms,
        )
    )


LAYER_NORM = _spec("layer_norm", _layer_norm_describe("layer_norm"))
LAYER_NORM_BACKWARD = _spec("layer_norm_backward", _layer_norm_describe("layer_norm_backward"))
RMS_NORM = _spec("rms_norm", _rms_norm_describe("rms_norm"))
RMS_NORM_BACKWARD = _spec("rms_norm_backward", _rms_norm_describe("rms_norm_backward"))
