"""Helpers for tests of kernels: outputs that start as NaN, and the bound against the float64 oracle."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

_PACKAGE = __name__.partition(".")[0]


def _poisoning(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(allocate)
    def poisoned_allocate(*args: Any, **kwargs: Any) -> torch.Tensor:
        out = allocate(*args, **kwargs)
        if torch.compiler.is_compiling() or type(out) is not torch.Tensor or out.device.type == "meta":
            return out
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if out.is_floating_point() and (caller == _PACKAGE or caller.startswith(_PACKAGE + ".")):
            out.detach().fill_(float("nan"))
        return out

    return poisoned_allocate


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """While the block runs, uninitialised floating tensors that tritonops allocates start as NaN.

    A kernel that leaves an element of its output or workspace unwritten then shows it. Covers ``torch.empty``,
    ``torch.empty_like``, ``torch.empty_strided``, ``Tensor.new_empty`` and ``Tensor.new_empty_strided`` called
    directly from the package; allocations of other code, integer, meta and fake tensors stay as they are.
    Process-wide, nests, not for threads that allocate while it is entered or left.
    """
    patched = (
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "empty_strided"),
        (torch.Tensor, "new_empty"),
        (torch.Tensor, "new_empty_strided"),
    )
    originals = [getattr(owner, name) for owner, name in patched]
    for (owner, name), original in zip(patched, originals, strict=True):
        setattr(owner, name, _poisoning(original))
    try:
        yield
    finally:
        for (owner, name), original in zip(patched, originals, strict=True):
            setattr(owner, name, original)


def relative_error(got: torch.Tensor, oracle: torch.Tensor) -> float:
    """Relative Frobenius error ``|got - oracle| / |oracle|``, in float64 and over the oracle's finite elements.

    inf where the two differ in where they are NaN or infinite; the absolute error where the oracle is zero.
    """
    got64, oracle64 = got.detach().to(oracle.device, torch.float64), oracle.detach().to(torch.float64)
    if got64.shape != oracle64.shape:
        raise AssertionError(f"shape {tuple(got64.shape)}, the oracle has {tuple(oracle64.shape)}")
    finite = oracle64.isfinite()
    if not torch.equal(
        torch.where(finite, torch.zeros_like(oracle64), oracle64).nan_to_num(nan=1.0, posinf=2.0, neginf=3.0),
        torch.where(got64.isfinite(), torch.zeros_like(got64), got64).nan_to_num(nan=1.0, posinf=2.0, neginf=3.0),
    ):
        return float("inf")
    if not finite.any():
        return 0.0
    error = torch.linalg.vector_norm((got64 - oracle64)[finite])
    norm = torch.linalg.vector_norm(oracle64[finite])
    return float(error / norm) if norm > 0 else float(error)


def error_bound(vendor_error: float, result: torch.Tensor, factor: float = 1.05, terms: int = 1) -> float:
    """The largest relative Frobenius error of `result` where the vendor's is `vendor_error`.

    ``factor`` times the vendor's, plus what two honest computations may differ by: ``sqrt(terms)`` unit roundoffs of
    the arithmetic (2**-24; 2**-53 for float64), because sums of that many terms run in different orders (Higham,
    Accuracy and Stability of Numerical Algorithms, 2nd ed., section 4.2: random signs), and ``eps / sqrt(numel)`` of
    the result's dtype, because elements are rounded differently: an ulp for one element, a thousandth for a million.
    """
    arithmetic = (2.0**-53 if result.dtype is torch.float64 else 2.0**-24) * max(terms, 1) ** 0.5
    return factor * vendor_error + arithmetic + torch.finfo(result.dtype).eps / max(result.numel(), 1) ** 0.5


def assert_close_to_oracle(
    got: torch.Tensor, oracle: torch.Tensor, vendor: torch.Tensor, *, factor: float = 1.05, terms: int = 1
) -> None:
    """Fail unless `got` is about as near to the float64 `oracle` as the `vendor`'s result is: within `error_bound`.

    Args:
        got: the result under test; same shape as the oracle, same dtype as the vendor's result.
        oracle: the exact result in float64.
        vendor: torch's result for the same inputs.
        terms: length of the longest sum in the computation.

    Raises:
        AssertionError: with both errors and the worst element.
    """
    if got.dtype != vendor.dtype:
        raise AssertionError(f"dtype {got.dtype}, the vendor's result has {vendor.dtype}")
    ours, theirs = relative_error(got, oracle), relative_error(vendor, oracle)
    bound = error_bound(theirs, got, factor, terms)
    if not ours <= bound:
        raise AssertionError(
            f"relative error {ours:.3e} exceeds {bound:.3e}, {factor} x the vendor's {theirs:.3e} and a rounding; "
            f"{_worst(got, oracle)}"
        )


def _worst(got: torch.Tensor, oracle: torch.Tensor) -> str:
    got64, oracle64 = got.detach().to(oracle.device, torch.float64), oracle.detach().to(torch.float64)
    difference = (got64 - oracle64).abs()
    flat = int(torch.where(difference.isnan() & ~oracle64.isnan(), float("inf"), difference.nan_to_num(0.0)).argmax())
    where = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), got64.shape))
    return f"worst at {where}: got {float(got64.flatten()[flat]):.6g}, the oracle {float(oracle64.flatten()[flat]):.6g}"
