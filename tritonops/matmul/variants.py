"""The variants of matmul. To add a tile or flag configuration, add a line to the lists at the end."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from .. import launch
from ..device import DeviceInfo
from ..dispatch import override
from ..dispatch.problem import Problem
from ..dispatch.variant import VENDOR, Choice, Variant
from .vendor import run_vendor, vendor_matmul

TILED = "tritonops.matmul.tiled:matmul_tiled_kernel"
PERSISTENT = "tritonops.matmul.persistent:matmul_persistent_kernel"
TMA = "tritonops.matmul.tma_persistent:matmul_tma_persistent_kernel"

_ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4}
_MAX_GRID_Y = 65535

Bias = torch.Tensor | None
OutDtype = torch.dtype | None


def programs(choice: Choice, per_sm: int) -> int:
    """Size of a persistent grid: per_sm programs on each SM of the budget."""
    budget = override.sm_budget(choice.problem.flags)
    sms = choice.device.sms if budget is None else min(budget, choice.device.sms)
    return per_sm * sms


def _out(choice: Choice, a: torch.Tensor, out_dtype: OutDtype) -> torch.Tensor:
    d = choice.problem.dims
    shape = (d["M"], d["N"]) if a.dim() == 2 else (d["batch"], d["M"], d["N"])
    return torch.empty(shape, dtype=out_dtype or a.dtype, device=a.device)


def _common(choice: Choice, bias: Bias) -> dict[str, Any]:
    p, meta = choice.problem, choice.variant.meta
    return {
        **{k: meta[k] for k in ("BLOCK_M", "BLOCK_N", "BLOCK_K", "GROUP_M")},
        "A_BY_COLUMN": p.layout[0] == "t",
        "B_BY_ROW": p.layout[1] == "n",
        "HAS_BIAS": bias is not None,
        "WIDE": p.traits["wide"],
        "ALIGN": math.gcd(p.dims["N"], 16 // _ITEMSIZE[p.traits["out"]]),
    }


def _access(t: torch.Tensor, by_column: bool) -> tuple[int, int | None, int]:
    """How a kernel walks over a matrix: stride across, stride along (None for 1), and alignment in elements.

    The alignment, at most 16 bytes, divides the stride across, the batch's stride and the length along.
    """
    along, across = (-2, -1) if by_column else (-1, -2)
    if t.shape[along] > 1 and t.stride(along) != 1:
        return t.stride(across), t.stride(along), 1
    align = math.gcd(16 // t.element_size(), t.shape[along])
    if t.shape[across] > 1:
        align = math.gcd(align, t.stride(across))
    if t.dim() == 3 and t.shape[0] > 1:
        align = math.gcd(align, t.stride(0))
    return t.stride(across), None, align


def _tiles(choice: Choice) -> int:
    d, meta = choice.problem.dims, choice.variant.meta
    return launch.int_ceil_div(d["M"], meta["BLOCK_M"]) * launch.int_ceil_div(d["N"], meta["BLOCK_N"])


def run_tiled(choice: Choice, a: torch.Tensor, b: torch.Tensor, bias: Bias, out_dtype: OutDtype) -> torch.Tensor:
    c = _out(choice, a, out_dtype)
    d, constants = choice.problem.dims, _common(choice, bias)
    batch = (a.stride(0), b.stride(0), c.stride(0)) if a.dim() == 3 else (0, 0, 0)
    stride_a, unit_a, constants["ALIGN_A"] = _access(a, constants["A_BY_COLUMN"])
    stride_b, unit_b, constants["ALIGN_B"] = _access(b, not constants["B_BY_ROW"])
    constants["EVEN_K"] = d["K"] % constants["BLOCK_K"] == 0
    args = (
        a, b, bias, c, d["M"], d["N"], d["K"],
        batch[0], stride_a, unit_a, batch[1], stride_b, unit_b, batch[2], c.stride(-2),
    )  # fmt: skip
    grid = (_tiles(choice), d["batch"])
    launch.launch(launch.kernel(TILED), grid, args, constants, choice.variant.options)
    return c


def run_persistent(choice: Choice, a: torch.Tensor, b: torch.Tensor, bias: Bias, out_dtype: OutDtype) -> torch.Tensor:
    c = _out(choice, a, out_dtype)
    a2, b2, c2 = (t.squeeze(0) if t.dim() == 3 else t for t in (a, b, c))
    d, meta = choice.problem.dims, choice.variant.meta
    size = programs(choice, meta["PER_SM"])
    constants = _common(choice, bias) | {"PROGRAMS": size, "FLATTEN": meta["FLATTEN"]}
    stride_a, unit_a, constants["ALIGN_A"] = _access(a2, constants["A_BY_COLUMN"])
    stride_b, unit_b, constants["ALIGN_B"] = _access(b2, not constants["B_BY_ROW"])
    constants["EVEN_K"] = d["K"] % constants["BLOCK_K"] == 0
    args = (a2, b2, bias, c2, d["M"], d["N"], d["K"], stride_a, unit_a, stride_b, unit_b, c2.stride(0))
    grid = (min(size, _tiles(choice)),)
    launch.launch(launch.kernel(PERSISTENT), grid, args, constants, choice.variant.options)
    return c


def descriptor(t: torch.Tensor, block: list[int], *, transpose: bool) -> Any:
    """A host tensor descriptor of a 2-D tensor; `transpose` describes t.T. Size-1 rows get a legal stride."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    if transpose:
        t = t.T
    rows, cols = t.shape
    per_16_bytes = 16 // t.element_size()
    stride = t.stride(0) if rows > 1 else launch.int_ceil_div(cols, per_16_bytes) * per_16_bytes
    return TensorDescriptor(t, [rows, cols], [stride, 1], block)


def launch_tma(choice: Choice, a: torch.Tensor, b: torch.Tensor, bias: Bias, c: torch.Tensor, layout: str) -> None:
    """The descriptor kernel on aligned 2-D operands of the given layout, into c [M, N] with unit column stride."""
    d, meta = choice.problem.dims, choice.variant.meta
    block_m, block_n, block_k = meta["BLOCK_M"], meta["BLOCK_N"], meta["BLOCK_K"]
    size = programs(choice, meta["PER_SM"])
    store_tma = c.data_ptr() % 16 == 0 and (c.stride(0) * c.element_size()) % 16 == 0
    by_column, by_row = layout[0] == "t", layout[1] == "n"
    args = (
        descriptor(a, [block_k, block_m] if by_column else [block_m, block_k], transpose=by_column),
        descriptor(b, [block_k, block_n] if by_row else [block_n, block_k], transpose=not by_row),
        bias,
        descriptor(c, [block_m, block_n // 2 if meta["SUBTILE"] else block_n], transpose=False) if store_tma else c,
        d["M"], d["N"], d["K"], c.stride(0),
    )  # fmt: skip
    constants = {
        **_common(choice, bias),
        "A_BY_COLUMN": by_column,
        "B_BY_ROW": by_row,
        "PROGRAMS": size,
        "FLATTEN": meta["FLATTEN"],
        "SUBTILE": meta["SUBTILE"],
        "STORE_TMA": store_tma,
    }
    if store_tma:
        constants["ALIGN"] = 1
    grid = (min(size, _tiles(choice)),)
    launch.launch(launch.kernel(TMA), grid, args, constants, choice.variant.options)


def run_tma(choice: Choice, a: torch.Tensor, b: torch.Tensor, bias: Bias, out_dtype: OutDtype) -> torch.Tensor:
    c = _out(choice, a, out_dtype)
    a2, b2, c2 = (t.squeeze(0) if t.dim() == 3 else t for t in (a, b, c))
    launch_tma(choice, a2, b2, bias, c2, choice.problem.layout)
    return c


def _round_up(n: int, multiple: int) -> int:
    return launch.int_ceil_div(n, multiple) * multiple


def _padded_copy(t: torch.Tensor, by_column: bool) -> torch.Tensor:
    """A copy whose contiguous dimension starts every row at a multiple of 16 bytes; the padding is never read."""
    rows, cols = (t.shape[1], t.shape[0]) if by_column else tuple(t.shape)
    buffer = torch.empty((rows, _round_up(cols, 16 // t.element_size())), dtype=t.dtype, device=t.device)[:, :cols]
    buffer.copy_(t.T if by_column else t)
    return buffer.T if by_column else buffer


def _is_aligned(t: torch.Tensor, by_column: bool) -> bool:
    inner, outer = (0, 1) if by_column else (1, 0)
    unit = t.shape[inner] == 1 or t.stride(inner) == 1
    stride = t.stride(outer) * t.element_size()
    enough = t.shape[outer] == 1 or (stride % 16 == 0 and t.stride(outer) >= t.shape[inner])
    return unit and enough and t.data_ptr() % 16 == 0


def run_padded_tma(choice: Choice, a: torch.Tensor, b: torch.Tensor, bias: Bias, out_dtype: OutDtype) -> torch.Tensor:
    c = _out(choice, a, out_dtype)
    a2, b2, c2 = (t.squeeze(0) if t.dim() == 3 else t for t in (a, b, c))
    by_column, by_row = choice.problem.layout[0] == "t", choice.problem.layout[1] == "n"
    a2 = a2 if _is_aligned(a2, by_column) else _padded_copy(a2, by_column)
    b2 = b2 if _is_aligned(b2, not by_row) else _padded_copy(b2, not by_row)
    launch_tma(choice, a2, b2, bias, c2, ("t" if by_column else "n") + ("n" if by_row else "t"))
    return c


def run_padded_vendor(
    choice: Choice, a: torch.Tensor, b: torch.Tensor, bias: Bias, out_dtype: OutDtype
) -> torch.Tensor:
    """cuBLAS on copies padded with zeros to whole 16-byte units in K and N; the surplus columns are cut off."""
    d = choice.problem.dims
    a2, b2 = (t.squeeze(0) if t.dim() == 3 else t for t in (a, b))
    unit = 16 // a.element_size()
    k, n = _round_up(d["K"], unit), _round_up(d["N"], unit)
    by_row = choice.problem.layout[1] == "n"
    if k != d["K"] or not _is_aligned(a2, False):
        a2 = torch.nn.functional.pad(a2, (0, k - d["K"]))
    if k != d["K"] or n != d["N"] or not _is_aligned(b2, not by_row):
        b2 = torch.nn.functional.pad(b2, (0, n - d["N"], 0, k - d["K"])) if by_row else torch.nn.functional.pad(
            b2.T, (0, k - d["K"], 0, n - d["N"])
        ).T  # fmt: skip
    if bias is not None and n != d["N"]:
        bias = torch.nn.functional.pad(bias, (0, n - d["N"]))
    out = vendor_matmul(a2, b2, bias, out_dtype)[:, : d["N"]].contiguous()
    return out if a.dim() == 2 else out.unsqueeze(0)


def _supported(problem: Problem, device: DeviceInfo) -> str | None:
    if problem.dtype not in _ITEMSIZE or problem.traits["out"] not in _ITEMSIZE:
        return f"computes float16, bfloat16 and float32, not {problem.dtype} -> {problem.traits['out']}"
    return None


def _shared_bytes(meta: Mapping[str, Any], stages: int, problem: Problem) -> int:
    """Operand buffers of the pipelined K loop plus, for descriptor stores, the staged output tile."""
    m, n, k = meta["BLOCK_M"], meta["BLOCK_N"], meta["BLOCK_K"]
    operands = stages * (m + n) * k * _ITEMSIZE[problem.dtype]
    if "SUBTILE" not in meta:
        # A flattened loop stages the output beside its operands: 262144 bytes for float32 128x128x64, 3 stages, where
        # 16-bit operands are pipelined less and stay below the plain sum (sm_90, Triton 3.6 and 3.9).
        flat = meta.get("FLATTEN", False) and _ITEMSIZE[problem.dtype] == 4
        return operands + (m * n * _ITEMSIZE[problem.traits["out"]] if flat else 0)
    return operands + m * (n // 2 if meta["SUBTILE"] else n) * _ITEMSIZE[problem.traits["out"]] + 1024


def _fits(meta: Mapping[str, Any], stages: int, problem: Problem, device: DeviceInfo) -> str | None:
    need = _shared_bytes(meta, stages, problem)
    if need > device.shared_bytes:
        return f"needs {need} bytes of shared memory, {device.arch} has {device.shared_bytes}"
    return None


def _one_matrix(problem: Problem) -> str | None:
    return None if problem.dims["batch"] == 1 else "computes one matrix, not a batch"


def _requires_tiled(meta: Mapping[str, Any], stages: int, problem: Problem, device: DeviceInfo) -> str | None:
    reason = _supported(problem, device)
    if reason is None and problem.dims["batch"] > _MAX_GRID_Y:
        reason = f"takes batches up to {_MAX_GRID_Y}"
    return reason or _fits(meta, stages, problem, device)


def _requires_persistent(meta: Mapping[str, Any], stages: int, problem: Problem, device: DeviceInfo) -> str | None:
    return _supported(problem, device) or _one_matrix(problem) or _fits(meta, stages, problem, device)


def _requires_tma(meta: Mapping[str, Any], stages: int, problem: Problem, device: DeviceInfo) -> str | None:
    if "x" in problem.layout:
        return "descriptors need one unit stride and rows that do not overlap"
    if not problem.traits["operands_aligned"]:
        return "descriptors need pointers and row strides that are multiples of 16 bytes"
    return _requires_persistent(meta, stages, problem, device)


def _requires_padded(problem: Problem, device: DeviceInfo) -> str | None:
    if problem.aligned:
        return "the operands and the output are aligned as they are"
    return _supported(problem, device) or _one_matrix(problem)


def _requires_padded_tma(meta: Mapping[str, Any], stages: int, problem: Problem, device: DeviceInfo) -> str | None:
    if problem.traits["operands_aligned"]:
        return "the operands are aligned as they are; tma_persistent stores a misaligned output as well"
    return _requires_padded(problem, device) or _fits(meta, stages, problem, device)


def _tile(m: int, n: int, k: int, group: int) -> dict[str, Any]:
    return {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "GROUP_M": group}


def _variant(
    family: str,
    suffix: str,
    run: Callable[..., torch.Tensor],
    requires: Callable[..., str | None],
    kernel: str,
    meta: dict[str, Any],
    warps: int,
    stages: int,
    needs: frozenset[str] = frozenset(),
    batch_invariant: bool = False,
) -> Variant:
    name = f"{meta['BLOCK_M']}x{meta['BLOCK_N']}x{meta['BLOCK_K']}-g{meta['GROUP_M']}-w{warps}-s{stages}{suffix}"
    return Variant(
        f"{family}{name}", run, functools.partial(requires, meta, stages), meta, launch.options(warps, stages),
        needs, kernel, batch_invariant=batch_invariant,
    )  # fmt: skip


def _tiled(m: int, n: int, k: int, group: int, warps: int, stages: int) -> Variant:
    return _variant(
        "tiled/", "", run_tiled, _requires_tiled, TILED, _tile(m, n, k, group), warps, stages, batch_invariant=True
    )


def _persistent(
    m: int, n: int, k: int, group: int, warps: int, stages: int, per_sm: int, flatten: bool = False
) -> Variant:
    meta = _tile(m, n, k, group) | {"PER_SM": per_sm, "FLATTEN": flatten}
    suffix = f"-p{per_sm}" + ("-flat" if flatten else "")
    return _variant("persistent/", suffix, run_persistent, _requires_persistent, PERSISTENT, meta, warps, stages)


def _tma(
    m: int, n: int, k: int, group: int, warps: int, stages: int, per_sm: int, subtile: bool, flatten: bool = False,
    padded: bool = False,
) -> Variant:  # fmt: skip
    meta = _tile(m, n, k, group) | {"PER_SM": per_sm, "FLATTEN": flatten, "SUBTILE": subtile}
    suffix = f"-p{per_sm}" + ("-sub" if subtile else "") + ("-flat" if flatten else "")
    needs = frozenset({"tma"})
    if padded:
        return _variant("padded/tma-", suffix, run_padded_tma, _requires_padded_tma, TMA, meta, warps, stages, needs)
    return _variant("tma_persistent/", suffix, run_tma, _requires_tma, TMA, meta, warps, stages, needs)


def variants() -> list[Variant]:
    """Every variant of matmul; ids are family/MxNxK-g<group>-w<warps>-s<stages>[-p<programs per SM>][-sub][-flat]."""
    return [
        Variant(VENDOR, run_vendor),
        _tiled(128, 256, 64, 8, 8, 3),
        _tiled(128, 128, 64, 8, 8, 3),
        _tiled(128, 128, 32, 8, 4, 4),
        _tiled(64, 128, 64, 8, 4, 4),
        _tiled(64, 64, 64, 8, 4, 4),
        _tiled(16, 128, 128, 8, 4, 4),
        _tiled(32, 64, 32, 8, 4, 3),
        _persistent(128, 128, 64, 8, 4, 3, 1),
        _persistent(128, 128, 64, 8, 4, 3, 2),
        _persistent(128, 128, 64, 8, 4, 3, 3),
        _persistent(128, 128, 64, 8, 8, 3, 1, flatten=True),
        _persistent(128, 128, 32, 8, 4, 4, 2),
        _persistent(128, 256, 64, 8, 8, 3, 1),
        _persistent(128, 256, 64, 8, 8, 3, 1, flatten=True),
        _persistent(64, 128, 64, 8, 4, 4, 2),
        _tma(128, 256, 64, 8, 8, 3, 1, subtile=False),
        _tma(128, 256, 64, 8, 8, 3, 1, subtile=False, flatten=True),
        _tma(128, 256, 64, 8, 8, 4, 1, subtile=True),
        _tma(128, 128, 64, 8, 4, 4, 2, subtile=True),
        _tma(128, 128, 32, 8, 8, 4, 1, subtile=True),
        _tma(128, 256, 64, 8, 8, 3, 1, subtile=True, padded=True),
        _tma(128, 128, 32, 8, 8, 4, 1, subtile=True, padded=True),
        Variant("padded/vendor", run_padded_vendor, _requires_padded),
    ]
