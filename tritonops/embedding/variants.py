"""The variants of embedding and embedding_backward: the file to edit to add one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..device import DeviceInfo
from ..dispatch.problem import Problem
from ..dispatch.variant import VENDOR, Choice, Variant
from ..launch import int_ceil_div, kernel, launch, options
from . import liger
from .operands import FLOATS, alignment, check_range, flat_ids, float32_sums_reason, plain_strides
from .vendor import embedding_backward_vendor, embedding_vendor

_GATHER = "tritonops.embedding.gather:embedding_gather_kernel"
_ATOMIC = "tritonops.embedding.atomic:embedding_backward_atomic_kernel"

# (tokens, columns) of a tile, the preferred first where widths fit equally. 4096 elements with 4 warps are 64 bytes in
# flight a thread at 16 bits; the single row spreads a decoding step's few tokens over the SMs.
_GATHER_TILES = ((4, 1024), (1, 1024), (8, 512), (16, 256), (32, 128), (64, 64), (64, 32))
# 16x256 reached 0.42 to 0.65 of copy bandwidth at D = 768 and 4096 (H200, Triton 3.6), Liger's kernel 0.18 to 0.57.
_ATOMIC_TILES = ((16, 256), (8, 512), (32, 128), (64, 64), (64, 32))


def _run_gather(choice: Choice, weight: Tensor, indices: Tensor, padding_idx: int, scale_grad_by_freq: bool) -> Tensor:
    rows, columns = weight.shape
    check_range(indices, rows)
    out = weight.new_empty((*indices.shape, columns))
    if out.numel() == 0:
        return out
    ids, index_stride = flat_ids(indices)
    row_stride, column_stride = plain_strides(weight)
    align = alignment(weight, columns, row_stride)
    meta = choice.variant.meta
    grid = (int_ceil_div(ids.shape[0], meta["BLOCK_T"]) * int_ceil_div(columns, meta["BLOCK_D"]),)
    args = (
        weight, ids, out, ids.shape[0], rows, index_stride, columns // align, row_stride // align, column_stride,
    )  # fmt: skip
    launch(kernel(_GATHER), grid, args, {**meta, "ALIGN": align}, choice.variant.options)
    return out


def _run_atomic(
    choice: Choice, dy: Tensor, indices: Tensor, num_embeddings: int, padding_idx: int, scale_grad_by_freq: bool
) -> Tensor:
    check_range(indices, num_embeddings)
    columns = dy.shape[-1]
    grad = torch.zeros((num_embeddings, columns), dtype=torch.float32, device=dy.device)
    if dy.numel() == 0 or grad.numel() == 0:
        return grad.to(dy.dtype)
    ids, index_stride = flat_ids(indices)
    dy = dy.reshape(ids.shape[0], columns)
    row_stride, column_stride = plain_strides(dy)
    align = alignment(dy, columns, row_stride)
    meta = choice.variant.meta
    grid = (int_ceil_div(ids.shape[0], meta["BLOCK_T"]) * int_ceil_div(columns, meta["BLOCK_D"]),)
    args = (
        dy, ids, grad, ids.shape[0], num_embeddings, padding_idx, index_stride, columns // align, row_stride // align,
        column_stride,
    )  # fmt: skip
    launch(kernel(_ATOMIC), grid, args, {**meta, "ALIGN": align}, choice.variant.options)
    return grad.to(dy.dtype)


def _gather_requires(problem: Problem, device: DeviceInfo) -> str | None:
    if problem.dtype not in FLOATS:
        return f"copies float32, float16 and bfloat16 tables, not {problem.dtype}"
    return None


def _tile(family: str, tile: tuple[int, int], num_warps: int, **record: Any) -> Variant:
    tokens, columns = tile
    return Variant(
        f"{family}/{tokens}x{columns}-w{num_warps}",
        meta={"BLOCK_T": tokens, "BLOCK_D": columns},
        # debug compiles the kernel's own device_assert; the overflow checks that come with it are not wanted.
        options=options(num_warps, debug=True, sanitize_overflow=False),
        **record,
    )


def _liger(config: str, compiler: Mapping[str, Any]) -> Variant:
    return Variant(
        f"liger/{config}", liger.embedding_backward, liger.requires,
        options=compiler, kernel=liger.KERNEL, deterministic=False,
    )  # fmt: skip


def load_forward() -> Sequence[Variant]:
    return (
        Variant(VENDOR, embedding_vendor, batch_invariant=True),
        *(
            _tile("gather", t, 4, run=_run_gather, requires=_gather_requires, kernel=_GATHER, batch_invariant=True)
            for t in _GATHER_TILES
        ),
    )


def load_backward() -> Sequence[Variant]:
    return (
        # The gradient of a table sums over the batch by definition, so batch_invariant asks no more than deterministic.
        Variant(VENDOR, embedding_backward_vendor, batch_invariant=True),
        *(
            _tile("atomic", t, 4, run=_run_atomic, requires=float32_sums_reason, kernel=_ATOMIC, deterministic=False)
            for t in _ATOMIC_TILES
        ),
        _liger("w4", options(4, cap=False)),
        _liger("w8", options(8)),
        _liger("w16", options(16)),
    )


def _by_width(tiles: Sequence[tuple[int, int]], columns: int) -> list[tuple[int, int]]:
    """Tiles ranked by the columns they waste on a row."""
    return sorted(tiles, key=lambda tile: int_ceil_div(max(columns, 1), tile[1]) * tile[1])


def prefer_forward(problem: Problem, device: DeviceInfo) -> Sequence[str]:
    """The tile that fits the width; single rows first where 4096-element tiles would leave SMs without a program."""
    tokens, columns = problem.dims["T"], problem.dims["D"]
    tiles = _by_width(_GATHER_TILES, columns)
    if columns > 512 and tokens * columns < 4096 * device.sms:
        tiles.sort(key=lambda tile: tile[0])
    return [f"gather/{t}x{d}-w4" for t, d in tiles]


def prefer_backward(problem: Problem, device: DeviceInfo) -> Sequence[str]:
    """The tile that fits the width; Liger's kernel, slower at every measured size, last."""
    tiles = _by_width(_ATOMIC_TILES, problem.dims["D"])
    return [*(f"atomic/{t}x{d}-w4" for t, d in tiles), "liger/w4", "liger/w8"]
