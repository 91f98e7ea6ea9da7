"""FlagGems."""

from __future__ import annotations

from tritonops.calibrate.case import Case

from .base import Call, Provider, plain


class FlagGems(Provider):
    """The functions that flag_gems.enable() puts in place of aten's, called directly; they tune at their first call.

    Forward: mm, layer_norm, rms_norm_forward, embedding. Backward alone: layer_norm_backward, rms_norm_backward,
    embedding_dense_backward.
    """

    name = "flaggems"
    distribution = "flag-gems"
    module = "flag_gems"

    def call(self, case: Case) -> Call:
        plain(case.problem)
        call: Call = getattr(self, f"_{case.problem.op}")()
        return call

    @staticmethod
    def _matmul() -> Call:
        from flag_gems.ops.mm import mm

        return lambda a, b, *_: mm(a, b)

    @staticmethod
    def _layer_norm() -> Call:
        from flag_gems.ops.layernorm import layer_norm

        return lambda x, weight, bias, ndim, eps: layer_norm(x, [x.shape[1]], weight, bias, eps)[0]

    @staticmethod
    def _layer_norm_backward() -> Call:
        from flag_gems.ops.layernorm import layer_norm_backward

        # The bias only lends its shape and dtype.
        return lambda dy, x, mean, rstd, weight, bias_dtype, ndim, eps, mask: layer_norm_backward(
            dy, x, [x.shape[1]], mean, rstd, weight, weight, mask
        )

    @staticmethod
    def _rms_norm() -> Call:
        from flag_gems.ops.rms_norm import rms_norm_forward

        return lambda x, weight, ndim, eps: rms_norm_forward(x, [x.shape[1]], weight, eps)[0]

    @staticmethod
    def _rms_norm_backward() -> Call:
        from flag_gems.ops.rms_norm import rms_norm_backward

        return lambda dy, x, rstd, weight, ndim, eps, mask: rms_norm_backward(dy, x, rstd, [x.shape[1]], weight, eps)

    @staticmethod
    def _embedding() -> Call:
        from flag_gems.ops.embedding import embedding

        return lambda weight, ids, *_: embedding(weight, ids)

    @staticmethod
    def _embedding_backward() -> Call:
        from flag_gems.ops.embedding_dense_backward import embedding_dense_backward

        return embedding_dense_backward
