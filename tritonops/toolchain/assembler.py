"""The CUDA programs that Triton itself uses for a target: which ptxas, with which flags, and the disassembler."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import _compat
from ..device import DeviceInfo, named_device
from ..errors import TritonOpsError

# The SM count of a target named by its architecture alone. Kernels see it as an argument or a constant; 132 (H200) is
# not a multiple of 16, which is the general case.
_UNNAMED_SMS = 132

_RELEASE = re.compile(r"release \d+\.\d+, V(\d+\.\d+\.\d+)")
_TOO_OLD = re.compile(r"Unsupported \.version ([\d.]+); current version is '?([\d.]+)")


class CompileError(TritonOpsError, RuntimeError):
    """A kernel does not compile for a target; the message is one line.

    Attributes:
        kernel, target: what was compiled, for what; variant: its id where one was named.
        problem: the last line of the cause, which stays as ``__cause__``.
    """

    def __init__(self, kernel: str, target: str, problem: str, variant: str | None = None):
        what = f"{variant} ({kernel})" if variant else kernel
        super().__init__(f"{what} does not compile for {target}: {problem}")
        self.kernel = kernel
        self.target = target
        self.problem = problem
        self.variant = variant


class AssemblerError(CompileError):
    """The assembler itself is missing, broken or too old: every kernel would fail, so stop, and blame no variant."""

    def __init__(self, path: str, target: str, problem: str):
        TritonOpsError.__init__(self, problem)
        self.kernel = ""
        self.target = target
        self.problem = problem
        self.variant = None
        self.path = path


@dataclass(frozen=True, slots=True)
class Assembler:
    """A ptxas. `own` says that it is the one in Triton's wheel and not one named by an environment variable."""

    path: str
    version: str
    own: bool


def target_device(device: DeviceInfo | str) -> DeviceInfo:
    """The device of a name such as ``sm_90-132`` or ``sm_90``, which stands for one with 132 SMs.

    Raises:
        ValueError: the name is neither, or the device is not a CUDA one.
    """
    if isinstance(device, str):
        device = named_device(device if "-" in device else f"{device}-{_UNNAMED_SMS}")
    if not device.capability:
        raise ValueError(f"toolchain: a kernel compiles for a CUDA architecture such as sm_90, not for {device.arch!r}")
    return device


def last_line(error: BaseException | str) -> str:
    """The line of an error that says most: the assembler's complaint, else the last line with a word in it."""
    lines = [line.strip() for line in str(error).splitlines()]
    complaints = [line for line in lines if line.startswith("ptxas") and re.search("fatal|error", line)]
    if complaints:
        return complaints[0]
    words = [line for line in lines if re.search("[A-Za-z]", line) and not line.startswith("Repro command")]
    text = words[-1] if words else "no message"
    return text if isinstance(error, str) else f"{type(error).__name__}: {text}"


def _identity(path: str) -> tuple[str, int, int]:
    stat = os.stat(path)
    return path, stat.st_mtime_ns, stat.st_size


@functools.lru_cache(maxsize=64)
def _ask(identity: tuple[str, int, int]) -> tuple[str | None, str]:
    """(version or None, what the program answered) of the program at a path, asked again when the file changes."""
    try:
        done = subprocess.run([identity[0], "--version"], capture_output=True, text=True, errors="replace", timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, str(error)
    answer = done.stdout + done.stderr
    match = _RELEASE.search(answer)
    return (
        match[1] if match and done.returncode == 0 else None
    ), answer.strip() or f"nothing, exit status {done.returncode}"


def _bundled(binary: str) -> Path:
    import triton

    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / binary


def _binary_for(capability: int) -> str:
    """The name of the assembler for a target: Triton 3.6 has a second one for sm_100 on, 3.9 uses it from sm_90 on."""
    if not _bundled("ptxas-blackwell").exists() or not _compat.triton_at_least(3, 6):
        return "ptxas"
    return "ptxas-blackwell" if capability >= (90 if _compat.triton_at_least(3, 9) else 100) else "ptxas"


def own_assembler(capability: int) -> Assembler:
    """The assembler in Triton's wheel for a target.

    Raises:
        AssemblerError: it is missing or does not answer.
    """
    path = str(_bundled(_binary_for(capability)))
    version, answer = _ask(_identity(path)) if os.path.exists(path) else (None, "no such file")
    if version is None:
        raise AssemblerError(
            path, f"sm_{capability}", f"the assembler of Triton's own wheel does not work: {path}: {answer}"
        )
    return Assembler(path, version, own=True)


def assembler(capability: int) -> Assembler:
    """The assembler that Triton uses for a target, honouring TRITON_PTXAS_PATH or TRITON_PTXAS_BLACKWELL_PATH.

    Triton silently falls back to its own where the named one does not answer; here that is an error.

    Raises:
        AssemblerError: naming the path and both versions.
    """
    variable = f"TRITON_{_binary_for(capability).upper().replace('-', '_')}_PATH"
    path = os.environ.get(variable)
    if not path:
        return own_assembler(capability)
    version, answer = _ask(_identity(path)) if os.path.isfile(path) else (None, "no such file")
    if version is None:
        raise unusable(path, capability, answer, None)
    own = path == str(_bundled(_binary_for(capability)))
    refusal = None if own else _refusal(_identity(path), version, capability)
    if refusal is not None:
        raise unusable(path, capability, refusal, version)
    return Assembler(path, version, own)


@functools.lru_cache(maxsize=64)
def _refusal(identity: tuple[str, int, int], version: str, capability: int) -> str | None:
    """What an assembler says against an empty module for a target, of the PTX version that Triton would write.

    Asked before compiling, since LLVM ends the process where that PTX version is too low for the target (Triton 3.9,
    sm_100 with a ptxas of 12.4).
    """
    from triton.backends.nvidia.compiler import ptx_get_version

    major, minor = divmod(ptx_get_version(version.rpartition(".")[0]), 10)
    ptx = f".version {major}.{minor}\n.target {gpu_name(capability)}\n.address_size 64\n"
    status, said = _assemble(identity[0], ptx, capability, [])
    return said if status else None


def unusable(path: str, capability: int, answer: str, version: str | None) -> AssemblerError:
    """The one message about an assembler that cannot serve: its path, both versions, what to do."""
    own = own_assembler(capability)
    too_old = _TOO_OLD.search(answer)
    ptx = f"it knows PTX up to {too_old[2]} and got {too_old[1]}; " if too_old else ""
    return AssemblerError(
        path,
        f"sm_{capability}",
        f"the assembler {path} (version {version or 'unknown'}) does not work with Triton {_compat.triton_version()}, "
        f"whose own is {own.version}: {ptx}it answered: {last_line(answer)}. "
        f"Unset TRITON_{_binary_for(capability).upper().replace('-', '_')}_PATH or name a newer one.",
    )


@contextlib.contextmanager
def using(tool: Assembler, capability: int) -> Iterator[None]:
    """Make Triton use an assembler for a target while the block runs."""
    import triton

    with triton.knobs.nvidia.scope():
        setattr(triton.knobs.nvidia, _binary_for(capability).replace("-", "_"), tool.path)
        yield


def _nothing() -> None:
    """Stands for the cache_clear of a function that this Triton does not cache (3.4's NvidiaTool.from_path)."""


_named: tuple[tuple[str, int, int] | None, ...] | None = None


@contextlib.contextmanager
def triton_cache(tool: Assembler) -> Iterator[None]:
    """Triton's compile cache, kept from serving what another assembler made.

    Triton keys its cache by the assembler's ``--version`` text, read once a process, so a changed path or a
    wrapper with the same text gives a stale hit. An assembler that is not Triton's own therefore works in a
    cache of its own that is thrown away.
    """
    global _named
    import triton
    from triton.backends.nvidia import compiler as backend

    paths = [os.environ.get(variable) for variable in ("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH")]
    named = tuple(_identity(path) if path and os.path.exists(path) else None for path in paths)
    if named != _named:
        _named = named
        for remembered in (triton.knobs.NvidiaTool.from_path, backend.get_ptxas_version, backend.get_features):
            getattr(remembered, "cache_clear", _nothing)()
    if tool.own:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="tritonops-") as directory, triton.knobs.cache.scope():
        triton.knobs.cache.dir = directory
        yield


def assembly_log(ptx: str, capability: int, tool: Assembler, options: Any) -> str:
    """What ``ptxas -v`` says of a PTX text, assembled with the flags that Triton passes.

    Args:
        options: an object with Triton's ``enable_fp_fusion`` and ``ptx_options``.

    Raises:
        AssemblerError: the assembler refuses PTX that it, or Triton's own, had accepted.
    """
    status, said = _assemble(tool.path, ptx, capability, ["-lineinfo", *_flags(options)])
    if status:
        raise unusable(tool.path, capability, said, tool.version)
    return said


def _assemble(path: str, ptx: str, capability: int, flags: list[str]) -> tuple[int, str]:
    """(exit status, what the assembler said)."""
    with tempfile.TemporaryDirectory(prefix="tritonops-") as directory:
        source = Path(directory, "kernel.ptx")
        source.write_text(ptx, encoding="utf-8")
        command = [path, "-v", *flags, f"--gpu-name={gpu_name(capability)}", str(source), "-o", os.devnull]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    return done.returncode, done.stdout + done.stderr


def gpu_name(capability: int) -> str:
    """``sm_90a`` for 90: Triton compiles for the architecture-specific instruction set from sm_90 on."""
    return f"sm_{capability}{'a' if capability >= 90 else ''}"


def _flags(options: Any) -> list[str]:
    flags = [] if options.enable_fp_fusion else ["--fmad=false"]
    if _compat.triton_at_least(3, 7):
        flags.append("--regAllocOptLevel=2")
    return flags + (options.ptx_options.split(" ") if options.ptx_options else [])


def disassembler() -> str | None:
    """Path of the nvdisasm that Triton uses (in its wheel, 3.4 to 3.9, or TRITON_NVDISASM_PATH), or None."""
    if not _compat.has_triton():
        return None
    path = os.environ.get("TRITON_NVDISASM_PATH") or str(_bundled("nvdisasm"))
    return path if os.access(path, os.X_OK) and os.path.isfile(path) else None
