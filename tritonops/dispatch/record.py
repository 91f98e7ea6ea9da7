"""Recording which problems a program has, for calibration and warm-up."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .problem import Problem
from .table import write_atomically


class Recorder:
    """Counts distinct problems."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, problem: Problem) -> None:
        row = {
            "op": problem.op,
            **dict(problem.dims),
            "dtype": problem.dtype,
            "layout": problem.layout,
            "aligned": problem.aligned,
            "policy": problem.policy,
            "mode": problem.mode,
            "traits": dict(problem.traits),
        }
        line = json.dumps(row)
        with self._lock:
            self._counts[line] += 1

    def lines(self) -> Iterator[str]:
        with self._lock:
            counts = self._counts.most_common()
        for line, count in counts:
            row: dict[str, Any] = json.loads(line)
            yield json.dumps(row | {"count": count}) + "\n"


active: Recorder | None = None
_lock = threading.Lock()


@contextlib.contextmanager
def record(path: str | os.PathLike[str]) -> Iterator[Recorder]:
    """Write each distinct problem that is served while the block runs, with its count, to `path` as JSONL.

    One line a problem: op, sizes, dtype, layout, alignment, policy, mode, traits, count; most frequent first. The
    file is written in one step when the block ends, also when it ends with an error. Process-wide; not nested.

    Raises:
        OSError: `path` cannot be written; checked before the block runs.
        RuntimeError: another record() is active.
    """
    global active
    target = Path(path)
    replaceable = target.is_file() or not target.exists()
    if not replaceable or not target.parent.is_dir() or not os.access(target.parent, os.W_OK):
        raise OSError(f"record(): path: {target} cannot be written")
    with _lock:
        if active is not None:
            raise RuntimeError("record(): another record() is active; problems are recorded process-wide")
        recorder = active = Recorder()
    try:
        yield recorder
    finally:
        with _lock:
            active = None
        write_atomically(target, "".join(recorder.lines()).encode())
