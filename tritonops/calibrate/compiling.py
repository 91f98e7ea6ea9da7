"""Compiling many launches for one target in parallel processes, into the cache where Triton's JIT finds them later.

A compile that dies with its process or that hangs costs its own result only, which ProcessPoolExecutor does not give:
there a dead worker fails all that was submitted, and nothing can be taken back from a worker that hangs.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any

from .. import launch
from ..device import DeviceInfo
from ..dispatch.problem import Problem
from ..dispatch.variant import REGISTRY, Choice, OpSpec, Variant
from ..toolchain import AssemblerError, CompileError, compile_request, measure, screen
from ..toolchain.assembler import last_line

Progress = Callable[[str], None]

TIMEOUT_SECONDS = 300.0
_START_SECONDS = 300.0
# A compiler killed for want of memory is often not the one that took it.
_ATTEMPTS = 2


@dataclass(frozen=True, slots=True)
class Built:
    """What one compilation gave.

    Attributes:
        key: Triton's cache key, the one that its JIT looks up.
        text: hash of the machine code.
        registers: 32-bit registers a thread; None where not known.
        spill: spill stores in bytes a thread; where they are not known, the stack frame, which holds them.
        shared: dynamic shared memory in bytes a block.
        num_warps: warps a block, those of warp specialisation included.
        seconds: wall time.
        rejected: why the screen refuses it, or None.
    """

    key: str
    text: str
    registers: int | None
    spill: int | None
    shared: int
    num_warps: int
    seconds: float
    rejected: str | None


@dataclass(frozen=True, slots=True)
class Job:
    """The `index`-th launch of a variant for a problem: enough for another process to make the launch itself."""

    variant: str
    problem: Problem
    index: int

    def plain(self) -> Job:
        """The same in builtin types alone, as a mapping proxy cannot be pickled."""
        p = self.problem
        plain = Problem(
            p.op, dict(p.dims), p.dtype, p.layout, p.aligned, p.policy, p.mode, dict(p.traits), p.flags
        )  # fmt: skip
        return Job(self.variant, plain, self.index)


def requests_of(
    variant: Variant, problem: Problem, device: DeviceInfo, args: tuple[Any, ...]
) -> list[launch.LaunchRequest]:
    """The launches that a variant makes for a problem, from meta tensors."""
    with launch.capture() as requests:
        variant.run(Choice(variant, problem, device, None), *args)
    return requests


def build(request: launch.LaunchRequest, device: DeviceInfo) -> Built:
    """Compile one launch and look at what came out.

    Raises:
        CompileError, AssemblerError: as compile_request.
    """
    started = time.perf_counter()
    compiled = compile_request(request, device)
    found = measure(compiled, sass=False)
    return Built(
        compiled.key,
        compiled.text_hash,
        found.registers,
        found.frame if found.spill_stores is None else found.spill_stores,
        compiled.shared,
        compiled.num_warps,
        time.perf_counter() - started,
        screen(found, compiled.shared, device),
    )


def reason(error: Exception) -> str:
    """Why something does not compile, in one line."""
    if isinstance(error, CompileError):
        return f"does not compile: {error.problem}"
    return f"does not compile: {last_line(error)}"


def cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Ticker:
    """Says about once a second how much is done and how long the rest will take at the pace since the first result."""

    def __init__(self, what: str, total: int, progress: Progress, clock: Callable[[], float] = time.monotonic):
        self._what, self._total, self._progress, self._clock = what, total, progress, clock
        self._said = clock()
        self._first: tuple[float, int] | None = None

    def __call__(self, done: int) -> None:
        now = self._clock()
        if self._first is None and done:
            self._first = now, done
        if now - self._said < 1.0 and done != self._total:
            return
        self._said = now
        started, before = self._first or (now, done)
        left = f", {(now - started) * (self._total - done) / (done - before):.0f} s left" if done > before else ""
        self._progress(f"{self._what} {done}/{self._total}{left}")


def build_all(
    spec: OpSpec,
    jobs: Sequence[Job],
    device: DeviceInfo,
    processes: int,
    progress: Progress = lambda text: None,
    timeout: float = TIMEOUT_SECONDS,
) -> list[Built | str]:
    """What each job gave, or the reason why nothing.

    Args:
        processes: 1 compiles in this process, where `spec` need not be registered and nothing ends a compile that
            hangs. More are forked from a process that has imported the package alone.

    Raises:
        AssemblerError: the toolchain itself is unusable.
        RuntimeError: no process can be started.
    """
    tick = Ticker(f"{spec.name}: compiled", len(jobs), progress)
    if processes > 1 and len(jobs) > 1:
        return _Pool(spec.name, jobs, device, min(processes, len(jobs)), tick, timeout).run()
    out: list[Built | str] = []
    for job in jobs:
        out.append(_attempt(spec, job, device))
        tick(len(out))
    return out


def _attempt(spec: OpSpec, job: Job, device: DeviceInfo) -> Built | str:
    try:
        variant = spec.variants()[job.variant]
        requests = requests_of(variant, job.problem, device, spec.sample(job.problem, "meta"))
        return build(requests[job.index], device)
    except AssemblerError:
        raise
    except Exception as error:
        return reason(error)


def _serve(op: str, device: DeviceInfo, environment: dict[str, str], connection: Connection) -> None:
    """The life of a worker: jobs in, (result, None) or (None, arguments of an AssemblerError) out."""
    # The fork server's own is that of the time when it was started.
    os.environ.clear()
    os.environ.update(environment)
    # Its own process group, so that an assembler that hangs is killed with it, and Ctrl-C reaches the parent alone.
    os.setpgid(0, 0)
    spec = REGISTRY[op]
    spec.variants()
    with contextlib.suppress(EOFError, ConnectionError):  # the parent ended
        connection.send(None)
        while True:
            job = connection.recv()
            try:
                connection.send((_attempt(spec, job, device), None))
            except AssemblerError as error:
                connection.send((None, (error.path, error.target, error.problem)))


@functools.cache
def _preload() -> list[str]:
    """This module and those of all kernels that can be imported: Liger's take 2 s."""
    modules = [__name__]
    for name in dict.fromkeys(v.kernel for spec in REGISTRY.values() for v in spec.variants().values() if v.kernel):
        with contextlib.suppress(Exception):
            launch.kernel(name)
            modules.append(name.partition(":")[0])
    return modules


def _start_server() -> None:
    """Start the fork server, unless it runs, deaf to Ctrl-C, which would end it in a traceback while it imports."""
    resource_tracker.ensure_running()  # lets SIGINT through again when it has started
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Worker:
    def __init__(self, op: str, device: DeviceInfo):
        # Not forked from this process, which may hold a CUDA context and threads, but from one that has imported the
        # package and nothing else: 16 fresh interpreters took 8 s to start, for each op.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_preload())
        _start_server()
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(op, device, dict(os.environ), theirs), daemon=True)
        self.process.start()
        theirs.close()
        self.ready = False
        self.job: int | None = None
        self.until = time.monotonic() + _START_SECONDS

    def give(self, number: int, job: Job, timeout: float) -> None:
        self.job, self.until = number, time.monotonic() + timeout
        with contextlib.suppress(OSError):  # it died meanwhile, which the connection will say
            self.connection.send(job.plain())

    def kill(self) -> None:
        if self.process.pid:
            with contextlib.suppress(OSError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.join()
        self.connection.close()

    def ending(self) -> str:
        self.process.join(5)
        code = self.process.exitcode
        if code is not None and code < 0:
            with contextlib.suppress(ValueError):
                return signal.Signals(-code).name
        return f"exit status {code}"


class _Pool:
    def __init__(self, op: str, jobs: Sequence[Job], device: DeviceInfo, processes: int, tick: Ticker, timeout: float):
        self._op, self._jobs, self._device, self._tick, self._timeout = op, jobs, device, tick, timeout
        self._queue = collections.deque(range(len(jobs)))
        self._results: dict[int, Built | str] = {}
        self._attempts: collections.Counter[int] = collections.Counter()
        self._size = processes
        self._workers: list[_Worker] = []
        self._any_ready = False

    def run(self) -> list[Built | str]:
        try:
            while len(self._results) < len(self._jobs):
                self._fill()
                connections = [w.connection for w in self._workers]
                answered = wait(connections, timeout=1.0)
                for worker in list(self._workers):
                    if worker.connection in answered:
                        self._listen(worker)
                    elif time.monotonic() > worker.until:
                        self._overdue(worker)
                self._tick(len(self._results))
        finally:
            for worker in self._workers:
                worker.kill()
        return [self._results[i] for i in range(len(self._jobs))]

    def _fill(self) -> None:
        open_jobs = len(self._jobs) - len(self._results)
        while len(self._workers) < min(self._size, open_jobs):
            self._workers.append(_Worker(self._op, self._device))
        for worker in self._workers:
            if worker.ready and worker.job is None and self._queue:
                number = self._queue.popleft()
                worker.give(number, self._jobs[number], self._timeout)

    def _listen(self, worker: _Worker) -> None:
        try:
            answer = worker.connection.recv()
        except (EOFError, OSError):
            self._died(worker)
            return
        if not worker.ready:
            worker.ready = self._any_ready = True
            worker.until = float("inf")
            return
        result, unusable = answer
        if unusable is not None:
            raise AssemblerError(*unusable)
        if worker.job is not None:
            self._results[worker.job] = result
        worker.job, worker.until = None, float("inf")

    def _died(self, worker: _Worker) -> None:
        ending = worker.ending()
        self._workers.remove(worker)
        worker.kill()
        if not worker.ready:
            self._size -= 1
            if not self._size or not self._any_ready:
                raise RuntimeError(f"calibrate: a compiling process ended while it started ({ending})")
        elif worker.job is not None:
            self._attempts[worker.job] += 1
            if self._attempts[worker.job] < _ATTEMPTS:
                self._queue.append(worker.job)
            else:
                self._results[worker.job] = f"does not compile: the compiler's process died ({ending})"

    def _overdue(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        worker.kill()
        if not worker.ready:
            raise RuntimeError(f"calibrate: a compiling process did not start within {_START_SECONDS:.0f} s")
        if worker.job is not None:
            self._results[worker.job] = f"does not compile: it takes longer than {self._timeout:.0f} s"
