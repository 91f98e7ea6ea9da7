"""What a provider computes, against the float64 oracle, before it is timed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tritonops.calibrate import outputs
from tritonops.calibrate.measure import bytes_of
from tritonops.dispatch.variant import OpSpec
from tritonops.testing import error_bound, relative_error

from .contender import Contender, caught
from .entries import Entry
from .machine import Machine

# Outputs of the public call; those of a forward's op record that follow are saved statistics.
_PUBLIC = {"layer_norm_backward": 3, "rms_norm_backward": 2}


def check(entry: Entry, spec: OpSpec, contenders: Sequence[Contender], machine: Machine, args: tuple[Any, ...]) -> int:
    """Run each contender, torch first, once on the arguments and judge its result: `call`, `error` and `failed`.

    The memory that a result may lie in holds NaN before. A result fails where an output is further from the oracle
    than testing.error_bound allows, or where the inputs were changed (they are put back).

    Returns:
        Bytes of torch's result; 0 where torch fails, and then nobody else has run.

    Raises:
        ContextLost: the device does nothing more.
        torch.OutOfMemoryError: the oracle does not fit.
    """
    exact: tuple[torch.Tensor, ...] = ()
    base: outputs.Outputs = ()
    before = [(view, view.clone()) for view in outputs.memory(args)]
    for c in contenders:
        try:
            call = c.provider.call(entry.case)
            own = c.provider.arguments(entry.case, args)
            outputs.poison_free_memory(machine.where, base)
            with c.provider.around(entry.case), c.provider.poison():
                got = _public(spec.name, call(*own))
            if machine.where.type == "cuda":
                torch.cuda.synchronize(machine.where)
        except Exception as error:
            c.failed = caught(c, entry, machine, "raised", error)
            if not base:
                return 0
            continue
        c.call = call
        if not base:
            base = tuple(t.clone() for t in got)
            exact = _oracle(spec, entry, args)[: len(base)]
        c.error, c.failed = _judge(got, exact, base, spec.terms(entry.case.problem))
        if not all(torch.equal(view, was) for view, was in before):
            c.failed = "it changed its inputs"
            for view, was in before:
                view.copy_(was)
    return bytes_of(base)


def _oracle(spec: OpSpec, entry: Entry, args: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
    if spec.oracle is None:
        raise ValueError(f"op {spec.name} has no oracle")
    return tuple(spec.oracle(entry.case.problem, *args))


def _public(op: str, out: Any) -> outputs.Outputs:
    """The outputs of the public call; one that is not asked for is empty."""
    found = tuple(out) if isinstance(out, tuple | list) else (out,)
    return tuple(torch.empty(0) if t is None else t for t in found[: _PUBLIC.get(op, 1)])


def _judge(
    got: outputs.Outputs, exact: Sequence[torch.Tensor], base: outputs.Outputs, terms: int
) -> tuple[float | None, str | None]:
    """(largest relative error of an output, why it fails or None). A wider dtype than torch's is allowed."""
    if len(got) != len(base):
        return None, f"{len(got)} outputs, torch has {len(base)}"
    worst, why = 0.0, None
    for i, (mine, oracle, torchs) in enumerate(zip(got, exact, base, strict=True)):
        if torchs.numel() == 0:
            continue
        if not isinstance(mine, torch.Tensor) or mine.shape != torchs.shape:
            return None, f"output {i} is not of torch's shape {tuple(torchs.shape)}"
        error, theirs = relative_error(mine, oracle), relative_error(torchs, oracle)
        bound = error_bound(theirs, torchs, terms=terms)
        worst = max(worst, error)
        if why is None and not bool(mine.isfinite().all()):
            why = f"output {i} is not finite"
        elif why is None and not error <= bound:
            why = f"output {i}: relative error {error:.2e}; {bound:.2e} is allowed, torch's is {theirs:.2e}"
    return worst, why
