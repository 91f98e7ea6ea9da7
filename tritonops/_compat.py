"""Feature probes of torch and Triton. Version differences live here and nowhere else."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import re
from collections.abc import Iterator, Sequence
from importlib import metadata
from typing import Any

import torch


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


@functools.cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def has_liger() -> bool:
    return importlib.util.find_spec("liger_kernel") is not None


@functools.cache
def triton_version() -> str | None:
    """The installed Triton's version, without importing it."""
    if not has_triton():
        return None
    return _version("triton") or getattr(__import__("triton"), "__version__", None)


def torch_version() -> str:
    return str(torch.__version__)


def minor(version: str | None) -> tuple[int, int] | None:
    """``"3.6.0+git"`` -> ``(3, 6)``; None where there is no version to read."""
    match = re.match(r"(\d+)\.(\d+)", version or "")
    return (int(match[1]), int(match[2])) if match else None


def triton_at_least(major: int, minor_: int) -> bool:
    found = minor(triton_version())
    return found is not None and found >= (major, minor_)


def interpreter_reason() -> str | None:
    """Why the Triton interpreter cannot be trusted here, or None.

    With numpy >= 2.4, Triton <= 3.6 fails on any loop whose bound is a run-time value (triton-lang/triton#9171).
    """
    if not has_triton():
        return "triton is not installed"
    numpy = minor(_version("numpy"))
    if numpy is None:
        return "numpy, which Triton's interpreter computes with, is not installed"
    if numpy >= (2, 4) and not triton_at_least(3, 7):
        return (
            f"the interpreter of Triton {triton_version()} fails with numpy {_version('numpy')} (it needs numpy < 2.4)"
        )
    return None


def tf32_allowed() -> bool:
    """Whether torch lets a float32 matmul on CUDA use TF32, by the new switch or the old one."""
    matmul = torch.backends.cuda.matmul
    precision = getattr(matmul, "fp32_precision", None)
    if precision is not None:
        if precision == "none":
            precision = getattr(torch.backends, "fp32_precision", "none")
        if precision != "none":
            return precision == "tf32"
    # The old getter raises once the new switch was set (torch 2.9+), which the branch above has answered.
    return torch.get_float32_matmul_precision() != "highest"


@contextlib.contextmanager
def float32_precision(tf32: bool) -> Iterator[None]:
    """Whether torch may use TF32 in float32 matmuls on CUDA while the block runs; then the switches are as before.

    The new switch alone is turned where there is one: the old getters raise where a program used both.
    """
    matmul = torch.backends.cuda.matmul
    new = getattr(matmul, "fp32_precision", None) is not None
    name, value = ("fp32_precision", "tf32" if tf32 else "ieee") if new else ("allow_tf32", tf32)
    before = getattr(matmul, name)
    setattr(matmul, name, value)
    try:
        yield
    finally:
        setattr(matmul, name, before)


def renew_after_fork(lock: Any) -> None:
    """Free `lock` in a forked child: the thread that held it does not live there. As the standard library does it."""
    os.register_at_fork(after_in_child=lock._at_fork_reinit)


def functorch_active() -> bool:
    return torch._C._are_functorch_transforms_active()


def batched_by_autograd(t: torch.Tensor) -> bool:
    """Whether `t` is a batch of torch.autograd.grad(is_grads_batched=True), whose memory cannot be looked at."""
    return torch._C._functorch.is_legacy_batchedtensor(t)


def functionalizing() -> bool:
    """Whether the innermost functorch transform is functionalize, which has no rule for autograd.Function."""
    stack = torch._C._functorch
    return stack.peek_interpreter_stack().key() == stack.TransformType.Functionalize


def profiler_active() -> bool:
    return torch._C._autograd._profiler_enabled()


def capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@functools.cache
def ptxas_version(capability: int) -> str | None:
    """``major.minor`` of the ptxas that Triton uses for this capability; runs ``ptxas --version`` once."""
    if not has_triton():
        return None
    try:
        from triton.backends.nvidia import compiler

        try:
            return str(compiler.get_ptxas(capability).version)
        except TypeError:  # Triton 3.4 and 3.5 have one ptxas for every capability
            return str(compiler.get_ptxas().version)
    except Exception:  # a missing or broken assembler is reported where something is compiled
        return None


def reshaped(t: torch.Tensor, shape: Sequence[Any]) -> torch.Tensor:
    """`t` in another shape over the same memory, but no view: a result may be modified in place, also by autograd."""
    return t if list(t.shape) == list(shape) else torch.ops.aten._unsafe_view.default(t, list(shape))


def no_autocast(device_type: str) -> contextlib.AbstractContextManager[object]:
    """Switches autocast off where it is on: operands were cast before the op, its inner calls must not cast again."""
    if device_type != "meta" and torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return contextlib.nullcontext()
