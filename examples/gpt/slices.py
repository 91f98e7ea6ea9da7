"""Slices of a training step's own tensors, small enough for Triton's interpreter."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor

from .model import GPT, Ops
from .training import step

ROWS = 160


class _Tap:
    """A model's ops that keep the operands and the output's gradient of each op's first call."""

    def __init__(self, ops: Ops):
        self.operands: dict[str, list[Tensor]] = {}
        self.grads: dict[str, Tensor] = {}
        self.ops = Ops(*(self._tapped(n, getattr(ops, n)) for n in ("embedding", "layer_norm", "linear", "matmul")))

    def _tapped(self, name: str, op: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*args: Any, **kwargs: Any) -> Tensor:
            out = op(*args, **kwargs)
            if name not in self.operands:
                self.operands[name] = [a.detach() for a in args]
                out.register_hook(lambda grad: self.grads.update({name: grad.detach()}))
            return out

        return call


def cut(model: GPT, ids: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """Operands of the first block's calls in one training step, cut to at most ROWS rows and 136 columns."""
    tap, ops = _Tap(model.ops), model.ops
    model.ops = tap.ops
    try:
        step(model, ids, targets)
    finally:
        model.ops = ops
        model.zero_grad(set_to_none=True)
    x, weight, bias = tap.operands["linear"]
    rows, gain, shift = tap.operands["layer_norm"]
    token_ids, table = tap.operands["embedding"]
    frequent = (token_ids.flatten() < 256).nonzero().flatten()[:ROWS]

    def scaled(grad: Tensor) -> Tensor:
        """Times a power of two, as a loss scaler does: a gradient's elements are too small for float16."""
        return grad * 2.0 ** -math.floor(math.log2(float(grad.abs().max())))

    slices = {
        "linear x": x.flatten(0, -2)[:ROWS, :104],
        "linear weight": weight[:136, :104],
        "linear bias": bias[:136],
        "linear dy": scaled(tap.grads["linear"].flatten(0, -2)[:ROWS, :136]),
        "norm x": rows.flatten(0, -2)[:70],
        "norm weight": gain,
        "norm bias": shift,
        "norm dy": scaled(tap.grads["layer_norm"].flatten(0, -2)[:70]),
        "embedding ids": token_ids.flatten()[frequent],
        "embedding table": table[:256],
        "embedding dy": scaled(tap.grads["embedding"].flatten(0, -2)[frequent]),
    }
    return {name: tensor.contiguous().clone() for name, tensor in slices.items()}
