"""The result file: one format for the runner, calibration's verification and the comparing tools; and its CSV."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tritonops.dispatch.table import write_atomically

from .entries import Entry

SCHEMA = 1
Row = dict[str, Any]

# Where one of these differs, times of two runs do not belong into one file.
IDENTITY = ("gpu", "arch", "sm_count", "driver", "torch", "triton", "ptxas")


class ResultsError(ValueError):
    """A result file that cannot be used or continued: the file, and why."""


def key_of(row: Mapping[str, Any]) -> str:
    """One text for what a row is of, whoever made it."""
    names = ("suite", "op", "pass", "shape", "dtype", "layout", "ids", "traits", "mode")
    return json.dumps([row.get(name) for name in names], sort_keys=True)


def entry_key(entry: Entry, mode: str) -> str:
    return key_of({**entry.facts(), "mode": mode})


class Results:
    """Rows on their way to a file; after every `add` the file holds them all.

    Attributes:
        path: None where nothing is written.
        rows: in the order in which their entries were first added.
    """

    def __init__(self, path: Path | None, command: str, environment: Mapping[str, Any]):
        self.path, self.command, self.environment = path, command, dict(environment)
        self._rows: dict[tuple[str, str], Row] = {}

    @property
    def rows(self) -> list[Row]:
        return list(self._rows.values())

    def of(self, key: str) -> dict[str, Row]:
        """Rows of one entry by provider."""
        return {provider: row for (k, provider), row in self._rows.items() if k == key}

    def add(self, rows: Iterable[Row]) -> None:
        """Rows of one entry, in place of those of the same providers.

        Raises:
            OSError: the file cannot be written; it holds what it held.
        """
        for row in rows:
            self._rows[key_of(row), row["provider"]] = row
        self.write()

    def write(self) -> None:
        if self.path is not None:
            write_atomically(self.path, dump(self.command, self.environment, self.rows))

    def resume(self) -> None:
        """Take over the rows of the file that is there, if one is.

        Raises:
            ResultsError: it is damaged, or was made by other versions or on another device.
        """
        if self.path is None or not self.path.exists():
            return
        old = read(self.path)
        before, now = old["environment"], self.environment
        moved = [name for name in IDENTITY if before.get(name) != now.get(name)]
        packages, found = before.get("providers", {}), now.get("providers", {})
        if any(packages[name] != version for name, version in found.items() if name in packages):
            moved.append("providers")
        if moved:
            what = "; ".join(f"{name}: {before.get(name)} then, {now.get(name)} now" for name in moved)
            raise ResultsError(f"{self.path} cannot be continued, it was made otherwise ({what})")
        kept = {name: value for name, value in before.items() if name not in ("absent", "skipped")}
        self.environment = {**now, **kept, "providers": {**packages, **found}}
        for row in old["rows"]:
            self._rows[key_of(row), row["provider"]] = row


def dump(command: str, environment: Mapping[str, Any], rows: Sequence[Row]) -> bytes:
    """The file's text: a line for each row, so that two files can be compared line by line."""
    head = json.dumps({"schema": SCHEMA, "command": command, "environment": dict(environment)}, allow_nan=False)
    lines = ",\n  ".join(json.dumps(row, allow_nan=False) for row in rows)
    return f'{head[:-1]},\n "rows": [\n  {lines}\n ]}}\n'.encode()


_NEEDED = ("suite", "op", "pass", "shape", "dtype", "layout", "ids", "provider", "mode", "ms", "failed")


def read(path: Path) -> dict[str, Any]:
    """A result file.

    Raises:
        ResultsError: it is damaged or of another schema; names it and the place.
        OSError: it cannot be read.
    """
    try:
        top = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ResultsError(f"{path}: not a result file: {error}") from None
    if not isinstance(top, dict) or top.get("schema") != SCHEMA:
        raise ResultsError(f"{path}: not a result file of schema {SCHEMA}")
    if not isinstance(top.get("environment"), dict) or not isinstance(top.get("rows"), list):
        raise ResultsError(f"{path}: no environment or no rows")
    for i, row in enumerate(top["rows"]):
        missing = [name for name in _NEEDED if not isinstance(row, dict) or name not in row]
        if missing or not isinstance(row["shape"], dict):
            raise ResultsError(f"{path}: rows[{i}]: {', '.join(missing) or 'shape'}: missing or of the wrong kind")
    return top


_COLUMNS = (
    "suite", "op", "pass", "shape", "dtype", "layout", "ids", "traits", "mode", "provider", "variant", "ms", "ms_low",
    "ms_high", "rounds", "clock_mhz", "fraction", "tflops", "error", "error_torch", "speedup", "speedup_low",
    "speedup_high", "verdict", "launch_bound", "ms_eager", "ms_graph", "heldout", "failed",
)  # fmt: skip


def to_csv(rows: Iterable[Row]) -> str:
    """A line for each row; what is not known is empty."""
    out = io.StringIO()
    writer = csv.DictWriter(out, _COLUMNS, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        flat = {name: row.get(name) for name in _COLUMNS}
        flat["shape"] = "x".join(map(str, row["shape"].values()))
        flat["traits"] = json.dumps(row["traits"]) if row.get("traits") else None
        flat["ms_low"], flat["ms_high"] = row.get("ci95") or (None, None)
        flat["speedup_low"], flat["speedup_high"] = row.get("speedup_ci95") or (None, None)
        writer.writerow(flat)
    return out.getvalue()
