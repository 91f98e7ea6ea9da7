"""A kernel planted for the screen: too many float32 accumulators are live across its loop.

Column sums of x and of x * y, and a row correction, one row an iteration. With BLOCK = 8192 columns and 4 warps a
thread holds 128 accumulators and 192 further values.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["M"])
def collapsing_kernel(x_ptr, y_ptr, w_ptr, out_ptr, dw_ptr, db_ptr, M, N, rows_per_program, BLOCK: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < N
    dw = tl.zeros((BLOCK,), dtype=tl.float32)
    db = tl.zeros((BLOCK,), dtype=tl.float32)
    w = tl.load(w_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    first = program * rows_per_program
    for row in range(first, tl.minimum(first + rows_per_program, M)):
        x = tl.load(x_ptr + row * N + columns, mask=inside, other=0.0).to(tl.float32)
        y = tl.load(y_ptr + row * N + columns, mask=inside, other=0.0).to(tl.float32)
        wy = w * y
        c1 = tl.sum(x * wy, axis=0) / N
        c2 = tl.sum(wy, axis=0) / N
        tl.store(out_ptr + row * N + columns, wy - (x * c1 + c2), mask=inside)
        dw += y * x
        db += y
    tl.store(dw_ptr + program * N + columns, dw, mask=inside)
    tl.store(db_ptr + program * N + columns, db, mask=inside)
