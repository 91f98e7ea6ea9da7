"""Embedding lookup: each program copies a tile of tokens x columns from the table to the output."""

import triton
import triton.language as tl


@triton.jit(
    do_not_specialize=["tokens", "rows", "index_stride", "column_units", "row_units"],
    do_not_specialize_on_alignment=["indices"],
)
def embedding_gather_kernel(
    weight,
    indices,
    out,
    tokens,
    rows,
    index_stride,
    column_units,
    row_units,
    column_stride,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """out[t, :] = weight[indices[t * index_stride], :]

    weight [rows, columns] with any strides, out [tokens, columns] contiguous. Widths and row strides come in units of
    ALIGN elements, so that the compiler knows they are multiples of it: one binary for each ALIGN, whatever the width.
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
    tl.device_assert(valid, "tritonops.embedding: index out of range in self")
    inside = (column < columns)[None, :]
    source = weight + (row * row_stride)[:, None] + (column.to(tl.int64) * column_stride)[None, :]
    tile = tl.load(source, mask=(live & valid)[:, None] & inside, other=0)
    tl.store(out + (token * columns)[:, None] + column[None, :], tile, mask=live[:, None] & inside)
