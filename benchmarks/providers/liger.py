"""liger-kernel."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tritonops.calibrate.case import Case

from .base import Arguments, Call, Provider, plain


class Liger(Provider):
    """The host functions of liger_kernel.ops, without their autograd.Function.

    Forward: layer_norm_forward and rms_norm_forward, which store the statistics too, and LigerEmbeddingFunction.
    Backward alone: layer_norm_backward; rms_norm_backward in place, its default, on a copy of dy made before; the
    backward of LigerEmbeddingFunction. RMSNorm computes in float32 throughout, as torch's does (casting mode "gemma").
    """

    name = "liger"
    distribution = "liger-kernel"
    module = "liger_kernel"
    ops = frozenset(
        {"layer_norm", "layer_norm_backward", "rms_norm", "rms_norm_backward", "embedding", "embedding_backward"}
    )

    def call(self, case: Case) -> Call:
        plain(case.problem)
        call: Call = getattr(self, f"_{case.problem.op}")()
        return call

    def arguments(self, case: Case, args: Arguments) -> Arguments:
        if case.problem.op == "rms_norm_backward":
            return (args[0].clone(), *args[1:])
        return args

    @staticmethod
    def _layer_norm() -> Call:
        from liger_kernel.ops.layer_norm import layer_norm_forward

        return lambda x, weight, bias, ndim, eps: layer_norm_forward(x, weight, bias, eps)[0]

    @staticmethod
    def _layer_norm_backward() -> Call:
        from liger_kernel.ops.layer_norm import layer_norm_backward

        # The bias only lends its dtype.
        return lambda dy, x, mean, rstd, weight, *_: layer_norm_backward(dy, x, weight, weight, mean, rstd)

    @staticmethod
    def _rms_norm() -> Call:
        from liger_kernel.ops.rms_norm import rms_norm_forward

        return lambda x, weight, ndim, eps: rms_norm_forward(x, weight, eps, 0.0, "gemma", None)[0]

    @staticmethod
    def _rms_norm_backward() -> Call:
        from liger_kernel.ops.rms_norm import _str_to_casting_mode, rms_norm_backward
        from liger_kernel.ops.utils import calculate_settings

        mode = _str_to_casting_mode["gemma"]

        def call(dy: Any, x: Any, rstd: Any, weight: Any, *_: Any) -> Any:
            block, warps = calculate_settings(x.shape[1])
            return rms_norm_backward(dy, x, weight, rstd, 0.0, mode, block, warps, True, None)

        return call

    @staticmethod
    def _embedding() -> Call:
        from liger_kernel.ops.experimental.embedding import LigerEmbeddingFunction

        return lambda weight, ids, *_: LigerEmbeddingFunction.apply(weight, ids)

    @staticmethod
    def _embedding_backward() -> Call:
        from liger_kernel.ops.experimental.embedding import LigerEmbeddingFunction

        tables: dict[tuple[int, int], Any] = {}

        def call(dy: Any, ids: Any, rows: int, *_: Any) -> Any:
            # The table only lends its shape and dtype.
            table = tables.get((rows, dy.shape[1]))
            if table is None:
                table = tables[rows, dy.shape[1]] = dy.new_empty((rows, dy.shape[1]))
            return LigerEmbeddingFunction.backward(SimpleNamespace(saved_tensors=(ids, table)), dy)[0]

        return call
