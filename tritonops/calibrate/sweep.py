"""The measuring stage: every candidate of every case, until the budget is spent, each case on disk before the next."""

from __future__ import annotations

import functools
import random
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch

from .. import _compat
from ..device import DeviceInfo
from ..dispatch.variant import VENDOR, Choice, OpSpec
from . import gate, measure
from .case import Case
from .header import EAGER_BELOW_MS, base_of, check_continues, header, join
from .outputs import Poison, refill
from .race import Stage, race
from .raw import Appender, Measured, Paths, Raw, read
from .telemetry import Monitor, monitor

if TYPE_CHECKING:
    from .static import Static

_EAGER_RIVALS = 1
# Six rounds: the fewest whose extremes are a 95 % interval of the median.
_EAGER_STAGES = (Stage(6, 8, float("inf")),)
# A first replay this much slower than the best is not worth a second.
_HOPELESS = 2.5
# Of one call outside of a graph that many milliseconds are surely not the host's alone.
_SURE_MS = 0.5
_SECONDS_A_CASE = 1.0

_BROKEN_CONTEXT = re.compile(r"illegal|misaligned address|unspecified launch failure|device-side assert|uncorrectable")


_T = TypeVar("_T")


class Bench(Protocol):
    """Measures one case."""

    def __call__(self, spec: OpSpec, case: Case, candidates: Sequence[str]) -> Measured: ...


class ContextLost(RuntimeError):
    """A kernel broke the CUDA context; nothing more runs in this process. `measured` names the culprit."""

    def __init__(self, measured: Measured, message: str):
        super().__init__(message)
        self.measured = measured


def sweep(
    spec: OpSpec,
    cases: Sequence[Case],
    static: Static,
    gated: Mapping[str, Mapping[str, Any]],
    device: DeviceInfo,
    paths: Paths,
    *,
    deadline: float = float("inf"),
    resume: bool = False,
    shapes: bool = False,
    bench: Bench | None = None,
    progress: Callable[[str], None] = lambda text: None,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Measure the cases in order and append each to ``paths.raw``; the number of cases left when the deadline came.

    Args:
        static, gated: what the stages before found; a variant that has not passed the gate is not measured.
        deadline: on `clock`; no case is begun after it.
        resume: continue the file that is there; otherwise there must be none.
        shapes: the cases are a user's own; the measurements of the table that serves this device, if they fit, stand
            beside them in the file.
        bench: how a case is measured; None: on the CUDA device.

    Raises:
        FileExistsError: not `resume`, and the file is there.
        RawError: the file to continue is damaged, or was made by other versions, kernels or another device.
        ContextLost: a kernel broke the CUDA context. It is on file; continuing leaves it out of that case.
        OSError: the file cannot be written; what was measured before stands.
    """
    if not resume and paths.raw.exists():
        raise FileExistsError(f"{paths.raw} is there already")
    done: dict[str, Measured] = {}
    started = resume and paths.raw.exists() and paths.raw.stat().st_size > 0
    if started:
        old = read(paths.raw)
        done = {m.case.key: m for m in old.measured}
    open_cases = [c for c in cases if not (c.key in done and done[c.key].graph)]
    cuda = CudaBench(device) if bench is None else None
    run: Bench = bench if bench is not None else cuda  # type: ignore[assignment]
    facts: dict[str, Any] = {}
    if cuda is not None:
        facts = {"driver": cuda.monitor.driver(), "memory_gib": cuda.memory_bytes >> 30}
        if not started:
            facts["roofs"] = measure.ceilings(cuda.where, device.l2_bytes)
    head = header(spec, static, gated, device, shapes=shapes, **facts)
    if started:
        check_continues(old.header, head, paths.raw)
    base: Raw | None = None
    if shapes and not started:
        base, why = base_of(spec, device, head)
        if base is not None:
            join(head, base)
        else:
            head["method"]["alone"] = why
        progress(f"{spec.name}: " + (f"{len(base.measured)} cases join yours" if base else f"yours alone, as {why}"))
    position = {c.key: i for i, c in enumerate(cases)}
    passed = {VENDOR} | {vid for vid, verdict in gated.items() if verdict["passed"] is True}
    with Appender(paths.raw) as out:
        if not started:
            out.add(head)
            for m in base.measured if base is not None else ():
                if m.case.key not in position:
                    out.add(m.to_json())
        for n, case in enumerate(open_cases):
            if clock() > deadline:
                return len(open_cases) - n
            progress(f"{spec.name} {len(cases) - len(open_cases) + n + 1}/{len(cases)} {case.problem.describe()}")
            known = dict(done[case.key].failed) if case.key in done else {}
            if VENDOR in known:  # it did not fit into this device's memory
                continue
            candidates = [vid for vid in static.candidates[position[case.key]] if vid in passed and vid not in known]
            try:
                result = run(spec, case, candidates)
            except ContextLost as error:
                lost = error.measured
                out.add(Measured(case, {}, failed={**known, **lost.failed}).to_json())
                raise
            same = {vid: twin for vid, twin in static.twins[position[case.key]].items() if vid in passed}
            result = replace(
                result,
                graph=_with_twins(result.graph, same),
                eager=_with_twins(result.eager, same),
                failed={**known, **_with_twins(result.failed, same)},
            )
            out.add(result.to_json())
    return 0


def _with_twins(found: Mapping[str, _T], same: Mapping[str, str]) -> dict[str, _T]:
    return {**found, **{vid: found[twin] for vid, twin in same.items() if twin in found}}


class CudaBench:
    """Measures cases on a CUDA device: graph times of all candidates, eager times of the fastest where they differ."""

    def __init__(self, device: DeviceInfo, watch: Monitor | None = None):
        self.device = device
        self.where = torch.device("cuda", device.index)
        torch.cuda.set_device(self.where)
        self.memory_bytes = int(torch.cuda.get_device_properties(self.where).total_memory)
        self.monitor = watch or monitor(device.index)
        self._flush = measure.Flush(self.where, device.l2_bytes)
        measure.warm_clocks(self.where)

    def __call__(self, spec: OpSpec, case: Case, candidates: Sequence[str]) -> Measured:
        with torch.no_grad(), _compat.float32_precision(case.problem.traits.get("precision") == "tf32"):
            try:
                return self._measure(spec, case, candidates)
            except torch.OutOfMemoryError as error:
                torch.cuda.empty_cache()
                return Measured(case, {}, failed={VENDOR: _reason("does not fit", error)})
            finally:
                # A graph's memory serves no other graph until it is given back; giving it back takes milliseconds.
                if torch.cuda.memory_reserved(self.where) > self.memory_bytes // 4:
                    torch.cuda.empty_cache()

    def _measure(self, spec: OpSpec, case: Case, candidates: Sequence[str]) -> Measured:
        variants = spec.variants()
        calls_of = {
            vid: functools.partial(variants[vid].run, Choice(variants[vid], case.problem, self.device, None))
            for vid in candidates
        }
        first = case.sample(spec, str(self.where))
        expected = calls_of[VENDOR](*first)
        bytes_per_call = measure.bytes_of(first) + measure.bytes_of(expected)
        failed: dict[str, str] = {}
        usable = []
        for vid in candidates:
            why = None if vid == VENDOR else self._try(case, vid, calls_of[vid], first, expected)
            if why is None:
                usable.append(vid)
            else:
                failed[vid] = why
        del expected
        calls, count = measure.calls_and_sets(bytes_per_call, self.device.l2_bytes, self.memory_bytes)
        sets = [first, *(case.sample(spec, str(self.where)) for _ in range(count - 1))]
        place = measure.Place()
        timers: dict[str, Callable[[], float]] = {}
        slow = self._slow(calls_of, usable, first)
        for vid in usable:
            if vid in slow:
                continue
            try:
                timers[vid] = measure.GraphTimer(calls_of[vid], sets, calls, self._flush, place)
            except Exception as error:
                if vid == VENDOR:
                    raise
                failed[vid] = _reason("cannot be captured in a graph", error)
        rng = random.Random(case.key)
        once = {vid: timer() for vid, timer in timers.items()}
        worth = [vid for vid, ms in once.items() if vid == VENDOR or ms <= _HOPELESS * min(once.values())]
        result = race(
            {vid: timers[vid] for vid in worth},
            base=VENDOR,
            rng=rng,
            monitor=self.monitor,
            seconds=_SECONDS_A_CASE,
        )
        graph = {vid: result.times.get(vid) or (once[vid],) for vid in timers}
        graph |= {vid: (ms,) for vid, ms in slow.items()}
        eager: Mapping[str, tuple[float, ...]] = {}
        middle = {vid: sorted(times)[len(times) // 2] for vid, times in graph.items()}
        if middle[VENDOR] < EAGER_BELOW_MS:
            own = sorted((vid for vid in timers if vid != VENDOR), key=lambda vid: (middle[vid], vid))[:_EAGER_RIVALS]
            eager = race(
                {vid: measure.EagerTimer(calls_of[vid], sets) for vid in [VENDOR, *own]},
                base=VENDOR,
                stages=_EAGER_STAGES,
                rng=rng,
                monitor=self.monitor,
            ).times
        known = [r for r in result.readings if r.clock_mhz is not None]
        return Measured(
            case,
            graph,
            eager,
            failed,
            calls,
            result.rejected,
            _middle([r.clock_mhz for r in known]),
            _middle([r.power_w for r in known]),
            _middle([r.temperature_c for r in known]),
        )

    def _slow(self, calls_of: Mapping[str, Callable[..., Any]], ids: Sequence[str], args: Any) -> dict[str, float]:
        """Candidates so slow that one call, host time and all, shows it, with that call's milliseconds."""
        once: dict[str, float] = {}
        for vid in ids:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._flush()
            start.record()
            calls_of[vid](*args)
            end.record()
            end.synchronize()
            once[vid] = start.elapsed_time(end)
        limit = max(_HOPELESS * min(once.values()), _SURE_MS)
        return {vid: ms for vid, ms in once.items() if ms > limit and vid != VENDOR}

    def _try(self, case: Case, vid: str, call: Callable[..., Any], args: Any, expected: Any) -> str | None:
        """Run once into memory that holds NaN and look at the result; why the candidate is out, or None."""
        try:
            refill(expected)
            with Poison():
                out = call(*args)
            torch.cuda.synchronize(self.where)
        except Exception as error:
            why = _reason("raised", error)
            if _BROKEN_CONTEXT.search(str(error)):
                raise ContextLost(
                    Measured(case, {}, failed={vid: why}),
                    f"{vid} broke the CUDA context on {case.problem.describe()} ({why}); --resume goes on without it",
                ) from error
            return why
        return gate.check_output(out, expected)


def _reason(what: str, error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{what}: {type(error).__name__}: {lines[-1][:200] if lines else ''}"


def _middle(values: Sequence[int | None]) -> int | None:
    known = sorted(v for v in values if v is not None)
    return known[len(known) // 2] if known else None
