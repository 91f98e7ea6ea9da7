"""What --report writes: pictures of each op's table and one page that holds them, readable without a network.

A pure function of the raw file and what was learned and scored from it: no date, no path and no host of today.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from ..dispatch.table import write_atomically
from ..dispatch.variant import REGISTRY, VENDOR

if TYPE_CHECKING:
    from .learn import Learned
    from .raw import Raw
    from .verify import Report, Score, Scored

WORST = 10

_STYLE = """\
body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 90em; padding: 0 1em; color: #222;
       background: #fff }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13px }
th, td { border-bottom: 1px solid #ddd; padding: .2em .6em; text-align: left; vertical-align: top }
td.n { text-align: right; white-space: nowrap }
div { overflow-x: auto; margin-bottom: 1em }
figure { margin: 1em 0 } img { max-width: 100% }
.no { color: #a00; font-weight: 600 }"""


def check() -> str | None:
    """Why no picture can be drawn here, or None."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        return f"matplotlib cannot be imported ({error}); pip install 'tritonops[bench]'"
    return None


def write(directory: Path, entries: Sequence[tuple[Raw, Learned, Report]]) -> list[Path]:
    """Draw the pictures of each op, `<op>-map-graph.png` and the like, and write them and `index.html`, each in one go.

    Raises:
        OSError: a file cannot be written.
    """
    from .pictures import draw

    parts, paths = [], []
    for raw, learned, report in entries:
        drawn = draw(raw, learned, report, REGISTRY[raw.op])
        for name, (_, data) in drawn.items():
            paths.append(directory / f"{raw.op}-{name}.png")
            write_atomically(paths[-1], data)
        parts.append(_op(raw, learned, report, drawn))
    headers = {raw.op: raw.header for raw, _, _ in entries}
    paths.append(directory / "index.html")
    write_atomically(paths[-1], page(headers, parts).encode())
    return paths


def page(headers: Mapping[str, Mapping[str, Any]], parts: Iterable[str]) -> str:
    """The document, from the raw files' headers by op and the part of each op."""
    names = sorted({str(name) for head in headers.values() for name in head["device"].get("names", ())})
    title = escape(f"tritonops on {', '.join(names)}")
    contents = " ".join(f'<a href="#{escape(op)}">{escape(op)}</a>' for op in headers)
    return (
        f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>{title}</title>\n'
        f'<meta name="viewport" content="width=device-width">\n<style>\n{_STYLE}\n</style>\n'
        f"<h1>{title}</h1>\n<p>{contents}</p>\n"
        "<p>Each time is compared with torch's of the same round; speed-ups are time of torch / time of the choice, so "
        "above 1 the choice is faster. Shapes held out were not learned from.</p>\n"
        f"<h2>Environment</h2>\n{_environment(headers)}\n" + "\n".join(parts) + "\n</html>\n"
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Numbers are those cells that are no text."""
    lines = ["<tr>" + "".join(f"<th>{escape(h)}</th>" for h in head) + "</tr>"]
    for row in rows:
        cells = (
            f"<td>{escape(c)}</td>" if isinstance(c, str) else f'<td class="n">{"" if c is None else f"{c:g}"}</td>'
            for c in row
        )
        lines.append("<tr>" + "".join(cells) + "</tr>")
    return "<div><table>\n" + "\n".join(lines) + "\n</table></div>"


def _environment(headers: Mapping[str, Mapping[str, Any]]) -> str:
    """One row a fact; where ops differ in it, each op's."""
    facts: dict[str, dict[str, str]] = {}
    for op, head in headers.items():
        for group in ("device", "made_with", "method"):
            for name, value in head[group].items():
                text = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
                facts.setdefault(f"{group} {name}", {})[op] = text
    rows = []
    for name, by_op in facts.items():
        same = len(set(by_op.values())) == 1 and len(by_op) == len(headers)
        rows.append((name, next(iter(by_op.values())) if same else "; ".join(f"{op}: {v}" for op, v in by_op.items())))
    return _table(("fact", "value"), rows)


def _op(raw: Raw, learned: Learned, report: Report, drawn: Mapping[str, tuple[str, bytes]]) -> str:
    held = sum(m.case.heldout for m in raw.measured)
    verdict = "meets every bar" if report.passed else '<span class="no">misses a bar</span>'
    out = [
        f'<h2 id="{escape(raw.op)}">{escape(raw.op)}</h2>',
        f"<p>{len(raw.measured)} cases, {held} of them held out; the table {verdict}. Pictures show the table as it is "
        "written, where a refused leaf is torch's; the rows below score the trees as they were learned.</p>",
        _modes(report),
    ]
    for what, data in drawn.values():
        text = escape(f"{raw.op}: {what}")
        inline = base64.b64encode(data).decode()
        out.append(
            f'<figure><img alt="{text}" src="data:image/png;base64,{inline}"><figcaption>{text}</figcaption></figure>'
        )
    out += ["<h3>Sections</h3>", _sections(learned, report), "<h3>Worst on held-out shapes</h3>", _worst(report)]
    left = _left_out(raw)
    if left:
        out += ["<h3>Variants left out</h3>", _table(("variant", "why", "cases"), left)]
    return "\n".join(out)


def _modes(report: Report) -> str:
    from .verify import geomean

    rows = []
    for mode in sorted({s.when["mode"] for s in report.scores}, reverse=True):
        found = report.rows_of(mode)
        if found:
            gains = [row.gain.value for row in found]
            of_best = geomean([row.of_oracle for row in found])
            rows.append((mode, len(found), _round(geomean(gains)), _round(min(gains)), _round(of_best)))
    return _table(("held out", "cases", "geomean against torch", "worst", "geomean against the best measured"), rows)


def _round(value: float) -> float:
    return round(value, 3)


def _sections(learned: Learned, report: Report) -> str:
    head = (
        "section", "mode", "sizes", "traits", "shapes", "held out", "against torch", "worst", "95 % interval",
        "against the best", "noise", "serve there", "remark",
    )  # fmt: skip
    rows = []
    for section, score in zip(learned.sections, report.scores, strict=True):
        when, found = section.when, score.evidence()
        interval = found.get("worst_vendor_ci95")
        rows.append((
            " ".join(w for w in (when["dtype"], when["layout"], "aligned" if when["aligned"] else "misaligned") if w),
            when["mode"],
            ", ".join(f"{k} {low}-{high}" for k, (low, high) in section.hull.items()),
            ", ".join(f"{k}={v}" for k, v in section.evidence.get("traits", {}).items()),
            section.evidence["shapes"],
            found["shapes"],
            found.get("geomean_vendor"),
            found.get("worst_vendor"),
            f"{interval[0]:g}-{interval[1]:g}" if interval else "",
            found.get("geomean_oracle"),
            found.get("noise"),
            ", ".join(sorted(_first(score.tree))),
            _remark(score),
        ))  # fmt: skip
    return _table(head, rows)


def _remark(score: Score) -> str:
    if not score.rows:
        return "nothing held out"
    said = [] if score.heldout else ["cross-validated by shape"]
    return ", ".join([*said, *([f"refused: {score.refused}"] if score.refused else [])])


def _first(tree: Mapping[str, Any]) -> set[str]:
    """What the leaves choose."""
    return {tree["use"][0]} if "use" in tree else _first(tree["yes"]) | _first(tree["no"])


def _worst(report: Report) -> str:
    head = (
        "case", "from", "mode", "choice", "time of torch / of the choice", "95 % interval", "best measured",
        "time of the best / of the choice", "torch ms", "choice ms",
    )  # fmt: skip
    rows = []
    for mode in sorted({s.when["mode"] for s in report.scores}, reverse=True):
        ordered = sorted(report.rows_of(mode), key=lambda row: (row.gain.value, row.sample.measured.case.key))
        rows += [_case(row, mode) for row in ordered[:WORST]]
    return _table(head, rows)


def _case(row: Scored, mode: str) -> tuple[Any, ...]:
    m = row.sample.measured
    times = m.eager if mode == "eager" and m.eager else m.graph
    problem, case = m.case.problem, m.case
    sizes = " ".join(f"{k}={problem.dims[k]}" for k in REGISTRY[problem.op].dims if k in problem.dims)
    words = (sizes, problem.table_dtype, problem.layout, "" if problem.aligned else "misaligned", case.ids)
    return (
        ", ".join(w for w in words if w),
        case.source,
        mode,
        row.choice,
        _round(row.gain.value),
        f"{row.gain.low:.3f}-{row.gain.high:.3f}",
        row.oracle,
        _round(row.of_oracle),
        *(float(f"{median(times[vid]):.4g}") if vid in times else None for vid in (VENDOR, row.choice)),
    )


def _left_out(raw: Raw) -> list[tuple[str, str, int]]:
    """Variants dropped by the static screen, failed in the gate or in a case; each reason with the number of cases."""
    out = [
        (vid, f"static: {why}", int(count))
        for vid, reasons in sorted(raw.header["dropped"].items())
        for why, count in sorted(reasons.items())
    ]
    out += [
        (vid, f"gate: {verdict['why']}", int(verdict["cases"]))
        for vid, verdict in sorted(raw.header["gate"].items())
        if not verdict["passed"]
    ]
    failed: dict[tuple[str, str], int] = {}
    for m in raw.measured:
        for vid, why in m.failed.items():
            failed[vid, why] = failed.get((vid, why), 0) + 1
    return out + [(vid, why, count) for (vid, why), count in sorted(failed.items())]
