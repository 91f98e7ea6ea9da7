"""Maps over the sizes: which provider is fastest, and which of our variants serves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from matplotlib.colors import to_rgb
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import NullFormatter

from .canvas import Looks, Picture, around, figure_of, name_of, png
from .contender import BASE
from .results import key_of
from .scores import Row, grouped, verdict_of, versions

# Colours of our variants, told from those of providers by their legend; grey is torch's kernel, as everywhere.
_VARIANTS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#8C564B", "#A5AA99")
_VENDOR = "vendor"
# A grid with less than this share of its cells measured, or more columns, is shown as points.
_FULL, _COLUMNS, _LINES = 0.3, 40, 40

_LOSS: dict[str, Any] = {"edgecolor": "black", "linewidth": 1.3}

# A label of the legend and what is written in the cell.
Cell = tuple[str, str]


def best(entry: Sequence[Row]) -> Row | None:
    """Of the rows of one entry the fastest right one whose 95 % interval says that it beats torch; else torch's."""
    winners = [r for r in entry if verdict_of(r) == "win" and not r["failed"]]
    base = [r for r in entry if r["provider"] == BASE and r["ms"] is not None]
    return min(winners or base, key=lambda r: (r["ms"], str(r["provider"])), default=None)


def maps(key: Sequence[str], rows: Sequence[Row], environment: Mapping[str, Any], looks: Looks) -> list[Picture]:
    """One map of the fastest provider, one of the variants that served where ours is among the providers."""
    entries = list(grouped(rows, lambda row: (key_of(row),)).values())
    if len(entries) < 2:
        return []
    out = []
    fastest = [(row, (str(row["provider"]), f"{row.get('speedup') or 1:.2f}")) for e in entries if (row := best(e))]
    if len(looks) > 1:
        caption = (
            f"{' '.join(key)}: the fastest provider, and its speed-up over torch; torch unless it is beaten for sure"
        )
        colours = {name: look[0] for name, look in looks.items()}
        out.append(_picture("winner", key, fastest, colours, environment, caption))
    ours = [row for row in rows if row["provider"] == "ours" and row["variant"]]
    if ours:
        labels = _labels(str(row["variant"]) for row in ours)
        served = [(row, (labels[str(row["variant"])], f"{row.get('speedup') or 1:.2f}")) for row in ours]
        colours = _colours(labels.values())
        caption = f"{' '.join(key)}: the variant that ours chose, and its speed-up over torch"
        out.append(_picture("variant", key, served, colours, environment, caption))
    return [picture for picture in out if picture is not None]


def _labels(variants: Iterable[str]) -> dict[str, str]:
    """Variants by themselves, or by their family where there are more than colours."""
    found = sorted(set(variants))
    few = len(found) <= len(_VARIANTS)
    return {vid: vid if few else vid.partition("/")[0] for vid in found}


def _colours(labels: Iterable[str]) -> dict[str, str]:
    names = sorted(set(labels) - {_VENDOR})
    found = {name: _VARIANTS[i % len(_VARIANTS)] for i, name in enumerate(names)}
    return ({_VENDOR: "#999999"} if _VENDOR in labels else {}) | found


def _axes(rows: Sequence[Row]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(what goes across, what goes up): sizes that vary, the last of a product's sweep over K alone across."""
    names = list(rows[0]["shape"])
    varied = [n for n in names if len({row["shape"].get(n) for row in rows}) > 1]
    if len(varied) < 2:
        return tuple(varied or names[-1:]), ()
    return tuple(varied[1:]), (varied[0],)


def _picture(
    what: str, key: Sequence[str], found: Sequence[tuple[Row, Cell]], colours: Mapping[str, str],
    environment: Mapping[str, Any], caption: str,
) -> Picture | None:  # fmt: skip
    """A panel for each layout and kind of ids."""
    names = ("layout", "ids", "traits")
    panels: dict[str, list[tuple[Row, Cell]]] = {}
    for row, cell in found:
        panels.setdefault(" ".join(str(row[n]) for n in names if row.get(n)), []).append((row, cell))
    forms = [_grid(members) for members in panels.values()]
    if not forms:
        return None
    width = max(0.42 * len(f[0]) + 1.6 if f else 4.6 for f in forms)
    height = sum(0.26 * max(len(f[1]), 2) + 0.9 if f else 3.6 for f in forms)
    subject = "fastest" if what == "winner" else "variant of ours"
    title = f"{' '.join(key)}: {subject}, times torch's speed\n{versions(environment)}"
    figure, axes = figure_of(len(forms), 1, (max(width, 5.5), height / len(forms)), title)
    for panel, (name, members), form in zip(axes, panels.items(), forms, strict=True):
        if form:
            _draw_grid(panel, members, form, colours)
        else:
            _draw_points(panel, members, colours)
        panel.set_title(name)
    seen = {cell[0] for _, cell in found}
    handles = [Patch(color=colour, label=name) for name, colour in colours.items() if name in seen]
    if any(verdict_of(row) == "loss" for row, _ in found):
        handles.append(Patch(label="slower than torch", fill=False, **_LOSS))
    return Picture(name_of(what, *key), caption, png(figure, handles))


Form = tuple[list[tuple[int, ...]], list[tuple[int, ...]]]


def _grid(members: Sequence[tuple[Row, Cell]]) -> Form | None:
    """(columns, lines) of a grid; None where too little of it was measured or it is too large."""
    across, up = _axes([row for row, _ in members])
    columns = sorted({tuple(row["shape"].get(n, 1) for n in across) for row, _ in members})
    lines = sorted({tuple(row["shape"].get(n, 1) for n in up) for row, _ in members})
    full = len(members) / (len(columns) * len(lines))
    return (columns, lines) if full >= _FULL and len(columns) <= _COLUMNS and len(lines) <= _LINES else None


def _draw_grid(panel: Any, members: Sequence[tuple[Row, Cell]], form: Form, colours: Mapping[str, str]) -> None:
    across, up = _axes([row for row, _ in members])
    columns, lines = form
    pixels = [[(1.0, 1.0, 1.0)] * len(columns) for _ in lines]
    for row, (label, text) in members:
        i = lines.index(tuple(row["shape"].get(n, 1) for n in up))
        j = columns.index(tuple(row["shape"].get(n, 1) for n in across))
        pixels[i][j] = to_rgb(colours[label])
        r, g, b = pixels[i][j]
        dark = 0.3 * r + 0.59 * g + 0.11 * b < 0.5
        panel.text(j, i, text, ha="center", va="center", fontsize=6, color="white" if dark else "black")
        if verdict_of(row) == "loss":
            panel.add_patch(Rectangle((j - 0.46, i - 0.44), 0.92, 0.88, fill=False, **_LOSS))
    panel.imshow(pixels, aspect="auto", origin="lower", interpolation="nearest")
    panel.grid(False)
    panel.set_xticks(range(len(columns)), ["x".join(map(str, c)) for c in columns], rotation=90, fontsize=6)
    panel.set_yticks(range(len(lines)) if up else (), ["x".join(map(str, c)) for c in lines] if up else (), fontsize=6)
    panel.set(xlabel=" x ".join(across), ylabel=" x ".join(up))


def _draw_points(panel: Any, members: Sequence[tuple[Row, Cell]], colours: Mapping[str, str]) -> None:
    """M over N x K on logarithmic axes, the sizes too scattered for a grid."""
    rows = [row for row, _ in members]
    across, up = _axes(rows)
    x, y = ([_product(row, names) for row in rows] for names in (across, up))
    for label, colour in colours.items():
        at = [i for i, (_, cell) in enumerate(members) if cell[0] == label]
        edges = ["black" if verdict_of(rows[i]) == "loss" else "white" for i in at]
        if at:
            panel.scatter([x[i] for i in at], [y[i] for i in at], s=30, c=colour, edgecolors=edges, linewidths=0.8)
    panel.set(xscale="log", yscale="log", xlim=around(x), ylim=around(y))
    panel.set(xlabel=" x ".join(across), ylabel=" x ".join(up))
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_minor_formatter(NullFormatter())


def _product(row: Row, names: Sequence[str]) -> int:
    out = 1
    for name in names:
        out *= row["shape"].get(name, 1)
    return out
