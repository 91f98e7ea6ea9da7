"""The gate: every candidate against the float64 oracle on small ragged problems, before anything is timed."""

from __future__ import annotations

import contextlib
import json
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .. import _compat
from ..device import DeviceInfo, device_info
from ..dispatch.table import dump, write_atomically
from ..dispatch.variant import VENDOR, Choice, OpSpec
from ..testing import assert_close_to_oracle, error_bound, relative_error
from ..toolchain.assembler import last_line
from ..toolchain.compile import specialization
from .case import Case
from .compiling import Job, Ticker, build_all, cores, requests_of
from .measure import tensors
from .outputs import (
    Outputs,
    Poison,
    check_output,
    layouts,
    memory,
    poison_free_memory,
    same_bits,
    share_memory,
    unlike,
)
from .ragged import Trial, trials
from .raw import Paths, digits
from .static import Static

__all__ = ["ContextLost", "check_output", "gate", "read", "write"]

SCHEMA = 1

# What stands for an infinite error, which JSON has not.
_HUGE = 1e9


class ContextLost(RuntimeError):
    """A variant broke the CUDA context; nothing more runs in this process.

    Attributes:
        verdicts: what is known by now, the culprit's failure with it; a gate that goes on takes it as `known`.
    """

    def __init__(self, message: str, verdicts: dict[str, dict[str, Any]]):
        super().__init__(message)
        self.verdicts = verdicts


def gate(
    spec: OpSpec,
    cases: Sequence[Case],
    static: Static,
    torch_device: torch.device | str,
    progress: Callable[[str], None] = lambda text: None,
    *,
    known: Mapping[str, Mapping[str, Any]] | None = None,
    jobs: int | None = None,
) -> dict[str, dict[str, Any]]:
    """Run each candidate on small ragged problems and compare with the oracle: vendor first, then in candidate order.

    Two runs on the same inputs, in memory that holds NaN. A variant passes where every output of both is within
    testing.error_bound of the oracle, has the vendor's shape and dtype, is contiguous and of its own memory; where the
    inputs are bit by bit what they were; and, if it is said to be deterministic, where both gave the same bits. The
    vendor passes where it runs and its results are finite. What a variant itself wrote and freed in C on the CPU is the
    one memory that may hold right values.

    Args:
        static: of the same cases.
        known: verdicts of an earlier gate; its failures stand, and those variants do not run.
        jobs: processes that compile for a CUDA device beforehand; None: one a core, 1: this one.

    Returns:
        ``{id: {"passed", "why", "cases", "error"}}``: the first reason against it, the trials it ran in, and its
        largest error in units of what is allowed.

    Raises:
        ContextLost: a variant broke the CUDA context.
        AssemblerError: the assembler is unusable.
        ValueError: `static` is of other cases, or the op has no oracle.
    """
    if len(static.candidates) != len(cases):
        raise ValueError(f"gate: {len(cases)} cases, but candidates for {len(static.candidates)}")
    if spec.oracle is None:
        raise ValueError(f"gate: op {spec.name} has no oracle")
    where = torch.device(torch_device)
    if where.type == "cuda" and where.index is None:
        where = torch.device("cuda", torch.cuda.current_device())
    device = device_info(where)
    judging = _Judging(spec, device, where)
    for vid, verdict in (known or {}).items():
        if not verdict["passed"]:
            judging.verdicts[vid] = dict(verdict)
    todo = _plan(spec, cases, static, device, judging)
    unbuilt = _compile(spec, todo, device, jobs, progress) if device.kind == "cuda" else {}
    tick = Ticker(f"{spec.name}: gate", len(todo), progress)
    with torch.no_grad(), torch.cuda.device(where) if where.type == "cuda" else contextlib.nullcontext():
        if where.type == "cuda":
            torch.cuda.empty_cache()
        for number, (trial, ids) in enumerate(todo, 1):
            with _compat.float32_precision(trial.problem.traits.get("precision") == "tf32"):
                judging.judge(trial, ids, unbuilt)
            tick(number)
    return judging.result()


def _plan(
    spec: OpSpec, cases: Sequence[Case], static: Static, device: DeviceInfo, judging: _Judging
) -> list[tuple[Trial, list[str]]]:
    """Each trial with the variants it is for, the vendor first."""
    listed = spec.variants()
    serves: dict[str, list[Case]] = {VENDOR: []}
    for case, ids in zip(cases, static.candidates, strict=True):
        for vid in ids:
            serves.setdefault(vid, []).append(case)
    todo: dict[str, tuple[Trial, list[str]]] = {}
    for vid in (VENDOR, *(v for v in listed if v in serves and v != VENDOR)):
        judging.of(vid)
        found, judging.never[vid] = trials(spec, listed[vid], serves[vid], device)
        for trial in found:
            todo.setdefault(trial.key, (trial, [VENDOR]))[1].append(vid)
    return [(trial, list(dict.fromkeys(ids))) for trial, ids in todo.values()]


def _compile(
    spec: OpSpec,
    todo: Sequence[tuple[Trial, Sequence[str]]],
    device: DeviceInfo,
    jobs: int | None,
    progress: Callable[[str], None],
) -> dict[tuple[str, str], str]:
    """Fill Triton's cache in parallel; why a variant cannot run a trial, where it does not compile."""
    planned: dict[str, Job] = {}
    needs: dict[tuple[str, str], list[str]] = {}
    for trial, ids in todo:
        args = spec.sample(trial.problem, "meta")
        for vid in ids:
            variant = spec.variants()[vid]
            if variant.kernel is None:
                continue
            # What fails here fails again when it runs, and is judged there.
            with contextlib.suppress(Exception):
                for index, request in enumerate(requests_of(variant, trial.problem, device, args)):
                    key = specialization(request, device)
                    planned.setdefault(key, Job(vid, trial.problem, index))
                    needs.setdefault((trial.key, vid), []).append(key)
    built = build_all(spec, list(planned.values()), device, cores() if jobs is None else jobs, progress)
    failed = {key: result for key, result in zip(planned, built, strict=True) if isinstance(result, str)}
    return {pair: failed[key] for pair, keys in needs.items() for key in keys if key in failed}


@dataclass
class _Reference:
    """A trial's arguments, what they hold, and what the vendor and the oracle make of them."""

    args: tuple[Any, ...]
    kinds: list[tuple[Any, ...]]
    contents: list[tuple[torch.Tensor, torch.Tensor]]
    vendor: Outputs
    exact: Outputs

    def changed(self) -> bool:
        """Whether the arguments, or their memory, are not what they were; gaps between rows count."""
        return layouts(self.args) != self.kinds or not all(torch.equal(now, before) for now, before in self.contents)


@dataclass
class _Judging:
    spec: OpSpec
    device: DeviceInfo
    where: torch.device
    verdicts: dict[str, dict[str, Any]] = field(default_factory=dict)
    never: dict[str, str] = field(default_factory=dict)

    def of(self, vid: str) -> dict[str, Any]:
        return self.verdicts.setdefault(vid, {"passed": True, "why": "", "cases": 0, "error": 0.0})

    def result(self) -> dict[str, dict[str, Any]]:
        for vid, verdict in self.verdicts.items():
            if verdict["passed"] and not verdict["cases"]:
                verdict.update(passed=False, why=f"never run: {self.never.get(vid, 'the vendor did not run')}")
            verdict["error"] = digits(min(verdict["error"], _HUGE))
        return self.verdicts

    def judge(self, trial: Trial, ids: Sequence[str], unbuilt: Mapping[tuple[str, str], str]) -> None:
        """Run one trial with all variants that it is for and that have not failed."""
        reference = self.reference(trial)
        for vid in ids:
            verdict = self.of(vid)
            if reference is None:
                return
            if not verdict["passed"]:
                continue
            why = unbuilt.get((trial.key, vid)) or self.try_variant(vid, trial, reference)
            if why is not None:
                verdict.update(passed=False, why=f"{trial.problem.describe()}: {why}")
                reference = self.reference(trial)  # the old one's inputs may have been changed

    def reference(self, trial: Trial) -> _Reference | None:
        """None where the vendor does not run, which its verdict then says."""
        with torch.random.fork_rng([self.where] if self.where.type == "cuda" else []):
            torch.manual_seed(zlib.crc32(trial.key.encode()))
            ids = (trial.ids,) if trial.ids else ()
            args = self.spec.sample(trial.problem, str(self.where), *ids)
        verdict, kinds = self.of(VENDOR), layouts(args)
        contents = [(view, view.clone()) for view in memory(args)]
        try:
            vendor = self._run(VENDOR, trial, args)
        except Exception as error:
            self._check_context(VENDOR, error)
            verdict.update(passed=False, why=f"{trial.problem.describe()}: {_raised(error)}")
            return None
        exact = self.spec.oracle(trial.problem, *args) if self.spec.oracle else ()
        reference = _Reference(args, kinds, contents, vendor, exact)
        why = None if all(bool(t.isfinite().all()) for t in vendor) else "its result is not finite"
        why = "it changed its inputs" if reference.changed() else why
        if why is not None:
            verdict.update(passed=False, why=f"{trial.problem.describe()}: {why}")
            return None
        return reference

    def try_variant(self, vid: str, trial: Trial, reference: _Reference) -> str | None:
        """Why a variant fails a trial, or None."""
        verdict = self.of(vid)
        verdict["cases"] += 1
        if vid == VENDOR:
            verdict["error"] = max(verdict["error"], self._error(trial, reference.vendor, reference))
            return None
        runs: list[Outputs] = []
        try:
            for again in (False, True):
                poison_free_memory(self.where, reference.vendor)
                with Poison():
                    runs.append(self._run(vid, trial, reference.args))
                if reference.changed():
                    return "it changed its inputs"
                why = self._refusal(trial, runs[-1], reference)
                verdict["error"] = max(verdict["error"], self._error(trial, runs[-1], reference))
                if why is not None:
                    return f"{why} (second run)" if again else why
        except Exception as error:
            verdict["error"] = _HUGE
            self._check_context(vid, error)
            return _raised(error)
        if share_memory(runs[0], runs[1]):
            return "two calls returned the same memory"
        if self.spec.variants()[vid].deterministic and not all(map(same_bits, *runs)):
            return "two runs on the same inputs differ, and it is said to be deterministic"
        return None

    def _run(self, vid: str, trial: Trial, args: tuple[Any, ...]) -> Outputs:
        variant = self.spec.variants()[vid]
        out = variant.run(Choice(variant, trial.problem, self.device, None), *args)
        if self.where.type == "cuda":
            torch.cuda.synchronize(self.where)
        return out if isinstance(out, tuple) else (out,)

    def _refusal(self, trial: Trial, outputs: Outputs, reference: _Reference) -> str | None:
        why = unlike(outputs, reference.vendor)
        if why is not None:
            return why
        if share_memory(outputs, tuple(tensors(reference.args))):
            return "an output shares memory with an input"
        for i, (got, exact, vendor) in enumerate(zip(outputs, reference.exact, reference.vendor, strict=True)):
            if vendor.numel() == 0:  # a gradient that is not asked for
                continue
            if not got.is_contiguous():
                return f"output {i} is not contiguous"
            try:
                assert_close_to_oracle(got, exact, vendor, terms=self.spec.terms(trial.problem))
            except AssertionError as error:
                return f"output {i}: {error}"
        return None

    def _error(self, trial: Trial, outputs: Outputs, reference: _Reference) -> float:
        """The largest error of an output over what is allowed."""
        if unlike(outputs, reference.vendor) is not None:
            return _HUGE
        worst, terms = 0.0, self.spec.terms(trial.problem)
        for got, exact, vendor in zip(outputs, reference.exact, reference.vendor, strict=True):
            if vendor.numel():
                bound = error_bound(relative_error(vendor, exact), got, terms=terms)
                ratio = relative_error(got, exact) / bound
                worst = max(worst, ratio if math.isfinite(ratio) else _HUGE)
        return worst

    def _check_context(self, vid: str, error: Exception) -> None:
        """Raise ContextLost where CUDA does nothing more after an error."""
        if self.where.type != "cuda":
            return
        try:
            torch.zeros(1, device=self.where).add_(1)
            torch.cuda.synchronize(self.where)
        except Exception:
            verdict = self.of(vid) | {"passed": False, "why": _raised(error), "error": _HUGE}
            raise ContextLost(f"{vid} broke the CUDA context: {_raised(error)}", {vid: verdict}) from error


def _raised(error: Exception) -> str:
    return f"raised {last_line(error)[:300]}"


def write(paths: Paths, verdicts: Mapping[str, Mapping[str, Any]]) -> None:
    """Write ``paths.gate`` in one step.

    Raises:
        OSError: it cannot be written.
    """
    content = {vid: dict(verdict) for vid, verdict in verdicts.items()}
    head = {"schema": SCHEMA, "op": paths.op, "device": paths.device.table_name}
    write_atomically(paths.gate, dump({**head, "gate": content}))


_FIELDS = {"passed": bool, "why": str, "cases": int, "error": float}


def read(paths: Paths) -> dict[str, dict[str, Any]]:
    """What `write` wrote.

    Raises:
        ValueError: the file is damaged, or about another op or device; names it.
        OSError: it cannot be read.
    """
    try:
        top = json.loads(paths.gate.read_bytes())
        if not isinstance(top, dict) or top.get("schema") != SCHEMA or not isinstance(top.get("gate"), dict):
            raise ValueError(f"no file of schema {SCHEMA}")
        for name, wanted in (("op", paths.op), ("device", paths.device.table_name)):
            if top.get(name) != wanted:
                raise ValueError(f"{name} is {top.get(name)!r}, not {wanted!r}")
        for vid, verdict in top["gate"].items():
            if not isinstance(verdict, dict) or {k: type(v) for k, v in verdict.items()} != _FIELDS:
                raise ValueError(f"{vid}: no verdict: {str(verdict)[:100]}")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{paths.gate}: {error}") from None
    out: dict[str, dict[str, Any]] = top["gate"]
    return out
