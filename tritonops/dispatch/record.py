"""Recording which problems a program has, for calibration and warm-up."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections import Counter
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any

from .. import _compat
from .problem import Problem
from .table import write_atomically


class Recorder:
    """Counts distinct problems."""

    def __init__(self) -> None:
        self._counts: Counter[Hashable] = Counter()
        self._problems: dict[Hashable, Problem] = {}
        self._lock = threading.Lock()

    def add(self, key: Hashable, problem: Problem) -> None:
        """Count one call of the problem that `key` stands for."""
        with self._lock:
            self._counts[key] += 1
            self._problems.setdefault(key, problem)

    @staticmethod
    def _row(problem: Problem) -> dict[str, Any]:
        return {
            "op": problem.op,
            **dict(problem.dims),
            "dtype": problem.dtype,
            "layout": problem.layout,
            "aligned": problem.aligned,
            "policy": problem.policy,
            "mode": problem.mode,
            "traits": dict(problem.traits),
        }

    def lines(self) -> Iterator[str]:
        """One JSON line a distinct problem; keys that differ only in what is not recorded are one problem."""
        with self._lock:
            counted = [(self._problems[key], count) for key, count in self._counts.items()]
        rows: Counter[str] = Counter()
        for problem, count in counted:
            rows[json.dumps(self._row(problem))] += count
        for line, count in rows.most_common():
            row: dict[str, Any] = json.loads(line)
            yield json.dumps(row | {"count": count}) + "\n"


active: Recorder | None = None
_lock = threading.Lock()
_compat.renew_after_fork(_lock)


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
