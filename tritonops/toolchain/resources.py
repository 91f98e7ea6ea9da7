"""What a compiled kernel uses: registers, spills, local and shared memory, instructions by class; and the screen.

A spill is what ``ptxas -v`` calls spill stores and spill loads, in bytes per thread. It is kept apart from the stack
frame, which Triton reports as ``n_spills`` (in words). What is not known is None, never 0.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from ..device import DeviceInfo
from .assembler import assembler, assembly_log, disassembler, target_device
from .cubin import kernel_info

if TYPE_CHECKING:
    from .compile import Compiled

# Opcode -> class. HGMMA, QGMMA, IGMMA are sm_90's warp-group products, UTC*MMA those of sm_100.
_CLASSES = {
    **dict.fromkeys(("IMMA", "QMMA", "IGMMA", "QGMMA"), "IMMA/QGMMA"),
    **dict.fromkeys(("UTCHMMA", "UTCQMMA", "UTCIMMA", "UTCOMMA", "UTCMXQMMA"), "UTCMMA"),
    **dict.fromkeys(("RED", "REDG"), "RED"),
    **dict.fromkeys(("ATOM", "ATOMG"), "ATOM"),
}
_OWN_CLASS = "HGMMA", "HMMA", "LDGSTS", "UTMALDG", "UTMASTG", "MEMBAR", "CCTL", "LDL", "STL", "BAR", "LDG", "STG"
_CLASSES |= {op: op for op in _OWN_CLASS}
CLASSES = (*dict.fromkeys(_CLASSES.values()), "total")

# A collapse leaves 32 registers (40 on sm_89 and sm_120) and at least 1672 bytes of spill stores (the smallest of
# 331 seen on Triton 3.2 to 3.9); small kernels that need no more than 40 registers spill nothing.
COLLAPSED_REGISTERS = 40
COLLAPSED_SPILL_BYTES = 512


@dataclass(frozen=True, slots=True)
class Resources:
    """Per-thread and per-block needs of one kernel; None where not known.

    Attributes:
        registers: 32-bit registers a thread.
        spill_stores, spill_loads: bytes a thread, from the assembler's log.
        frame: stack frame in bytes a thread; what was spilled is a part of it.
        static_shared: static shared memory in bytes a block (Triton's own is dynamic).
        sass: instructions by class (CLASSES), ``total`` without NOP; None where there is no disassembler.
    """

    registers: int | None = None
    spill_stores: int | None = None
    spill_loads: int | None = None
    frame: int | None = None
    static_shared: int | None = None
    sass: Mapping[str, int] | None = None


_ENTRY = re.compile(r"Compiling entry function '([^']+)'")
_FUNCTION = re.compile(r"Function properties for (\S+)")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


def parse_resource_log(text: str) -> dict[str, Resources]:
    """The resources of every kernel in a log of ``ptxas -v``; static_shared is 0 where the log names none."""
    out: dict[str, Resources] = {}
    entry = function = None
    for line in text.splitlines():
        if match := _ENTRY.search(line):
            entry = function = match[1]
            out[entry] = Resources()
        elif match := _FUNCTION.search(line):
            function = match[1]
        elif (match := _SPILLS.search(line)) and function in out:
            frame, stores, loads = map(int, match.groups())
            out[function] = replace(out[function], frame=frame, spill_stores=stores, spill_loads=loads)
        elif (match := _USED.search(line)) and entry is not None:
            shared = _SHARED.search(line)
            out[entry] = replace(out[entry], registers=int(match[1]), static_shared=int(shared[1]) if shared else 0)
    return out


_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P[T\d]+\s+)?([A-Z][A-Z0-9]*)", re.MULTILINE)


def count_sass(text: str) -> dict[str, int]:
    """Instructions by class in nvdisasm's text of one kernel."""
    counts = dict.fromkeys(CLASSES, 0)
    for match in _INSTRUCTION.finditer(text):
        opcode = match[1]
        if opcode == "NOP":
            continue
        counts["total"] += 1
        if opcode in _CLASSES:
            counts[_CLASSES[opcode]] += 1
    return counts


def sass_counts(cubin: bytes) -> dict[str, int] | None:
    """Instructions by class of a one-kernel cubin, with the nvdisasm of Triton's wheel; None where it cannot serve."""
    program = disassembler()
    if program is None:
        return None
    with tempfile.TemporaryDirectory(prefix="tritonops-") as directory:
        file = Path(directory, "kernel.cubin")
        file.write_bytes(cubin)
        try:
            done = subprocess.run(
                [program, "-c", str(file)], capture_output=True, text=True, errors="replace", timeout=300
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
    counts = count_sass(done.stdout)
    return counts if done.returncode == 0 and counts["total"] else None


def measure(compiled: Compiled, *, spills: bool = True, sass: bool = True) -> Resources:
    """The resources of a compiled kernel.

    Registers and frame are read from the cubin. Spills come from assembling the PTX again with ``-v``, which is
    left out where the frame is empty: there is nowhere to spill to.

    Args:
        spills, sass: False leaves what needs another program unknown (0.1 to 0.5 s each); the screen then judges
            by the frame.

    Raises:
        AssemblerError: the assembler that made the cubin can no longer be run.
    """
    info = kernel_info(compiled.cubin, compiled.kernel)
    stores: int | None = 0
    loads: int | None = 0
    if info.frame != 0 and not (spills and compiled.ptx):
        stores = loads = None
    elif info.frame != 0:
        tool = assembler(compiled.capability)
        log = parse_resource_log(assembly_log(compiled.ptx, compiled.capability, tool, compiled))
        stated = log.get(compiled.kernel, Resources())
        # Another assembler than the one that made the cubin would state another kernel's spills.
        known = tool.version == compiled.ptxas and stated.frame == info.frame
        stores, loads = (stated.spill_stores, stated.spill_loads) if known else (None, None)
    counts = sass_counts(compiled.cubin) if sass else None
    return Resources(
        info.registers, stores, loads, info.frame, info.static_shared, MappingProxyType(counts) if counts else None
    )


def screen(resources: Resources, shared: int, device: DeviceInfo | str) -> str | None:
    """Why a compiled kernel must not be a candidate on a device, or None.

    Two reasons exist: the register collapse (at most COLLAPSED_REGISTERS registers while more than
    COLLAPSED_SPILL_BYTES a thread are spilled; where spills are not known, the frame stands for them), and more
    shared memory than a block can have. A kernel that merely spills stays: measuring decides.

    Args:
        shared: dynamic shared memory of a launch in bytes, ``Compiled.shared``.
    """
    spilled = resources.frame if resources.spill_stores is None else resources.spill_stores
    if resources.registers is not None and spilled is not None:
        if resources.registers <= COLLAPSED_REGISTERS and spilled > COLLAPSED_SPILL_BYTES:
            return (
                f"register collapse: {resources.registers} registers with {spilled} bytes a thread in local memory "
                "(maxnreg or more warps avoids it)"
            )
    limit = target_device(device).shared_bytes
    needed = shared + (resources.static_shared or 0)
    if needed > limit:
        return f"shared memory: {needed} bytes a block, the device has {limit}"
    return None
