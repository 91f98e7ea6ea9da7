"""The report of --report: what its pictures show, and a page that holds all of it, escaped and the same each time."""

from __future__ import annotations

import base64
import io
import json
import re
import sys
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

matplotlib = pytest.importorskip("matplotlib")
pytest.importorskip("numpy")

from matplotlib.image import imread  # noqa: E402

from learn_cases import SPEC, measured, raw_of, synthetic, walk  # noqa: E402
from tritonops.calibrate import pictures, report  # noqa: E402
from tritonops.calibrate.case import Case  # noqa: E402
from tritonops.calibrate.learn import Learned, learn  # noqa: E402
from tritonops.calibrate.raw import Measured, Raw  # noqa: E402
from tritonops.calibrate.samples import device_of  # noqa: E402
from tritonops.calibrate.verify import Report, verify  # noqa: E402
from tritonops.dispatch.problem import Problem  # noqa: E402
from tritonops.dispatch.variant import REGISTRY, VENDOR  # noqa: E402

NAMES = [f"learned_toy-{name}.png" for name in ("map-graph", "map-eager", "speedup", "roofline")]
HOSTILE = "<script>alert('1')</script>&amp;"


def entry(raw: Raw) -> tuple[Raw, Learned, Report]:
    learned = learn(raw, SPEC)
    return raw, learned, verify(raw, learned, SPEC)


@pytest.fixture(autouse=True)
def toy(monkeypatch) -> None:
    monkeypatch.setattr(report, "REGISTRY", {SPEC.name: SPEC})


@pytest.fixture(scope="module")
def found() -> tuple[Raw, Learned, Report]:
    return entry(synthetic())


def refused(heldout: float = 0.7) -> tuple[Raw, Learned, Report]:
    """On what was learned from wide/a wins, on what was held out it loses."""
    rows = [measured(m, n, {"wide/a": 1.5}) for m in (64, 256, 1024) for n in (512, 2048, 8192)]
    return entry(raw_of(rows + [measured(m, 4096, {"wide/a": heldout}, heldout=True) for m in (100, 500)]))


class Page(HTMLParser):
    """Tags, attributes, and the tables as lists of rows of texts."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str]] = []
        self.tables: list[list[list[str]]] = []
        self.cell: list[str] | None = None
        self.feed(text)

    def handle_starttag(self, tag, attrs) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.cell = []

    def handle_data(self, data) -> None:
        if self.cell is not None:
            self.cell.append(data)

    def handle_endtag(self, tag) -> None:
        if tag in ("td", "th") and self.cell is not None:
            self.tables[-1][-1].append("".join(self.cell))
            self.cell = None

    def table(self, first: str) -> list[dict[str, str]]:
        head, *rows = next(t for t in self.tables if t[0][0] == first)
        return [dict(zip(head, row, strict=True)) for row in rows]


def page_of(*entries: tuple[Raw, Learned, Report]) -> Page:
    return Page(report.page({raw.op: raw.header for raw, *_ in entries}, [report._op(*e, {}) for e in entries]))


def test_every_measured_case_is_shown_with_what_the_table_gives_it(found) -> None:
    raw, learned, scored = found
    rows = pictures.served(raw, learned, scored, SPEC, "graph")
    assert len(rows) == len(raw.measured) == 76 and sum(row.heldout for row in rows) == 40
    (section,) = [s for s in learned.sections if s.when["mode"] == "graph"]
    device = device_of(raw)
    for row in rows:
        features = SPEC.all_features(row.sample.measured.case.problem, device)
        use = walk(section.tree, features)["use"]
        assert row.choice == next(vid for vid in use if vid in row.sample.gains)
    assert {row.family.replace("twin", "small") for row in rows} == {"small", "wide", VENDOR}
    assert {row.where for row in rows} == {"bfloat16 aligned"}
    scores = [r for s in scored.scores if s.when["mode"] == "graph" for r in s.rows]
    shown = {row.sample.measured.case.key: (row.choice, row.gain.value) for row in rows if row.heldout}
    assert shown == {r.sample.measured.case.key: (r.choice, r.gain.value) for r in scores}


def test_a_refused_section_is_shown_as_torchs() -> None:
    raw, learned, scored = refused()
    assert all(s.refused for s in scored.scores)
    assert {row.choice for row in pictures.served(raw, learned, scored, SPEC, "graph")} == {VENDOR}
    raw, learned, scored = refused(1.5)
    assert {row.choice for row in pictures.served(raw, learned, scored, SPEC, "graph")} == {"wide/a"}


def _colours(png: bytes) -> set[str]:
    pixels = (imread(io.BytesIO(png), format="png")[:, :, :3] * 255).round().astype(int) @ [1 << 16, 1 << 8, 1]
    return {c for c in (*pictures._OURS, pictures._TORCH) if (pixels == int(c[1:], 16)).sum() > 100}


def test_families_have_their_colours_in_every_picture(found) -> None:
    small, wide, torch = *pictures._OURS[:2], pictures._TORCH
    for name, (_, png) in pictures.draw(*found, SPEC).items():
        assert _colours(png) == {small, wide, torch}, name
    drawn = pictures.draw(*refused(1.5), SPEC)
    assert [_colours(drawn[name][1]) for name in ("map-graph", "map-eager", "speedup")] == [{small}] * 3
    assert _colours(pictures.draw(*refused(), SPEC)["map-graph"][1]) == {torch}


def test_a_marker_tells_what_was_held_out(found) -> None:
    raw, learned, scored = found
    rows, drawn = pictures.served(raw, learned, scored, SPEC, "graph"), Counter()

    class Panel:
        def scatter(self, x, y, *, marker, **style) -> None:
            drawn[marker] += len(x)

    where = [float(i) for i in range(len(rows))]
    pictures._points(Panel(), rows, where, where, {"small": "red", "twin": "red", "wide": "blue", VENDOR: "grey"})
    assert drawn == {"o": 36, "^": 40}


def test_the_page_holds_every_picture_and_needs_nothing_else(found, tmp_path) -> None:
    paths = report.write(tmp_path / "new" / "report", [found])
    assert [p.name for p in paths] == [*NAMES, "index.html"]
    assert sorted((tmp_path / "new" / "report").iterdir()) == sorted(paths)
    page = Page(paths[-1].read_text())
    pngs = [base64.b64decode(v.removeprefix("data:image/png;base64,")) for t, a, v in page.attributes if a == "src"]
    assert pngs == [p.read_bytes() for p in paths[:-1]] and all(b.startswith(b"\x89PNG\r\n\x1a\n") for b in pngs)
    assert [v for _, a, v in page.attributes if a == "alt"] == [
        "learned_toy: what serves each measured shape, graph", "learned_toy: what serves each measured shape, eager",
        "learned_toy: speed-up over torch", "learned_toy: roofline, graph",
    ]  # fmt: skip
    assert not {"script", "link", "iframe", "object"} & set(page.tags)
    assert not re.search(r"https?:|//|url\(", re.sub(r'src="data:[^"]*"', "", paths[-1].read_text()))


def test_the_same_measurements_give_the_same_bytes_whatever_the_users_settings(found, tmp_path) -> None:
    first = {p.name: p.read_bytes() for p in report.write(tmp_path / "a", [found])}
    with matplotlib.rc_context({"font.size": 30, "axes.facecolor": "red", "savefig.dpi": 20}):
        again = {p.name: p.read_bytes() for p in report.write(tmp_path / "b", [found])}
        assert matplotlib.rcParams["font.size"] == 30
    assert first == again
    raw, learned, scored = found
    mixed = Raw(raw.header, tuple(reversed(raw.measured)))
    assert {p.name: p.read_bytes() for p in report.write(tmp_path / "c", [entry(mixed)])} == first


def test_sections_show_their_evidence_and_what_was_refused() -> None:
    raw, learned, scored = refused()
    for row, section, score in zip(page_of((raw, learned, scored)).table("section"), learned.sections, scored.scores,
                                   strict=True):  # fmt: skip
        evidence = score.evidence()
        assert (row["section"], row["mode"]) == ("bfloat16 aligned", section.when["mode"])
        assert row["sizes"] == "M 64-1024, N 512-8192" and (row["shapes"], row["held out"]) == ("9", "2")
        assert float(row["against torch"]) == evidence["geomean_vendor"] < 0.75
        assert float(row["worst"]) == evidence["worst_vendor"]
        assert row["95 % interval"] == "-".join(f"{v:g}" for v in evidence["worst_vendor_ci95"])
        assert float(row["against the best"]) == evidence["geomean_oracle"]
        assert row["serve there"] == VENDOR and row["remark"] == f"refused: {score.refused}"
    kept = page_of(refused(1.5)).table("section")
    assert [(row["serve there"], row["remark"]) for row in kept] == [("wide/a", "")] * 2


def test_the_worst_come_first_ten_a_mode(found) -> None:
    raw, _, scored = found
    rows = page_of(found).table("case")
    assert Counter(row["mode"] for row in rows) == {"graph": report.WORST, "eager": report.WORST}
    gains = sorted(row.gain.value for row in scored.rows_of("graph"))[: report.WORST]
    assert [float(row["time of torch / of the choice"]) for row in rows[:10]] == [round(g, 3) for g in gains]
    worst = min(scored.rows_of("graph"), key=lambda row: (row.gain.value, row.sample.measured.case.key))
    dims = worst.sample.measured.case.problem.dims
    assert (rows[0]["case"], rows[0]["choice"]) == (f"M={dims['M']} N={dims['N']}, bfloat16", worst.choice)
    ms = sorted(worst.sample.measured.graph[worst.choice])
    assert float(rows[0]["choice ms"]) == pytest.approx((ms[9] + ms[10]) / 2, rel=1e-3)


def test_without_held_out_shapes_it_says_that_scores_are_cross_validated() -> None:
    rows = page_of(entry(synthetic(heldout=0))).table("section")
    assert [row["remark"] for row in rows] == ["cross-validated by shape"] * 2


def test_text_of_others_stays_text(found) -> None:
    raw, *_ = found
    rows = [replace(m, case=replace(m.case, source=HOSTILE), failed={"twin/a": HOSTILE}) for m in raw.measured]
    header = json.loads(json.dumps(raw.header))
    header["device"]["names"] = [HOSTILE]
    header["made_with"]["command"] = HOSTILE
    header["gate"]["slow/a"] |= {"passed": False, "why": HOSTILE}
    page = page_of(entry(Raw(header, tuple(rows))))
    assert page.tags["script"] == 0
    assert {row["from"] for row in page.table("case")} == {HOSTILE}
    facts = {row["fact"]: row["value"] for row in page.table("fact")}
    assert facts["made_with command"] == facts["device names"] == HOSTILE
    assert page.table("variant") == [
        {"variant": "slow/a", "why": f"gate: {HOSTILE}", "cases": "1"},
        {"variant": "twin/a", "why": HOSTILE, "cases": "76"},
    ]


def test_the_environment_names_an_ops_own_value_where_ops_differ() -> None:
    heads = {
        op: {"device": {"names": ["NVIDIA Test"], "sms": 132}, "made_with": {"date": date}, "method": more}
        for op, date, more in (("matmul", "2026-01-01", {"shapes": True}), ("rms_norm", "2026-01-02", {}))
    }
    facts = {row["fact"]: row["value"] for row in Page(report.page(heads, [])).table("fact")}
    assert facts == {
        "device names": "NVIDIA Test", "device sms": "132", "method shapes": "matmul: True",
        "made_with date": "matmul: 2026-01-01; rms_norm: 2026-01-02",
    }  # fmt: skip


def test_the_roof_bends_where_bandwidth_and_rate_meet() -> None:
    line, label = pictures._roof(1.0, 1000.0, 4.0, 800.0)
    assert line == [(1.0, 4.0), (200.0, 800.0), (1000.0, 800.0)]
    assert label == "measured: copy 4 TB/s, bfloat16 product 800 TFLOP/s"
    assert pictures._roof(1.0, 100.0, 4.0, 800.0)[0] == [(1.0, 4.0), (100.0, 400.0)]
    assert pictures._roof(1.0, 100.0, 4.0, None) == ([(1.0, 4.0), (100.0, 4.0)], "measured: copy 4 TB/s")


@pytest.mark.parametrize("op, dims, x, y, unit", [
    ("matmul", {"batch": 2, "M": 512, "N": 256, "K": 128}, 2**26 / (4 * (2**16 + 2**15 + 2**17)), 2**26 / 1e9,
     "TFLOP/s"),
    ("rms_norm", {"M": 512, "N": 1024}, 2 * 2**19 * 2 / 1e6, 2 * 2**19 * 2 / 1e9, "TB/s"),
    ("embedding_backward", {"T": 512, "D": 64, "V": 1000}, (512 + 1000) * 64 * 2 / 1e6, 1512 * 64 * 2 / 1e9, "TB/s"),
])  # fmt: skip
def test_rates_on_the_roofline_are_of_useful_work(monkeypatch, op, dims, x, y, unit) -> None:
    panels = []
    monkeypatch.setattr(pictures, "_points", lambda panel, rows, x, y, colours: panels.append((panel, x, y)))
    case = Case(Problem(op, dims, "bfloat16", "nt" if op == "matmul" else ""))
    sample = pictures.Sample(Measured(case, {VENDOR: (2.0, 1.0, 3.0), "o/a": (0.5, 1.0, 1.5)}), "", {}, {}, 1.0)
    head = {"op": op, "device": {"copy_tbps": 4.0, "matmul_tflops": 800.0}}
    pictures._roofline([pictures.Served(sample, "o/a")], Raw(head, ()), {VENDOR: "#999999", "o": "#0072B2"})
    ((panel, xs, ys),) = panels
    assert xs == pytest.approx([x]) and ys == pytest.approx([y]) and panel.get_ylabel() == unit
    (_, torch_rate), = panel.collections[0].get_offsets().tolist()  # fmt: skip
    assert torch_rate == pytest.approx(y / 2)


def test_axes_of_the_maps_are_sizes_that_the_ops_have() -> None:
    for op, (across, up) in pictures._AXES.items():
        assert {*across, *up} <= set(REGISTRY[op].dims)


def test_without_roofs_and_without_times_there_is_still_a_page(found, tmp_path) -> None:
    raw, learned, scored = found
    header = json.loads(json.dumps(raw.header))
    del header["device"]["copy_tbps"]
    assert set(pictures.draw(Raw(header, raw.measured), learned, scored, SPEC)) == {
        "map-graph", "map-eager", "speedup", "roofline",
    }  # fmt: skip
    failed = [Measured(m.case, {}, failed={VENDOR: "out of memory"}) for m in raw.measured]
    paths = report.write(tmp_path, [entry(Raw(raw.header, tuple(failed)))])
    page = Page(paths[-1].read_text())
    assert [p.name for p in paths] == ["index.html"] and page.tags["img"] == 0
    assert page.table("variant") == [{"variant": VENDOR, "why": "out of memory", "cases": "76"}]


def test_why_nothing_can_be_drawn_is_one_sentence(monkeypatch) -> None:
    assert report.check() is None
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    why = report.check()
    assert why is not None and why.startswith("matplotlib cannot be imported") and "tritonops[bench]" in why


def test_a_failure_leaves_the_page_that_was_there(found, tmp_path, monkeypatch) -> None:
    (tmp_path / "index.html").write_text("old")
    write = report.write_atomically

    def full(path: Path, data: bytes) -> None:
        if path.name == NAMES[2]:
            raise OSError(28, "No space left on device")
        write(path, data)

    monkeypatch.setattr(report, "write_atomically", full)
    with pytest.raises(OSError, match="No space left"):
        report.write(tmp_path, [found])
    assert (tmp_path / "index.html").read_text() == "old"
