"""Launching a Triton kernel with its compiler options; every kernel launch of the package goes through launch()."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from . import _compat


@functools.cache
def kernel(name: str) -> Any:
    """The ``@triton.jit`` function named ``module:function``; its module, and Triton, load at the first call."""
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


@functools.cache
def liger_reason(name: str, parameters: tuple[str, ...]) -> str | None:
    """Why liger-kernel's own kernel ``module:function`` cannot be launched with these parameters, or None."""
    if not _compat.has_liger():
        return "liger-kernel is not installed"
    function = name.partition(":")[2]
    try:
        found = tuple(kernel(name).arg_names)
    except Exception as error:  # whatever an installation of Liger raises while it is imported
        return f"liger-kernel's {function} cannot be loaded: {type(error).__name__}: {error}"
    if found != parameters:
        return f"this liger-kernel's {function} takes other parameters than version 0.8.5's"
    return None


@dataclass(frozen=True)
class LaunchRequest:
    """One kernel launch that was captured instead of run; the static toolchain compiles it."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    meta: Mapping[str, Any]
    options: Mapping[str, Any]


_captured: list[LaunchRequest] | None = None


@contextlib.contextmanager
def capture() -> Iterator[list[LaunchRequest]]:
    """Collect launches instead of running them. For meta tensors and one thread: calibration, tests, doctor."""
    global _captured
    outer, _captured = _captured, []
    try:
        yield _captured
    finally:
        _captured = outer


def launch(
    jit_kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], meta: Mapping[str, Any], options: Mapping[str, Any]
) -> None:
    """Run `jit_kernel` over `grid` with run-time arguments in the kernel's order, constexprs by name, and options.

    An empty grid launches nothing.
    """
    if 0 in grid:
        return
    if _captured is not None:
        _captured.append(LaunchRequest(jit_kernel, grid, args, meta, options))
        return
    jit_kernel[grid](*args, **meta, **options)


def options(
    num_warps: int,
    num_stages: int = 1,
    *,
    level: int | None = None,
    maxnreg: int | None = None,
    cap: bool = True,
    **more: Any,
) -> dict[str, Any]:
    """Compiler options of a configuration.

    Unless `cap` is False, ``maxnreg`` is the natural ceiling min(255, 65536 // threads): it cured 331 of 331
    cells in which ptxas fell to 32 registers (Liger's LayerNorm backward at 4608 columns, fp32, 4 warps,
    Triton 3.6, H200: 848 us without it, 131 us with it).

    Args:
        level: ptxas --register-usage-level, 0 to 10. Three classes exist in effect: 0-3, 4-5 (default), 6-10.
    """
    out: dict[str, Any] = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True}
    if maxnreg is not None:
        out["maxnreg"] = maxnreg
    elif cap:
        out["maxnreg"] = min(255, 65536 // (32 * num_warps))
    if level is not None:
        out["ptx_options"] = f"--register-usage-level={level}"
    out.update(more)
    return out


def offsets_exceed_int32(*tensors: Any) -> bool:
    """Whether an element offset of any of the tensors leaves the range of int32.

    The largest reachable offset decides, not the element count: a 40 x 64 slice of a buffer with row stride
    2**26 overflows as well.
    """
    for t in tensors:
        extent = 0
        for size, stride in zip(t.shape, t.stride(), strict=True):
            if size == 0:
                extent = 0
                break
            extent += (size - 1) * stride
        if extent >= 2**31:
            return True
    return False


def int_ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()
