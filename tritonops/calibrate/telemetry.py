"""The GPU's clock, power, temperature and reasons to slow down, from NVML where nvidia-ml-py is installed."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any

import torch

# NVML's clocks event reasons (nvml.h) under which a round says nothing about the kernel: thermal slowdown by
# software, slowdown by hardware, hardware thermal slowdown, power brake. The power cap (0x4) is not one of them: large
# products run at it all the time.
_THROTTLED = {0x20: "thermal slowdown", 0x08: "hardware slowdown", 0x40: "thermal slowdown", 0x80: "power brake"}


@dataclass(frozen=True)
class Reading:
    """One look at the GPU; None where it is not known. `throttled` names why its clocks are held down."""

    clock_mhz: int | None = None
    power_w: int | None = None
    temperature_c: int | None = None
    throttled: str | None = None


class Monitor:
    """Reads nothing: for machines without NVML, and the base of those that do."""

    known = False

    def read(self) -> Reading:
        return Reading()

    def driver(self) -> str | None:
        return None


class NvmlMonitor(Monitor):
    """One GPU through NVML."""

    known = True

    def __init__(self, nvml: Any, handle: Any):
        self._nvml, self._handle = nvml, handle
        # "Throttle reasons" became "event reasons" in NVML 12; the old name goes after CUDA 13.
        new, old = "nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"
        self._reasons = getattr(nvml, new, None) or getattr(nvml, old)

    def _ask(self, question: Any, *arguments: Any) -> int | None:
        try:
            return int(question(self._handle, *arguments))
        except self._nvml.NVMLError:
            return None

    def read(self) -> Reading:
        nvml = self._nvml
        power = self._ask(nvml.nvmlDeviceGetPowerUsage)
        reasons = self._ask(self._reasons) or 0
        return Reading(
            self._ask(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM),
            None if power is None else power // 1000,
            self._ask(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU),
            next((name for bit, name in _THROTTLED.items() if reasons & bit), None),
        )

    def driver(self) -> str | None:
        try:
            version = self._nvml.nvmlSystemGetDriverVersion()
        except self._nvml.NVMLError:
            return None
        return version.decode() if isinstance(version, bytes) else str(version)


def monitor(index: int) -> Monitor:
    """The monitor of a CUDA device; one that knows nothing where NVML cannot be asked."""
    if importlib.util.find_spec("pynvml") is None:
        return Monitor()
    import pynvml

    try:
        pynvml.nvmlInit()
        uuid = f"GPU-{torch.cuda.get_device_properties(index).uuid}"
        return NvmlMonitor(pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid))
    except (pynvml.NVMLError, AttributeError):  # uuid: torch 2.6 and newer
        return Monitor()
