"""What is inside a timed region and what is not, how many calls and argument sets there are. No GPU."""

from __future__ import annotations

import itertools

import pytest
import torch

from tritonops.calibrate import measure

L2, MEMORY = 60 << 20, 140 << 30


class FakeCuda:
    """torch.cuda's graphs, events and streams, taking note of what happens in which order."""

    def __init__(self, monkeypatch):
        self.log: list[str] = []
        self.clock = itertools.count(1)
        fake = self

        class Graph:
            def capture_begin(self, pool, capture_error_mode):
                fake.log.append("begin")

            def capture_end(self):
                fake.log.append("end")

            def replay(self):
                fake.log.append("replay")

        class Event:
            def __init__(self, enable_timing):
                self.at = 0

            def record(self):
                self.at = next(fake.clock)
                fake.log.append("record")

            def synchronize(self):
                fake.log.append("wait")

            def elapsed_time(self, end):
                return float(end.at - self.at)

        class Stream:
            def wait_stream(self, other):
                pass

            def __enter__(self):
                return self

            def __exit__(self, *_):
                pass

        for name, value in {
            "CUDAGraph": Graph, "Event": Event, "Stream": Stream, "current_stream": Stream, "stream": lambda s: s,
            "graph_pool_handle": lambda: (0, 0), "synchronize": lambda *_: fake.log.append("synchronize"),
        }.items():  # fmt: skip
            monkeypatch.setattr(torch.cuda, name, value)


@pytest.fixture
def cuda(monkeypatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


def test_ben_02_the_flush_lies_before_the_first_event_and_only_the_replay_between(cuda) -> None:
    """facebookexperimental/triton#1679: clearing inside the timed region favours configurations with less memory."""
    timer = measure.GraphTimer(lambda x: x, [(1,), (2,)], 10, lambda: cuda.log.append("flush"), measure.Place())
    assert cuda.log == ["begin", "end"]
    cuda.log.clear()
    times = [timer() for _ in range(3)]
    assert cuda.log == ["flush", "record", "replay", "record", "wait"] * 3
    assert times == [0.1] * 3


def test_a_graph_takes_the_sets_in_turn_and_keeps_as_many_results_alive(cuda) -> None:
    seen, alive, most = [], set(), 0

    class Output:
        def __init__(self, n):
            nonlocal most
            self.n = n
            alive.add(n)
            most = max(most, len(alive))

        def __del__(self):
            alive.discard(self.n)

    def call(x):
        seen.append(x)
        return Output(len(seen))

    measure.GraphTimer(call, [(i,) for i in range(4)], 10, lambda: None, measure.Place())
    assert seen == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]
    assert most == 5 and not alive


def test_a_capture_that_fails_is_ended_and_raises_and_leaves_the_next_one_a_clean_place(cuda) -> None:
    def call(x):
        raise RuntimeError("not permitted when stream is capturing")

    place = measure.Place()
    kept = place.stream
    measure.GraphTimer(lambda x: x, [(1,)], 10, lambda: None, place)
    assert place.stream is kept
    with pytest.raises(RuntimeError, match="not permitted"):
        measure.GraphTimer(call, [(1,)], 10, lambda: None, place)
    assert cuda.log == ["begin", "end"] * 2 and place.stream is not kept


def test_eager_waits_before_the_clock_starts_and_for_the_last_call(cuda) -> None:
    seen = []
    timer = measure.EagerTimer(lambda x: (seen.append(x), cuda.log.append("call")), [(1,), (2,), (3,)])
    ms = timer()
    assert cuda.log == ["synchronize", *["call"] * measure.EAGER_CALLS, "synchronize"]
    assert measure.EAGER_CALLS >= 200 and seen[:4] == [1, 2, 3, 1] and 0 < ms < 1


def test_host_times_every_call_alone(cuda) -> None:
    timer = measure.HostTimer(lambda x: cuda.log.append("call"), [(1,)], calls=3)
    assert timer() > 0
    assert cuda.log == ["synchronize", "call"] * 3 + ["synchronize"]


@pytest.mark.parametrize("size", [1, 1000, 1 << 20, 10 << 20, 300 << 20, 4 << 30, 30 << 30])
def test_calls_and_sets(size: int) -> None:
    calls, sets = measure.calls_and_sets(size, L2, MEMORY)
    assert measure.MIN_CALLS <= calls <= measure.MAX_CALLS and 1 <= sets <= calls
    assert calls * size >= 4 * L2 or calls == measure.MAX_CALLS
    assert sets * size >= 4 * L2 or sets == measure.MAX_CALLS
    assert sets * size <= max(MEMORY // 8, size, 4 * L2)
    if 10 * size <= MEMORY // 8:
        assert sets == calls


def test_a_small_card_takes_turns_on_fewer_sets() -> None:
    assert measure.calls_and_sets(1 << 30, 4 << 20, 8 << 30) == (10, 1)
    assert measure.calls_and_sets(8 << 20, 40 << 20, 1 << 30) == (20, 20)


def test_bytes_of_nested_arguments_and_results() -> None:
    x = torch.empty(3, 5)
    assert measure.bytes_of((x, None, [x.to(torch.float16), 3], "s")) == 60 + 30
    assert measure.bytes_of(torch.empty(0)) == 0
