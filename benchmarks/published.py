"""README's section on benchmarks: generated from the published result files, between two marker comments."""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .contender import BASE
from .results import ResultsError, key_of
from .scores import File, Row, Score, grouped, is_trial, load, score, scores, shape_of, verdict_of, versions
from .trials import trials_in

ROOT = Path(__file__).parents[1]
PUBLISHED = Path("benchmarks/results/h200")
BEGIN, END = "<!-- benchmarks:begin -->", "<!-- benchmarks:end -->"
NOTHING = (
    "No benchmark results are published yet; `python -m benchmarks.run --help` measures some, and "
    "[docs/benchmarking.md](docs/benchmarking.md) says how."
)
FIGURES = {"speedup-graph": "Speed-up over torch by row", "roofline-graph": "Roofline"}
# Yardsticks of the host, not peers.
_YARDSTICKS = ("library",)


def load_all(paths: Sequence[Path]) -> list[File]:
    """Result files, and those in directories; [] for a directory that is not there.

    Raises:
        ResultsError: a file is damaged, two hold the same row, or they are of different GPUs.
        OSError: a file cannot be read.
    """
    files = []
    for path in paths:
        found = sorted(path.glob("*.json")) if path.is_dir() or not path.suffix else [path]
        files += [load(file) for file in found]
    seen: dict[tuple[str, str], Path] = {}
    for file in files:
        if file.environment.get("gpu") != files[0].environment.get("gpu"):
            raise ResultsError(f"{file.path} and {files[0].path} are of different GPUs")
        for row in file.rows:
            key = key_of(row), str(row["provider"])
            if row["provider"] != BASE and not is_trial(row) and seen.setdefault(key, file.path) != file.path:
                raise ResultsError(f"{file.path}: {seen[key]} has the same row of {row['provider']}, {shape_of(row)}")
    return files


def rows_of(files: Sequence[File]) -> list[Row]:
    """What is published of providers: trials are not, and torch's row of an entry is there once."""
    once = {(key_of(row), str(row["provider"])): row for f in reversed(files) for row in reversed(f.rows)}
    return [row for row in reversed(once.values()) if not is_trial(row)]


def digest(files: Sequence[File]) -> str:
    """Of the rows and the environment that the figures show; kept in each figure."""
    text = json.dumps([rows_of(files), [f.environment for f in files[:1]]], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def section(files: Sequence[File], place: Path = PUBLISHED) -> str:
    """The Markdown between the markers."""
    rows = [row for row in rows_of(files) if row["provider"] not in _YARDSTICKS]
    if not rows:
        return NOTHING
    graph = [row for row in rows if row["mode"] == "graph"]
    suites = list(dict.fromkeys(str(row["suite"]) for row in rows))
    dates = sorted({str(f.environment.get("date") or "") for f in files} - {""})
    when = f", {dates[0]}" + (f" to {dates[-1]}" if dates[1:] else "") if dates else ""
    entries = len({key_of(row) for row in rows})
    out = [
        f"Measured on one {versions(files[0].environment)}{when}: {entries:,} rows of {len(suites)} suites "
        f"(`{place.as_posix()}`), every provider in the same rounds and checked against float64 first "
        "([docs/benchmarking.md](docs/benchmarking.md)). Ratios are time of torch / time of it, in CUDA graphs; a win "
        "or a loss is where the 95 % interval leaves out 1, and what the accuracy gate calls wrong is neither.",
    ]
    ours = [row for row in graph if row["provider"] == "ours"]
    if ours:
        found = [score(key, members) for key, members in grouped(ours, lambda r: (r["op"], r["pass"])).items()]
        head = ("op", "pass", "wins", "ties", "losses", "failed", "geomean", "worst", "worst shape")
        out += ["", "Ours (the dispatcher's choice):", "", *_table(head, [(*_code(s.key), *_cells(s)) for s in found])]
    peers = scores((r for r in graph if r["provider"] != "ours" and r["provider"] != BASE), "op", "pass")
    if peers:
        body = [
            (f"`{s.key[2]}`", f"`{s.key[0]}` {s.key[1]}", *_cells(s)) for s in sorted(peers, key=lambda s: s.key[2])
        ]
        head = ("provider", "op", "wins", "ties", "losses", "failed", "geomean", "worst", "worst shape")
        out += ["", "Peers, on the rows that they have:", "", *_table(head, body)]
    out += _losses(ours)
    out += _wrong(rows)
    out += _host([row for row in rows_of(files) if row["mode"] == "host"], files)
    out += _trial_lines(files)
    for name, text in FIGURES.items():
        if graph:
            out += ["", f"![{text}]({(place / f'{name}.png').as_posix()})"]
    return "\n".join(out)


def _code(key: Sequence[str]) -> tuple[str, ...]:
    return f"`{key[0]}`", key[1]


def _cells(s: Score) -> tuple[str, ...]:
    """Without what could not be timed or is wrong, which is one number here."""
    worst = s.worst
    return (
        *map(str, (s.wins, s.ties, s.losses, s.wrong + s.untimed)),
        "" if s.geomean is None else f"{s.geomean:.2f}",
        "" if worst is None else f"{worst['speedup']:.2f}",
        "" if worst is None else f"{shape_of(worst)}",
    )


def _table(head: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *body]
    return ["| " + " | ".join(_cell(c) for c in line) + " |" for line in lines]


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def _losses(ours: Sequence[Row]) -> list[str]:
    lost = [row for row in ours if verdict_of(row) == "loss" and not row["failed"]]
    if not lost:
        return ["", "Losses of ours: none."] if ours else []
    worst = [
        min(members, key=lambda row: (row["speedup"], shape_of(row)))
        for members in grouped(lost, lambda r: (r["op"], r["pass"])).values()
    ]
    named = [f"`{r['op']}` {r['pass']} {shape_of(r)} {r['speedup']:.2f} ({_cell(str(r['variant']))})" for r in worst]
    return ["", f"Losses of ours: {len(lost)} of {len(ours)} rows; the worst of each op: {'; '.join(named)}."]


def _wrong(rows: Sequence[Row]) -> list[str]:
    found = grouped((r for r in rows if r["failed"]), lambda r: (str(r["provider"]), str(r["op"]), str(r["pass"])))
    if not found:
        return []
    lines = []
    for (provider, op, direction), members in found.items():
        wrong = sum(row["ms"] is not None for row in members)
        counts = [f"{wrong} wrong"] * bool(wrong) + [f"{len(members) - wrong} not timed"] * (len(members) > wrong)
        why = _cell(str(members[0]["failed"]))[:90]
        lines.append(f"- `{provider}`, `{op}` {direction}: {', '.join(counts)}, such as {shape_of(members[0])}: {why}")
    return ["", "Failures:", "", *lines]


def _host(rows: Sequence[Row], files: Sequence[File]) -> list[str]:
    """Host time of a call, which a graph does not show."""
    if not rows:
        return []
    body = []
    for key, members in grouped(rows, lambda r: (str(r["op"]), str(r["pass"]))).items():
        us = {str(row["provider"]): f"{row['ms'] * 1e3:.1f}" for row in members if row["ms"] is not None}
        body.append((*_code(key), us.get(BASE, ""), us.get("ours", "")))
    b = next((f.environment["library_us"] for f in files if f.environment.get("library_us") is not None), None)
    more = "" if b is None else f"; an operator of torch.library around torch.mm adds {b:.1f} us"
    return ["", f"Host time of a call on sizes of 64, in us{more}:", "", *_table(("op", "pass", "torch", "ours"), body)]


def _trial_lines(files: Sequence[File]) -> list[str]:
    found = trials_in(files)
    lines = [f"- {name}: {outcome.lines[1]}{'' if outcome.passed else ' (MISSED)'}" for name, outcome in found.items()]
    return ["", "Trials of the method:", "", *lines] if lines else []


def between(text: str) -> tuple[str, str, str]:
    """README before, between and after the markers.

    Raises:
        ValueError: they are not there once each, in this order.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"needs one {BEGIN} and one {END} after it")
    before, _, rest = text.partition(BEGIN)
    inside, _, after = rest.partition(END)
    return before, inside, after


def filled(text: str, inside: str) -> str:
    before, _, after = between(text)
    return f"{before}{BEGIN}\n{inside}\n{END}{after}"


_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def stamped(png: bytes, text: str) -> bytes:
    """A PNG that carries the digest of what it shows."""
    data = b"Source\0" + text.encode()
    chunk = struct.pack(">I", len(data)) + b"tEXt" + data + struct.pack(">I", zlib.crc32(b"tEXt" + data))
    head = len(_SIGNATURE) + 25
    return png[:head] + chunk + png[head:]


def stamp_of(png: bytes) -> str | None:
    """The digest that a PNG carries, or None."""
    at = len(_SIGNATURE)
    while png.startswith(_SIGNATURE) and at + 8 <= len(png):
        size, kind = struct.unpack(">I4s", png[at : at + 8])
        data = png[at + 8 : at + 8 + size]
        if kind == b"tEXt" and data.startswith(b"Source\0"):
            return data[7:].decode("latin-1")
        at += 12 + size
    return None


def figures(files: Sequence[File]) -> dict[str, bytes]:
    """The pictures that README shows, by name."""
    from .pictures import draw

    rows: list[Any] = [r for r in rows_of(files) if r["mode"] == "graph" and r["provider"] not in _YARDSTICKS]
    drawn = {p.name: p.png for p in draw(rows, files[0].environment, overview=True)} if rows else {}
    return {name: stamped(drawn[name], digest(files)) for name in FIGURES if name in drawn}


def out_of_step(files: Sequence[File], readme: Path, root: Path, place: Path = PUBLISHED) -> list[str]:
    """What does not follow from the published files, in words; [] where all is in step.

    Raises:
        ValueError: README has no markers.
        OSError: README cannot be read.
    """
    _, inside, _ = between(readme.read_text(encoding="utf-8"))
    wrong = (
        []
        if inside.strip() == section(files, place).strip()
        else [f"{readme.name}: the section between {BEGIN} and {END}"]
    )
    if any(row["mode"] == "graph" and row["ms"] is not None for row in rows_of(files)):
        for name in FIGURES:
            path = root / place / f"{name}.png"
            if not path.is_file() or stamp_of(path.read_bytes()) != digest(files):
                wrong.append(f"{(place / path.name).as_posix()}: not drawn from these results")
    return wrong
