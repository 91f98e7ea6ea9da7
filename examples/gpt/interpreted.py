"""Runs every Triton variant in Triton's interpreter on saved slices and compares it with the float64 oracle.

TRITON_INTERPRET=1 python -m gpt.interpreted slices.pt
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import tritonops
from tritonops.errors import VariantUnavailable
from tritonops.testing import error_bound, relative_error

from .slices import ROWS

DTYPES = torch.float32, torch.float16
Outputs = tuple[Tensor, ...]


@dataclass(frozen=True)
class Case:
    """One call of an op on slices of the training's tensors, and its exact results."""

    op: str
    dtype: torch.dtype
    run: Callable[[], Outputs]
    exact: Outputs
    terms: int  # of the longest sum


def _with_grads(forward: Callable[..., Tensor], dy: Tensor, *operands: Tensor) -> Outputs:
    leaves = [t.detach().clone().requires_grad_() for t in operands]
    return torch.autograd.grad(forward(*leaves), leaves, dy)


def cases(slices: dict[str, Tensor], dtype: torch.dtype) -> list[Case]:
    t = {k: v if k.endswith("ids") else v.to(dtype) for k, v in slices.items()}
    d = {k: v if k.endswith("ids") else v.double() for k, v in t.items()}
    out: list[Case] = []

    def add(
        op: str, ours: Callable[[dict[str, Tensor]], Outputs], exact: Callable[[dict[str, Tensor]], Outputs]
    ) -> None:
        out.append(Case(op, dtype, lambda: ours(t), exact(d), terms=ROWS))

    def product(pick: Callable[[dict[str, Tensor]], tuple[Tensor, Tensor]]) -> None:
        add("matmul", lambda s: (tritonops.matmul(*pick(s)),), lambda s: (torch.matmul(*pick(s)),))

    product(lambda s: (s["linear x"], s["linear weight"].t()))
    product(lambda s: (s["linear dy"], s["linear weight"]))
    product(lambda s: (s["linear dy"].t(), s["linear x"]))
    product(lambda s: (s["linear x"][:99, :97].contiguous(), s["linear weight"][:85, :97].contiguous().t()))
    add(
        "matmul",
        lambda s: (tritonops.linear(s["linear x"], s["linear weight"], s["linear bias"], activation="gelu"),),
        lambda s: (F.gelu(F.linear(s["linear x"], s["linear weight"], s["linear bias"])),),
    )

    def layer_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.layer_norm(x, w.shape, w, b)

    def rms_norm(x: Tensor, w: Tensor) -> Tensor:
        return F.rms_norm(x, w.shape, w, 1e-5)

    def our_rms_norm(x: Tensor, w: Tensor) -> Tensor:
        return tritonops.rms_norm(x, w, 1e-5)

    def norm(names: tuple[str, ...], op: str, ours: Callable[..., Tensor], exact: Callable[..., Tensor]) -> None:
        add(op, lambda s: (ours(*(s[n] for n in names)),), lambda s: (exact(*(s[n] for n in names)),))
        add(
            f"{op}_backward",
            lambda s: _with_grads(ours, s["norm dy"], *(s[n] for n in names)),
            lambda s: _with_grads(exact, s["norm dy"], *(s[n] for n in names)),
        )

    norm(("norm x", "norm weight", "norm bias"), "layer_norm", tritonops.layer_norm, layer_norm)
    norm(("norm x", "norm weight"), "rms_norm", our_rms_norm, rms_norm)

    add(
        "embedding",
        lambda s: (tritonops.embedding(s["embedding ids"], s["embedding table"]),),
        lambda s: (F.embedding(s["embedding ids"], s["embedding table"]),),
    )

    def table_grad(op: Callable[..., Tensor]) -> Callable[[dict[str, Tensor]], Outputs]:
        return lambda s: _with_grads(
            lambda table: op(s["embedding ids"], table), s["embedding dy"], s["embedding table"]
        )

    add("embedding_backward", table_grad(tritonops.embedding), table_grad(F.embedding))
    return out


@dataclass
class Worst:
    """The call with the largest error in units of its bound."""

    share: float = -1.0
    error: float = 0.0
    vendor: float = 0.0

    def see(self, case: Case, got: Outputs, vendor: Outputs) -> None:
        for ours, theirs, exact in zip(got, vendor, case.exact, strict=True):
            error, reference = relative_error(ours, exact), relative_error(theirs, exact)
            share = error / error_bound(reference, ours, terms=case.terms)
            if not share <= self.share:
                self.share, self.error, self.vendor = share, error, reference


def forced(case: Case, variant: str) -> Outputs:
    with tritonops.use(variant={case.op: variant}):
        return tuple(o.detach() for o in case.run())


def report(slices: dict[str, Tensor]) -> bool:
    """Print a line for each variant; whether all are within the bound."""
    todo = [case for dtype in DTYPES for case in cases(slices, dtype)]
    vendor = [forced(case, "vendor") for case in todo]
    good = True
    print(f"  {'':62}{'float32':>21}{'float16':>21}")
    print(f"  {'op':20}{'variant':42}{'error':>12}{'torch':>9}{'error':>12}{'torch':>9}")
    skipped: list[str] = []
    for op in dict.fromkeys(case.op for case in todo):
        for variant in tritonops.variants(op):
            if variant.kernel is None:
                continue
            worst = {dtype: Worst() for dtype in DTYPES}
            reason, failed = "", False
            for case, reference in zip(todo, vendor, strict=True):
                if case.op != op:
                    continue
                try:
                    worst[case.dtype].see(case, forced(case, variant.id), reference)
                except VariantUnavailable as error:
                    failed = failed or error.__cause__ is not None
                    reason = reason or str(error).rpartition(": ")[2]
            if failed:
                good = False
                print(f"  {op:20}{variant.id:42}  FAILED: {reason}", flush=True)
                continue
            if all(w.share < 0 for w in worst.values()):
                skipped.append(f"  {op:20}{variant.id:42}{reason}")
                continue
            cells = "".join(
                f"{w.error:12.1e}{w.vendor:9.1e}" if w.share >= 0 else f"{'-':>12}{'-':>9}" for w in worst.values()
            )
            bad = any(not w.share <= 1 for w in worst.values())
            good = good and not bad
            print(f"  {op:20}{variant.id:42}{cells}{'   TOO LARGE' if bad else ''}", flush=True)
    if skipped:
        print("\n  Not run here, and why:")
        print("\n".join(skipped))
    return good


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(0 if report(torch.load(sys.argv[1], weights_only=True)) else 1)
