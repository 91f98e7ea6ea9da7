"""The operator tritonops::matmul: schema, fake, implementation, gradient and vmap rule."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .. import _checks, _compat, launch
from ..device import DeviceInfo, device_info
from ..dispatch import memo, override
from ..dispatch.problem import Problem, dtype_name
from ..dispatch.variant import OpSpec, Variant, register

NAME = "matmul"

torch.library.define(
    "tritonops::matmul",
    "(Tensor a, Tensor b, Tensor? bias, ScalarType? out_dtype, int flags) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)

Bias = torch.Tensor | None
OutDtype = torch.dtype | None


def _check(a: torch.Tensor, b: torch.Tensor, bias: Bias, out_dtype: OutDtype) -> None:
    """2-D or 3-D operands of one device and dtype whose sizes fit; RuntimeError as torch's."""
    _checks.same_device(NAME, a=a, b=b, bias=bias)
    if a.dim() != b.dim() or a.dim() not in (2, 3):
        raise RuntimeError(f"tritonops.matmul(): expected 2-D or 3-D 'a' and 'b', got {a.dim()}-D and {b.dim()}-D")
    if a.shape[-1] != b.shape[-2]:
        raise RuntimeError(
            f"tritonops.matmul(): 'a' and 'b' shapes cannot be multiplied "
            f"({a.shape[-2]}x{a.shape[-1]} and {b.shape[-2]}x{b.shape[-1]})"
        )
    if a.dim() == 3 and a.shape[0] != b.shape[0]:
        raise RuntimeError(f"tritonops.matmul(): batch sizes of 'a' and 'b' differ: {a.shape[0]} and {b.shape[0]}")
    _checks.same_dtype(NAME, a=a, b=b, bias=bias)
    if bias is not None and (bias.dim() != 1 or bias.shape[0] != b.shape[-1]):
        raise RuntimeError(f"tritonops.matmul(): expected 'bias' of shape ({b.shape[-1]},), got {tuple(bias.shape)}")
    if out_dtype is not None and out_dtype != a.dtype:
        if not (out_dtype is torch.float32 and a.dtype in (torch.float16, torch.bfloat16)):
            raise RuntimeError(
                f"tritonops.matmul(): 'out_dtype' must be the inputs' dtype ({a.dtype}), or torch.float32 for 16-bit "
                f"inputs, got {out_dtype}"
            )


def _out_shape(a: torch.Tensor, b: torch.Tensor) -> list[Any]:
    return [*a.shape[:-1], b.shape[-1]]


@torch.library.register_fake("tritonops::matmul")
def _fake(a: torch.Tensor, b: torch.Tensor, bias: Bias, out_dtype: OutDtype, flags: int) -> torch.Tensor:
    _check(a, b, bias, out_dtype)
    return a.new_empty(_out_shape(a, b), dtype=out_dtype or a.dtype)


def _layout(t: torch.Tensor) -> tuple[str, bool]:
    """Layout letter of a matrix and whether its rows are aligned.

    n: rows contiguous (row-major); t: columns contiguous (its transpose is row-major); x: neither, broadcast or
    overlapping rows. Strides of size-1 dimensions say nothing and are ignored.
    """
    rows, cols = t.shape[-2], t.shape[-1]
    stride_row, stride_col = t.stride(-2), t.stride(-1)
    itemsize = t.element_size()
    if cols == 1 or stride_col == 1:
        if rows == 1:
            return "n", t.data_ptr() % 16 == 0
        if stride_row >= cols:
            return "n", (t.data_ptr() | stride_row * itemsize) % 16 == 0
    if rows == 1 or stride_row == 1:
        if cols == 1:
            return "t", t.data_ptr() % 16 == 0
        if stride_col >= rows:
            return "t", (t.data_ptr() | stride_col * itemsize) % 16 == 0
    return "x", False


# Everything a choice may depend on, as a flat tuple: see _problem for the names.
Key = tuple[Any, ...]


def _key(a: torch.Tensor, b: torch.Tensor, bias: Bias, out_dtype: OutDtype, flags: int, graph: bool) -> Key:
    layout_a, aligned_a = _layout(a)
    layout_b, aligned_b = _layout(b)
    return (
        NAME,
        a.device,
        a.dtype,
        out_dtype or a.dtype,
        a.shape[0] if a.dim() == 3 else 1,
        a.shape[-2],
        b.shape[-1],
        a.shape[-1],
        layout_a + layout_b,
        aligned_a and aligned_b,
        # The output is contiguous: its rows are aligned where N is (4100 x 4100 x 4104 bf16: cuBLAS 214 TFLOP/s on an
        # H200, 598 with N padded to 4104).
        a.shape[-2] == 1 or b.shape[-1] * (out_dtype or a.dtype).itemsize % 16 == 0,
        a.dtype is torch.float32 and _compat.tf32_allowed(),
        bias is not None,
        launch.offsets_exceed_int32(a, b) or a.shape[-2] * b.shape[-1] >= 2**31,
        override.effective(flags),
        graph,
    )


def _problem(key: Key) -> Problem:
    _, _, dtype, out, batch, m, n, k, layout, operands, output, tf32, bias, wide, flags, graph = key
    return Problem(
        NAME,
        {"batch": batch, "M": m, "N": n, "K": k},
        dtype_name(dtype),
        layout,
        operands and output,
        override.policy(flags),
        "graph" if graph else "eager",
        {
            "out": dtype_name(out),
            "bias": bias,
            "precision": "tf32" if tf32 else "ieee",
            "wide": wide,
            "operands_aligned": operands,
        },
        flags,
    )


def execute(
    a: torch.Tensor, b: torch.Tensor, bias: Bias, out_dtype: OutDtype, flags: int, *, compiled: bool = False
) -> torch.Tensor:
    """The implementation, on real tensors: problem -> choice -> launch."""
    _check(a, b, bias, out_dtype)
    # Every kernel reads the bias with unit stride.
    bias = None if bias is None else bias.contiguous()
    if a.numel() == 0 or b.numel() == 0:
        out = torch.zeros(_out_shape(a, b), dtype=out_dtype or a.dtype, device=a.device)
        return out if bias is None else out.add_(bias)
    key = _key(a, b, bias, out_dtype, flags, compiled or _compat.capturing(a.device))
    device = device_info(a.device)
    return memo.serve(SPEC, key, device, lambda: _problem(key), (a, b, bias, out_dtype))


def _impl(a: torch.Tensor, b: torch.Tensor, bias: Bias, out_dtype: OutDtype, flags: int) -> torch.Tensor:
    return execute(a, b, bias, out_dtype, flags, compiled=True)


torch.library.impl("tritonops::matmul", ("cpu", "cuda"), _impl)


def fold(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, list[Any]]:
    """torch.matmul's operands as 2-D or 3-D ones, and the shape to view the product as.

    RuntimeError for 0-D operands and for sizes that do not fit.
    """
    if a.dim() == 0 or b.dim() == 0:
        raise RuntimeError(
            f"tritonops.matmul(): both arguments need to be at least 1-D, but 'a' is {a.dim()}-D and 'b' is {b.dim()}-D"
        )
    a2 = a.unsqueeze(0) if a.dim() == 1 else a
    b2 = b.unsqueeze(1) if b.dim() == 1 else b
    if a2.shape[-1] != b2.shape[-2]:
        raise RuntimeError(
            f"tritonops.matmul(): 'a' and 'b' shapes cannot be multiplied ({tuple(a.shape)} and {tuple(b.shape)}): "
            f"{a2.shape[-1]} != {b2.shape[-2]}"
        )
    if b2.dim() == 2:
        lead = list(a2.shape[:-1])
        if a2.dim() > 2:
            # An explicit row count: -1 cannot be inferred where K is 0.
            a2 = a2.reshape(_product(lead), a2.shape[-1])
    else:
        try:
            batch = torch.broadcast_shapes(a2.shape[:-2], b2.shape[:-2])
        except RuntimeError:
            raise RuntimeError(
                f"tritonops.matmul(): batch dimensions of 'a' {tuple(a2.shape[:-2])} and 'b' {tuple(b2.shape[:-2])} "
                f"cannot be broadcast together"
            ) from None
        lead = [*batch, a2.shape[-2]]
        count = _product(batch)
        a2 = a2.expand(*batch, *a2.shape[-2:]).reshape(count, *a2.shape[-2:])
        b2 = b2.expand(*batch, *b2.shape[-2:]).reshape(count, *b2.shape[-2:])
    shape = [*lead, b2.shape[-1]]
    if b.dim() == 1:
        shape.pop()
    if a.dim() == 1:
        del shape[-1 if b.dim() == 1 else -2]
    return a2, b2, shape


def _product(sizes: Sequence[Any]) -> Any:
    out = 1
    for s in sizes:
        out = out * s
    return out


def _as_matrix(value: Any, name: str, dtype: torch.dtype | None, transposed: bool) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value
    if dtype is None:
        raise TypeError(f"tritonops.explain(): 'dtype' must be given where '{name}' is a shape")
    shape = [int(s) for s in value]
    if transposed and len(shape) >= 2:
        shape[-2:] = shape[:-3:-1]
        return torch.empty(shape, dtype=dtype, device="meta").mT
    return torch.empty(shape, dtype=dtype, device="meta")


def describe(
    a: Any,
    b: Any,
    *,
    bias: Any = None,
    activation: str | None = None,
    residual: Any = None,
    out_dtype: OutDtype = None,
    dtype: OutDtype = None,
    layout: str = "nn",
) -> Problem:
    """The Problem of a call of tritonops.matmul; `layout` ("nn", "nt", ...) says how shapes given as tuples lie."""
    a = _as_matrix(a, "a", dtype, layout[0] == "t")
    b = _as_matrix(b, "b", dtype if dtype is not None else a.dtype, layout[1] == "t")
    _checks.strided("explain", a=a, b=b)
    a2, b2, _ = fold(a, b)
    bias_t = torch.empty(b2.shape[-1], dtype=a2.dtype, device=a2.device) if bias is not None else None
    return _problem(_key(a2, b2, bias_t, out_dtype, override.flags, _compat.capturing(a2.device)))


def describe_linear(
    x: Any,
    weight: Any,
    bias: Any = None,
    *,
    activation: str | None = None,
    residual: Any = None,
    dtype: OutDtype = None,
) -> Problem:
    """The Problem of a call of tritonops.linear."""
    x = _as_matrix(x, "x", dtype, False)
    weight = _as_matrix(weight, "weight", dtype if dtype is not None else x.dtype, False)
    return describe(x, weight.t() if weight.dim() == 2 else weight, bias=bias)


def sample(problem: Problem, device: str) -> tuple[torch.Tensor, torch.Tensor, Bias, OutDtype]:
    """Operands that make up a problem: random on a real device, unallocated on "meta"."""
    d = problem.dims
    dtype, out = getattr(torch, problem.dtype), getattr(torch, problem.traits["out"])

    def matrix(rows: int, cols: int, letter: str) -> torch.Tensor:
        inner, outer = (rows, cols) if letter == "t" else (cols, rows)
        unit = 16 // dtype.itemsize
        # x: row-major with a gap after every element; misaligned: rows one element past a 16-byte unit.
        step = 2 if letter == "x" else 1
        width = -(-inner * step // unit) * unit + (0 if problem.traits["operands_aligned"] else 1)
        shape = (d["batch"], outer, width)
        t = torch.empty(shape, dtype=dtype, device=device) if device == "meta" else torch.randn(
            shape, device=device).to(dtype)  # fmt: skip
        t = t[..., : inner * step : step]
        t = t.mT if letter == "t" else t
        return t[0] if d["batch"] == 1 else t

    a, b = matrix(d["M"], d["K"], problem.layout[0]), matrix(d["K"], d["N"], problem.layout[1])
    bias = torch.empty(d["N"], dtype=dtype, device=device) if device == "meta" else torch.randn(
        d["N"], device=device).to(dtype)  # fmt: skip
    return a, b, bias if problem.traits["bias"] else None, None if out == dtype else out


def oracle(problem: Problem, a: torch.Tensor, b: torch.Tensor, bias: Bias, out_dtype: OutDtype) -> tuple[torch.Tensor]:
    from . import reference

    return (reference.oracle(a, b, bias),)


def features(problem: Problem, device: DeviceInfo) -> Mapping[str, int]:
    """tiles128: output tiles of 128 x 128; waves100: 100 x tiles128 / SMs, rounded down."""
    d = problem.dims
    tiles = d["batch"] * launch.int_ceil_div(d["M"], 128) * launch.int_ceil_div(d["N"], 128)
    return {"tiles128": tiles, "waves100": 100 * tiles // max(device.sms, 1)}


def prefer(problem: Problem, device: DeviceInfo) -> list[str]:
    """Our variants where no table decides: descriptors where they are legal, tiles by M, small tiles for float32."""
    m = problem.dims["M"]
    order = ["tma_persistent/128x256x64-g8-w8-s3-p1-flat", "tma_persistent/128x256x64-g8-w8-s4-p1-sub"]
    order += ["padded/tma-128x256x64-g8-w8-s3-p1-sub"]
    # On FMA units (float32) a 128-wide tile spills, and the interpreter's time goes with the padded tile.
    if problem.policy == "batch_invariant":
        order = []
    elif device.kind == "interpreter" or problem.dtype == "float32":
        order = ["tiled/32x64x32-g8-w4-s3"]
    elif m <= 16:
        order = ["tiled/16x128x128-g8-w4-s4", *order]
    elif m <= 64:
        order = ["tiled/64x128x64-g8-w4-s4", *order]
    return [*order, "tiled/128x128x64-g8-w8-s3", "tiled/64x64x64-g8-w4-s4", "tiled/32x64x32-g8-w4-s3"]


def invariant(problem: Problem) -> Problem:
    """The same N, K and dtype at one row count, layout and alignment, so that every batch gets one variant."""
    return dataclasses.replace(problem, dims={**problem.dims, "batch": 1, "M": 4096}, layout="nn", aligned=False)


def _load() -> list[Variant]:
    from .variants import variants

    return variants()


SPEC = register(
    OpSpec(
        NAME,
        _load,
        ("batch", "M", "N", "K"),
        prefer,
        describe,
        sample,
        features,
        ("tiles128", "waves100"),
        invariant,
        {"linear": describe_linear},
        oracle,
        lambda problem: problem.dims["K"],
    )
)
