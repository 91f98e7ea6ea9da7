"""torch's own matmul (cuBLAS on NVIDIA GPUs)."""

from __future__ import annotations

import torch

from .. import _compat
from ..dispatch.variant import Choice


def vendor_matmul(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype | None
) -> torch.Tensor:
    """a @ b + bias for 2-D or 3-D operands of one dtype; contiguous, in `out_dtype` (default: the operands')."""
    with _compat.no_autocast(a.device.type):
        if out_dtype is not None and out_dtype != a.dtype:
            # aten has mm with an out_dtype on CUDA only (torch 2.8+): fp32 accumulators stored unrounded.
            if a.device.type == "cuda":
                out = torch.mm(a, b, out_dtype=out_dtype) if a.dim() == 2 else torch.bmm(a, b, out_dtype=out_dtype)
            else:
                out = a.to(out_dtype) @ b.to(out_dtype)
            out = out if bias is None else out.add_(bias)
        elif a.dim() == 2:
            out = torch.mm(a, b) if bias is None else torch.addmm(bias, a, b)
        else:
            out = torch.bmm(a, b) if bias is None else torch.bmm(a, b).add_(bias)
    return out.contiguous()


def run_vendor(
    choice: Choice, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype | None
) -> torch.Tensor:
    return vendor_matmul(a, b, bias, out_dtype)
