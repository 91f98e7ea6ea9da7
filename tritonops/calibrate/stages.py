"""The stages of a run over its ops, each from the files of the one before."""

from __future__ import annotations

import gzip
import hashlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from .. import _env
from ..device import DeviceInfo
from ..dispatch import store, table
from ..dispatch.variant import REGISTRY, VENDOR, OpSpec
from ..errors import TableError
from . import gate, plan, raw, static, sweep
from .case import Case
from .install import check, install
from .progress import Progress

if TYPE_CHECKING:
    from .learn import Learned
    from .verify import Report

T = TypeVar("T")

STAGES = ("plan", "static", "gate", "measure", "learn", "verify", "emit")
ON_GPU = ("gate", "measure")
WRITING = ("plan", "static", "gate", "measure", "emit")
# Shares of the budget: about what each op's plan takes on an H200.
WEIGHTS = {
    "matmul": 0.5,
    "layer_norm": 0.07,
    "layer_norm_backward": 0.11,
    "rms_norm": 0.07,
    "rms_norm_backward": 0.08,
    "embedding": 0.05,
    "embedding_backward": 0.12,
}
SMOKE_CASES = 4


class Stop(Exception):
    """One sentence that ends the command."""


class Skip(Exception):
    """One sentence that ends one op; the others go on."""


@dataclass(frozen=True)
class Settings:
    """What the command line asks for.

    Attributes:
        budget: seconds of measuring, for all ops together.
        shapes: cases by op, of the user's file; None: those of `plan`.
        install: None: where verify passes and the cache can be written.
    """

    device: DeviceInfo
    out: Path
    ops: Sequence[str]
    budget: float = 600.0
    jobs: int | None = None
    resume: bool = False
    smoke: bool = False
    shapes: Mapping[str, Sequence[Case]] | None = None
    install: bool | None = False


@dataclass
class Work:
    """One op: where its files are, and what of them was made or read already."""

    spec: OpSpec
    paths: raw.Paths
    cases: list[Case] | None = None
    static: static.Static | None = None
    gated: dict[str, dict[str, Any]] | None = None
    raw: raw.Raw | None = None
    learned: Learned | None = None
    report: Report | None = None


@dataclass
class Run:
    """One run; `result` takes what goes to stdout, a line each time."""

    settings: Settings
    progress: Progress
    result: Callable[[str], None] = print
    clock: Callable[[], float] = time.monotonic
    works: dict[str, Work] = field(default_factory=dict)
    skipped: bool = False
    below: bool = False
    installed: list[Path] = field(default_factory=list)

    def __post_init__(self) -> None:
        for op in self.settings.ops:
            self.works[op] = Work(REGISTRY[op], raw.Paths(self.settings.out, op, self.settings.device))

    @property
    def code(self) -> int:
        return 2 if self.skipped else int(self.below)

    def each(self, do: Callable[[Work], None]) -> None:
        """For every op that is still in the run."""
        for op, work in list(self.works.items()):
            try:
                do(work)
            except (Skip, raw.RawError, plan.PlanError, TableError) as error:
                self.progress.say(f"{op}: {error}")
                self.skipped = True
                del self.works[op]
            except OSError as error:
                if error.filename is None or str(error.filename).endswith(".tmp"):
                    error.filename = str(work.paths.raw.parent)
                raise

    def run(self, stages: Sequence[str]) -> None:
        """The stages in order, each for all ops before the next.

        Raises:
            Stop: nothing more can be done.
            AssemblerError: Triton's assembler is missing or unusable.
            OSError: a file cannot be written.
        """
        for stage in stages:
            if stage == "measure":
                self.measure()
                continue
            do = getattr(self, stage)

            def one(work: Work, stage: str = stage, do: Callable[[Work], None] = do) -> None:
                self.progress.stage(stage, work.spec.name)
                do(work)

            self.each(one)
        self.progress.close()

    def _read(self, path: Path, stage: str, reader: Callable[[], T]) -> T:
        """What `stage` wrote."""
        if not path.exists():
            raise Skip(f"{path} is not there; run the stage {stage} first")
        try:
            return reader()
        except ValueError as error:
            raise Skip(str(error)) from None
        except (KeyError, TypeError, AttributeError, RecursionError) as error:
            raise Skip(f"{path}: damaged ({type(error).__name__}: {error}); run the stage {stage} again") from None

    def cases(self, work: Work) -> list[Case]:
        if work.cases is None:
            work.cases = self._read(work.paths.plan, "plan", lambda: plan.read(work.paths))
        return work.cases

    def screened(self, work: Work) -> static.Static:
        if work.static is None:
            cases = self.cases(work)
            work.static = self._read(work.paths.static, "static", lambda: static.read(work.paths, cases))
        return work.static

    def verdicts(self, work: Work) -> dict[str, dict[str, Any]]:
        if work.gated is None:
            work.gated = self._read(work.paths.gate, "gate", lambda: gate.read(work.paths))
        return work.gated

    def plan(self, work: Work) -> None:
        shapes = self.settings.shapes
        if shapes is None:
            cases = plan.plan(work.spec, self.settings.device)
        else:
            cases = list(shapes.get(work.spec.name, ()))
            if not cases:
                raise Skip("the file of --shapes has no row of it")
        work.cases = cases[:SMOKE_CASES] if self.settings.smoke else cases
        plan.write(work.paths, work.cases)
        self.progress.say(f"plan {work.spec.name}: {len(work.cases)} cases")

    def static(self, work: Work) -> None:
        cases = self.cases(work)
        if self.settings.resume and work.paths.static.exists():
            try:
                self.screened(work)
                return
            except Skip as error:
                self.progress.say(f"{work.spec.name}: {error}; compiling anew")
        found = static.screen(work.spec, cases, self.settings.device, self.settings.jobs, self.progress)
        why = next((why for reasons in found.dropped.values() for why in reasons if "does not compile" in why), None)
        if why is not None and set(found.variants) <= {vid for vid, v in work.spec.variants().items() if not v.kernel}:
            raise Skip(
                f"none of its Triton kernels compiles for {self.settings.device.arch}, the first because it {why}"
            )
        static.write(work.paths, found)
        work.static = found
        compiled = found.cost.get("compilations", 0)
        self.progress.say(f"static {work.spec.name}: {len(found.variants)} variants in {compiled} compilations")

    def gate(self, work: Work) -> None:
        cases, screened = self.cases(work), self.screened(work)
        known = self.verdicts(work) if self.settings.resume and work.paths.gate.exists() else {}
        where = torch.device("cuda", self.settings.device.index)
        try:
            work.gated = gate.gate(
                work.spec, cases, screened, where, self.progress, known=known, jobs=self.settings.jobs
            )
        except gate.ContextLost as error:
            gate.write(work.paths, {**known, **error.verdicts})
            raise Stop(f"gate {work.spec.name}: {error}; --resume goes on without it") from None
        gate.write(work.paths, work.gated)
        for vid, verdict in work.gated.items():
            if not verdict["passed"]:
                self.progress.say(f"gate {work.spec.name}: {vid} is out: {verdict['why']}")

    def measure(self) -> None:
        """All ops within the budget: each its share of what is left, so that what one does not need the next has."""
        start = self.clock()
        end = start + self.settings.budget
        waiting = list(self.works)

        def one(work: Work) -> None:
            now, name = self.clock(), work.spec.name
            share = WEIGHTS[name] / sum(WEIGHTS[op] for op in waiting)
            waiting.remove(name)
            self._measure(work, now + max(end - now, 0.0) * share, end)

        self.each(one)

    def _measure(self, work: Work, deadline: float, end: float) -> None:
        name, paths = work.spec.name, work.paths
        self.progress.stage("measure", name, end)
        cases, screened, gated = self.cases(work), self.screened(work), self.verdicts(work)
        vendor = gated.get(VENDOR, {"passed": False, "why": "no verdict"})
        if not vendor["passed"]:
            raise Skip(f"torch's own kernel failed the gate, nothing is measured ({vendor['why']})")
        self._prepare(work)
        try:
            left = sweep.sweep(
                work.spec,
                cases,
                screened,
                gated,
                self.settings.device,
                paths,
                deadline=deadline,
                resume=self.settings.resume,
                shapes=self.settings.shapes is not None,
                progress=self.progress,
            )
        except sweep.ContextLost as error:
            raise Stop(f"measure {name}: {error}") from None
        except torch.OutOfMemoryError as error:
            raise Stop(
                f"measure {name}: the GPU's memory is full ({str(error).splitlines()[0][:200]}); what was measured is "
                f"in {paths.raw}; free it and go on with --resume"
            ) from None
        work.raw = work.learned = work.report = None
        done = len(cases) - left
        self.progress.say(
            f"measure {name}: {done} of {len(cases)} cases in {paths.raw}"
            + (f"; its part of the budget is spent, --resume measures the other {left}" if left else "")
        )
        if not done:
            raise Skip(f"no case was measured in its part of {self.settings.budget:g} s; raise --budget")

    def _prepare(self, work: Work) -> None:
        """The file to append to: none, or that of the run to continue."""
        paths = work.paths
        if not self.settings.resume:
            if paths.raw.exists():
                previous = paths.raw.with_name(f"{paths.raw.name}.previous")
                os.replace(paths.raw, previous)
                self.progress.say(f"measure {work.spec.name}: an unfinished run is moved to {previous}")
        elif not paths.raw.exists() and paths.packed.exists():
            raw.read(paths.packed)
            table.write_atomically(paths.raw, gzip.decompress(paths.packed.read_bytes()))

    def known(self, work: Work) -> tuple[raw.Raw, Learned]:
        """The raw file, and what is learned from it."""
        from . import learn

        source = work.paths.source()
        if work.raw is None:
            work.raw = self._read(source, "measure", lambda: raw.read(source))
            facts, device = work.raw.header["device"], self.settings.device
            if (work.raw.op, facts["arch"], facts["sms"]) != (work.spec.name, device.arch, device.sms):
                raise Skip(f"{source} is about {work.raw.op} on {facts['arch']}-{facts['sms']}")
        if not work.raw.measured:
            raise Skip(f"{source} has no case; run the stage measure")
        if work.learned is None:
            work.learned = learn.learn(work.raw, work.spec)
        return work.raw, work.learned

    def judged(self, work: Work) -> tuple[raw.Raw, Learned, Report]:
        """What `known` gives, and its scores."""
        from . import verify

        found, learned = self.known(work)
        if work.report is None:
            work.report = verify.verify(found, learned, work.spec)
        return found, learned, work.report

    def learn(self, work: Work) -> None:
        found, learned = self.known(work)
        self.progress.say(f"learn {work.spec.name}: {len(learned.sections)} sections from {len(found.measured)} cases")

    def verify(self, work: Work) -> None:
        _, _, report = self.judged(work)
        self.progress.close()
        for line in report.lines():
            self.result(line)
        self.below |= not report.passed

    def emit(self, work: Work) -> None:
        from . import emit

        found, learned, report = self.judged(work)
        self.progress.close()
        paths, name = work.paths, work.spec.name
        plain = paths.raw.exists()
        packed = paths.packed.read_bytes() if not plain else _pack(paths.raw)
        data = emit.emit(found, learned, report, paths.packed.name, hashlib.sha256(packed).hexdigest())
        features = {*work.spec.dims, *work.spec.feature_names}
        table.parse(data, str(paths.table), op=name, features=features, known=set(work.spec.variants()))
        if plain:
            if paths.packed.exists() and paths.packed.read_bytes() != packed:
                previous = paths.packed.with_name(f"{paths.packed.name}.previous")
                os.replace(paths.packed, previous)
                self.progress.say(f"emit {name}: the measurements that were there are kept as {previous}")
            table.write_atomically(paths.packed, packed)
        table.write_atomically(paths.table, data)
        if plain:
            paths.raw.unlink()
        self.result(f"{name}: wrote {paths.table} and {paths.packed}")
        if not report.passed:
            self.below = True
            self.result(f"{name}: a bar was missed on held-out shapes; what is refused is torch's in the table")

    def install(self, work: Work) -> None:
        """Into the user's cache, where `settings.install` says so."""
        name, paths = work.spec.name, work.paths
        asked = self.settings.install is True
        if not asked and not self.judged(work)[2].passed:
            self.result(f"{name}: not installed, as a bar was missed; --install installs it all the same")
            return
        self._read(paths.table, "emit", lambda: check(paths, work.spec))
        serving = next((f for f in store.search(work.spec, self.settings.device) if f.status == "used"), None)
        alone = self.known(work)[0].header["method"].get("alone") if self.settings.shapes is not None else None
        if not asked and alone and serving is not None:
            self.result(
                f"{name}: not installed, as it knows your shapes alone ({alone}) and {serving.path} knows more; "
                "--install installs it all the same"
            )
            return
        try:
            where, _ = install(paths)
        except OSError as error:
            if asked:
                raise
            self.progress.say(
                f"{name}: not installed, {_env.cache_dir()} cannot be written ({error.strerror or error}); "
                f"TRITONOPS_TABLE_DIR={self.settings.out} makes tritonops use the tables there"
            )
            return
        self.installed.append(where)
        self.result(f"{name}: installed {where}")
        used = next((f for f in store.search(work.spec, self.settings.device) if f.status == "used"), None)
        if used is not None and used.path != where:
            self.result(f"{name}: but {used.path} ({used.place}) comes first")

    def pictures(self, directory: Path) -> None:
        """The report of --report."""
        from . import report

        entries: list[tuple[raw.Raw, Learned, Report]] = []
        self.each(lambda work: entries.append(self.judged(work)))
        if entries:
            self.progress.say(f"report: drawing {', '.join(found.op for found, *_ in entries)}")
            try:
                report.write(directory, entries)
            except OSError as error:
                error.filename = str(directory)
                raise
            self.result(f"wrote {directory / 'index.html'}")


def _pack(path: Path) -> bytes:
    """The whole lines, gzipped; a last one without its newline is of a run that was killed."""
    data = path.read_bytes()
    return raw.pack(data[: data.rfind(b"\n") + 1])
