"""A provider on one entry: its call, its result's errors, why it failed; and what a broken device means."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .entries import Entry
from .machine import Machine, Timer
from .providers import Call, Provider, Refused

BASE = "torch"
BROKEN = "broke the CUDA context"


class ContextLost(RuntimeError):
    """A provider broke the CUDA context; nothing more runs in this process. `provider` and `why` are the row's."""

    def __init__(self, provider: Provider, why: str, where: str):
        super().__init__(f"{provider.name} {BROKEN} on {where} ({why})")
        self.provider = provider
        self.why = f"{BROKEN}: {why}"


@dataclass
class Contender:
    """A provider on one entry.

    Attributes:
        call: None where it cannot be called.
        failed: why it cannot be called, is wrong, or cannot be timed.
        error: largest relative Frobenius error of an output against float64.
    """

    provider: Provider
    call: Call | None = None
    failed: str | None = None
    error: float | None = None
    timer: Timer | None = None

    @property
    def name(self) -> str:
        return self.provider.name

    def entered(self, entry: Entry, timer: Timer) -> Timer:
        """The timer inside what the provider wants around its calls."""

        def timed() -> float:
            with self.provider.around(entry.case):
                return timer() * self.provider.charge

        return timed


def reason(what: str, error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{what}: {type(error).__name__}: {lines[-1][:200] if lines else ''}"


def caught(c: Contender, entry: Entry, machine: Machine, what: str, error: Exception) -> str:
    """The reason for the row.

    Raises:
        ContextLost: the device does nothing more.
    """
    if isinstance(error, Refused):
        return str(error)
    why = reason(what, error)
    if not machine.alive():
        raise ContextLost(c.provider, why, entry.describe()) from error
    if isinstance(error, torch.OutOfMemoryError) and machine.where.type == "cuda":
        torch.cuda.empty_cache()
    return why
