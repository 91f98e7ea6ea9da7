"""The HTML page of results: pictures inlined, wins and losses, every row; readable without a network."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tritonops.dispatch.table import write_atomically

from .scores import HEAD, Row, cells, scores, shape_of, verdict_of, versions

if TYPE_CHECKING:
    from .canvas import Picture

WORST = 20

_STYLE = """\
body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 90em; padding: 0 1em; color: #222;
       background: #fff }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13px }
th, td { border-bottom: 1px solid #ddd; padding: .2em .6em; text-align: left; vertical-align: top }
div { overflow-x: auto; margin-bottom: 1em }
figure { margin: 1em 0 } img { max-width: 100% }
tr.loss td { background: #fbe9e2 } tr.win td { background: #e6f1f8 }"""


def missing() -> str | None:
    """Why no picture can be drawn here, or None."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        return f"matplotlib cannot be imported ({error}); pip install 'tritonops[bench]'"
    return None


def write(
    directory: Path, rows: Sequence[Row], environment: Mapping[str, Any], command: str, metrics: Sequence[str] = ()
) -> list[Path]:
    """Draw the pictures of some rows and write them, and `index.html` with all of them, each in one go.

    Args:
        metrics: of the line plots, as in pictures.draw.

    Raises:
        OSError: a file cannot be written.
    """
    from .pictures import draw

    drawn = draw(rows, environment, metrics)
    paths = []
    for picture in drawn:
        paths.append(directory / f"{picture.name}.png")
        write_atomically(paths[-1], picture.png)
    paths.append(directory / "index.html")
    write_atomically(paths[-1], html(rows, environment, command, drawn).encode())
    return paths


def html(rows: Sequence[Row], environment: Mapping[str, Any], command: str, drawn: Iterable[Picture]) -> str:
    """The document."""
    title = escape(f"Benchmarks on {versions(environment)}")
    losses = sorted((r for r in rows if verdict_of(r) == "loss"), key=lambda r: (r["speedup"], shape_of(r)))
    failed = [(str(r["provider"]), *_words(r), str(r["failed"])) for r in rows if r["failed"]]
    parts = [
        f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>{title}</title>',
        f'<meta name="viewport" content="width=device-width">\n<style>\n{_STYLE}\n</style>\n<h1>{title}</h1>',
        f"<p><code>{escape(command)}</code></p>" if command else "",
        "<p>All providers are timed in the same rounds, in random order. A ratio is time of torch / time of the "
        "provider, so above 1 the provider is faster; a win or a loss is where its 95 % interval leaves out 1. A "
        "result that the accuracy gate calls wrong is neither.</p>",
        "<h2>Wins and losses</h2>",
        _table(
            ("op", "pass", "mode", "provider", *HEAD), [[*s.key, *cells(s)] for s in scores(rows, "op", "pass", "mode")]
        ),
        f"<h2>The {min(WORST, len(losses))} worst losses of {len(losses)}</h2>" if losses else "<h2>No losses</h2>",
        _table(_ROW_HEAD, [_row(r) for r in losses[:WORST]]) if losses else "",
    ]
    if failed:
        parts += [
            "<h2>Wrong, or could not be timed</h2>",
            _table(("provider", "op", "pass", "shape", "dtype", "mode", "why"), failed),
        ]
    for picture in drawn:
        data, text = base64.b64encode(picture.png).decode(), escape(picture.caption)
        parts.append(
            f'<figure><img alt="{text}" src="data:image/png;base64,{data}"><figcaption>{text}</figcaption></figure>'
        )
    facts = [(name, _fact(value)) for name, value in environment.items()]
    parts += ["<h2>Environment</h2>", _table(("fact", "value"), facts)]
    parts += ["<h2>Every row</h2>", _table(_ROW_HEAD, [_row(r) for r in rows], [verdict_of(r) or "" for r in rows])]
    return "\n".join(part for part in parts if part) + "\n</html>\n"


def _fact(value: Any) -> str:
    if isinstance(value, dict):
        return "; ".join(f"{k}: {_fact(v)}" for k, v in value.items())
    return str(value)


def _words(row: Row) -> tuple[str, ...]:
    return str(row["op"]), str(row["pass"]), shape_of(row), str(row["dtype"]), str(row["mode"])


_ROW_HEAD = (
    "provider", "op", "pass", "shape", "dtype", "mode", "us", "torch / it", "95 %", "verdict", "TFLOP/s", "of copy",
    "variant", "suite",
)  # fmt: skip


def _row(row: Row) -> list[str]:
    low, high = row.get("speedup_ci95") or (None, None)
    number = {name: "" if row.get(name) is None else f"{row[name]:.4g}" for name in ("speedup", "tflops", "fraction")}
    return [
        str(row["provider"]),
        *_words(row),
        "" if row["ms"] is None else f"{row['ms'] * 1e3:.4g}",
        number["speedup"],
        "" if low is None else f"{low:.3f}-{high:.3f}",
        verdict_of(row) or "",
        number["tflops"],
        number["fraction"],
        str(row.get("variant") or ""),
        str(row["suite"]),
    ]


def _table(head: Sequence[str], body: Iterable[Sequence[str]], classes: Sequence[str] = ()) -> str:
    lines = ["<tr>" + "".join(f"<th>{escape(h)}</th>" for h in head) + "</tr>"]
    for i, row in enumerate(body):
        kind = f' class="{classes[i]}"' if classes and classes[i] else ""
        lines.append(f"<tr{kind}>" + "".join(f"<td>{escape(c)}</td>" for c in row) + "</tr>")
    return "<div><table>\n" + "\n".join(lines) + "\n</table></div>"
