"""A small GPT, written once over a set of ops: torch's or tritonops'."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tritonops


@dataclass(frozen=True)
class Config:
    width: int
    layers: int
    heads: int
    context: int
    batch: int
    vocab: int = 4096
    dtype: torch.dtype = torch.float32
    tolerance: float = 1e-4  # relative difference of two losses at the same step

    @property
    def tokens(self) -> int:
        return self.batch * self.context


CPU = Config(width=128, layers=2, heads=4, context=64, batch=8)
# bfloat16 keeps 8 bits, so two orders of summation drift apart within the 20 steps.
GPU = Config(width=1024, layers=8, heads=16, context=1024, batch=8, dtype=torch.bfloat16, tolerance=1e-2)
GPU_FLOAT32 = replace(GPU, batch=2, dtype=torch.float32, tolerance=1e-3)


@dataclass(frozen=True)
class Ops:
    embedding: Callable[..., Tensor]
    layer_norm: Callable[..., Tensor]
    linear: Callable[..., Tensor]
    matmul: Callable[..., Tensor]


def _torch_linear(
    x: Tensor, weight: Tensor, bias: Tensor, *, activation: str | None = None, residual: Tensor | None = None
) -> Tensor:
    y = F.linear(x, weight, bias)
    y = F.gelu(y) if activation == "gelu" else y
    return y if residual is None else y + residual


TORCH = Ops(F.embedding, lambda x, w, b: F.layer_norm(x, w.shape, w, b), _torch_linear, torch.matmul)
OURS = Ops(tritonops.embedding, tritonops.layer_norm, tritonops.linear, tritonops.matmul)


class GPT(nn.Module):
    """Pre-norm decoder whose head is the token table transposed; attention itself is torch's."""

    def __init__(self, config: Config):
        super().__init__()
        self.config, self.ops = config, TORCH
        w = config.width

        def matrix(*shape: int, scale: float = 0.02) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape) * scale)

        def ones() -> nn.Parameter:
            return nn.Parameter(torch.ones(w))

        def zeros(n: int = w) -> nn.Parameter:
            return nn.Parameter(torch.zeros(n))

        self.tokens, self.positions = matrix(config.vocab, w), matrix(config.context, w)
        small = 0.02 / math.sqrt(2 * config.layers)
        self.blocks = nn.ModuleList(
            nn.ParameterDict(
                {
                    "norm1_w": ones(),
                    "norm1_b": zeros(),
                    "qkv_w": matrix(3 * w, w),
                    "qkv_b": zeros(3 * w),
                    "out_w": matrix(w, w, scale=small),
                    "out_b": zeros(),
                    "norm2_w": ones(),
                    "norm2_b": zeros(),
                    "up_w": matrix(4 * w, w),
                    "up_b": zeros(4 * w),
                    "down_w": matrix(w, 4 * w, scale=small),
                    "down_b": zeros(),
                }
            )  # fmt: skip
            for _ in range(config.layers)
        )
        self.norm_w, self.norm_b = ones(), zeros()

    def forward(self, ids: Tensor) -> Tensor:
        ops, heads = self.ops, self.config.heads
        batch, length = ids.shape
        x = ops.embedding(ids, self.tokens) + self.positions[:length]
        for p in self.blocks:
            h = ops.layer_norm(x, p["norm1_w"], p["norm1_b"])
            q, k, v = ops.linear(h, p["qkv_w"], p["qkv_b"]).view(batch, length, 3, heads, -1).permute(2, 0, 3, 1, 4)
            h = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
            x = ops.linear(h, p["out_w"], p["out_b"], residual=x)
            h = ops.layer_norm(x, p["norm2_w"], p["norm2_b"])
            h = ops.linear(h, p["up_w"], p["up_b"], activation="gelu")
            x = ops.linear(h, p["down_w"], p["down_b"], residual=x)
        x = ops.layer_norm(x, self.norm_w, self.norm_b)
        return ops.matmul(x, self.tokens.t())
