"""LayerNorm and RMSNorm forward: a program normalises a tile of whole rows held in registers."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["M"])
def norm_forward_rows_kernel(
    X,
    W,
    B,
    Y,
    MEAN,
    RSTD,
    M,
    N,
    stride_x,
    eps,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CENTER: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    # X [M, N], row stride stride_x; Y [M, N] contiguous; W, B [N]; MEAN, RSTD [M] float32, MEAN only with CENTER.
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK_N)
    row_ok = row < M
    col_ok = col < N
    ok = row_ok[:, None] & col_ok[None, :]
    x = tl.load(X + row[:, None] * stride_x + col[None, :], mask=ok, other=0.0).to(tl.float32)
    if CENTER:
        mean = tl.sum(x, 1) / N
        x = tl.where(ok, x - mean[:, None], 0.0)
        # The rounding error of the mean is taken out before the squares: Chan, Golub, LeVeque 1983, equation 1.7.
        shift = tl.sum(x, 1) / N
        x = tl.where(ok, x - shift[:, None], 0.0)
        tl.store(MEAN + row, mean + shift, mask=row_ok)
    var = tl.sum(x * x, 1) / N
    rstd = tl.div_rn(1.0, tl.sqrt_rn(var + eps))
    tl.store(RSTD + row, rstd, mask=row_ok)
    y = x * rstd[:, None]
    if HAS_WEIGHT:
        y *= tl.load(W + col, mask=col_ok, other=0.0).to(tl.float32)[None, :]
    if HAS_BIAS:
        y += tl.load(B + col, mask=col_ok, other=0.0).to(tl.float32)[None, :]
    tl.store(Y + row[:, None] * N + col[None, :], y.to(Y.dtype.element_ty), mask=ok)
