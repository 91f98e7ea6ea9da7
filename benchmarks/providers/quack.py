"""quack-kernels, which needs nvidia-cutlass-dsl."""

from __future__ import annotations

import importlib.util

from tritonops.calibrate.case import Case

from .base import Arguments, Call, Provider, plain
from .compiled import NAMED as PRODUCTS

# Ten shapes of a norm and pass, twelve products: it compiles for 10 to 60 s a shape.
ROWS = (
    (4096, 1024), (4096, 4096), (4096, 4608), (4096, 8192), (4096, 8704), (4096, 15872),
    (3072, 4096), (16384, 16384), (8192, 32768), (32768, 1024),
)  # fmt: skip
_NORMS = ("layer_norm", "layer_norm_backward", "rms_norm", "rms_norm_backward")


class Quack(Provider):
    """Forward: quack.gemm_interface.gemm, tuned by Quack at its first call; layernorm_fwd; rmsnorm_fwd.

    Backward alone: layernorm_bwd and rmsnorm_bwd. LayerNorm's weight and bias are float32, which Quack asks for and
    they are made before; so are its gradients of them.
    """

    name = "quack"
    distribution = "quack-kernels"
    module = "quack"
    ops = frozenset({"matmul", *_NORMS})
    named = PRODUCTS | {f"{op} {m}x{n}" for op in _NORMS for m, n in ROWS}
    most = 10

    def available(self) -> str | None:
        reason = super().available()
        if reason is None and importlib.util.find_spec("cutlass") is None:
            reason = "nvidia-cutlass-dsl is not installed, which quack-kernels needs"
        return reason

    def call(self, case: Case) -> Call:
        plain(case.problem)
        if case.problem.op == "matmul":
            from quack.gemm_interface import gemm

            return lambda a, b, *_: gemm(a, b)
        from quack import rmsnorm

        calls: dict[str, Call] = {
            "layer_norm": lambda x, weight, bias, ndim, eps: rmsnorm.layernorm_fwd(x, weight, bias, eps),
            "layer_norm_backward": lambda dy, x, mean, rstd, weight, *_: rmsnorm.layernorm_bwd(
                x, weight, dy, rstd, mean
            ),
            "rms_norm": lambda x, weight, ndim, eps: rmsnorm.rmsnorm_fwd(x, weight, eps=eps)[0],
            "rms_norm_backward": lambda dy, x, rstd, weight, *_: rmsnorm.rmsnorm_bwd(x, weight, dy, rstd)[:2],
        }
        return calls[case.problem.op]

    def arguments(self, case: Case, args: Arguments) -> Arguments:
        if case.problem.op == "layer_norm":
            x, weight, bias, *rest = args
            return (x, weight.float(), bias.float(), *rest)
        if case.problem.op == "layer_norm_backward":
            dy, x, mean, rstd, weight, *rest = args
            return (dy, x, mean, rstd, weight.float(), *rest)
        return args
