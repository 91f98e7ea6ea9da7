"""Compiling a captured launch for a named target, without a GPU, as Triton's JIT would compile it there."""

from __future__ import annotations

import contextlib
import functools
import io
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .. import _compat, launch
from ..device import DeviceInfo
from ..dispatch.problem import Problem
from ..dispatch.variant import Choice, OpSpec, Variant
from .assembler import (
    Assembler,
    AssemblerError,
    CompileError,
    assembler,
    last_line,
    own_assembler,
    target_device,
    triton_cache,
    unusable,
    using,
)
from .hashes import text_hash

if TYPE_CHECKING:
    from .resources import Resources

__all__ = ["AssemblerError", "CompileError", "Compiled", "compile_request", "compile_variant"]


@dataclass(frozen=True)
class Compiled:
    """One kernel compiled for one target.

    Attributes:
        kernel: its name, also in the cubin and in a profile.
        target: ``sm_90`` and the like (the code is for ``sm_90a``, as always with Triton).
        ptx, cubin: what Triton made; ptx is "" where Triton's cache keeps binaries only.
        shared: dynamic shared memory a launch asks for, in bytes.
        num_warps: warps a block, those of warp specialisation included.
        seconds: wall time of compiling; small where Triton's cache had it.
        key: Triton's cache key, the one a launch of the same arguments looks up.
        enable_fp_fusion, ptx_options: the options that reached the assembler's command line.
        triton, ptxas: their versions.
    """

    kernel: str
    target: str
    ptx: str
    cubin: bytes
    shared: int
    num_warps: int
    seconds: float
    key: str
    enable_fp_fusion: bool
    ptx_options: str | None
    triton: str
    ptxas: str

    @property
    def capability(self) -> int:
        return int(self.target.removeprefix("sm_"))

    @functools.cached_property
    def resources(self) -> Resources:
        """Registers, spills, frame, shared memory and SASS counts; found at the first use."""
        from .resources import measure

        return measure(self)

    @functools.cached_property
    def text_hash(self) -> str:
        """sha256 of the machine code alone; equal for configurations that compile to the same code."""
        return text_hash(self.cubin, self.kernel)


def compile_request(
    request: launch.LaunchRequest, device: DeviceInfo | str, *, options: Mapping[str, Any] | None = None
) -> Compiled:
    """Compile one captured launch for a target; no GPU is needed.

    Arguments are specialised by Triton's own rules: a tensor or an int divisible by 16 is marked so, an int equal
    to 1 and None become constants, unless the kernel says do_not_specialize. Meta tensors count as aligned
    unless they are views at a misaligned offset.

    Args:
        options: compiler options that replace those of the request, for example ``{"maxnreg": 128}``; None as a
            value removes one.

    Raises:
        CompileError: the kernel does not compile for the target.
        AssemblerError: the assembler cannot serve (a CompileError that no kernel is to blame for).
        ValueError: the target is no CUDA architecture.
    """
    return _compile(request, target_device(device), options, None)


def compile_variant(spec: OpSpec, variant: Variant, problem: Problem, device: DeviceInfo | str) -> list[Compiled]:
    """Compile every kernel that a variant would launch for a problem; [] for the vendor and for empty problems.

    Raises:
        CompileError, AssemblerError, ValueError: as compile_request, naming the variant.
    """
    target = target_device(device)
    choice = Choice(variant, problem, target, decision=None)
    with launch.capture() as requests:
        variant.run(choice, *spec.sample(problem, "meta"))
    return [_compile(request, target, None, variant.id) for request in requests]


def _compile(
    request: launch.LaunchRequest, device: DeviceInfo, changes: Mapping[str, Any] | None, variant: str | None
) -> Compiled:
    name = getattr(request.kernel, "__name__", repr(request.kernel))
    if not _compat.has_triton():
        raise CompileError(name, device.arch, "triton is not installed", variant)
    tool = assembler(device.capability)
    options = {k: v for k, v in {**request.options, **(changes or {})}.items() if v is not None}
    printed = io.StringIO()
    started = time.perf_counter()
    try:
        result = _triton_compile(request, device.capability, options, tool, printed)
        metadata, cubin = result.metadata, result.asm["cubin"]
        # TRITON_STORE_BINARY_ONLY leaves everything else out of Triton's cache.
        ptx = result.asm.get("ptx", "")
    except Exception as error:
        text = str(error)
        if "ptxas" in text and not tool.own and _own_assembler_accepts(request, device.capability, options):
            raise unusable(tool.path, device.capability, text, tool.version) from error
        raise CompileError(name, device.arch, last_line(error), variant) from error
    if printed.getvalue():
        sys.stdout.write(printed.getvalue())
    return Compiled(
        kernel=metadata.name,
        target=device.arch,
        ptx=ptx if isinstance(ptx, str) else ptx.decode(),
        cubin=cubin,
        shared=metadata.shared,
        num_warps=metadata.num_warps,
        seconds=time.perf_counter() - started,
        key=result.hash,
        enable_fp_fusion=metadata.enable_fp_fusion,
        ptx_options=metadata.ptx_options,
        triton=str(_compat.triton_version()),
        ptxas=tool.version,
    )


def _own_assembler_accepts(request: launch.LaunchRequest, capability: int, options: dict[str, Any]) -> bool:
    own = own_assembler(capability)
    try:
        with using(own, capability):
            _triton_compile(request, capability, options, own, io.StringIO())
    except Exception:
        return False
    return True


def _triton_compile(
    request: launch.LaunchRequest, capability: int, options: dict[str, Any], tool: Assembler, printed: io.StringIO
) -> Any:
    """triton.compile with the signature, constants and attributes that the JIT derives from the same arguments.

    All Triton versions have ``create_function_from_signature``; ``_pack_args`` is inlined in 3.4's ``run``. What
    Triton prints goes to `printed`: the whole PTX, where the assembler fails.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = request.kernel
    backend, bind = _binder(kernel, capability)
    target = GPUTarget("cuda", capability, 32)
    given = {**request.meta, **options}
    given["debug"] = given.get("debug", kernel.debug) or triton.knobs.runtime.debug
    bound, specialization, rest = bind(*request.args, **given)
    if hasattr(kernel, "_pack_args"):
        parsed, signature, constants, attributes = kernel._pack_args(backend, given, bound, specialization, rest)
    else:
        parsed, signature, constants, attributes = _pack_arguments(kernel, backend, given, bound, specialization)
    source = (_gluon_source() if kernel.is_gluon() else ASTSource)(kernel, signature, constants, attributes)
    with triton_cache(tool), contextlib.redirect_stdout(printed):
        return triton.compile(source, target=target, options=parsed.__dict__)


def _binder(kernel: Any, capability: int) -> tuple[Any, Any]:
    """(backend, function that gives bound arguments, their specialization and the options) of a kernel."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import JITFunction, create_function_from_signature

    if not isinstance(kernel, JITFunction):
        raise TypeError(f"{type(kernel).__name__} is not a @triton.jit function (is TRITON_INTERPRET set?)")
    backend = make_backend(GPUTarget("cuda", capability, 32))
    return backend, create_function_from_signature(kernel.signature, kernel.params, backend)


@functools.lru_cache(maxsize=256)
def _kept_binder(kernel: Any, capability: int) -> Any:
    return _binder(kernel, capability)[1]


def specialization(request: launch.LaunchRequest, device: DeviceInfo) -> str:
    """Equal for launches that the JIT serves with one binary: what it keys its cache in memory by, and the kernel.

    Costs about 30 us, compiles nothing.

    Raises:
        TypeError: the kernel is not a ``@triton.jit`` function, or does not take these arguments.
    """
    kernel = request.kernel
    options = {k: v for k, v in request.options.items() if v is not None}
    _, types, rest = _kept_binder(kernel, device.capability)(*request.args, **request.meta, **options)
    return f"{kernel.__module__}:{kernel.__qualname__} {types} {sorted(rest.items())}"


def _gluon_source() -> Any:
    from triton.experimental.gluon._runtime import GluonASTSource

    return GluonASTSource


def _pack_arguments(
    kernel: Any, backend: Any, given: dict[str, Any], bound: dict[str, Any], specialization: list[Any]
) -> Any:
    """What JITFunction._pack_args does from Triton 3.5 on."""
    from triton._utils import find_paths_if, get_iterable_path

    parsed = backend.parse_options(given)
    names = [parameter.name for parameter in kernel.params]
    unknown = [k for k in given if k not in parsed.__dict__ and k not in names]
    if unknown:
        raise KeyError(f"Keyword argument {unknown[0]} was specified but unrecognised")
    types = [x[0] for x in specialization]
    constants = {
        p: get_iterable_path(list(bound.values()), p) for p in find_paths_if(types, lambda _, x: x == "constexpr")
    }
    values = [x[1] for x in specialization]
    attributes = {
        p: backend.parse_attr(get_iterable_path(values, p))
        for p in find_paths_if(values, lambda _, x: isinstance(x, str))
    }
    return parsed, dict(zip(names, types, strict=True)), constants, attributes
