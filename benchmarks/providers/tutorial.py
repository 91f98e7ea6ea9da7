"""Plain kernels in the style of Triton's tutorials, one configuration an op, nothing tuned."""

from __future__ import annotations

import functools
import re

import torch

from tritonops.calibrate.case import Case
from tritonops.device import device_info
from tritonops.dispatch.select import illegal
from tritonops.dispatch.variant import REGISTRY, Choice

from .base import Call, Provider, Refused

_FIXED = {
    "matmul": "tiled/128x128x64-g8-w8-s3",
    "embedding": "gather/4x1024-w4",
    "embedding_backward": "atomic/16x256-w4",
}
# 128 x 128 tiles of float32 on FMA units spill.
_FLOAT32_MATMUL = "tiled/32x64x32-g8-w4-s3"
_TILE = re.compile(r"rows/t(\d+)-")


def configuration(case: Case) -> str:
    """The variant that stands for the tutorial: of a norm the first whose tile holds a row (tutorial 05), of the
    others always the same (tutorial 03).

    Raises:
        Refused: no tile holds a row.
    """
    problem = case.problem
    if problem.op == "matmul" and problem.dtype == "float32":
        return _FLOAT32_MATMUL
    if problem.op in _FIXED:
        return _FIXED[problem.op]
    for vid in REGISTRY[problem.op].variants():
        tile = _TILE.match(vid)
        if tile and int(tile[1]) >= problem.dims["N"]:
            return vid
    raise Refused(f"no tile holds a row of {problem.dims['N']}")


class Tutorial(Provider):
    """The kernels of our `tiled`, `rows`, `gather` and `atomic` families, called without the dispatcher.

    Forward and backward alone as `ours`, with the host code of the variant only.
    """

    name = "tutorial"
    module = "triton"

    def call(self, case: Case) -> Call:
        spec, problem = REGISTRY[case.problem.op], case.problem
        variant = spec.variants()[configuration(case)]

        @functools.cache
        def choice(device: torch.device) -> Choice:
            info = device_info(device)
            why = illegal(spec, variant, problem, info)
            if why is not None:
                raise Refused(f"{variant.id}: {why}")
            return Choice(variant, problem, info, None)

        return lambda *args: variant.run(choice(args[0].device), *args)

    def variant(self, case: Case, mode: str) -> str | None:
        return configuration(case)
