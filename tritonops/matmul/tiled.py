"""Matmul, one output tile a program."""

import triton
import triton.language as tl

from .tiles import add_bias, dot_over_k, multiple, offsets, store_tile, tile_of


@triton.jit(
    do_not_specialize=[
        "M", "N", "K", "stride_ab", "stride_a", "unit_a", "stride_bb", "stride_b", "unit_b", "stride_cb", "stride_cm",
    ]
)  # fmt: skip
def matmul_tiled_kernel(
    a_ptr, b_ptr, bias_ptr, c_ptr, M, N, K,
    stride_ab, stride_a, unit_a, stride_bb, stride_b, unit_b, stride_cb, stride_cm,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    A_BY_COLUMN: tl.constexpr, B_BY_ROW: tl.constexpr, EVEN_K: tl.constexpr, HAS_BIAS: tl.constexpr,
    WIDE: tl.constexpr, ALIGN_A: tl.constexpr, ALIGN_B: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """c[z] = a[z] @ b[z] + bias; a [batch, M, K], b [batch, K, N] by strides, c [batch, M, N] with unit column stride.

    Strides of a and b as in dot_over_k; stride_ab and stride_bb, those of the batch, are multiples of ALIGN_A and
    ALIGN_B. Grid: (tiles, batch).
    """
    batch = tl.program_id(1).to(tl.int64)
    pid_m, pid_n = tile_of(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP_M)
    offs_m = offsets(pid_m, BLOCK_M, WIDE)
    offs_n = offsets(pid_n, BLOCK_N, WIDE)
    acc = dot_over_k(
        a_ptr + batch * multiple(stride_ab, ALIGN_A), b_ptr + batch * multiple(stride_bb, ALIGN_B),
        offs_m, offs_n, M, N, K, stride_a, unit_a, stride_b, unit_b,
        BLOCK_M, BLOCK_N, BLOCK_K, A_BY_COLUMN, B_BY_ROW, EVEN_K, WIDE, ALIGN_A, ALIGN_B,
    )  # fmt: skip
    acc = add_bias(acc, bias_ptr, offs_n, N, HAS_BIAS, ALIGN)
    store_tile(c_ptr + batch * multiple(stride_cb, ALIGN), acc, offs_m, offs_n, M, N, stride_cm, ALIGN)
