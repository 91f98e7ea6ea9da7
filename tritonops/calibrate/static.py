"""The static stage: compile every candidate of every case for the target, screen, and drop what is the same code.

It needs no GPU. What it compiles lies in Triton's cache, where the JIT of the measuring process finds it, unless
TRITON_PTXAS_PATH names an assembler that is not Triton's own (toolchain.assembler.triton_cache).
"""

from __future__ import annotations

import collections
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .. import _compat
from ..device import DeviceInfo
from ..dispatch.select import illegal
from ..dispatch.table import dump, write_atomically
from ..dispatch.variant import VENDOR, OpSpec, Variant
from ..launch import LaunchRequest
from ..toolchain import AssemblerError, target_device
from ..toolchain.assembler import assembler
from ..toolchain.compile import specialization
from .case import Case
from .compiling import TIMEOUT_SECONDS, Built, Job, Ticker, build_all, cores, reason, requests_of
from .raw import Paths

SCHEMA = 1


@dataclass(frozen=True)
class Static:
    """What may be measured, and what is known of it without a GPU.

    Attributes:
        variants: of each variant that is a candidate of some case: ``meta``, ``options`` (as launched, in the first
            such case) and, where it launches a Triton kernel, ``regs`` and ``spill`` (the largest of its compilations)
            and ``text`` (sha256 of its sorted distinct text hashes, one a line).
        dropped: by variant, each reason with the number of cases it holds for; what is illegal for a case is no
            candidate that could be dropped.
        candidates: by case, the variant ids: vendor first, then in the order of the op's list.
        twins: by case, each variant that is the same code as a candidate, and that candidate: legal at run time, it
            takes that one's times.
        cases: sha256 of the cases' keys, one a line.
        made_with: versions of ``triton`` and ``ptxas``.
        cost: ``captures``, distinct ``compilations``, and their ``seconds`` in all processes together.
    """

    variants: Mapping[str, Mapping[str, Any]]
    dropped: Mapping[str, Mapping[str, int]]
    candidates: Sequence[Sequence[str]]
    twins: Sequence[Mapping[str, str]]
    cases: str = ""
    made_with: Mapping[str, Any] = field(default_factory=dict)
    cost: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Launch:
    """One launch of a variant for a case: what is compiled (`key`) and what else decides whether two do the same."""

    key: str
    kernel: str
    grid: tuple[int, ...]
    arguments: str
    options: Mapping[str, Any]


def digest(cases: Sequence[Case]) -> str:
    """What says that a plan is the one that a later stage worked on."""
    return hashlib.sha256("\n".join(case.key for case in cases).encode()).hexdigest()


def screen(
    spec: OpSpec,
    cases: Sequence[Case],
    device: DeviceInfo,
    jobs: int | None = None,
    progress: Callable[[str], None] = lambda text: None,
    timeout: float = TIMEOUT_SECONDS,
) -> Static:
    """Compile, screen and de-duplicate the variants that are legal for each case.

    Args:
        device: a CUDA device, or one that is only named.
        jobs: compiling processes; None: one a core. 1 compiles in this process.
        timeout: seconds a compilation may take in a process of its own.

    Raises:
        ValueError: `device` is no CUDA device.
        AssemblerError: the assembler is missing, broken or too old. Any other error drops the one candidate.
    """
    assembler(target_device(device).capability)
    planned = _capture(spec, cases, device, progress)
    built = build_all(spec, list(planned.jobs.values()), device, cores() if jobs is None else jobs, progress, timeout)
    results = dict(zip(planned.jobs, built, strict=True))
    return _judge(spec, cases, device, planned, results)


@dataclass
class _Planned:
    """For each case the launches of its variants, or why there are none; and one job for each distinct compilation."""

    by_case: list[dict[str, tuple[_Launch, ...] | str]] = field(default_factory=list)
    jobs: dict[str, Job] = field(default_factory=dict)
    captures: int = 0


def _capture(spec: OpSpec, cases: Sequence[Case], device: DeviceInfo, progress: Callable[[str], None]) -> _Planned:
    planned, tick = _Planned(), Ticker(f"{spec.name}: cases captured", len(cases), progress)
    for number, case in enumerate(cases, 1):
        args = case.sample(spec, "meta")
        found: dict[str, tuple[_Launch, ...] | str] = {}
        for variant in spec.variants().values():
            if illegal(spec, variant, case.problem, device) is not None:
                continue
            found[variant.id] = ()
            if variant.kernel is None:
                continue
            try:
                requests = requests_of(variant, case.problem, device, args)
                launches = tuple(_launch(request, device) for request in requests)
            except AssemblerError:
                raise
            except Exception as error:
                found[variant.id] = reason(error)
                continue
            found[variant.id] = launches
            planned.captures += 1
            for index, one in enumerate(launches):
                planned.jobs.setdefault(one.key, Job(variant.id, case.problem, index))
        planned.by_case.append(found)
        tick(number)
    return planned


def _launch(request: LaunchRequest, device: DeviceInfo) -> _Launch:
    return _Launch(
        specialization(request, device),
        getattr(request.kernel, "__name__", ""),
        request.grid,
        " ".join(map(_described, request.args)),
        request.options,
    )


def _described(argument: Any) -> str:
    """What a kernel is told by one argument, addresses aside."""
    if isinstance(argument, torch.Tensor):
        return f"{argument.dtype}{tuple(argument.shape)}{argument.stride()}"
    base = getattr(argument, "base", None)
    if isinstance(base, torch.Tensor):  # a tensor descriptor
        return f"{base.dtype}{argument.shape}{argument.strides}{argument.block_shape}"
    return repr(argument)


# Options of a launch that need not show in the machine code.
_OF_THE_LAUNCH = ("num_ctas", "cluster_dims", "launch_cooperative_grid", "launch_pdl")


def _same(one: _Launch, built: Built) -> tuple[Any, ...]:
    launching = tuple(one.options.get(name) for name in _OF_THE_LAUNCH)
    return one.grid, built.text, built.shared, built.num_warps, built.registers, one.arguments, launching


def _judge(
    spec: OpSpec, cases: Sequence[Case], device: DeviceInfo, planned: _Planned, results: Mapping[str, Built | str]
) -> Static:
    listed = spec.variants()
    order = [VENDOR, *(vid for vid in listed if vid != VENDOR)]
    dropped: dict[str, collections.Counter[str]] = {vid: collections.Counter() for vid in order}
    uses: dict[str, dict[str, _Launch]] = {}
    first: dict[str, Mapping[str, Any]] = {}
    candidates: list[list[str]] = []
    twins: list[dict[str, str]] = []
    for found in planned.by_case:
        seen: dict[tuple[Any, ...], str] = {}
        kept: list[str] = []
        same: dict[str, str] = {}
        for vid in (v for v in order if v in found):
            launches = found[vid]
            if isinstance(launches, str):
                dropped[vid][launches] += 1
                continue
            why = _refusal(launches, results)
            if why is None and launches:
                twin = seen.setdefault(tuple(_same(one, _built(results, one)) for one in launches), vid)
                if twin != vid:
                    same[vid], why = twin, f"same code as {twin}"
            if why is not None:
                dropped[vid][why] += 1
                continue
            kept.append(vid)
            uses.setdefault(vid, {}).update((one.key, one) for one in launches)
            first.setdefault(vid, _options(listed[vid], launches))
        candidates.append(kept)
        twins.append(same)
    built = [r for r in results.values() if isinstance(r, Built)]
    return Static(
        variants={
            vid: _entry(listed[vid], first[vid], [_built(results, one) for one in uses[vid].values()])
            for vid in order
            if vid in uses
        },
        dropped={vid: dict(sorted(why.items())) for vid, why in dropped.items() if why},
        candidates=candidates,
        twins=twins,
        cases=digest(cases),
        made_with={"triton": _compat.triton_version(), "ptxas": _compat.ptxas_version(device.capability)},
        cost={
            "captures": planned.captures,
            "compilations": len(results),
            "seconds": round(sum(b.seconds for b in built), 1),
        },
    )


def _built(results: Mapping[str, Built | str], one: _Launch) -> Built:
    result = results[one.key]
    if isinstance(result, str):
        raise RuntimeError(result)
    return result


def _refusal(launches: Sequence[_Launch], results: Mapping[str, Built | str]) -> str | None:
    for one in launches:
        result = results[one.key]
        why = result if isinstance(result, str) else result.rejected
        if why is not None:
            return why
    return None


def _options(variant: Variant, launches: Sequence[_Launch]) -> Mapping[str, Any]:
    """The options of the launch of the variant's own kernel."""
    name = (variant.kernel or "").partition(":")[2]
    own = [one for one in launches if one.kernel == name] or list(launches)
    return own[0].options if own else variant.options


def _entry(variant: Variant, options: Mapping[str, Any], built: Sequence[Built]) -> dict[str, Any]:
    """A variant's record, as it stands in a table."""
    entry: dict[str, Any] = json.loads(json.dumps({"meta": dict(variant.meta), "options": dict(options)}, default=str))
    if built:
        registers, spills = ([getattr(b, name) for b in built] for name in ("registers", "spill"))
        entry |= {"regs": max(n or 0 for n in registers)} if None not in registers else {}
        entry |= {"spill": max(n or 0 for n in spills)} if None not in spills else {}
        texts = sorted({b.text for b in built})
        entry["text"] = hashlib.sha256("\n".join(texts).encode()).hexdigest()
    return entry


def write(paths: Paths, static: Static) -> None:
    """Write ``paths.static`` in one step.

    Raises:
        OSError: it cannot be written.
    """
    write_atomically(
        paths.static,
        dump(
            {
                "schema": SCHEMA,
                "op": paths.op,
                "device": paths.device.table_name,
                "cases": static.cases,
                "made_with": dict(static.made_with),
                "cost": dict(static.cost),
                "variants": {vid: dict(entry) for vid, entry in static.variants.items()},
                "dropped": {vid: dict(why) for vid, why in static.dropped.items()},
                "candidates": [list(ids) for ids in static.candidates],
                "twins": [dict(same) for same in static.twins],
            }
        ),
    )


def read(paths: Paths, cases: Sequence[Case] | None = None) -> Static:
    """What `write` wrote.

    Args:
        cases: those of the plan; a file about others is refused.

    Raises:
        ValueError: the file is damaged, or about another op, device or plan, or made with another Triton; names it.
        OSError: it cannot be read.
    """
    data = paths.static.read_bytes()
    try:
        top = json.loads(data)
        if not isinstance(top, dict) or top.get("schema") != SCHEMA:
            raise ValueError(f"no file of schema {SCHEMA}")
        for name, wanted in (("op", paths.op), ("device", paths.device.table_name)):
            if top.get(name) != wanted:
                raise ValueError(f"{name} is {top.get(name)!r}, not {wanted!r}")
        static = Static(
            _records(top["variants"], _is_entry),
            _records(top["dropped"], _is_count),
            _candidates(top["candidates"]),
            _twins(top["twins"], top["candidates"]),
            *(_typed(top[name], kind) for name, kind in (("cases", str), ("made_with", dict), ("cost", dict))),
        )
        if cases is not None and static.cases != digest(cases):
            raise ValueError("it is about another plan; run the static stage again")
        then, now = static.made_with.get("triton"), _compat.triton_version()
        if now is not None and then != now:
            raise ValueError(f"it was made with Triton {then}, this is {now}; run the static stage again")
    except KeyError as error:
        raise ValueError(f"{paths.static}: {error.args[0]} is missing") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{paths.static}: {error}") from None
    return static


def _typed(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"expected {kind.__name__}, got {type(value).__name__}")
    return value


def _records(value: Any, fits: Callable[[str, Any], bool]) -> dict[str, dict[str, Any]]:
    for vid, record in _typed(value, dict).items():
        for name, one in _typed(record, dict).items():
            if not fits(name, one):
                raise ValueError(f"{vid}: {name} is {str(one)[:60]!r}")
    out: dict[str, dict[str, Any]] = value
    return out


def _is_count(name: str, value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_entry(name: str, value: Any) -> bool:
    if name in ("meta", "options"):
        return isinstance(value, dict)
    return isinstance(value, str) if name == "text" else name in ("regs", "spill") and _is_count(name, value)


def _candidates(value: Any) -> list[list[str]]:
    for ids in _typed(value, list):
        if not all(isinstance(vid, str) for vid in _typed(ids, list)) or VENDOR not in ids[:1]:
            raise ValueError(f"candidates: {str(ids)[:60]!r} is no list of variants that starts with {VENDOR}")
    out: list[list[str]] = value
    return out


def _twins(value: Any, candidates: list[list[str]]) -> list[dict[str, str]]:
    if len(_typed(value, list)) != len(candidates):
        raise ValueError(f"twins: of {len(value)} cases, candidates of {len(candidates)}")
    for same, ids in zip(value, candidates, strict=True):
        if not all(twin in ids and vid not in ids for vid, twin in _typed(same, dict).items()):
            raise ValueError(f"twins: {str(same)[:60]!r} are not those of candidates")
    out: list[dict[str, str]] = value
    return out
