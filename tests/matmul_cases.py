"""Operands for tests of matmul variants: ragged, strided, broadcast, misaligned and size-1."""

from __future__ import annotations

from collections.abc import Callable

import torch

Operands = tuple[torch.Tensor, torch.Tensor]


def _randn(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    return torch.randn(shape, device=device).to(dtype)


def _plain(m: int, n: int, k: int, layout: str, batch: int = 0) -> Callable[[torch.dtype, str], Operands]:
    def make(dtype: torch.dtype, device: str) -> Operands:
        lead = (batch,) if batch else ()
        a = _randn((*lead, m, k), dtype, device) if layout[0] == "n" else _randn((*lead, k, m), dtype, device).mT
        b = _randn((*lead, k, n), dtype, device) if layout[1] == "n" else _randn((*lead, n, k), dtype, device).mT
        return a, b

    return make


def _view(take: Callable[[torch.Tensor], torch.Tensor], n: int = 64) -> Callable[[torch.dtype, str], Operands]:
    def make(dtype: torch.dtype, device: str) -> Operands:
        a = take(_randn((20000,), dtype, device))
        return a, _randn((a.shape[-1], n), dtype, device)

    return make


CASES: dict[str, Callable[[torch.dtype, str], Operands]] = {
    **{f"ragged-{x}": _plain(37, 41, 50, x) for x in ("nn", "nt", "tn", "tt")},
    **{f"tiles-{x}": _plain(160, 272, 80, x) for x in ("nn", "nt", "tn", "tt")},
    "uneven-k-aligned": _plain(48, 64, 72, "nt"),
    "one-row": _plain(1, 40, 33, "nt"),
    "one-row-aligned": _plain(1, 64, 64, "nt"),
    "one-column": _plain(24, 1, 33, "nn"),
    "one-k": _plain(24, 40, 1, "nn"),
    "one": _plain(1, 1, 1, "nn"),
    "batch": _plain(20, 24, 17, "nt", batch=3),
    "batch-of-one": _plain(24, 32, 16, "nn", batch=1),
    # SHP-12 of the public reports: the layouts that crash descriptor kernels
    "row-stride-130-bytes": _view(lambda t: t.as_strided((64, 64), (65, 1))),
    "start-at-2-bytes": _view(lambda t: t.as_strided((64, 64), (64, 1), 1)),
    "transposed-66-rows": _view(lambda t: t.as_strided((64, 66), (66, 1)).t()[:66, :64]),
    "one-row-odd-stride": _view(lambda t: t.as_strided((1, 64), (65, 1))),
    "both-strides-over-1": _view(lambda t: t.as_strided((64, 64), (131, 2))),
    "expanded-rows": _view(lambda t: t[:64].expand(40, 64)),
    "expanded-columns": _view(lambda t: t[:40, None].expand(40, 64)),
    "overlapping-rows": _view(lambda t: t.as_strided((40, 64), (16, 1))),
    "expanded-b": lambda dtype, device: (
        _randn((40, 64), dtype, device),
        _randn((1, 48), dtype, device).expand(64, 48),
    ),
    "sliced-columns": lambda dtype, device: (
        _randn((40, 128), dtype, device)[:, 32:96],
        _randn((48, 128), dtype, device)[:, 32:96].mT,
    ),
}
