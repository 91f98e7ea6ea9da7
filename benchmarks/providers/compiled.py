"""torch.compile of torch's ops."""

from __future__ import annotations

import contextlib
import types
from typing import Any

import torch

from tritonops.calibrate.case import Case

from .base import Call, Provider
from .vendor import CALLS

# The twelve products that max-autotune compiles, some 10 s each: tutorial sweeps, squares, a model's layers in training
# and decoding, misaligned rows.
NAMED = frozenset(
    {
        "matmul nt 4096x4096x128", "matmul nt 4096x4096x512", "matmul nt 4096x4096x4096", "matmul nt 8192x8192x512",
        "matmul nt 8192x8192x8192", "matmul nn 2048x2048x2048", "matmul nt 3072x37888x3584", "matmul nt 1x4608x3584",
        "matmul nt 24x37888x3584", "matmul nt 4100x4100x4104", "matmul nt 4096x50257x768", "matmul nt 8192x4095x4097",
    }
)  # fmt: skip


def _own_code(function: Call) -> Call:
    """The function with a code object of its own: Dynamo limits recompilations by code object."""
    if not isinstance(function, types.FunctionType):
        return function
    code = function.__code__.replace(co_name=f"{function.__code__.co_name}_compiled")
    return types.FunctionType(code, function.__globals__, code.co_name, function.__defaults__, function.__closure__)


class Compile(Provider):
    """torch.compile(fullgraph=True, dynamic=False) of what `torch` calls, compiled for each shape, untimed.

    Backward alone: Inductor's code for aten's backward operator, whose decomposition is also what AOTAutograd's
    backward graph holds.
    """

    name = "compile"
    mode: str | None = None
    backend: str = "inductor"

    def available(self) -> str | None:
        return None

    def call(self, case: Case) -> Call:
        options: dict[str, Any] = {} if self.mode is None else {"mode": self.mode}
        compiled: Call = torch.compile(
            _own_code(CALLS[case.problem.op]), fullgraph=True, dynamic=False, backend=self.backend, **options
        )
        return compiled

    def poison(self) -> contextlib.AbstractContextManager[Any]:
        # Dynamo compiles nothing under a dispatch mode.
        return contextlib.nullcontext()


class MaxAutotune(Compile):
    """As `compile`, mode ``max-autotune-no-cudagraphs`` (the timing makes the graphs); products only."""

    name = "compile-max-autotune"
    mode = "max-autotune-no-cudagraphs"
    ops = frozenset({"matmul"})
    named = NAMED
    most = 12
