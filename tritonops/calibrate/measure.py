"""Timing calls on a CUDA device: in a graph, eagerly, and on the host alone. Calibration and the benchmarks share it.

graph: a CUDA graph of R calls on disjoint argument sets, at least ten and at least four times the L2 in all; one
    time is a replay's, between two events, over R. Before the first event the L2 is swept by reading a buffer twice
    its size, which also keeps the device busy while the host enqueues the replay. Where the sets would need more than
    an eighth of the device's memory the calls take turns on fewer; where four L2 would need more than MAX_CALLS calls
    there are that many, and the sweep alone makes them cold.
eager: wall time of EAGER_CALLS back-to-back calls and the wait for the last, over their number.
host: wall time until one call returns, the queue being empty.
"""

from __future__ import annotations

import collections
import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

MIN_CALLS, MAX_CALLS = 10, 64
EAGER_CALLS = 200

Call = Callable[..., Any]
Arguments = tuple[Any, ...]


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in arguments or results."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors(item)


def bytes_of(value: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tensors(value))


def calls_and_sets(bytes_per_call: int, l2_bytes: int, memory_bytes: int) -> tuple[int, int]:
    """(calls in a graph, disjoint argument sets) for a call that touches so many bytes, arguments and results."""
    cold = math.ceil(4 * l2_bytes / max(bytes_per_call, 1))
    calls = min(max(MIN_CALLS, cold), MAX_CALLS)
    fit = max(1, memory_bytes // 8 // max(bytes_per_call, 1))
    return calls, max(min(calls, fit), min(cold, calls), 1)


class Flush:
    """Replaces what the L2 holds by reading a buffer of twice its size."""

    def __init__(self, device: torch.device, l2_bytes: int):
        self._buffer = torch.zeros(max(2 * l2_bytes, 1 << 20) // 4, dtype=torch.float32, device=device)
        self._sum = torch.zeros((), dtype=torch.float32, device=device)

    def __call__(self) -> None:
        torch.sum(self._buffer, dim=0, out=self._sum)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A collection may destroy a graph or a tensor, which a capture does not survive."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Place:
    """Memory and stream of captures: what one has freed serves the next, if both are on one stream."""

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """What a failed capture leaves to its pool and stream makes the next capture there fail too."""
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream()


class GraphTimer:
    """Times replays of one captured graph; calling it gives milliseconds a call.

    Args:
        call: executes once; its results are kept until as many later ones as there are sets exist, so that results
            are disjoint too.
        sets: argument sets, used in turn.
        calls: calls in the graph.
        place: memory and stream of the capture, which timers may share that are alive together and never run at the
            same time.
    """

    def __init__(self, call: Call, sets: Sequence[Arguments], calls: int, flush: Callable[[], None], place: Place):
        self._calls, self._flush = calls, flush
        self._graph = torch.cuda.CUDAGraph()
        results: collections.deque[Any] = collections.deque(maxlen=len(sets))
        # torch.cuda.graph() empties the allocator's cache at each capture, which costs more than the capture.
        place.stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(place.stream), _no_garbage_collection():
                self._graph.capture_begin(pool=place.pool, capture_error_mode="thread_local")
                try:
                    for i in range(calls):
                        results.append(call(*sets[i % len(sets)]))
                finally:
                    self._graph.capture_end()
        except BaseException:
            place.renew()
            raise
        torch.cuda.current_stream().wait_stream(place.stream)
        results.clear()
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def __call__(self) -> float:
        self._flush()
        self._start.record()
        self._graph.replay()
        self._end.record()
        self._end.synchronize()
        return float(self._start.elapsed_time(self._end)) / self._calls


class EagerTimer:
    """Times EAGER_CALLS back-to-back calls from the host; calling it gives milliseconds a call."""

    def __init__(self, call: Call, sets: Sequence[Arguments], calls: int = EAGER_CALLS):
        self._call, self._sets, self._calls = call, sets, calls

    def __call__(self) -> float:
        call, sets, count = self._call, self._sets, len(self._sets)
        torch.cuda.synchronize()
        started = time.perf_counter()
        for i in range(self._calls):
            call(*sets[i % count])
        torch.cuda.synchronize()
        return (time.perf_counter() - started) * 1e3 / self._calls


class HostTimer:
    """Times how long one call keeps the host, the queue being empty; calling it gives milliseconds a call."""

    def __init__(self, call: Call, sets: Sequence[Arguments], calls: int = EAGER_CALLS):
        self._call, self._sets, self._calls = call, sets, calls

    def __call__(self) -> float:
        taken = 0.0
        for i in range(self._calls):
            torch.cuda.synchronize()
            started = time.perf_counter()
            self._call(*self._sets[i % len(self._sets)])
            taken += time.perf_counter() - started
        torch.cuda.synchronize()
        return taken * 1e3 / self._calls


def warm_clocks(device: torch.device, seconds: float = 1.0) -> None:
    """Keep the device busy until its clocks are what they are under load."""
    a = torch.randn(4096, 4096, device=device).to(torch.bfloat16)
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        for _ in range(20):
            torch.mm(a, a)
        torch.cuda.synchronize(device)


def ceilings(device: torch.device, l2_bytes: int) -> tuple[float, float]:
    """(copy bandwidth in TB/s, bf16 product rate in TFLOP/s), measured: the device's two roofs.

    The copy is an elementwise kernel over 2 GiB, read and written (a memcpy node runs at 2.7 TB/s on an H200 where the
    kernel runs at 4.3); the product is torch's, 8192 x 8192 x 8192, random operands. Median of 10 replays.
    """
    flush = Flush(device, l2_bytes)

    def middle(call: Call, sets: Sequence[Arguments]) -> float:
        call(*sets[0])
        torch.cuda.synchronize(device)
        timer = GraphTimer(call, sets, MIN_CALLS, flush, Place())
        return sorted(timer() for _ in range(10))[5]

    count = min(2 << 30, torch.cuda.get_device_properties(device).total_memory // 16) // 4
    source = torch.randn(count, device=device)
    copy = middle(lambda x: x * 1.0, [(source,)])
    del source
    a, b = (torch.randn(8192, 8192, device=device).to(torch.bfloat16) for _ in range(2))
    product = middle(torch.mm, [(a, b.t())])
    return 2 * 4 * count / copy / 1e9, 2 * 8192**3 / product / 1e9
