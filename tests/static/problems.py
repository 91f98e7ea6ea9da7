"""A few problems of each op: together every variant can serve one of them, on some target."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tritonops.dispatch.problem import Problem
from tritonops.dispatch.variant import REGISTRY, OpSpec

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


def _matmul(spec: OpSpec) -> list[Problem]:
    def one(m: int, n: int, k: int, dtype: torch.dtype, layout: str, **more) -> Problem:
        return spec.describe((m, k), (k, n), dtype=dtype, layout=layout, **more)

    batched = spec.describe((3, 1000, 512), (3, 512, 768), dtype=BF16, layout="tn", out_dtype=F32)
    return [
        one(4096, 4096, 4096, F16, "nn"),
        one(1000, 1001, 999, BF16, "nt", bias=True),
        batched,
    ]


def _norm(spec: OpSpec) -> list[Problem]:
    def one(m: int, n: int, dtype: torch.dtype, weight: bool = True) -> Problem:
        parameters = ({"weight": n, "bias": n} if spec.name.startswith("layer") else {"weight": n}) if weight else {}
        return spec.describe((m, n), dtype=dtype, **parameters)

    wide = [] if spec.name.endswith("_backward") else [one(64, 65536, BF16)]
    return [
        one(4096, 512, BF16),
        one(4096, 4096, BF16),
        one(4096, 1001, F16, weight=False),
        one(4096, 16384, F32),
        *wide,
    ]


def _embedding(spec: OpSpec) -> list[Problem]:
    return [
        spec.describe((4096,), (32000, 1024), dtype=BF16),
        spec.describe((4096,), (32000, 1001), 0, dtype=F32),
    ]


_BY_DIMS: dict[tuple[str, ...], Callable[[OpSpec], list[Problem]]] = {
    ("batch", "M", "N", "K"): _matmul,
    ("M", "N"): _norm,
    ("T", "D", "V"): _embedding,
}


def problems(op: str) -> list[Problem]:
    """The representative problems of an op, found by its dimensions."""
    spec = REGISTRY[op]
    if spec.dims not in _BY_DIMS:
        raise LookupError(f"tests/static/problems.py has no problems for op {op!r} with dims {spec.dims}")
    return _BY_DIMS[spec.dims](spec)
