"""The variants of layer_norm, rms_norm and their backwards: one line adds a configuration.

``run`` receives, after the choice, the op's arguments without flags:

    layer_norm(x, weight | None, bias | None, ndim, eps) -> (y, mean, rstd)
    layer_norm_backward(dy, x, mean, rstd, weight | None, bias_dtype | None, ndim, eps, mask) -> (dx, dw, db)
    rms_norm(x, weight | None, ndim, eps) -> (y, rstd)
    rms_norm_backward(dy, x, rstd, weight | None, ndim, eps, mask) -> (dx, dw)

x is normalised over its last `ndim` dimensions; mean and rstd have shape (M,), float32 (float64 for float64 x);
y and dx are contiguous and of x's dtype, dw of weight's, db of `bias_dtype`. A gradient that `mask` does not ask
for, or whose parameter is not there, has size 0 and is not computed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

from .. import launch
from ..device import DeviceInfo
from ..dispatch.problem import Problem
from ..dispatch.variant import VENDOR, Variant
from . import liger, rows, vendor

# (elements of a tile, warps)
FORWARD = ((512, 1), (1024, 4), (2048, 4), (4096, 4), (4096, 8), (8192, 8), (16384, 16), (32768, 32), (65536, 32))

# (elements of a tile, warps, stages, programs per SM). Measured on an H200, bf16, of its copy bandwidth: 0.70 for
# 32768 x 1024 at (4096, 4, 3, 2), 0.90 for 32768 x 4096 at (8192, 8, 3, 1). A tile of 32768 elements spills 872 bytes
# a thread (sm_90, Triton 3.6) and is left out.
BACKWARD = (
    (1024, 4, 3, 4),
    (2048, 4, 3, 4),
    (4096, 4, 3, 2),
    (4096, 8, 3, 2),
    (8192, 8, 3, 1),
    (8192, 16, 2, 1),
    (16384, 16, 2, 1),
    (16384, 32, 2, 1),
)

# (name, warps or 0 for Liger's own rule, maxnreg at its ceiling). ptxas register usage levels 0 and 10 are no
# configurations of their own: median 1.00 of the default's time over 38 sizes (H200, Triton 3.6, ptxas 12.8).
LIGER = (("own", 0, False), ("own-cap", 0, True), ("w8-cap", 8, True), ("w16-cap", 16, True), ("w32-cap", 32, True))


def _forward(run_rows: Callable[..., Any], run_vendor: Callable[..., Any]) -> list[Variant]:
    own = [
        Variant(
            id=f"rows/t{tile}-w{warps}",
            run=run_rows,
            requires=functools.partial(rows.forward_requires, tile=tile),
            meta={"tile": tile},
            options=launch.options(warps),
            kernel=rows.FORWARD,
            batch_invariant=True,
        )
        for tile, warps in FORWARD
    ]
    return [Variant(VENDOR, run_vendor), *own]


def _backward(run_rows: Callable[..., Any], run_vendor: Callable[..., Any]) -> list[Variant]:
    own = [
        Variant(
            id=f"rows/t{tile}-w{warps}-s{stages}-p{programs}",
            run=run_rows,
            requires=functools.partial(rows.backward_requires, tile=tile, stages=stages),
            meta={"tile": tile, "stages": stages, "programs_per_sm": programs},
            options=launch.options(warps),
            kernel=rows.BACKWARD,
            batch_invariant=True,
        )
        for tile, warps, stages, programs in BACKWARD
    ]
    return [Variant(VENDOR, run_vendor), *own]


def _liger() -> list[Variant]:
    return [
        Variant(
            id=f"liger/{name}",
            run=liger.layer_norm_backward,
            requires=liger.requires,
            meta={"warps": warps, "cap": cap},
            options=launch.options(warps, 3, cap=cap) if warps else {},
            kernel=liger.KERNEL,
        )
        for name, warps, cap in LIGER
    ]


def layer_norm() -> list[Variant]:
    return _forward(rows.layer_norm, vendor.layer_norm)


def rms_norm() -> list[Variant]:
    return _forward(rows.rms_norm, vendor.rms_norm)


def layer_norm_backward() -> list[Variant]:
    return _backward(rows.layer_norm_backward, vendor.layer_norm_backward) + _liger()


def rms_norm_backward() -> list[Variant]:
    return _backward(rows.rms_norm_backward, vendor.rms_norm_backward)


def prefer_forward(problem: Problem, device: DeviceInfo) -> Sequence[str]:
    """Tiles of about 2048 elements, 16 elements a thread; smaller ones where rows are few."""
    ranked = sorted(FORWARD, key=functools.partial(_distance, problem, device, 2048, 16, 4))
    return [f"rows/t{tile}-w{warps}" for tile, warps in ranked]


def prefer_backward(problem: Problem, device: DeviceInfo) -> Sequence[str]:
    """4096 elements up to 2048 columns and 8192 above, 32 elements a thread, 16 where rows are misaligned."""
    tile = 4096 if problem.dims["N"] <= 2048 else 8192
    per_thread = 32 if problem.aligned else 16
    ranked = sorted(BACKWARD, key=functools.partial(_distance, problem, device, tile, per_thread, 2))
    return [f"rows/t{tile}-w{warps}-s{stages}-p{programs}" for tile, warps, stages, programs in ranked]


def _distance(
    problem: Problem,
    device: DeviceInfo,
    tile: int,
    per_thread: int,
    programs_per_sm: int,
    configuration: tuple[int, ...],
) -> tuple[float, float]:
    """How far a configuration is from the wished tile and elements a thread, in powers of two.

    The number of rows counts only where the policy lets the choice depend on the batch.
    """
    block = launch.next_power_of_2(problem.dims["N"])
    if problem.policy != "batch_invariant":
        while tile > block and tile > 512 and problem.dims["M"] * block < tile * programs_per_sm * device.sms:
            tile //= 2
    tile = max(tile, block)
    size, warps = configuration[:2]
    return abs(math.log2(size / tile)), abs(math.log2(size / (32 * warps * per_thread)))
