"""Small kernels that the tests of the toolchain compile."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["M"])
def arguments_kernel(x_ptr, y_ptr, ids_ptr, bias_ptr, M, N, big, scale, flag, BLOCK: tl.constexpr, MODE: tl.constexpr):
    """Every kind of run-time argument; bias_ptr may be None."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = (columns < N) & (row < M)
    value = tl.load(x_ptr + row * N + columns, mask=inside, other=0.0).to(tl.float32) * scale
    if bias_ptr is not None:
        value += tl.load(bias_ptr + columns, mask=inside, other=0.0)
    if MODE == "ids":
        value += tl.load(ids_ptr + row + big)
    value = tl.where(flag, value, -value)
    tl.store(y_ptr + row * N + columns, value, mask=inside)


@triton.jit
def dot_kernel(a_ptr, b_ptr, c_ptr, K, M: tl.constexpr, N: tl.constexpr, BLOCK_K: tl.constexpr):
    """One M x N product over K; a and c row-major, b row-major [K, N]."""
    rows, columns, inner = tl.arange(0, M), tl.arange(0, N), tl.arange(0, BLOCK_K)
    total = tl.zeros((M, N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        a = tl.load(a_ptr + rows[:, None] * K + (k + inner)[None, :])
        b = tl.load(b_ptr + (k + inner)[:, None] * N + columns[None, :])
        total = tl.dot(a, b, total)
    tl.store(c_ptr + rows[:, None] * N + columns[None, :], total)


@triton.jit
def descriptor_kernel(x_desc, y_desc, BLOCK: tl.constexpr):
    """Copies tiles of BLOCK x BLOCK through two host descriptors."""
    row, column = tl.program_id(0) * BLOCK, tl.program_id(1) * BLOCK
    y_desc.store([row, column], x_desc.load([row, column]))


@triton.jit
def atomic_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr, SEM: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    tl.atomic_add(y_ptr + columns, tl.load(x_ptr + columns), sem=SEM)


@triton.jit
def broken_kernel(x_ptr, BLOCK: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, BLOCK), no_such_name)  # noqa: F821
