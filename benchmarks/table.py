"""The table that a run ends with."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from .contender import BASE
from .rows import bytes_and_operations

Row = Mapping[str, Any]


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _interval(row: Row) -> str:
    low, high = row["speedup_ci95"] or (None, None)
    return "" if low is None else f"{row['speedup']:.3f} ({low:.3f}-{high:.3f})"


def _gbps(row: Row) -> str:
    return "" if not row["ms"] else f"{bytes_and_operations(row)[0] / row['ms'] / 1e6:.0f}"


# Columns by metric; each is a heading and what a row shows there.
METRICS: dict[str, tuple[tuple[str, Callable[[Row], str]], ...]] = {
    "latency": (("us", lambda r: "" if not r["ms"] else f"{r['ms'] * 1e3:.4g}"),),
    "speedup": (("torch / it (95 %)", _interval), ("", lambda r: r["verdict"] or "")),
    "tflops": (("TFLOP/s", lambda r: _number(r["tflops"], ".4g")),),
    "gbps": (("GB/s", _gbps),),
    "fraction": (("of copy", lambda r: _number(r["fraction"], ".2f")),),
    "accuracy": (
        ("error", lambda r: _number(r["error"], ".1e")),
        ("torch's", lambda r: _number(r["error_torch"], ".1e")),
    ),
}
DEFAULT_METRICS = ("latency", "speedup", "tflops", "fraction", "accuracy")


def lines(rows: Iterable[Row], metrics: Sequence[str] = DEFAULT_METRICS) -> list[str]:
    """A line for each row under its entry; failures and launch-bound rows say so at their end."""
    columns = [column for name in metrics for column in METRICS[name]]
    cells: list[list[str]] = [["", "provider", *(heading for heading, _ in columns), ""]]
    last = ""
    for row in rows:
        shape = "x".join(map(str, row["shape"].values()))
        more = [f"{k}={v}" for k, v in row.get("traits", {}).items()]
        words = (row["op"], row["pass"], row["dtype"], row["layout"], row["ids"], *more, shape, row["mode"])
        title = " ".join(str(w) for w in words if w)
        notes = [row["variant"] or "", "launch-bound" if row["launch_bound"] else ""]
        notes += [f"FAILED: {row['failed']}"] if row["failed"] else []
        cells.append(
            [
                title if title != last else "",
                row["provider"],
                *(show(row) for _, show in columns),
                ", ".join(n for n in notes if n),
            ]
        )
        last = title
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]) - 1)]
    return ["  ".join([*_padded(row, widths), row[-1]]).rstrip() for row in cells]


def _padded(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    """The names to the left, the numbers to the right."""
    return [c.ljust(w) if i < 2 else c.rjust(w) for i, (c, w) in enumerate(zip(row[:-1], widths, strict=True))]


def summary(rows: Iterable[Row]) -> list[str]:
    """Wins, losses and ties of each provider against torch, and the geometric mean of its speed."""
    by: dict[str, list[Row]] = {}
    for row in rows:
        by.setdefault(row["provider"], []).append(row)
    out = []
    for name, found in by.items():
        if name == BASE:
            continue
        timed = [r for r in found if r["ms"]]
        count = {v: sum(r["verdict"] == v for r in timed) for v in ("win", "loss", "tie")}
        text = f"{name}: {count['win']} wins, {count['loss']} losses, {count['tie']} ties against torch"
        if timed:
            mean = math.exp(math.fsum(math.log(r["speedup"]) for r in timed) / len(timed))
            worst = min(timed, key=lambda r: r["speedup"])
            text += f", {mean:.3f} x torch's speed in the geomean, worst {worst['speedup']:.3f}"
        wrong = [r for r in timed if r["failed"]]
        if wrong:
            text += f"; {len(wrong)} wrong by the accuracy gate"
        if len(found) > len(timed):
            text += f"; {len(found) - len(timed)} could not be timed"
        out.append(text)
    return out
