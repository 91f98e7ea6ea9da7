"""Device helpers shared by the matmul kernels: tile order, the K loop over pointers, the store."""

import triton
import triton.language as tl


@triton.jit
def tile_of(tile, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """(m, n) of a tile number, in groups of GROUP_M tile rows so that neighbours share operands in L2."""
    per_group = GROUP_M * tiles_n
    first = (tile // per_group) * GROUP_M
    rows = min(tiles_m - first, GROUP_M)
    return first + (tile % per_group) % rows, (tile % per_group) // rows


@triton.jit
def offsets(start, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """start * BLOCK + [0, BLOCK); int64 where an element offset leaves int32."""
    if WIDE:
        return start.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    else:
        return start * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def multiple(n, ALIGN: tl.constexpr):
    """n, which is a multiple of ALIGN, so that the compiler knows it; the JIT specialises on no size or stride."""
    return n // ALIGN * ALIGN


@triton.jit
def dot_over_k(
    a_ptr, b_ptr, offs_m, offs_n, M, N, K, stride_a, unit_a, stride_b, unit_b,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    A_BY_COLUMN: tl.constexpr, B_BY_ROW: tl.constexpr, EVEN_K: tl.constexpr, WIDE: tl.constexpr,
    ALIGN_A: tl.constexpr, ALIGN_B: tl.constexpr,
):  # fmt: skip
    """fp32 [BLOCK_M, BLOCK_N] = a[offs_m, :] @ b[:, offs_n].

    stride_a leads from one row of a to the next (by column: from one column), unit_a along it; None is 1. The length of
    a row and stride_a are multiples of ALIGN_A, so that loads, masked or not, are of so many elements. The same for b.

    Rows of a past M, columns of b past N: along the contiguous dimension they are masked, so that vector loads stay
    inside the buffer; across it they are clamped to 0, which costs no predicate in the loop. Either way they only
    reach results that are not stored.
    """
    along_a = 1 if unit_a is None else unit_a
    along_b = 1 if unit_b is None else unit_b
    across_a = multiple(stride_a, ALIGN_A)
    across_b = multiple(stride_b, ALIGN_B)
    offs_k = tl.arange(0, BLOCK_K)
    if A_BY_COLUMN:
        m_in = offs_m < multiple(M, ALIGN_A)
        a_rows = a_ptr + offs_m[:, None] * along_a
    else:
        a_rows = a_ptr + tl.where(offs_m < M, offs_m, 0)[:, None] * across_a
    if B_BY_ROW:
        n_in = offs_n < multiple(N, ALIGN_B)
        b_cols = b_ptr + offs_n[None, :] * along_b
    else:
        b_cols = b_ptr + tl.where(offs_n < N, offs_n, 0)[None, :] * across_b
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, tl.cdiv(K, BLOCK_K)):
        kk = k * BLOCK_K + offs_k
        # K's masks are taken before widening: K itself fits int32, k * stride may not.
        k_in_a = kk < multiple(K, 1 if A_BY_COLUMN else ALIGN_A)
        k_in_b = kk < multiple(K, 1 if B_BY_ROW else ALIGN_B)
        if WIDE:
            kk = kk.to(tl.int64)
        if A_BY_COLUMN:
            a_ptrs = a_rows + kk[None, :] * across_a
            if EVEN_K:
                a = tl.load(a_ptrs, mask=m_in[:, None], other=0.0)
            else:
                a = tl.load(a_ptrs, mask=m_in[:, None] & k_in_a[None, :], other=0.0)
        else:
            a_ptrs = a_rows + kk[None, :] * along_a
            if EVEN_K:
                a = tl.load(a_ptrs)
            else:
                a = tl.load(a_ptrs, mask=k_in_a[None, :], other=0.0)
        if B_BY_ROW:
            b_ptrs = b_cols + kk[:, None] * across_b
            if EVEN_K:
                b = tl.load(b_ptrs, mask=n_in[None, :], other=0.0)
            else:
                b = tl.load(b_ptrs, mask=n_in[None, :] & k_in_b[:, None], other=0.0)
        else:
            b_ptrs = b_cols + kk[:, None] * along_b
            if EVEN_K:
                b = tl.load(b_ptrs)
            else:
                b = tl.load(b_ptrs, mask=k_in_b[:, None], other=0.0)
        # Not TF32, whose operands Triton truncates: relative error 7.7e-4 at K = 256, cuBLAS has 2.9e-4 (H200).
        acc = tl.dot(a, b, acc, input_precision="ieee")
    return acc


@triton.jit
def add_bias(acc, bias_ptr, offs_n, N, HAS_BIAS: tl.constexpr, ALIGN: tl.constexpr):
    if HAS_BIAS:
        acc += tl.load(bias_ptr + offs_n, mask=offs_n < multiple(N, ALIGN), other=0.0).to(tl.float32)[None, :]
    return acc


@triton.jit
def store_tile(c_ptr, acc, offs_m, offs_n, M, N, stride_cm, ALIGN: tl.constexpr):
    """N and stride_cm are multiples of ALIGN: so many are stored at once."""
    mask = (offs_m < M)[:, None] & (offs_n < multiple(N, ALIGN))[None, :]
    rows = c_ptr + offs_m[:, None] * multiple(stride_cm, ALIGN)
    tl.store(rows + offs_n[None, :], acc.to(c_ptr.dtype.element_ty), mask=mask)
