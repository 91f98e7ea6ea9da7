"""What is known of the device a call runs on, or of a device named for an explanation."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

import torch

from . import _env

# Opt-in shared memory per block in bytes, by compute capability: CUDA C++ Programming Guide,
# "Technical Specifications per Compute Capability" (maximum shared memory per thread block).
_SHARED_BYTES = {
    70: 98304, 75: 65536, 80: 166912, 86: 101376, 87: 166912, 89: 101376,
    90: 232448, 100: 232448, 103: 232448, 120: 101376, 121: 101376,
}  # fmt: skip
_CONSERVATIVE_SHARED_BYTES = 49152

_NAME = re.compile(r"sm_([1-9][0-9]{1,2})-([0-9]{1,4})")


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """One device, as dispatch sees it.

    Attributes:
        kind: ``cuda``, ``interpreter`` (Triton's, on CPU tensors) or ``cpu``.
        arch: ``sm_90`` and the like; ``cpu`` where there is no GPU.
        sms: number of streaming multiprocessors.
        shared_bytes: opt-in shared memory per block, in bytes.
        l2_bytes: L2 size in bytes, 0 where unknown.
        name: the driver's name of the card, or "" for a device that was only named.
        index: CUDA device index, -1 where there is none.
    """

    kind: str
    arch: str
    sms: int
    shared_bytes: int
    l2_bytes: int = 0
    name: str = ""
    index: int = -1

    @property
    def capability(self) -> int:
        """90 for sm_90; 0 where there is no GPU."""
        return int(self.arch[3:]) if self.arch.startswith("sm_") else 0

    @property
    def table_name(self) -> str:
        return f"{self.arch}-{self.sms}"

    @property
    def runs_triton(self) -> bool:
        return self.kind != "cpu"


CPU = DeviceInfo("cpu", "cpu", 0, 0, name="CPU")
# The interpreter runs one program at a time; 4 stands in for the SM count so that a persistent grid has
# several programs, several tiles a program, and a last program with fewer. It has no shared memory to exceed.
INTERPRETER = DeviceInfo("interpreter", "interpreter", 4, 1 << 30, name="Triton interpreter")


@functools.cache
def _cuda_info(index: int) -> DeviceInfo:
    p = torch.cuda.get_device_properties(index)
    if torch.version.hip is not None:
        return DeviceInfo("cuda", p.gcnArchName.split(":")[0], p.multi_processor_count, 65536, 0, p.name, index)
    return DeviceInfo(
        "cuda",
        f"sm_{p.major}{p.minor}",
        p.multi_processor_count,
        int(getattr(p, "shared_memory_per_block_optin", 0))
        or _SHARED_BYTES.get(p.major * 10 + p.minor, _CONSERVATIVE_SHARED_BYTES),
        int(getattr(p, "L2_cache_size", 0)),
        p.name,
        index,
    )


def device_info(device: torch.device) -> DeviceInfo:
    """The DeviceInfo of a tensor's device; one per CUDA device index, looked up once."""
    if device.type == "cuda":
        return _cuda_info(device.index if device.index is not None else torch.cuda.current_device())
    return INTERPRETER if device.type == "cpu" and _env.interpret() else CPU


def named_device(name: str) -> DeviceInfo:
    """The device that a table name such as ``sm_90-132`` stands for; no GPU is asked.

    Raises:
        ValueError: the name is not ``sm_<capability>-<SM count>``.
    """
    match = _NAME.fullmatch(name)
    capability, sms = (int(match[1]), int(match[2])) if match else (0, 0)
    if not sms:
        raise ValueError(f"device: expected a name like 'sm_90-132' (architecture, SM count), got {name!r}")
    return DeviceInfo("cuda", f"sm_{capability}", sms, _SHARED_BYTES.get(capability, _CONSERVATIVE_SHARED_BYTES))
