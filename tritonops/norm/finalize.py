"""Column sums of the backward's partial sums, in a fixed order, rounded once to the gradients' dtypes."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["P"])
def norm_backward_finalize_kernel(
    PART_W,
    PART_B,
    DW,
    DB,
    P,
    N,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WANT_DW: tl.constexpr,
    WANT_DB: tl.constexpr,
):
    # PART_W, PART_B [P, N] float32; DW, DB [N].
    col = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    col_ok = col < N
    dw = tl.zeros((BLOCK_P, BLOCK_N), tl.float32)
    db = tl.zeros((BLOCK_P, BLOCK_N), tl.float32)
    for first in range(0, P, BLOCK_P):
        p = first + tl.arange(0, BLOCK_P)
        ok = (p < P)[:, None] & col_ok[None, :]
        offset = p[:, None] * N + col[None, :]
        if WANT_DW:
            dw += tl.load(PART_W + offset, mask=ok, other=0.0)
        if WANT_DB:
            db += tl.load(PART_B + offset, mask=ok, other=0.0)
    if WANT_DW:
        tl.store(DW + col, tl.sum(dw, 0).to(DW.dtype.element_ty), mask=col_ok)
    if WANT_DB:
        tl.store(DB + col, tl.sum(db, 0).to(DB.dtype.element_ty), mask=col_ok)
