"""What the gate and the timing stage look at in results: kind, memory, bits, distance; and memory that holds NaN."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .. import _compat
from .measure import tensors

Outputs = tuple[torch.Tensor, ...]


def layouts(args: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """Where the tensors in arguments lie and how they are read."""
    return [(t.data_ptr(), t.dtype, tuple(t.shape), t.stride()) for t in tensors(args)]


def memory(values: Any) -> list[torch.Tensor]:
    """The bytes that tensors lie in, whole allocations, each once."""
    storages = {t.untyped_storage().data_ptr(): t for t in tensors(values) if t.untyped_storage().nbytes()}
    return [torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage()) for t in storages.values()]


def share_memory(one: Outputs, other: Outputs) -> bool:
    """Whether a tensor of the one lies in the allocation of a tensor of the other."""
    where, there = ({t.untyped_storage().data_ptr() for t in ts if t.numel()} for ts in (one, other))
    return bool(where & there)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two contiguous tensors of one kind are equal bit by bit, NaN included."""
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def unlike(outputs: tuple[Any, ...], vendor: Outputs) -> str | None:
    """How outputs differ from the vendor's in kind, or None. What the vendor leaves empty must be empty."""
    if len(outputs) != len(vendor):
        return f"{len(outputs)} outputs, torch has {len(vendor)}"
    for i, (got, want) in enumerate(zip(outputs, vendor, strict=True)):
        if not isinstance(got, torch.Tensor):
            return f"output {i} is no tensor but {type(got).__name__}"
        if want.numel() == 0 and got.numel() == 0:
            continue
        for what in ("shape", "dtype", "device"):
            ours, theirs = getattr(got, what), getattr(want, what)
            if ours != theirs:
                return f"output {i} has {what} {_text(ours)}, torch's has {_text(theirs)}"
    return None


def _text(value: Any) -> str:
    return str(tuple(value)) if isinstance(value, torch.Size) else str(value)


_aten = torch.ops.aten
_ALLOCATIONS = {
    _aten.empty, _aten.empty_like, _aten.empty_strided, _aten.empty_permuted, _aten.new_empty, _aten.new_empty_strided,
}  # fmt: skip


class Poison(TorchDispatchMode):
    """Floating tensors that are allocated uninitialised start as NaN, whichever Python code allocates them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in _ALLOCATIONS and out.is_floating_point():
            out.fill_(float("nan"))
        return out


def refill(like: Any) -> None:
    """Fill memory that the next allocations of the sizes of `like` will get with 0xFF, which is NaN."""
    held = [
        torch.empty(t.numel() * t.element_size(), dtype=torch.uint8, device=t.device).fill_(255)
        for t in tensors(like)
        for _ in range(2)
    ]
    del held


def poison_free_memory(where: torch.device, like: Outputs) -> None:
    """Fill memory that the next allocations may get with 0xFF, which is NaN in every floating dtype."""
    sizes = [t.numel() * t.element_size() for t in like for _ in range(4)]
    if where.type == "cuda":
        sizes += [
            block["size"]
            for segment in torch.cuda.memory_snapshot()
            if segment["device"] == where.index
            for block in segment["blocks"]
            if block["state"] == "inactive"
        ]
    # All are held until the last is filled. The largest first: each takes the free block of its size.
    held = [torch.empty(n, dtype=torch.uint8, device=where).fill_(255) for n in sorted(sizes, reverse=True)]
    del held


# Two float32 sums of 2**17 terms in different orders; rounding operands to TF32 costs up to 2**-11 of each product.
_FLOAT32_SUM = 2.0**-24 * 2.0**8.5
_TF32 = 2.0**-9
# Of sums near zero only what rounding the terms, which are of order one, may cost is left: the mean of 62295 numbers.
_NEAR_ZERO = 1e-6
_CHUNK = 1 << 26


def check_output(out: Any, vendor_out: Any) -> str | None:
    """Why a result cannot be right, given the vendor's for the same arguments, or None.

    Relative Frobenius difference, and largest difference over the largest magnitude, each at most 4 eps of the output's
    dtype plus what float32 sums, and TF32 where torch's switch allows it, cost. Nothing may be NaN or infinite. Sums
    are float32; at most 2**26 elements are copied at a time.
    """
    outputs, vendors = (o if isinstance(o, tuple) else (o,) for o in (out, vendor_out))
    why = unlike(outputs, vendors)
    if why is not None:
        return why
    for i, (got, want) in enumerate(zip(outputs, vendors, strict=True)):
        if want.numel() == 0:
            continue
        difference, norm, largest, most = _distances(got, want)
        tolerance = 4 * torch.finfo(got.dtype).eps + _FLOAT32_SUM
        if got.dtype is torch.float32 and _compat.tf32_allowed():
            tolerance += _TF32
        if not all(map(math.isfinite, (difference, norm, largest, most))):
            return f"output {i} is not finite" if math.isfinite(norm) else f"output {i} of torch is not finite"
        if difference > tolerance * norm + _NEAR_ZERO * want.numel() ** 0.5:
            return (
                f"output {i} differs from torch's by {difference:.2e} of {norm:.2e}, {tolerance:.1e} of it is allowed"
            )
        if largest > tolerance * most + _NEAR_ZERO:
            return f"output {i} has an element {largest:.2e} off torch's, {tolerance:.1e} of {most:.2e} is allowed"
    return None


def _distances(got: torch.Tensor, want: torch.Tensor) -> tuple[float, float, float, float]:
    """(norm of the difference, norm of `want`, largest difference, largest magnitude of `want`)."""
    found = []
    for a, b in zip(got.reshape(-1).split(_CHUNK), want.reshape(-1).split(_CHUNK), strict=True):
        b32 = b.float()
        d = a.float() - b32
        found.append(torch.stack((d.square().sum(), b32.square().sum(), d.abs().amax(), b32.abs().amax())))
    sums = torch.stack(found)
    squares, most = sums[:, :2].sum(0).sqrt().tolist(), sums[:, 2:].amax(0).tolist()
    return squares[0], squares[1], most[0], most[1]
