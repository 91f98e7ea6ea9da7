"""The host yardstick: what an operator of torch.library costs by itself."""

from __future__ import annotations

import torch

from tritonops.calibrate.case import Case

from .base import Call, Provider, plain

_KEEP: list[torch.library.Library] = []


def _operator() -> Call:
    if not _KEEP:
        library = torch.library.Library("tritonops_benchmarks", "DEF")
        library.define("mm(Tensor a, Tensor b) -> Tensor")
        for key in ("CPU", "CUDA"):
            library.impl("mm", torch.mm, key)
        _KEEP.append(library)
    operator: Call = torch.ops.tritonops_benchmarks.mm
    return operator


class LibraryImpl(Provider):
    """torch.mm behind a Library.impl; B, the yardstick, is its host time less torch.mm's."""

    name = "library"
    ops = frozenset({"matmul"})

    def call(self, case: Case) -> Call:
        plain(case.problem)
        operator = _operator()
        return lambda a, b, *_: operator(a, b)
