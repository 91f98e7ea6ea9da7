"""What the pictures of results share: figures, and one look of a provider in all of them."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from .contender import BASE
from .scores import Row, grouped

Looks = Mapping[str, tuple[str, str]]

# Okabe and Ito's palette, which colour-blind readers can tell apart; grey is torch. Markers say it once more.
_LOOKS = {
    BASE: ("#999999", "s"), "ours": ("#0072B2", "o"), "liger": ("#E69F00", "^"), "quack": ("#009E73", "v"),
    "compile": ("#56B4E9", "D"), "compile-max-autotune": ("#D55E00", "P"), "flaggems": ("#CC79A7", "X"),
    "tutorial": ("#000000", "+"),
}  # fmt: skip
_OTHERS = ("#F0E442", "#8C564B", "#7F3C8D", "#11A579", "#3969AC", "#A5AA99")
_MARKERS = "<>hpd*"


@dataclass(frozen=True)
class Picture:
    """A PNG by name, and what it shows in words."""

    name: str
    caption: str
    png: bytes


def looks_of(rows: Iterable[Row]) -> dict[str, tuple[str, str]]:
    """Colour and marker by provider, in the order of the legend."""
    names = list(dict.fromkeys(str(row["provider"]) for row in rows))
    rest = [name for name in names if name not in _LOOKS]
    found = {name: look for name, look in _LOOKS.items() if name in names}
    return found | {n: (_OTHERS[i % len(_OTHERS)], _MARKERS[i % len(_MARKERS)]) for i, n in enumerate(rest)}


def figure_of(lines: int, columns: int, size: tuple[float, float], title: str) -> tuple[Figure, list[Any]]:
    figure = Figure(figsize=(max(size[0] * columns, 4.8), size[1] * lines + 1.0), layout="constrained", dpi=110)
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=9)
    return figure, list(figure.subplots(lines, columns, squeeze=False).flat)


def png(figure: Figure, handles: Sequence[Any]) -> bytes:
    if handles:
        figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 6), frameon=False)
    out = io.BytesIO()
    figure.savefig(out, format="png", metadata={"Software": None})
    return out.getvalue()


def name_of(*words: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", "-".join(words)).strip("-").lower()


def by_provider(rows: Iterable[Row], looks: Mapping[str, tuple[str, str]]) -> dict[str, list[Row]]:
    """Rows by provider in the order of the legend."""
    by = grouped(rows, lambda row: (str(row["provider"]),))
    return {name: by[(name,)] for name in looks if (name,) in by}


def handles_of(names: Iterable[str], looks: Mapping[str, tuple[str, str]], line: str = "") -> list[Any]:
    return [
        Line2D([], [], linestyle=line, marker=looks[n][1], color=looks[n][0], markersize=5, label=n) for n in names
    ]  # fmt: skip


def around(values: Sequence[float]) -> tuple[float, float]:
    return 10.0 ** math.floor(math.log10(min(values)) - 0.05), 10.0 ** math.ceil(math.log10(max(values)) + 0.05)
