"""The raw file: what `measure` appends and what `learn`, `verify` and `emit` are pure functions of.

JSON lines, plain while it grows and gzipped beside the table it made. First a header, then one line a case:

    {"kind": "header", "schema": 1, "op": ..., "device": {...}, "made_with": {...}, "kernels": {...}, "variants": {...},
     "dropped": {...}, "gate": {...}, "method": {...}}
    {"kind": "case", <case>, "calls": 24, "graph": {"vendor": [0.0312, ...], ...}, "eager": {...}, "failed": {...},
     "rejected": 0, "clock_mhz": 1980, "power_w": 512, "temperature_c": 48}

Times are milliseconds a call to 4 significant digits, one for each round that was kept, in order: the k-th entries of
two variants were taken in the same round. A variant that was eliminated early has fewer.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from ..device import DeviceInfo
from .case import Case

SCHEMA = 1


class RawError(ValueError):
    """A raw file that cannot be used: where, and why."""


# What a case's row must have, and the header.
_CASE: dict[str, Any] = {
    "dims": dict, "dtype": str, "layout": str, "aligned": bool, "traits": dict, "ids": str, "source": str,
    "heldout": bool, "weight": int | float, "graph": dict, "eager": dict, "failed": dict, "calls": int, "rejected": int,
}  # fmt: skip
_HEADER = ("device", "made_with", "kernels", "variants", "dropped", "gate", "method")


@dataclass(frozen=True)
class Measured:
    """One case with its times in milliseconds a call, by variant.

    Attributes:
        graph: times in a CUDA graph; every legal candidate has at least one.
        eager: times of back-to-back calls; {} where the device is the bottleneck by far, so that eager equals graph.
        failed: variants that raised or gave a wrong result here, with the reason.
        calls: calls in the graph.
        rejected: rounds that were thrown away (throttled, or the vendor's time off its median).
        clock_mhz, power_w, temperature_c: medians over the rounds; None where NVML is not there.
    """

    case: Case
    graph: Mapping[str, tuple[float, ...]]
    eager: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)
    calls: int = 0
    rejected: int = 0
    clock_mhz: int | None = None
    power_w: int | None = None
    temperature_c: int | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": "case",
            **self.case.to_json(),
            "calls": self.calls,
            "graph": {v: [digits(t) for t in times] for v, times in self.graph.items()},
            "eager": {v: [digits(t) for t in times] for v, times in self.eager.items()},
            "failed": dict(self.failed),
            "rejected": self.rejected,
            "clock_mhz": self.clock_mhz,
            "power_w": self.power_w,
            "temperature_c": self.temperature_c,
        }

    @classmethod
    def from_json(cls, op: str, row: Mapping[str, Any]) -> Measured:
        for name, kind in _CASE.items():
            if not isinstance(row[name], kind) or (kind is int and isinstance(row[name], bool)):
                raise TypeError(f"{name} is {str(row[name])[:40]!r}")
        for name, value in row["dims"].items():
            if type(value) is not int or not 0 < value < 2**53:
                raise TypeError(f"dims.{name} is {str(value)[:40]!r}")
        return cls(
            Case.from_json(op, row),
            {v: tuple(map(float, times)) for v, times in row["graph"].items()},
            {v: tuple(map(float, times)) for v, times in row["eager"].items()},
            row["failed"],
            row["calls"],
            row["rejected"],
            row["clock_mhz"],
            row["power_w"],
            row["temperature_c"],
        )


@dataclass(frozen=True)
class Raw:
    """A raw file that was read; `sha256` callers compute from the file's bytes."""

    header: Mapping[str, Any]
    measured: tuple[Measured, ...]

    @property
    def op(self) -> str:
        return str(self.header["op"])


def digits(value: float, figures: int = 4) -> float:
    """`value` to so many significant digits."""
    return float(f"{value:.{figures}g}")


@dataclass(frozen=True)
class Paths:
    """Where the files of one op and device lie under ``--out``."""

    out: Path
    op: str
    device: DeviceInfo

    def _work(self, suffix: str) -> Path:
        return self.out / self.op / "raw" / f"{self.op}-{self.device.table_name}{suffix}"

    @property
    def table(self) -> Path:
        return self.out / self.op / f"{self.device.table_name}.json"

    @property
    def packed(self) -> Path:
        return self._work(".jsonl.gz")

    @property
    def raw(self) -> Path:
        """Where `measure` appends; packed and removed by `emit`."""
        return self._work(".jsonl")

    @property
    def plan(self) -> Path:
        return self._work(".plan.json")

    @property
    def static(self) -> Path:
        return self._work(".static.json")

    @property
    def gate(self) -> Path:
        return self._work(".gate.json")

    def source(self) -> Path:
        """The raw file that `learn`, `verify` and `emit` read: the growing one if it is there, else the packed one."""
        return self.raw if self.raw.exists() else self.packed


def encode(row: Mapping[str, Any]) -> bytes:
    """One line."""
    return (json.dumps(row, ensure_ascii=True, allow_nan=False) + "\n").encode("ascii")


def pack(data: bytes) -> bytes:
    """Gzip without a time or a name in it."""
    return gzip.compress(data, compresslevel=9, mtime=0)


def read(path: Path) -> Raw:
    """A raw file, plain or gzipped. A last line without its newline (a run that was killed) is left out.

    Raises:
        RawError: damaged, of another schema, or without a header; names the file and the line.
        OSError: it cannot be read.
    """
    if path.exists() and not path.is_file():
        raise RawError(f"{path}: not a regular file")
    data = path.read_bytes()
    if path.suffix == ".gz":
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, ValueError) as error:
            raise RawError(f"{path}: not a whole gzip file: {error}") from None
    lines = data[: data.rfind(b"\n") + 1].splitlines()
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            kind = row["kind"]
        except (ValueError, KeyError, TypeError):
            raise RawError(f"{path}: line {number} is not a row of a raw file") from None
        if (kind == "header") != (number == 1):
            raise RawError(f"{path}: line {number}: {'no header first' if number == 1 else 'a second header'}")
        rows.append(row)
    if not rows:
        raise RawError(f"{path}: empty")
    header = rows[0]
    if header.get("schema") != SCHEMA:
        raise RawError(f"{path}: schema {header.get('schema')!r}, this version reads {SCHEMA}")
    _check_header(header, path)
    measured: dict[str, Measured] = {}
    for number, row in enumerate(rows[1:], 2):
        try:
            m = Measured.from_json(header["op"], row)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise RawError(f"{path}: line {number}: {type(error).__name__}: {error}") from None
        measured[m.case.key] = m
    return Raw(header, tuple(measured.values()))


def _check_header(header: Mapping[str, Any], path: Path) -> None:
    def fail(name: str) -> RawError:
        return RawError(f"{path}: line 1: {name} is {str(header.get(name))[:60]!r}")

    if not isinstance(header.get("op"), str):
        raise fail("op")
    for name in _HEADER:
        if not isinstance(header.get(name), dict):
            raise fail(name)
    device, names = header["device"], header["device"].get("names")
    named = isinstance(names, list) and bool(names) and all(isinstance(n, str) for n in names)
    if not (named and isinstance(device.get("arch"), str) and type(device.get("sms")) is int):
        raise fail("device")
    for name in ("kernels", "variants", "gate"):
        if not all(isinstance(v, dict) for v in header[name].values()):
            raise fail(name)
    if not all("passed" in verdict for verdict in header["gate"].values()):
        raise fail("gate")


class Appender:
    """Appends whole lines to a raw file, each on disk before the next case is measured.

    Raises:
        OSError: from the constructor or `add` where the file cannot be written (a full disk); the lines before stand.
    """

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: BinaryIO = open(path, "r+b" if path.exists() else "w+b")  # noqa: SIM115
        data = self._file.read()
        whole = data.rfind(b"\n") + 1
        self._file.seek(whole)
        self._file.truncate()

    def add(self, row: Mapping[str, Any]) -> None:
        start = self._file.tell()
        try:
            self._file.write(encode(row))
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError:
            self._file.seek(start)
            self._file.truncate()
            raise

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Appender:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
