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
def dot_over_k(
    a_ptr, b_ptr, offs_m, offs_n, M, N, K,
    stride_am, stride_ak, stride_bk, stride_bn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    A_BY_COLUMN: tl.constexpr, B_BY_ROW: tl.constexpr, EVEN_K: tl.constexpr,
    WIDE: tl.constexpr, ALIGN_M: tl.constexpr,
):  # fmt: skip
    """fp32 [BLOCK_M, BLOCK_N] = a[offs_m, :] @ b[:, offs_n].

    M, on which the JIT does not specialise, is a multiple of ALIGN_M, so that masked loads along it are vectors.

    Rows of a past M, columns of b past N: along the contiguous dimension they are masked, so that vector loads stay
    inside the buffer; across it they are clamped to 0, which costs no predicate in the loop. Either way they only
    reach results that are not stored.
    """
    offs_k = tl.arange(0, BLOCK_K)
    rows = offs_m if A_BY_COLUMN else tl.where(offs_m < M, offs_m, 0)
    cols = offs_n if B_BY_ROW else tl.where(offs_n < N, offs_n, 0)
    a_rows = a_ptr + rows[:, None] * stride_am
    b_cols = b_ptr + cols[None, :] * stride_bn
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, tl.cdiv(K, BLOCK_K)):
        kk = k * BLOCK_K + offs_k
        # K's mask is taken before widening: K itself fits int32, k * stride may not.
        k_in = kk < K
        if WIDE:
            kk = kk.to(tl.int64)
        a_ptrs = a_rows + kk[None, :] * stride_ak
        b_ptrs = b_cols + kk[:, None] * stride_bk
        if A_BY_COLUMN:
            if EVEN_K:
                a = tl.load(a_ptrs, mask=(offs_m < M // ALIGN_M * ALIGN_M)[:, None], other=0.0)
            else:
                a = tl.load(a_ptrs, mask=(offs_m < M // ALIGN_M * ALIGN_M)[:, None] & k_in[None, :], other=0.0)
        else:
            if EVEN_K:
                a = tl.load(a_ptrs)
            else:
                a = tl.load(a_ptrs, mask=k_in[None, :], other=0.0)
        if B_BY_ROW:
            if EVEN_K:
                b = tl.load(b_ptrs, mask=(offs_n < N)[None, :], other=0.0)
            else:
                b = tl.load(b_ptrs, mask=(offs_n < N)[None, :] & k_in[:, None], other=0.0)
        else:
            if EVEN_K:
                b = tl.load(b_ptrs)
            else:
                b = tl.load(b_ptrs, mask=k_in[:, None], other=0.0)
        # Not TF32, whose operands Triton truncates: relative error 7.7e-4 at K = 256, cuBLAS has 2.9e-4 (H200).
        acc = tl.dot(a, b, acc, input_precision="ieee")
    return acc


@triton.jit
def add_bias(acc, bias_ptr, offs_n, N, HAS_BIAS: tl.constexpr):
    if HAS_BIAS:
        acc += tl.load(bias_ptr + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)[None, :]
    return acc


@triton.jit
def store_tile(c_ptr, acc, offs_m, offs_n, M, N, stride_cm, ALIGN: tl.constexpr):
    """N and stride_cm are multiples of ALIGN, which is told to the compiler: it then stores so many at once."""
    mask = (offs_m < M)[:, None] & (offs_n < N // ALIGN * ALIGN)[None, :]
    rows = c_ptr + offs_m[:, None] * (stride_cm // ALIGN * ALIGN)
    tl.store(rows + offs_n[None, :], acc.to(c_ptr.dtype.element_ty), mask=mask)
