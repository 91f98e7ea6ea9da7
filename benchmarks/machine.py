"""The device that is measured and the timers on it: calibration's."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import torch

from tritonops.calibrate import measure
from tritonops.calibrate.header import made_with
from tritonops.calibrate.raw import digits
from tritonops.calibrate.telemetry import Monitor, monitor
from tritonops.device import DeviceInfo

from .providers import Call, Provider

MODES = ("graph", "eager", "host")
Timer = Callable[[], float]


class Machine(Protocol):
    """What `bench` needs of a device.

    Attributes:
        where, device, memory_bytes: of the device.
        monitor: its clocks.
    """

    where: torch.device
    device: DeviceInfo
    memory_bytes: int
    monitor: Monitor

    def timer(self, mode: str, call: Call, sets: Sequence[tuple[Any, ...]], calls: int) -> Timer:
        """Milliseconds a call, each time it is called."""

    def case(self) -> None:
        """A case begins: memory of the one before may be reused."""

    def alive(self) -> bool:
        """Whether the device still runs what it is given."""


class CudaMachine:
    """One NVIDIA GPU, its clocks warmed up."""

    def __init__(self, device: DeviceInfo):
        self.device = device
        self.where = torch.device("cuda", device.index)
        torch.cuda.set_device(self.where)
        self.memory_bytes = int(torch.cuda.get_device_properties(self.where).total_memory)
        self.monitor = monitor(device.index)
        self._flush = measure.Flush(self.where, device.l2_bytes)
        self._place: measure.Place | None = None
        measure.warm_clocks(self.where)

    def case(self) -> None:
        self._place = None
        if torch.cuda.memory_reserved(self.where) > self.memory_bytes // 4:
            torch.cuda.empty_cache()

    def alive(self) -> bool:
        try:
            torch.zeros(1, device=self.where).add_(1)
            torch.cuda.synchronize(self.where)
        except Exception:
            return False
        return True

    def timer(self, mode: str, call: Call, sets: Sequence[tuple[Any, ...]], calls: int) -> Timer:
        if mode == "graph":
            if self._place is None:
                self._place = measure.Place()
            return measure.GraphTimer(call, sets, calls, self._flush, self._place)
        return (measure.EagerTimer if mode == "eager" else measure.HostTimer)(call, sets)

    def roofs(self) -> tuple[float, float]:
        """(copy bandwidth in TB/s, bf16 product rate in TFLOP/s), measured now."""
        return measure.ceilings(self.where, self.device.l2_bytes)


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _git() -> str | None:
    """The commit of this checkout, with ``-dirty`` where it was changed."""
    here = Path(__file__).parent
    try:
        found = [
            subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, timeout=10, check=True).stdout
            for words in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        ]
    except (OSError, subprocess.SubprocessError):
        return None
    return found[0].strip() + ("-dirty" if found[1].strip() else "")


def environment(
    device: DeviceInfo, driver: str | None, memory_bytes: int, providers: Sequence[Provider]
) -> dict[str, Any]:
    """What a result file says of where it was made; the roofs are added by who measures them."""
    made = made_with(device, driver)
    # The peers' versions; torch's, Triton's and our own stand beside them.
    versions = {p.distribution: p.version() for p in providers if p.distribution not in ("", "tritonops")}
    return {
        "gpu": device.name or device.table_name,
        "arch": device.arch,
        "sm_count": device.sms,
        "l2_mib": device.l2_bytes >> 20,
        "memory_gib": memory_bytes >> 30,
        "driver": driver,
        "cuda": torch.version.cuda,
        **{name: made[name] for name in ("tritonops", "torch", "triton", "ptxas")},
        "python": platform.python_version(),
        "cpu": _cpu(),
        "providers": {name: version for name, version in sorted(versions.items()) if version is not None},
        "git": _git(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


def roofs_of(machine: CudaMachine) -> dict[str, float]:
    copy, product = machine.roofs()
    return {"copy_tbps": digits(copy, 3), "matmul_tflops": digits(product, 3)}
