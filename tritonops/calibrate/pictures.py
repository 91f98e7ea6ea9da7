"""Pictures of one op's table over its measured shapes: what serves where, the speed-up over torch, the roofline."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import matplotlib
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FormatStrFormatter, NullFormatter, NullLocator

from ..dispatch import table
from ..dispatch.problem import MODES
from ..dispatch.select import ranked_by_table
from ..dispatch.store import Loaded
from ..dispatch.variant import VENDOR, OpSpec
from .emit import emit
from .learn import Learned
from .raw import Raw
from .samples import Gain, Sample, device_of, samples
from .verify import Report, useful

# Okabe and Ito's palette, which colour-blind readers can tell apart; grey is torch.
_TORCH = "#999999"
_OURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")
_LEARNED, _HELD_OUT = "o", "^"
_COLUMNS = 4
_TICKS = (0.1, 0.2, 0.3, 0.5, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.5, 2, 3, 5, 7, 10, 20, 50, 100)
# What the two axes of a map are: products of sizes.
_AXES = {
    "matmul": (("batch", "M"), ("N", "K")),
    "embedding": (("T",), ("D",)),
    "embedding_backward": (("T",), ("D",)),
}


@dataclass(frozen=True)
class Served:
    """A measured case and what the table gives it."""

    sample: Sample
    choice: str

    @property
    def family(self) -> str:
        return self.choice.partition("/")[0]

    @property
    def gain(self) -> Gain:
        return self.sample.gains[self.choice]

    @property
    def heldout(self) -> bool:
        return self.sample.measured.case.heldout

    @property
    def where(self) -> str:
        """The section that it belongs to, in words."""
        p = self.sample.measured.case.problem
        return " ".join(w for w in (p.table_dtype, p.layout, "aligned" if p.aligned else "misaligned") if w)


def served(raw: Raw, learned: Learned, report: Report, spec: OpSpec, mode: str) -> list[Served]:
    """Every measured case with the choice of the table that `emit` makes, leaves refused included."""
    made = emit(raw, learned, report, f"{raw.op}.jsonl.gz", "0" * 64)
    loaded = Loaded(table.parse(made, "(learned)", op=raw.op, features={*spec.dims, *spec.feature_names}))
    device, out = device_of(raw), []
    for heldout in (False, True):
        for sample in samples(raw, spec, mode, heldout=heldout):
            problem = replace(sample.measured.case.problem, mode=mode)
            ids = ranked_by_table(spec, problem, device, loaded).ids
            out.append(Served(sample, next(vid for vid in ids if vid in sample.gains)))
    return out


def draw(raw: Raw, learned: Learned, report: Report, spec: OpSpec) -> dict[str, tuple[str, bytes]]:
    """By name, what each picture shows and its PNG; the same bytes each time with the same matplotlib."""
    rows = {mode: served(raw, learned, report, spec, mode) for mode in MODES}
    if not any(rows.values()):
        return {}
    families = sorted({row.family for found in rows.values() for row in found} - {VENDOR})
    colours = {VENDOR: _TORCH} | {name: _OURS[i % len(_OURS)] for i, name in enumerate(families)}
    drawn: dict[str, tuple[str, bytes]] = {}
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update({"font.size": 8, "axes.grid": True, "grid.alpha": 0.3, "axes.axisbelow": True})
        for mode in reversed(MODES):
            drawn[f"map-{mode}"] = f"what serves each measured shape, {mode}", _map(rows[mode], spec, colours)
        drawn["speedup"] = "speed-up over torch", _speedup(rows, colours)
        drawn["roofline"] = "roofline, graph", _roofline(rows["graph"], raw, colours)
    return drawn


def _grid(count: int, width: float = 3.2, height: float = 2.9) -> tuple[Figure, list[Any]]:
    """A figure of `count` panels, at least one."""
    columns = max(1, min(count, _COLUMNS))
    lines = max(1, -(-count // columns))
    figure = Figure(figsize=(max(width * columns, 4.8), height * lines + 0.5), layout="constrained", dpi=110)
    FigureCanvasAgg(figure)
    panels = list(figure.subplots(lines, columns, squeeze=False).flat)
    for panel in panels[max(count, 1) :]:
        panel.set_visible(False)
    return figure, panels[: max(count, 1)]


def _png(figure: Figure, rows: Sequence[Served], colours: Mapping[str, str], extra: Sequence[Any] = ()) -> bytes:
    """With one legend of the families seen and, where both are there, the two markers."""
    seen = {row.family for row in rows}
    handles = [
        _handle(f"{name} (torch)" if name == VENDOR else name, _LEARNED, colour)
        for name, colour in colours.items()
        if name in seen
    ]
    if any(row.heldout for row in rows):
        handles += [_handle("learned from", _LEARNED, "black"), _handle("held out", _HELD_OUT, "black")]
    handles += extra
    if handles:
        figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 5), frameon=False)
    out = io.BytesIO()
    figure.savefig(out, format="png", metadata={"Software": None})
    return out.getvalue()


def _handle(label: str, marker: str, colour: str) -> Line2D:
    return Line2D([], [], linestyle="", marker=marker, color=colour, label=label)


def _points(
    panel: Any, rows: Sequence[Served], x: Sequence[float], y: Sequence[float], colours: Mapping[str, str]
) -> None:
    """One marker a case; torch's below ours."""
    for name in colours:
        for heldout, marker in ((False, _LEARNED), (True, _HELD_OUT)):
            at = [i for i, row in enumerate(rows) if row.family == name and row.heldout == heldout]
            if at:
                panel.scatter(
                    [x[i] for i in at], [y[i] for i in at],
                    s=26, marker=marker, c=colours[name], edgecolors="white", linewidths=0.4, zorder=3,
                )  # fmt: skip


def _decades(panel: Any, x: Sequence[float], y: Sequence[float] = ()) -> None:
    """Logarithmic axes over whole decades, so that each has two labels at least."""
    for name, values in (("x", x), ("y", y)):
        if values:
            panel.set(**{f"{name}scale": "log", f"{name}lim": _around(values)})
            getattr(panel, f"{name}axis").set_minor_formatter(NullFormatter())


def _around(values: Sequence[float]) -> tuple[float, float]:
    return 10.0 ** math.floor(math.log10(min(values)) - 0.05), 10.0 ** math.ceil(math.log10(max(values)) + 0.05)


def _by(rows: Sequence[Served], key: Any) -> dict[str, list[Served]]:
    found: dict[str, list[Served]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return dict(sorted(found.items()))


def _map(rows: Sequence[Served], spec: OpSpec, colours: Mapping[str, str]) -> bytes:
    across, up = _AXES.get(spec.name, ((spec.dims[0],), (spec.dims[min(1, len(spec.dims) - 1)],)))
    sections = _by(rows, lambda row: row.where)
    figure, panels = _grid(len(sections))
    sizes = [row.sample.measured.case.problem.dims for row in rows]
    x, y = ([math.prod(d[k] for k in names) for d in sizes] for names in (across, up))
    for panel, name in zip(panels, sections, strict=False):
        at = [i for i, row in enumerate(rows) if row.where == name]
        _points(panel, [rows[i] for i in at], [x[i] for i in at], [y[i] for i in at], colours)
        panel.set(title=name, xlabel=" x ".join(across), ylabel=" x ".join(up))
        _decades(panel, x, y)
    return _png(figure, rows, colours)


def _speedup(by_mode: Mapping[str, list[Served]], colours: Mapping[str, str]) -> bytes:
    figure, panels = _grid(len(by_mode), 5.5, 4.2)
    for panel, (mode, rows) in zip(panels, sorted(by_mode.items(), reverse=True), strict=True):
        x = [_vendor_ms(row, mode) for row in rows]
        y = [row.gain.value for row in rows]
        panel.vlines(x, [r.gain.low for r in rows], [r.gain.high for r in rows], colors="#bbbbbb", linewidth=0.7)
        _points(panel, rows, x, y, colours)
        panel.axhline(1.0, color="black", linewidth=0.8)
        panel.set(title=mode, xlabel="time of torch (ms a call)", ylabel="speed-up over torch (line: 95 % interval)")
        _decades(panel, x)
        low = min([0.9, *(row.gain.low / 1.05 for row in rows)])
        high = max([1.1, *(row.gain.high * 1.05 for row in rows)])
        panel.set(yscale="log", ylim=(low, high))
        panel.yaxis.set_major_locator(FixedLocator([t for t in _TICKS if low <= t <= high]))
        panel.yaxis.set_major_formatter(FormatStrFormatter("%g"))
        panel.yaxis.set_minor_locator(NullLocator())
    return _png(figure, [row for rows in by_mode.values() for row in rows], colours)


def _vendor_ms(row: Served, mode: str) -> float:
    m = row.sample.measured
    return median(m.eager[VENDOR] if mode == "eager" and m.eager else m.graph[VENDOR])


def _roofline(rows: Sequence[Served], raw: Raw, colours: Mapping[str, str]) -> bytes:
    """Operations a second over operations a byte; where an op only moves data, bytes a second over bytes."""
    dtypes = _by(rows, lambda row: row.sample.measured.case.problem.table_dtype)
    figure, panels = _grid(len(dtypes), 3.6, 3.2)
    copy, peak = (raw.header["device"].get(name) for name in ("copy_tbps", "matmul_tflops"))
    roofs: dict[str, Any] = {}
    for panel, (name, mine) in zip(panels, dtypes.items(), strict=False):
        needs = []
        for row in mine:
            p = row.sample.measured.case.problem
            needs.append(useful(raw.op, p.dims, getattr(torch, p.dtype).itemsize))
        counted = all(operations for operations, _ in needs)
        x = [operations / moved if counted else moved / 1e6 for operations, moved in needs]
        work = [operations if counted else moved for operations, moved in needs]
        graph = [row.sample.measured.graph for row in mine]
        theirs, ours = (
            [w / median(times[vid]) / 1e9 for w, times, vid in zip(work, graph, ids, strict=True)]
            for ids in ([VENDOR] * len(mine), [row.choice for row in mine])
        )
        roofs["torch"] = panel.scatter(
            x, theirs, s=36, facecolors="none", edgecolors=_TORCH, linewidths=0.8, label="torch, same case"
        )
        _points(panel, mine, x, ours, colours)
        line: list[tuple[float, float]] = []
        if copy and (peak or not counted):
            line, label = _roof(*_around(x), copy, peak if counted else None)
            (roofs["roof"],) = panel.plot(*zip(*line, strict=True), color="black", linewidth=1, label=label)
        panel.set(
            title=name, xlabel="operations a byte" if counted else "MB that must move",
            ylabel="TFLOP/s" if counted else "TB/s",
        )  # fmt: skip
        _decades(panel, x, [*theirs, *ours, *(height for _, height in line)])
    return _png(figure, rows, colours, [roofs[k] for k in ("torch", "roof") if k in roofs])


def _roof(low: float, high: float, copy: float, peak: float | None) -> tuple[list[tuple[float, float]], str]:
    """Points of the measured ceiling between two abscissae, and what it is; without `peak` that of bytes alone."""
    if peak is None:
        return [(low, copy), (high, copy)], f"measured: copy {copy:g} TB/s"
    bends = [low, *(at for at in (peak / copy,) if low < at < high), high]
    label = f"measured: copy {copy:g} TB/s, bfloat16 product {peak:g} TFLOP/s"
    return [(at, min(peak, copy * at)) for at in bends], label
