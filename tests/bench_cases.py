"""A machine without a GPU for the benchmark runner: timers that say what they are told, providers on CPU tensors."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import entries
from benchmarks.providers import Provider
from benchmarks.providers.vendor import Torch
from tritonops.calibrate.telemetry import Monitor
from tritonops.device import CPU

ENVIRONMENT = {"gpu": "Fake GPU", "arch": "sm_90", "sm_count": 132, "driver": "1", "torch": "2", "triton": "3",
               "ptxas": "12", "providers": {}, "copy_tbps": 4.3, "matmul_tflops": 700.0}  # fmt: skip


class Timed:
    """A call with the milliseconds that a timer finds for it, by mode."""

    def __init__(self, function: Callable[..., Any], ms: float | dict[str, float]):
        self.function = function
        self.ms = ms if isinstance(ms, dict) else dict.fromkeys(("graph", "eager", "host"), ms)

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)


class FakeMachine:
    """Its timers call what they time once, then give `ms`, times the noise of each timing."""

    where = torch.device("cpu")
    device = CPU
    memory_bytes = 1 << 30

    def __init__(self, noise: Callable[[], float] = lambda: 1.0):
        self.noise, self.monitor, self.log = noise, Monitor(), []
        self.dead = False

    def case(self) -> None:
        self.log.append("case")

    def alive(self) -> bool:
        return not self.dead

    def timer(self, mode, call, sets, calls):
        call(*sets[0])
        ms = call.ms[mode] if isinstance(call, Timed) else 1.0

        def timed() -> float:
            self.log.append((mode, ms))
            return ms * self.noise()

        return timed


def gaussian(seed: int, sigma: float) -> Callable[[], float]:
    rng = random.Random(seed)
    return lambda: max(rng.gauss(1.0, sigma), 0.1)


class FakeTorch(Torch):
    """torch on the CPU, in `ms` milliseconds."""

    def __init__(self, ms: float | dict[str, float] = 1.0):
        self.ms = ms

    def call(self, case):
        return Timed(super().call(case), self.ms)


class Fake(Provider):
    """torch's result made by another name in `ms`; `wrong` changes it, `error` is raised instead."""

    def __init__(self, name="fake", ms=1.0, wrong=None, error=None, absent=None):
        self.name, self.ms, self.wrong, self.error, self.absent = name, ms, wrong, error, absent

    def available(self):
        return self.absent

    def poison(self):
        return contextlib.nullcontext() if self.wrong is None else super().poison()

    def call(self, case):
        if self.error is not None:
            raise self.error
        inner = Torch().call(case)
        return Timed(inner if self.wrong is None else lambda *args: self.wrong(inner(*args), args), self.ms)


def one(text="64x64x64", op="matmul", direction="fwd", dtype="float32"):
    return entries.listed(text, (op,), (direction,), (dtype,))[0]
