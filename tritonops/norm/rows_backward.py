"""LayerNorm and RMSNorm backward: persistent programs over tiles of whole rows, with float32 partial sums."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["M"])
def norm_backward_rows_kernel(
    X,
    DY,
    W,
    MEAN,
    RSTD,
    DX,
    PART_W,
    PART_B,
    M,
    N,
    stride_x,
    stride_dy,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    SUM_ROWS: tl.constexpr,
    CENTER: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    WANT_DX: tl.constexpr,
    WANT_DW: tl.constexpr,
    WANT_DB: tl.constexpr,
):
    # X, DY [M, N] with row strides; DX [M, N] contiguous; W [N]; MEAN, RSTD [M]; PART_W, PART_B [programs, N] float32.
    # SUM_ROWS is ROWS where a row spans several threads of each column group, so that columns are added up across
    # threads once at the end, and 1 where each thread holds all rows of its columns.
    program = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK_N)
    col_ok = col < N
    if HAS_WEIGHT:
        if WANT_DX:
            w = tl.load(W + col, mask=col_ok, other=0.0).to(tl.float32)
    if WANT_DW:
        dw = tl.zeros((SUM_ROWS, BLOCK_N), tl.float32)
    if WANT_DB:
        db = tl.zeros((SUM_ROWS, BLOCK_N), tl.float32)

    for first in tl.range(program * ROWS, M, tl.num_programs(0).to(tl.int64) * ROWS, num_stages=STAGES):
        row = first + tl.arange(0, ROWS).to(tl.int64)
        row_ok = row < M
        ok = row_ok[:, None] & col_ok[None, :]
        dy = tl.load(DY + row[:, None] * stride_dy + col[None, :], mask=ok, other=0.0).to(tl.float32)
        if WANT_DX or WANT_DW:
            x = tl.load(X + row[:, None] * stride_x + col[None, :], mask=ok, other=0.0).to(tl.float32)
            rstd = tl.load(RSTD + row, mask=row_ok, other=0.0)
            if CENTER:
                mean = tl.load(MEAN + row, mask=row_ok, other=0.0)
                x = tl.where(ok, x - mean[:, None], 0.0)
            xhat = x * rstd[:, None]
        if WANT_DX:
            g = dy
            if HAS_WEIGHT:
                g = dy * w[None, :]
            dx = g - xhat * (tl.sum(xhat * g, 1) / N)[:, None]
            if CENTER:
                dx -= (tl.sum(g, 1) / N)[:, None]
            dx *= rstd[:, None]
            tl.store(DX + row[:, None] * N + col[None, :], dx.to(DX.dtype.element_ty), mask=ok)
        if WANT_DW:
            if SUM_ROWS == 1:
                dw += tl.sum(dy * xhat, 0, keep_dims=True)
            else:
                dw += dy * xhat
        if WANT_DB:
            if SUM_ROWS == 1:
                db += tl.sum(dy, 0, keep_dims=True)
            else:
                db += dy

    if WANT_DW:
        tl.store(PART_W + program * N + col, tl.sum(dw, 0), mask=col_ok)
    if WANT_DB:
        tl.store(PART_B + program * N + col, tl.sum(db, 0), mask=col_ok)
