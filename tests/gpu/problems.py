"""Public arguments on the GPU that between them make every variant of every op legal."""

from __future__ import annotations

from typing import Any

import torch

B, H, F = torch.bfloat16, torch.float16, torch.float32


def _randn(*shape: int, dtype: torch.dtype = B) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def _ids(tokens: int, rows: int) -> torch.Tensor:
    return torch.randint(0, rows, (tokens,), device="cuda")


def problems(op: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Arguments of the op's public function (of its forward, for a backward)."""
    if op == "matmul":
        return [
            ((_randn(256, 512), _randn(384, 512).t()), {}),
            ((_randn(255, 129), _randn(67, 129).t()), {}),
            ((_randn(256, 512, dtype=F), _randn(512, 384, dtype=F)), {}),
            ((_randn(255, 129, dtype=F), _randn(129, 67, dtype=F)), {}),
            ((_randn(16, 64), _randn(64, 128)), {}),
        ]
    if op.startswith("layer_norm") or op.startswith("rms_norm"):
        out = []
        for m, n in (
            (512, 64),
            (300, 256),
            (512, 1024),
            (256, 4096),
            (100, 5000),
            (64, 8192),
            (64, 12288),
            (16, 32768),
        ):
            for dtype in (B, F):
                x, w = _randn(m, n, dtype=dtype), _randn(n, dtype=dtype)
                out.append(((x, w, _randn(n, dtype=dtype)) if op.startswith("layer") else (x, w), {}))
        return out
    return [
        ((_ids(tokens, rows), _randn(rows, width, dtype=dtype)), {})
        for tokens, rows, width in ((1000, 50, 64), (777, 3000, 257), (4096, 1000, 768), (2048, 30000, 1024))
        for dtype in (B, F)
    ]
