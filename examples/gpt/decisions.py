"""Collecting what the dispatcher decided while a model ran, and how often."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tritonops


class Decisions:
    """Each distinct decision made in a block, and the number of calls that it served."""

    def __init__(self) -> None:
        self.made: list[Any] = []
        self._counts: dict[str, int] = {}

    def count(self, decision: Any) -> int:
        problem = decision.problem
        return self._counts.get(_key({**problem.dims, **{k: getattr(problem, k) for k in _FIELDS}}), 0)

    def read(self, recorded: Path) -> None:
        for line in recorded.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            self._counts[_key(row)] = row.pop("count")


_FIELDS = ("op", "dtype", "layout", "aligned", "policy", "mode", "traits")


def _key(row: dict[str, Any]) -> str:
    return json.dumps({k: v for k, v in row.items() if k != "count"}, sort_keys=True, default=dict)


@contextlib.contextmanager
def collected() -> Iterator[Decisions]:
    """Forget earlier decisions, then collect those of the block, as TRITONOPS_LOG=decisions logs them."""
    out = Decisions()
    handler = logging.Handler()
    handler.emit = lambda entry: out.made.append(entry.args[0])  # type: ignore[method-assign,union-attr,index]
    log = logging.getLogger("tritonops")
    level, propagate, switch = log.level, log.propagate, os.environ.get("TRITONOPS_LOG", "")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
    os.environ["TRITONOPS_LOG"] = "decisions"
    tritonops.clear_cache()
    try:
        with tempfile.TemporaryDirectory() as scratch:
            recorded = Path(scratch, "problems.jsonl")
            with tritonops.record(recorded):
                yield out
            out.read(recorded)
    finally:
        os.environ["TRITONOPS_LOG"] = switch
        log.removeHandler(handler)
        log.setLevel(level)
        log.propagate = propagate
