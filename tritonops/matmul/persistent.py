"""Matmul, a fixed number of programs that walk over the output tiles."""

import triton
import triton.language as tl

from .tiles import add_bias, dot_over_k, offsets, store_tile, tile_of


@triton.jit(do_not_specialize=["M", "N", "K", "stride_a", "unit_a", "stride_b", "unit_b", "stride_cm"])
def matmul_persistent_kernel(
    a_ptr, b_ptr, bias_ptr, c_ptr, M, N, K,
    stride_a, unit_a, stride_b, unit_b, stride_cm,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    PROGRAMS: tl.constexpr, FLATTEN: tl.constexpr,
    A_BY_COLUMN: tl.constexpr, B_BY_ROW: tl.constexpr, EVEN_K: tl.constexpr, HAS_BIAS: tl.constexpr,
    WIDE: tl.constexpr, ALIGN_A: tl.constexpr, ALIGN_B: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """c = a @ b + bias; a [M, K] and b [K, N] by strides as in dot_over_k, c [M, N] with unit column stride.

    Grid: (min(PROGRAMS, tiles),). Program p takes tiles p, p + PROGRAMS, ...
    """
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS, flatten=FLATTEN):
        pid_m, pid_n = tile_of(tile, tiles_m, tiles_n, GROUP_M)
        offs_m = offsets(pid_m, BLOCK_M, WIDE)
        offs_n = offsets(pid_n, BLOCK_N, WIDE)
        acc = dot_over_k(
            a_ptr, b_ptr, offs_m, offs_n, M, N, K, stride_a, unit_a, stride_b, unit_b,
            BLOCK_M, BLOCK_N, BLOCK_K, A_BY_COLUMN, B_BY_ROW, EVEN_K, WIDE, ALIGN_A, ALIGN_B,
        )  # fmt: skip
        acc = add_bias(acc, bias_ptr, offs_n, N, HAS_BIAS, ALIGN)
        store_tile(c_ptr, acc, offs_m, offs_n, M, N, stride_cm, ALIGN)
