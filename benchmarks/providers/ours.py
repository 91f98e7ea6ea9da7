"""tritonops: the dispatcher's choice, or a variant or family that is forced."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import torch

import tritonops
from tritonops import testing
from tritonops.calibrate.case import Case
from tritonops.device import device_info
from tritonops.dispatch import override
from tritonops.dispatch.select import choose
from tritonops.dispatch.variant import REGISTRY
from tritonops.embedding import op as embedding_op
from tritonops.norm import op as norm_op

from .base import Call, Provider


def _matmul(a: torch.Tensor, b: torch.Tensor, bias: Any, out_dtype: Any) -> Any:
    return tritonops.matmul(a, b, bias=bias, out_dtype=out_dtype)


def _layer_norm(x: torch.Tensor, weight: Any, bias: Any, ndim: int, eps: float) -> Any:
    return tritonops.layer_norm(x, weight, bias, eps, x.shape[1:])


def _rms_norm(x: torch.Tensor, weight: Any, ndim: int, eps: float) -> Any:
    return tritonops.rms_norm(x, weight, eps, x.shape[1:])


def _embedding(weight: torch.Tensor, ids: torch.Tensor, padding_idx: int, scale: bool) -> Any:
    return tritonops.embedding(
        ids, weight, None if padding_idx < 0 else padding_idx, scale_grad_by_freq=scale
    )  # fmt: skip


def _under_flags(execute: Call) -> Call:
    """The implementation of a backward, under what tritonops.use says when it is called."""
    return lambda *args: execute(*args, override.flags)


_CALLS: dict[str, Call] = {
    "matmul": _matmul,
    "layer_norm": _layer_norm,
    "layer_norm_backward": _under_flags(norm_op.execute_layer_norm_backward),
    "rms_norm": _rms_norm,
    "rms_norm_backward": _under_flags(norm_op.execute_rms_norm_backward),
    "embedding": _embedding,
    "embedding_backward": _under_flags(embedding_op.execute_backward),
}


class Ours(Provider):
    """Forward: the public function, without autograd. Backward alone: the implementation that autograd's rule calls.

    Args:
        wish: a variant or family that tritonops.use forces; "" for what the dispatcher chooses.
    """

    distribution = "tritonops"

    def __init__(self, wish: str = ""):
        self.wish = wish
        self.name = f"ours:{wish}" if wish else "ours"
        owners = {op for op, spec in REGISTRY.items() if override.owns(spec.variants(), wish)} if wish else set()
        if wish and not owners:
            raise ValueError(f"no provider {self.name!r}: {wish!r} is no variant or family of any op")
        self.ops = frozenset(owners) if wish else None

    def call(self, case: Case) -> Call:
        return _CALLS[case.problem.op]

    def around(self, case: Case) -> contextlib.AbstractContextManager[Any]:
        return tritonops.use(variant={case.problem.op: self.wish}) if self.wish else contextlib.nullcontext()

    def poison(self) -> contextlib.AbstractContextManager[Any]:
        # A dispatch mode would take the calls another way.
        return testing.poisoned()

    def variant(self, case: Case, mode: str) -> str | None:
        device = device_info(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        with self.around(case):
            problem = dataclasses.replace(
                case.problem, mode="graph" if mode == "graph" else "eager", flags=override.effective(override.flags)
            )
            return str(choose(REGISTRY[problem.op], problem, device).variant)
