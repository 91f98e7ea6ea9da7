"""Pictures of result rows: lines per sweep, who wins over the sizes, speed-up against torch, roofline."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.ticker import FixedLocator, FormatStrFormatter, MaxNLocator, NullFormatter, NullLocator

from .canvas import Looks, Picture, around, by_provider, figure_of, handles_of, looks_of, name_of, png
from .contender import BASE
from .results import key_of
from .rows import bytes_and_operations
from .scores import Row, grouped, is_trial, versions
from .winners import maps

_TICKS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.5, 2, 3, 5, 7, 10, 20, 50, 100, 1000)
# Fewer points than these are no line.
_SWEEP = 4
# Rows of one line plot or map have these in common.
_GROUP = ("suite", "op", "pass", "dtype", "mode")


@dataclass(frozen=True)
class Metric:
    """What a panel shows of a row: the axis with its unit, the value and its 95 % interval; None where it has none."""

    label: str
    value: Callable[[Row], tuple[float, float, float] | None]
    logarithmic: bool = False


def _per_time(amount: Callable[[Row], float | None]) -> Callable[[Row], tuple[float, float, float] | None]:
    def value(row: Row) -> tuple[float, float, float] | None:
        size = amount(row)
        if not size or row["ms"] is None:
            return None
        low, high = row.get("ci95") or (row["ms"], row["ms"])
        return size / row["ms"], size / high, size / low

    return value


def _latency(row: Row) -> tuple[float, float, float] | None:
    if row["ms"] is None:
        return None
    low, high = row.get("ci95") or (row["ms"], row["ms"])
    return row["ms"] * 1e3, low * 1e3, high * 1e3


def _speedup(row: Row) -> tuple[float, float, float] | None:
    if not row.get("speedup"):
        return None
    low, high = row.get("speedup_ci95") or (row["speedup"], row["speedup"])
    return row["speedup"], low, high


def metrics(environment: Mapping[str, Any]) -> dict[str, Metric]:
    """By name as --metrics has them."""
    copy = environment.get("copy_tbps")
    return {
        "latency": Metric("time (us a call)", _latency, True),
        "speedup": Metric("time of torch / time of it", _speedup, True),
        "tflops": Metric("TFLOP/s", _per_time(lambda row: bytes_and_operations(row)[1] / 1e9)),
        "gbps": Metric("GB/s of bytes that must move", _per_time(lambda row: bytes_and_operations(row)[0] / 1e6)),
        "fraction": Metric(
            "fraction of copy bandwidth",
            _per_time(lambda row: bytes_and_operations(row)[0] / 1e9 / copy if copy else None),
        ),
    }


def draw(
    rows: Iterable[Row], environment: Mapping[str, Any], wanted: Sequence[str] = (), *, overview: bool = False
) -> list[Picture]:
    """The pictures of some rows, the same bytes each time with the same matplotlib.

    Args:
        wanted: metrics of the line plots; default: the rate that counts for the op, time and speed-up.
        overview: speed-up and roofline alone.
    """
    timed = [row for row in rows if row["ms"] is not None and not is_trial(row)]
    looks = looks_of(timed)
    out = []
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update({"font.size": 8, "axes.grid": True, "grid.alpha": 0.3, "axes.axisbelow": True})
        for (mode,), of_mode in grouped(timed, lambda row: (row["mode"],)).items():
            out.append(speedup(of_mode, mode, environment, looks))
            if mode != "host":
                out += roofline(of_mode, mode, environment, looks)
            if overview:
                continue
            for key, found in grouped(of_mode, lambda row: tuple(str(row[n]) for n in _GROUP)).items():
                out += _lines(key, found, environment, looks, wanted)
                out += maps(key, found, environment, looks)
    return [picture for picture in out if picture is not None]


def _ratio_axis(panel: Any, low: float, high: float) -> None:
    """Ratios to torch on a logarithmic axis; below 1, where torch is faster, the ground is tinted."""
    low, high = min(0.9, low / 1.06), max(1.1, high * 1.06)
    panel.set(yscale="log", ylim=(low, high))
    panel.axhspan(low, 1.0, color="#D55E00", alpha=0.07, zorder=0)
    panel.axhline(1.0, color="black", linewidth=0.8)
    ticks = [t for t in _TICKS if low <= t <= high]
    if high / low > 3:
        ticks = [t for t in ticks if t not in (0.7, 0.8, 0.9, 1.1, 1.2)]
    panel.yaxis.set_major_locator(FixedLocator(ticks))
    panel.yaxis.set_major_formatter(FormatStrFormatter("%g"))
    panel.yaxis.set_minor_locator(NullLocator())


def speedup(rows: Sequence[Row], mode: str, environment: Mapping[str, Any], looks: Looks) -> Picture | None:
    """Every row against the time of torch, a panel for each op and pass."""
    torchs = {key_of(row): row["ms"] for row in rows if row["provider"] == BASE}
    shown = [r for r in rows if r["provider"] != BASE and _speedup(r) and key_of(r) in torchs]
    panels = grouped(shown, lambda row: (str(row["op"]), str(row["pass"])))
    if not panels:
        return None
    columns = min(len(panels), 3)
    figure, axes = figure_of(-(-len(panels) // columns), columns, (3.6, 3.0), f"{mode}: {versions(environment)}")
    for panel in axes[len(panels) :]:
        panel.set_visible(False)
    for panel, (key, found) in zip(axes, panels.items(), strict=False):
        for name, mine in by_provider(found, looks).items():
            x = [torchs[key_of(row)] * 1e3 for row in mine]
            y = [_speedup(row) or (1.0, 1.0, 1.0) for row in mine]
            colour, marker = looks[name]
            panel.vlines(x, [v[1] for v in y], [v[2] for v in y], colors=colour, linewidth=0.8, alpha=0.5)
            panel.scatter(x, [v[0] for v in y], s=16, marker=marker, c=colour, linewidths=0.8, alpha=0.85, zorder=3)
        panel.set(title=" ".join(key), xlabel="time of torch (us a call)", ylabel="speed-up over torch")
        panel.set(xscale="log", xlim=around([torchs[key_of(row)] * 1e3 for row in found]))
        panel.xaxis.set_minor_formatter(NullFormatter())
        values = [v for row in found for v in _speedup(row) or ()]
        _ratio_axis(panel, min(values), max(values))
    handles = handles_of(by_provider(shown, looks), looks)
    caption = f"speed-up over torch, {mode}: each point a row, its line the 95 % interval; tinted: torch is faster"
    return Picture(name_of("speedup", mode), caption, png(figure, handles))


def roofline(rows: Sequence[Row], mode: str, environment: Mapping[str, Any], looks: Looks) -> list[Picture]:
    """Operations a second over operations a byte; of ops that only move data, bytes a second over bytes."""
    panels = grouped(rows, lambda row: ("matmul" if row["op"] == "matmul" else str(row["op"]), str(row["dtype"])))
    columns = min(len(panels), 3)
    figure, axes = figure_of(-(-len(panels) // columns), columns, (3.6, 3.0), f"{mode}: {versions(environment)}")
    for panel in axes[len(panels) :]:
        panel.set_visible(False)
    copy, peak = environment.get("copy_tbps"), environment.get("matmul_tflops")
    roof: list[Any] = []
    for panel, (key, found) in zip(axes, panels.items(), strict=False):
        counted = key[0] == "matmul"
        xs: list[float] = []
        ys: list[float] = []
        for name, mine in by_provider(found, looks).items():
            needs = [bytes_and_operations(row) for row in mine]
            x = [ops / moved if counted else moved / 1e6 for moved, ops in needs]
            work = [ops if counted else moved for moved, ops in needs]
            y = [w / row["ms"] / 1e9 for w, row in zip(work, mine, strict=True)]
            colour, marker = looks[name]
            panel.scatter(x, y, s=14, marker=marker, c=colour, linewidths=0.8, alpha=0.8, zorder=3)
            xs, ys = xs + x, ys + y
        ends = around(xs)
        line = roof_between(*ends, copy, peak if counted else None) if copy and (peak or not counted) else []
        if line:
            (drawn,) = panel.plot(*zip(*line, strict=True), color="black", linewidth=1)
            roof = [drawn]
        unit = ("operations a byte", "TFLOP/s") if counted else ("MB that must move", "TB/s")
        panel.set(title=" ".join(key), xlabel=unit[0], ylabel=unit[1], xscale="log", yscale="log")
        panel.set(xlim=ends, ylim=around([*ys, *(height for _, height in line)]))
        for axis in (panel.xaxis, panel.yaxis):
            axis.set_minor_formatter(NullFormatter())
    if roof:
        product = f", product {peak:g} TFLOP/s" if peak else ""
        roof[0].set_label(f"measured roof: copy {copy:g} TB/s{product}")
    caption = f"roofline, {mode}: useful work a second; the line is what this GPU was measured to do at most"
    return [
        Picture(name_of("roofline", mode), caption, png(figure, [*handles_of(by_provider(rows, looks), looks), *roof]))
    ]


def roof_between(low: float, high: float, copy: float, peak: float | None) -> list[tuple[float, float]]:
    """Points of the ceiling between two abscissae; without `peak` that of bytes alone."""
    if peak is None:
        return [(low, copy), (high, copy)]
    bends = [low, *(at for at in (peak / copy,) if low < at < high), high]
    return [(at, min(peak, copy * at)) for at in bends]


@dataclass(frozen=True)
class Sweep:
    """Rows that differ in one size alone, or in all by the same (squares)."""

    axis: str
    fixed: str
    rows: tuple[Row, ...]


def sweeps(rows: Sequence[Row]) -> list[Sweep]:
    """Of rows of one op, pass, dtype and mode those along an axis with four sizes or more, each only once, longest
    first."""
    found: list[tuple[set[int], Sweep]] = []
    names = list(rows[0]["shape"]) if rows else []
    for axis in (*names, "="):
        of_axis = [r for r in rows if axis in r["shape"] or len(set(r["shape"].values())) == 1]

        def rest(row: Row, axis: str = axis) -> tuple[str, ...]:
            fixed = [f"{k}={v}" for k, v in row["shape"].items() if k != axis and axis != "="]
            words = [row["layout"], row["ids"], *(f"{k}={v}" for k, v in (row.get("traits") or {}).items())]
            return (" ".join([*fixed, *(str(w) for w in words if w)]),)

        for (fixed,), members in grouped(of_axis, rest).items():
            label = " = ".join(names) if axis == "=" else axis
            key = names[0] if axis == "=" else axis
            values = {row["shape"].get(key) for row in members}
            if len(values) >= _SWEEP:
                found.append((values, Sweep(label, fixed, tuple(members))))
    found.sort(key=lambda item: -len(item[0]))
    taken: set[int] = set()
    out = []
    for _, sweep in found:
        fresh = {id(row) for row in sweep.rows} - taken
        if len(fresh) * 2 > len(sweep.rows):
            taken |= fresh
            out.append(sweep)
    return out


def _lines(
    key: Sequence[str], rows: Sequence[Row], environment: Mapping[str, Any], looks: Looks,
    wanted: Sequence[str],
) -> list[Picture]:  # fmt: skip
    known = metrics(environment)
    rate = "tflops" if key[1] == "matmul" else "fraction" if environment.get("copy_tbps") else "gbps"
    chosen = [known[n] for n in wanted or (rate, "latency", "speedup") if n in known]
    out = []
    for sweep in sweeps(rows):
        shown = [m for m in chosen if any(m.value(row) for row in sweep.rows)]
        if not shown:
            continue
        title = f"{' '.join(key)}  {sweep.fixed}\n{versions(environment)}"
        figure, axes = figure_of(1, len(shown), (4.2, 3.2), title)
        for panel, metric in zip(axes, shown, strict=True):
            _line_panel(panel, sweep, metric, looks)
        caption = f"{' '.join(key)}, {sweep.fixed}: over {sweep.axis}; bands are 95 % intervals"
        name = name_of("lines", *key, sweep.axis, sweep.fixed)
        out.append(Picture(name, caption, png(figure, handles_of(by_provider(sweep.rows, looks), looks, "-"))))
    return out


def _line_panel(panel: Any, sweep: Sweep, metric: Metric, looks: Looks) -> None:
    axis, everything = sweep.axis.split(" = ")[0], []
    sizes = [row["shape"][axis] for row in sweep.rows]
    for name, mine in by_provider(sweep.rows, looks).items():
        points = sorted((row["shape"][axis], *v) for row in mine if (v := metric.value(row)))
        if not points:
            continue
        x, y, low, high = zip(*points, strict=True)
        colour, marker = looks[name]
        panel.fill_between(x, low, high, color=colour, alpha=0.2, linewidth=0)
        panel.plot(x, y, color=colour, marker=marker, markersize=3.5, linewidth=1.2)
        everything += [*low, *high]
    wide = max(sizes) / min(sizes) > 32
    panel.set(xlabel=sweep.axis, ylabel=metric.label, xscale="log" if wide else "linear")
    if wide:
        panel.set_xscale("log", base=2)
        panel.xaxis.set_major_formatter(FormatStrFormatter("%d"))
        panel.tick_params(axis="x", rotation=45)
    if metric.label.startswith("time of torch"):
        _ratio_axis(panel, min(everything), max(everything))
    elif metric.logarithmic:
        panel.set(yscale="log")
        if max(everything) / min(everything) < 20:
            panel.yaxis.set_major_locator(FixedLocator(_nice(min(everything), max(everything))))
            panel.yaxis.set_major_formatter(FormatStrFormatter("%g"))
            panel.yaxis.set_minor_locator(NullLocator())
    else:
        panel.set_ylim(bottom=0)


def _nice(low: float, high: float) -> list[float]:
    return [float(t) for t in MaxNLocator(6, steps=[1, 2, 5, 10]).tick_values(low, high) if t > 0]
