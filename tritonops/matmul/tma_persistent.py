"""Persistent matmul whose operands come through tensor descriptors (the copy engine of Hopper and newer)."""

import triton
import triton.language as tl

from .tiles import add_bias, offsets, store_tile, tile_of


@triton.jit
def _store(c, acc, pid_m, col, M, N, stride_cm, bias_ptr, BLOCK_M: tl.constexpr, WIDTH: tl.constexpr,
           STORE_TMA: tl.constexpr, HAS_BIAS: tl.constexpr, WIDE: tl.constexpr, ALIGN: tl.constexpr):  # fmt: skip
    offs_n = offsets(col, WIDTH, WIDE)
    acc = add_bias(acc, bias_ptr, offs_n, N, HAS_BIAS, ALIGN)
    if STORE_TMA:
        c.store([pid_m * BLOCK_M, col * WIDTH], acc.to(c.dtype))
    else:
        store_tile(c, acc, offsets(pid_m, BLOCK_M, WIDE), offs_n, M, N, stride_cm, ALIGN)


@triton.jit(do_not_specialize=["M", "N", "K", "stride_cm"])
def matmul_tma_persistent_kernel(
    a_desc, b_desc, bias_ptr, c, M, N, K, stride_cm,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    PROGRAMS: tl.constexpr, FLATTEN: tl.constexpr, SUBTILE: tl.constexpr, STORE_TMA: tl.constexpr,
    A_BY_COLUMN: tl.constexpr, B_BY_ROW: tl.constexpr, HAS_BIAS: tl.constexpr,
    WIDE: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """c = a @ b + bias.

    a_desc: [M, K] in blocks [BLOCK_M, BLOCK_K], or by column [K, M] in [BLOCK_K, BLOCK_M]; b_desc: by row [K, N] in
    [BLOCK_K, BLOCK_N], else [N, K] in [BLOCK_N, BLOCK_K]. c: a descriptor in blocks [BLOCK_M, BLOCK_N] (half as wide
    with SUBTILE), or with STORE_TMA off a pointer, for rows that are not a multiple of 16 bytes (but of ALIGN
    elements). What a descriptor loads past its shape is zero. SUBTILE stores the tile in two halves: half the
    epilogue's shared memory, so a pipeline stage more fits. Grid: (min(PROGRAMS, tiles),).
    """
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS, flatten=FLATTEN):
        pid_m, pid_n = tile_of(tile, tiles_m, tiles_n, GROUP_M)
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(0, tl.cdiv(K, BLOCK_K)):
            if A_BY_COLUMN:
                a = a_desc.load([k * BLOCK_K, pid_m * BLOCK_M]).T
            else:
                a = a_desc.load([pid_m * BLOCK_M, k * BLOCK_K])
            if B_BY_ROW:
                b = b_desc.load([k * BLOCK_K, pid_n * BLOCK_N])
            else:
                b = b_desc.load([pid_n * BLOCK_N, k * BLOCK_K]).T
            acc = tl.dot(a, b, acc, input_precision="ieee")
        if SUBTILE:
            halves = tl.permute(tl.reshape(acc, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1))
            left, right = tl.split(halves)
            _store(
                c, left, pid_m, pid_n * 2, M, N, stride_cm, bias_ptr,
                BLOCK_M, BLOCK_N // 2, STORE_TMA, HAS_BIAS, WIDE, ALIGN,
            )  # fmt: skip
            _store(
                c, right, pid_m, pid_n * 2 + 1, M, N, stride_cm, bias_ptr,
                BLOCK_M, BLOCK_N // 2, STORE_TMA, HAS_BIAS, WIDE, ALIGN,
            )  # fmt: skip
        else:
            _store(
                c, acc, pid_m, pid_n, M, N, stride_cm, bias_ptr,
                BLOCK_M, BLOCK_N, STORE_TMA, HAS_BIAS, WIDE, ALIGN,
            )  # fmt: skip
