"""Embedding backward by atomic addition: each program adds a tile of tokens x columns into the gradient."""

import triton
import triton.language as tl


@triton.jit(
    do_not_specialize=["tokens", "rows", "padding_idx", "index_stride", "column_units", "row_units"],
    do_not_specialize_on_alignment=["indices"],
)
def embedding_backward_atomic_kernel(
    dy,
    indices,
    grad,
    tokens,
    rows,
    padding_idx,
    index_stride,
    column_units,
    row_units,
    column_stride,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """grad[indices[t * index_stride], :] += dy[t, :] for every token whose id is not padding_idx

    dy [tokens, columns] with any strides (0 where it is expanded), grad float32 [rows, columns] contiguous and zero.
    Widths and row strides come in units of ALIGN elements, so that the compiler knows they are multiples of it.
    """
    columns = column_units * ALIGN
    row_stride = row_units.to(tl.int64) * ALIGN
    column_blocks = tl.cdiv(columns, BLOCK_D)
    program = tl.program_id(0)
    token = (program // column_blocks).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    column = (program % column_blocks) * BLOCK_D + tl.arange(0, BLOCK_D)
    live = token < tokens
    row = tl.load(indices + token * index_stride, mask=live, other=0).to(tl.int64)
    valid = (row >= 0) & (row < rows)
    tl.device_assert(valid, "tritonops.embedding_backward: index out of range in self")
    mask = (live & valid & (row != padding_idx))[:, None] & (column < columns)[None, :]
    source = dy + (token * row_stride)[:, None] + (column.to(tl.int64) * column_stride)[None, :]
    tile = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    # relaxed: nothing reads a sum before the kernel ends. With the default, acq_rel, ptxas 12.8 and newer fence and
    # invalidate L1 at every atomic: up to 2.25 times as long (Liger's tile, T=16384 D=768 V=1024 float32, Triton 3.6,
    # H200).
    tl.atomic_add(grad + (row * columns)[:, None] + column[None, :], tile, mask=mask, sem="relaxed")
