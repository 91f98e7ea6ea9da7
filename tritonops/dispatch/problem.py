"""The dispatch key: what a choice of variant may depend on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

POLICIES = ("fast", "deterministic", "batch_invariant")
MODES = ("eager", "graph")

_EMPTY: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem of one op.

    Attributes:
        op: the op's name, for example ``matmul`` or ``layer_norm_backward``.
        dims: the op's integer sizes, for example ``{"batch": 1, "M": 4096, "N": 4096, "K": 512}``.
        dtype: name of the principal input's dtype without ``torch.``.
        layout: the op's layout class ("nt" and the like for matmul, "" where the op has none).
        aligned: pointers and row strides of every operand are multiples of 16 bytes.
        policy: one of POLICIES.
        mode: ``eager``, or ``graph`` for a call that is captured or compiled.
        traits: further facts that a variant's legality asks for (output dtype, int64 offsets, ...).
        flags: the packed policy, SM budget and overrides of the call (dispatch/override.py).
    """

    op: str
    dims: Mapping[str, int]
    dtype: str
    layout: str = ""
    aligned: bool = True
    policy: str = "fast"
    mode: str = "eager"
    traits: Mapping[str, Any] = field(default_factory=lambda: _EMPTY)
    flags: int = 0

    @property
    def table_dtype(self) -> str:
        """What a table calls the dtype: ``tf32`` for a float32 product in TF32, which other kernels win, else dtype."""
        return "tf32" if self.traits.get("precision") == "tf32" else self.dtype

    def describe(self) -> str:
        """``matmul batch=1 M=4096 N=4096 K=512, float16, nt, aligned, eager, fast``."""
        sizes = " ".join(f"{k}={v}" for k, v in self.dims.items())
        parts = [self.dtype, self.layout, "aligned" if self.aligned else "misaligned", self.mode, self.policy]
        return f"{self.op} {sizes}, " + ", ".join(p for p in parts if p)


def dtype_name(dtype: Any) -> str:
    """``torch.float16`` -> ``float16``."""
    return str(dtype).removeprefix("torch.")
