"""What tritonops finds on this machine: ``python -m tritonops.doctor [--strict] [--device sm_90-132]``.

Versions, devices, environment variables, and for each op the dispatch tables found, with the reason why one is set
aside, is out of date or was made on another card. Changes nothing and compiles nothing.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

import torch

from . import __version__, _compat, _env
from .device import DeviceInfo, device_info, named_device
from .dispatch import store
from .dispatch.variant import REGISTRY, OpSpec
from .toolchain.assembler import AssemblerError, assembler, disassembler

_DRIVER = Path("/proc/driver/nvidia/version")
_CAPABILITIES = (80, 90, 100)


def report(devices: Sequence[DeviceInfo] | None = None) -> tuple[list[str], int]:
    """The lines of the report and the number of damaged tables among those found.

    Args:
        devices: whose tables to look for. None: this machine's GPUs, else every device that a table file names.
    """
    present = _present()
    wanted = list(devices) if devices is not None else [d for d in present if d.capability] or _devices_of_files()
    lines = ["versions", *_indented(_versions()), "devices", *_indented(_devices(present))]
    lines += ["environment", *_indented(_environment())]
    lines += ["places searched for tables", *_indented(f"{place}: {path}" for place, path in store.places())]
    damaged = 0
    for device in wanted:
        lines.append(f"tables for {device.table_name}" + (f" ({device.name})" if device.name else ""))
        for spec in REGISTRY.values():
            found, bad = _tables(spec, device)
            lines += _indented(found)
            damaged += bad
    if not wanted:
        lines.append("tables: none found, and no device to look for; --device sm_90-132 names one")
    return lines, damaged


def _indented(lines: Iterator[str]) -> list[str]:
    return [f"  {line}" for line in lines]


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"


def _versions() -> Iterator[str]:
    yield f"tritonops     {__version__} ({Path(__file__).parent})"
    yield f"python        {platform.python_version()} ({sys.executable})"
    yield f"torch         {_compat.torch_version()} (CUDA {torch.version.cuda or 'none'})"
    yield f"triton        {_compat.triton_version() or 'not installed: torch serves every call'}"
    if _compat.has_triton():
        for capability in _CAPABILITIES:
            try:
                tool = assembler(capability)
                yield f"ptxas sm_{capability:<4} {tool.version} ({tool.path})"
            except AssemblerError as error:
                yield f"ptxas sm_{capability:<4} unusable: {error}"
        yield f"nvdisasm      {disassembler() or 'not found: instruction counts are not known'}"
    yield f"liger-kernel  {_version('liger-kernel')}"
    yield f"numpy         {_version('numpy')}"
    yield f"driver        {_driver()}"


def _driver() -> str:
    try:
        match = re.search(r"\b(\d{3}\.\d+(?:\.\d+)?)\b", _DRIVER.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return "no NVIDIA driver found"
    return match[1] if match else "an NVIDIA driver of unknown version"


def _present() -> list[DeviceInfo]:
    """The CUDA devices torch sees; [] where there is none or the driver fails."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return [device_info(torch.device("cuda", i)) for i in range(torch.cuda.device_count())]
        except (RuntimeError, AssertionError):
            return []


def _devices(present: list[DeviceInfo]) -> Iterator[str]:
    for d in present:
        yield f"cuda:{d.index} {d.name}, {d.table_name}, {d.shared_bytes} bytes shared, {d.l2_bytes / 2**20:.0f} MiB L2"
    if not present:
        yield "no GPU" if _env.interpret() else "no GPU: torch serves every call on the CPU"
    reason = _compat.interpreter_reason()
    yield f"Triton's interpreter: {reason or 'usable'}{', on (TRITON_INTERPRET)' if _env.interpret() else ''}"


def _environment() -> Iterator[str]:
    for name, meaning in _env.VARIABLES.items():
        value = os.environ.get(name)
        yield f"{name} = {value!r}" if value is not None else f"{name} is not set ({meaning})"
    for name in sorted(os.environ.keys() - _env.VARIABLES.keys()):
        if name.startswith("TRITONOPS_"):
            yield f"{name} = {os.environ[name]!r}: no such variable, it has no effect"


def _devices_of_files() -> list[DeviceInfo]:
    names = set()
    for _, directory in store.places():
        for op in REGISTRY:
            try:
                names |= {path.stem for path in (directory / op).glob("sm_*-*.json")}
            except OSError:
                continue
    devices = []
    for name in sorted(names):
        try:
            devices.append(named_device(name))
        except ValueError:
            continue
    return devices


def _tables(spec: OpSpec, device: DeviceInfo) -> tuple[Iterator[str], int]:
    found = store.search(spec, device)
    return _describe(spec, device, found), sum(f.status == "damaged" for f in found)


def _describe(spec: OpSpec, device: DeviceInfo, found: Sequence[store.Found]) -> Iterator[str]:
    if not any(f.table for f in found):
        yield f"{spec.name}: no table that can serve; torch does"
    for f in found:
        if f.status == "damaged":
            yield f"{spec.name}: rejected ({f.place}): {f.problem}"
        elif f.table is not None:
            kind = f.table.provenance["kind"]
            yield f"{spec.name}: {f.status} ({f.place}), {kind} on {', '.join(f.table.names)}: {f.path}"
            if device.name and device.name not in f.table.names:
                yield f"{spec.name}:   neighbour: this is {device.name}; only choices 10 % ahead of torch are taken"
            for reason in store.stale_reasons(f.table, device, spec):
                yield f"{spec.name}:   stale: {reason}"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. 0, or with --strict 1 where a table found is damaged; 2 for a wrong argument."""
    parser = argparse.ArgumentParser(
        prog="python -m tritonops.doctor",
        description="Show versions, devices, environment variables and the dispatch tables found, and what is wrong.",
    )
    parser.add_argument("--strict", action="store_true", help="exit with 1 where a table that was found is damaged")
    parser.add_argument("--device", metavar="NAME", help="look for this device's tables, for example sm_90-132")
    options = parser.parse_args(arguments)
    try:
        devices = [named_device(options.device)] if options.device else None
    except ValueError as error:
        parser.error(str(error))
    lines, damaged = report(devices)
    print("\n".join(lines))
    if damaged and options.strict:
        print(f"{damaged} damaged table{'s' if damaged > 1 else ''}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
