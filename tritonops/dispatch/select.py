"""Choosing a variant: override, then table, then default, each checked for legality; and the record of the choice."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .. import _compat
from ..device import DeviceInfo
from ..errors import VariantUnavailable
from . import override
from .problem import Problem
from .store import Loaded, load
from .table import Section, Table, walk
from .variant import VENDOR, OpSpec, Variant

NEIGHBOUR_GAIN = 1.10

# Triton's numpy interpreter: bf16 arithmetic is off by up to 1e10 without an error and fp8 casts do not match
# torch's (every Triton from 3.2 to 3.9).
_NOT_INTERPRETED = ("bfloat16", "float8_e4m3fn", "float8_e5m2")


@dataclass(frozen=True)
class Decision:
    """Which variant serves a problem on a device, which rule chose it, on what evidence, and what is not known.

    ``str()`` gives the readable paragraph; the fields are the data.
    """

    op: str
    variant: str
    problem: Problem
    device: DeviceInfo
    rule: str
    reason: str
    ranking: tuple[str, ...] = ()
    path: tuple[str, ...] = ()
    table: str | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)
    evidence: Mapping[str, Any] = field(default_factory=dict)
    rejected: tuple[tuple[str, str], ...] = ()
    stale: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()

    def __str__(self) -> str:
        where = self.device.name or self.device.table_name
        lines = [f"{self.problem.describe()} on {where}: {self.variant} [{self.rule}]", f"  because {self.reason}"]
        if self.path:
            lines.append(f"  table path: {', '.join(self.path)}")
        if self.evidence:
            lines.append("  evidence: " + ", ".join(f"{k}={v}" for k, v in self.evidence.items()))
        lines += [f"  not {variant}: {why}" for variant, why in self.rejected]
        lines += [f"  stale: {s}" for s in self.stale]
        lines += [f"  not known: {u}" for u in self.unknown]
        return "\n".join(lines)


@dataclass(frozen=True)
class _Ranking:
    ids: tuple[str, ...]
    rule: str
    reason: str
    path: tuple[str, ...] = ()
    table: Table | None = None
    evidence: Mapping[str, Any] = field(default_factory=dict)
    stale: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()


_quarantined: dict[tuple[str, int, str, str], str] = {}


def quarantine(op: str, variant: str, device: DeviceInfo, why: str) -> bool:
    """Mark a variant as unusable on this device for this process; False if it was already."""
    key = (device.kind, device.index, op, variant)
    new = key not in _quarantined
    _quarantined.setdefault(key, why)
    return new


def clear_quarantine() -> None:
    _quarantined.clear()


def _lacks(needs: Iterable[str], device: DeviceInfo) -> str | None:
    for need in sorted(needs):
        if need == "tma" and device.kind == "cuda" and device.capability < 90:
            return f"needs tensor descriptors in hardware (sm_90 or newer), this is {device.arch}"
        if need == "cluster" and (device.kind != "cuda" or device.capability < 90 or not _compat.triton_at_least(3, 8)):
            return "needs thread-block clusters (sm_90 or newer and Triton 3.8 or newer)"
        if need in ("gluon", "bf16_dot", "fp8") and device.kind == "interpreter":
            return f"needs {need}, which Triton's interpreter does not have"
    return None


def illegal(spec: OpSpec, variant: Variant, problem: Problem, device: DeviceInfo) -> str | None:
    """Why `variant` cannot serve `problem` on `device`, or None; excluded variants are illegal."""
    if any(override.matches(variant.id, e) for e in override.overrides(problem.flags).excluded):
        return "excluded by use(exclude=...)"
    if problem.policy != "fast" and not variant.deterministic:
        return f"not deterministic, and the policy is {problem.policy}"
    if problem.policy == "batch_invariant" and not variant.batch_invariant:
        return "not batch-invariant"
    if variant.kernel is not None:
        if not device.runs_triton:
            return "Triton kernels need an NVIDIA GPU, or TRITON_INTERPRET=1 on the CPU"
        if device.kind == "cuda" and device.capability == 0:
            return f"written for NVIDIA GPUs, this is {device.arch}"
        # A device that is only named is judged for a machine that has it, not for this one.
        if not _compat.has_triton() and (device.name or device.kind != "cuda"):
            return "triton is not installed"
        if device.kind == "interpreter":
            reason = _compat.interpreter_reason()
            if reason is not None:
                return reason
            bad = [t for t in (problem.dtype, *problem.traits.values()) if t in _NOT_INTERPRETED]
            if bad:
                return f"Triton's interpreter computes {bad[0]} wrongly"
        lack = _lacks(variant.needs, device)
        if lack is not None:
            return lack
    why = _quarantined.get((device.kind, device.index, spec.name, variant.id))
    if why is not None:
        return f"failed here before: {why}"
    return variant.requires(problem, device)


def _section(table: Table, problem: Problem) -> tuple[Section | None, str]:
    """The section for a problem, else its nearest: mode graph -> eager, then policy -> fast."""
    facts: dict[str, Any] = {f: getattr(problem, f) for f in ("layout", "aligned", "policy", "mode")}
    facts["dtype"] = problem.table_dtype
    tries: list[tuple[dict[str, Any], str]] = [(facts, "")]
    if problem.mode == "graph":
        tries.append((facts | {"mode": "eager"}, "no section for mode graph, the eager one serves"))
    if problem.policy != "fast":
        tries.append((facts | {"policy": "fast"}, f"no section for policy {problem.policy}, the fast one is filtered"))
        tries.append((facts | {"policy": "fast", "mode": "eager"}, f"no section for policy {problem.policy}"))
    for wanted, note in tries:
        for section in table.sections:
            if all(wanted[k] == v for k, v in section.when.items()):
                return section, note
    return None, ""


def ranked_by_table(spec: OpSpec, problem: Problem, device: DeviceInfo, loaded: Loaded) -> _Ranking:
    table = loaded.table
    if table is None:
        raise ValueError("no table")
    # Our own where no table ranks them come last of all: nothing says that they beat torch.
    last = (*table.default, VENDOR, *spec.prefer(problem, device))
    trusted = not table.published and not loaded.neighbour
    common: dict[str, Any] = {"table": table, "stale": loaded.stale}
    unknown = []
    if table.published:
        unknown.append("how our variants compare with torch here: the table is published, not measured")
    if loaded.neighbour:
        unknown.append(f"how {device.name} differs from {', '.join(table.names)}")
    section, note = _section(table, problem)
    if section is None:
        reason = f"{table.path} has no section for {problem.table_dtype} {problem.layout}".rstrip()
        ids = last if trusted else (VENDOR, *last)
        return _Ranking(ids, "table default", reason, unknown=tuple(unknown), **common)
    if note:
        unknown.append(note)
    features = spec.all_features(problem, device)
    outside = [
        f"{k}={features[k]} is outside [{low}, {high}]"
        for k, (low, high) in section.hull.items()
        if not low <= features[k] <= high
    ]
    if outside:
        unknown.append(f"nothing was measured here: {', '.join(outside)}")
    edge = {k: min(max(features[k], low), high) for k, (low, high) in section.hull.items()}
    leaf, path = walk(section.tree, features | edge)
    ids = (*leaf.use, *last)
    rule, reason = "table", f"{table.path} says so on {leaf.n} measured shapes"
    if table.published:
        rule, reason = "published table", f"torch comes first: {table.provenance['source']} ranks our own variants only"
        ids = (VENDOR, *ids)
    elif outside:
        rule = "outside the table"
        reason = "the nearest edge of the table says torch" if leaf.use[0] == VENDOR else "nothing was measured here"
        ids = (VENDOR, *ids)
    elif loaded.neighbour and leaf.use[0] != VENDOR:
        if leaf.gain is not None and leaf.gain >= NEIGHBOUR_GAIN:
            # The gain is that of the first; nothing is known of the others.
            ids = (leaf.use[0], VENDOR, *ids)
        else:
            rule = "neighbour's table"
            gain = "no gain on record" if leaf.gain is None else f"a gain of {leaf.gain:g}"
            reason = f"the table was made on {', '.join(table.names)}; {leaf.use[0]} has {gain} there (1.10 is asked)"
            ids = (VENDOR, *ids)
    return _Ranking(ids, rule, reason, tuple(path), evidence=section.evidence, unknown=tuple(unknown), **common)


def _rank(spec: OpSpec, problem: Problem, device: DeviceInfo) -> _Ranking:
    if device.kind == "interpreter":
        own = tuple(spec.prefer(problem, device))
        return _Ranking((*own, VENDOR), "interpreter", "TRITON_INTERPRET=1 runs Triton's kernels on CPU tensors")
    loaded = load(spec, device)
    if loaded.table is not None:
        return ranked_by_table(spec, problem, device, loaded)
    if device.kind == "cpu":
        return _Ranking((VENDOR, *spec.prefer(problem, device)), "no GPU", "on the CPU torch's own kernels serve")
    own = tuple(spec.prefer(problem, device))
    return _Ranking(
        (VENDOR, *own),
        "no table",
        f"there is no usable table for {device.table_name}, so torch comes first",
        unknown=(f"how our variants compare with torch on {device.table_name}: nothing was measured",),
    )


def choose(spec: OpSpec, problem: Problem, device: DeviceInfo) -> Decision:
    """The decision for a problem on a device. Compiles and launches nothing.

    Raises:
        VariantUnavailable: a forced variant cannot serve, or every variant is excluded or illegal.
    """
    if problem.policy == "batch_invariant":
        return _invariant(spec, problem, device)
    return _choose(spec, problem, device, problem)


def _invariant(spec: OpSpec, problem: Problem, device: DeviceInfo) -> Decision:
    """The choice for the problem that stands for every batch; the one at hand has no other to fall back to."""
    decision = _choose(spec, dataclasses.replace(spec.invariant(problem), mode="eager"), device, problem)
    why = illegal(spec, spec.variants()[decision.variant], problem, device)
    if why is not None:
        head = "the variant of every batch cannot serve this one"
        raise VariantUnavailable(_nothing_left(spec, problem, device, [(decision.variant, why)], head))
    return dataclasses.replace(decision, problem=problem)


def _choose(spec: OpSpec, problem: Problem, device: DeviceInfo, asked: Problem) -> Decision:
    """The decision for `problem`; a refusal names the problem that was `asked` about."""
    variants = spec.variants()
    wish = override.forced(problem.flags, spec.name, variants)
    if wish is not None:
        return _forced(spec, problem, device, wish, asked)
    ranking = _rank(spec, problem, device)
    rejected: list[tuple[str, str]] = []
    for vid in dict.fromkeys(ranking.ids):
        why = illegal(spec, variants[vid], problem, device)
        if why is None:
            table = ranking.table
            return Decision(
                spec.name, vid, problem, device, ranking.rule, ranking.reason, tuple(dict.fromkeys(ranking.ids)),
                ranking.path, table.path if table else None, table.provenance if table else {}, ranking.evidence,
                tuple(rejected), ranking.stale, ranking.unknown,
            )  # fmt: skip
        rejected.append((vid, why))
    raise VariantUnavailable(_nothing_left(spec, asked, device, rejected, "no variant can serve"))


def _forced(spec: OpSpec, problem: Problem, device: DeviceInfo, wish: str, asked: Problem) -> Decision:
    variants = spec.variants()
    preferred = [*spec.prefer(problem, device), *variants]
    if device.kind == "cuda":
        loaded = load(spec, device)
        if loaded.table is not None:
            preferred = [*ranked_by_table(spec, problem, device, loaded).ids, *preferred]
    rejected: list[tuple[str, str]] = []
    for vid in dict.fromkeys(preferred):
        if override.matches(vid, wish):
            why = illegal(spec, variants[vid], problem, device)
            if why is None:
                return Decision(
                    spec.name, vid, problem, device, "forced", f"use(variant=...) names {wish}", (vid,),
                    rejected=tuple(rejected),
                )  # fmt: skip
            rejected.append((vid, why))
    head = f"the forced variant {wish!r} cannot serve"
    raise VariantUnavailable(_nothing_left(spec, asked, device, rejected, head))


def _nothing_left(
    spec: OpSpec, problem: Problem, device: DeviceInfo, rejected: list[tuple[str, str]], head: str
) -> str:
    why = "; ".join(f"{vid}: {reason}" for vid, reason in rejected) or "no variant has that name"
    return f"tritonops.{spec.name}: {head} {problem.describe()} on {device.name or device.table_name}: {why}"
