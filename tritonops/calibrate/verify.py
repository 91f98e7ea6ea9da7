"""Scoring learned trees on shapes that were held out: against the vendor and against the best that was measured.

A choice is made as at run time, by the table's own code. A leaf that makes its section lose to the vendor on held-out
shapes is refused: the table gives what reaches it to the vendor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from ..dispatch import table
from ..dispatch.select import ranked_by_table
from ..dispatch.store import Loaded
from ..dispatch.variant import VENDOR, OpSpec
from . import emit
from .learn import Learned, LearnedSection, noise_of
from .raw import Raw, digits
from .samples import Gain, Sample, device_of, samples

# A section passes with at least this geomean and worst case against the vendor and geomean against the oracle.
GEOMEAN_VENDOR, WORST_VENDOR, GEOMEAN_ORACLE = 1.0, 0.95, 0.95


@dataclass(frozen=True)
class Scored:
    """One held-out case: what is chosen, its gain over the vendor, and oracle / choice, both as times' ratios."""

    sample: Sample
    choice: str
    gain: Gain
    oracle: str
    of_oracle: float


@dataclass(frozen=True)
class Score:
    """One section's result; the sections of a report are in the order of the table's.

    Attributes:
        tree: what is served, as in the table's JSON: the learned tree with the vendor in the leaves refused.
        heldout: False where no shape was held out and cross-validation on the training shapes stands in.
        refused: why leaves, or the whole section, are given to the vendor, or "".
        lost: the keys of the rows that thereby are the vendor's.
        own: the user's own shapes, on which the tree was learned.
    """

    when: Mapping[str, Any]
    rows: tuple[Scored, ...]
    noise: float
    tree: Mapping[str, Any]
    heldout: bool = True
    refused: str = ""
    lost: frozenset[str] = frozenset()
    own: tuple[Scored, ...] = ()

    @property
    def served(self) -> tuple[Scored, ...]:
        """The rows as the table serves them."""
        return tuple(
            _score(row.sample, VENDOR) if row.sample.measured.case.key in self.lost else row for row in self.rows
        )

    @property
    def shapes(self) -> int:
        return len({row.sample.shape for row in self.rows})

    @property
    def worst(self) -> Scored:
        return min(self.rows, key=lambda row: (row.gain.value, row.sample.measured.case.key))

    def evidence(self) -> dict[str, Any]:
        """As in a table."""
        if not self.rows:
            return {"shapes": 0}
        worst = self.worst.gain
        out = {
            "shapes": self.shapes,
            "geomean_oracle": digits(geomean([r.of_oracle for r in self.rows])),
            "worst_oracle": digits(min(r.of_oracle for r in self.rows)),
            "geomean_vendor": digits(geomean([r.gain.value for r in self.rows])),
            "worst_vendor": digits(worst.value),
            "worst_vendor_ci95": [digits(worst.low), digits(worst.high)],
            "noise": digits(self.noise, 2),
        }
        if not self.heldout:
            out["method"] = "cross-validated by shape"
        if self.refused:
            out["refused"] = self.refused
            left = self.served
            out["served"] = {
                "geomean_oracle": digits(geomean([r.of_oracle for r in left])),
                "geomean_vendor": digits(geomean([r.gain.value for r in left])),
                "worst_vendor": digits(min(r.gain.value for r in left)),
            }
        return out


@dataclass(frozen=True)
class Report:
    op: str
    scores: tuple[Score, ...]
    header: Mapping[str, Any]

    @property
    def passed(self) -> bool:
        """Nothing is refused, and over all held-out shapes each mode reaches the bars."""
        return not any(s.refused for s in self.scores) and all(self._bars(mode) for mode in self._modes())

    def _modes(self) -> list[str]:
        return sorted({s.when["mode"] for s in self.scores if s.rows}, reverse=True)

    def rows_of(self, mode: str) -> list[Scored]:
        return [row for s in self.scores if s.when["mode"] == mode for row in s.rows]

    def as_served(self, mode: str) -> list[Scored]:
        """The rows once the leaves that are refused are torch's."""
        return [row for s in self.scores if s.when["mode"] == mode for row in s.served]

    def _bars(self, mode: str) -> bool:
        rows = self.rows_of(mode)
        return (
            geomean([r.gain.value for r in rows]) >= GEOMEAN_VENDOR
            and min(r.gain.high for r in rows) >= WORST_VENDOR
            # Eagerly the best is not known: two variants at most were timed.
            and (mode != "graph" or geomean([r.of_oracle for r in rows]) >= GEOMEAN_ORACLE)
        )

    def lines(self) -> list[str]:
        """The report as text, for people."""
        out = [
            f"{self.op}: held-out shapes, time of torch / time of the choice, and of the best measured / of the choice"
        ]
        out.append(f"  {'section':34s} mode  shapes vs torch  worst (95 % interval)  vs best")
        for s in self.scores:
            name = f"{s.when['dtype']} {s.when['layout']} {'aligned' if s.when['aligned'] else 'misaligned'}"
            if not s.rows:
                out.append(f"  {name:34s} {s.when['mode']:5s} {0:6d}  none measured")
                continue
            w = s.worst.gain
            out.append(
                f"  {name:34s} {s.when['mode']:5s} {s.shapes:6d} {geomean([r.gain.value for r in s.rows]):8.3f} "
                f"{w.value:7.3f} ({w.low:.3f}-{w.high:.3f}) {geomean([r.of_oracle for r in s.rows]):8.3f}"
                + ("" if s.heldout else "  cross-validated")
                + (f"  REFUSED: {s.refused}" if s.refused else "")
            )
        for mode in sorted({s.when["mode"] for s in self.scores if s.own}, reverse=True):
            yours = [row for s in self.scores if s.when["mode"] == mode for row in s.own]
            if yours:
                out.append(
                    f"  yours, {mode}: {len(yours)} cases, {geomean([r.gain.value for r in yours]):.3f} x torch's "
                    f"speed in the geomean, worst {min(r.gain.value for r in yours):.3f}"
                )
        for mode in self._modes():
            rows = self.rows_of(mode)
            verdict = "pass" if self._bars(mode) else "FAIL"
            out.append(
                f"  all, {mode}: {len(rows)} cases, {geomean([r.gain.value for r in rows]):.3f} x torch's speed in the "
                f"geomean, worst {min(r.gain.value for r in rows):.3f}, {geomean([r.of_oracle for r in rows]):.3f} of "
                f"the best's: {verdict}"
            )
            if any(s.refused for s in self.scores if s.when["mode"] == mode):
                left = self.as_served(mode)
                gains, of_best = [r.gain.value for r in left], geomean([r.of_oracle for r in left])
                out.append(
                    f"  all, {mode}, as served, what is refused being torch's: {geomean(gains):.3f}, {min(gains):.3f}, "
                    f"{of_best:.3f}"
                )
            for row in sorted(rows, key=lambda r: (r.gain.value, r.sample.measured.case.key))[:3]:
                problem = replace(row.sample.measured.case.problem, mode=mode).describe()
                out.append(
                    f"    {row.gain.value:.3f} ({row.gain.low:.3f}-{row.gain.high:.3f}) {row.choice} on {problem}"
                    + (f" {row.sample.measured.case.ids}" if row.sample.measured.case.ids else "")
                    + f"; best {row.oracle}"
                )
        return out

    def rows(self) -> list[dict[str, Any]]:
        """Result rows: for each held-out case torch's and ours."""
        out = []
        for s in self.scores:
            for row in s.rows:
                m, mode = row.sample.measured, s.when["mode"]
                measured = m.eager if mode == "eager" and m.eager else m.graph
                for provider, vid in (("torch", VENDOR), ("ours", row.choice)):
                    if vid in measured:
                        out.append(_row(self.op, row, provider, vid, mode, measured[vid], self.header, s.heldout))
        return out


def geomean(values: Sequence[float]) -> float:
    return math.exp(math.fsum(math.log(v) for v in values) / len(values)) if values else 1.0


def useful(op: str, dims: Mapping[str, int], itemsize: int) -> tuple[int, int]:
    """(operations, bytes) that a problem needs at least; 0 operations where bytes are what counts."""
    if op == "matmul":
        b, m, n, k = dims["batch"], dims["M"], dims["N"], dims["K"]
        return 2 * b * m * n * k, b * (m * k + k * n + m * n) * itemsize
    if "embedding" in op:
        t, d, v = dims["T"], dims["D"], dims["V"]
        return 0, ((t * d + v * d) if op.endswith("_backward") else 2 * t * d) * itemsize
    return 0, (3 if op.endswith("_backward") else 2) * dims["M"] * dims["N"] * itemsize


_ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8}


def _row(
    op: str, row: Scored, provider: str, vid: str, mode: str, times: Sequence[float], header: Mapping[str, Any],
    heldout: bool,
) -> dict[str, Any]:  # fmt: skip
    from .samples import interval

    m = row.sample.measured
    p, ms = m.case.problem, median(times)
    operations, moved = useful(op, p.dims, _ITEMSIZE.get(p.dtype, 4))
    copy = header["device"].get("copy_tbps")
    return {
        "suite": "calibrate-heldout",
        "op": op.removesuffix("_backward"),
        "pass": "bwd" if op.endswith("_backward") else "fwd",
        "shape": {k: v for k, v in p.dims.items() if k != "batch"},
        "dtype": p.table_dtype,
        "layout": p.layout or None,
        "ids": m.case.ids or None,
        "provider": provider,
        "variant": vid,
        "mode": mode,
        "ms": digits(ms),
        "ci95": [digits(t) for t in interval(times)],
        "rounds": len(times),
        "clock_mhz": m.clock_mhz,
        "fraction": digits(moved / ms / 1e9 / copy, 3) if copy and not operations else None,
        "tflops": digits(operations / ms / 1e9) if operations else None,
        "error": None,
        "error_torch": None,
        "failed": None,
        "heldout": heldout,
    }


def verify(raw: Raw, learned: Learned, spec: OpSpec) -> Report:
    """The score of every section on its held-out shapes, or by cross-validation where it has none."""
    device = device_of(raw)
    by: dict[tuple[Any, ...], list[Sample]] = {}
    training: dict[tuple[Any, ...], list[Sample]] = {}
    for mode in sorted({s.when["mode"] for s in learned.sections}):
        for heldout, into in ((True, by), (False, training)):
            for sample in samples(raw, spec, mode, heldout=heldout):
                p = sample.measured.case.problem
                into.setdefault((p.table_dtype, p.layout, p.aligned, mode), []).append(sample)

    def choices(made: bytes) -> Callable[[Sample, str], Scored]:
        loaded = Loaded(table.parse(made, "(learned)", op=spec.name, features={*spec.dims, *spec.feature_names}))

        def served(sample: Sample, mode: str) -> Scored:
            problem = replace(sample.measured.case.problem, mode=mode)
            ids = ranked_by_table(spec, problem, device, loaded).ids
            return _score(sample, next(vid for vid in ids if vid in sample.gains))

        return served

    as_learned = choices(emit.provisional(raw, learned, spec))
    scores = []
    for section in learned.sections:
        when = section.when
        key = (when["dtype"], when["layout"], when["aligned"], when["mode"])
        held = by.get(key, [])
        if held:
            rows = [as_learned(sample, when["mode"]) for sample in held]
        else:
            rows = [
                _score(sample, vid if vid in sample.gains else VENDOR)
                for sample in training.get(key, [])
                if (vid := section.crossvalidated.get(sample.measured.case.key)) is not None
            ]
        tree, refused, lost = _refused(section, rows, bool(held))
        noise = noise_of([r.sample for r in rows], when["mode"])
        scores.append(Score(when, tuple(rows), noise, tree, bool(held), refused, lost))
    as_served = choices(emit.provisional(raw, served_by(learned, scores), spec))
    for i, score in enumerate(scores):
        when = score.when
        mine = training.get((when["dtype"], when["layout"], when["aligned"], when["mode"]), [])
        own = tuple(as_served(s, when["mode"]) for s in mine if s.measured.case.own)
        scores[i] = replace(score, own=own)
    return Report(raw.op, tuple(scores), raw.header)


def served_by(learned: Learned, scores: Sequence[Score]) -> Learned:
    """What was learned with the trees that are served."""
    pairs = zip(learned.sections, scores, strict=True)
    return replace(learned, sections=tuple(replace(section, tree=score.tree) for section, score in pairs))


def _refused(
    section: LearnedSection, rows: Sequence[Scored], heldout: bool
) -> tuple[Mapping[str, Any], str, frozenset[str]]:
    """(the tree to serve, why it is not the learned one, the rows that lose their choice).

    Of a section that loses to the vendor in the geomean, the leaves that lose are refused; of one with a sure loss, the
    leaf of that row. Cross-validated rows were chosen by other trees, so they refuse the whole section.
    """
    ours = [row for row in rows if row.choice != VENDOR]
    if not ours:
        return section.tree, "", frozenset()
    by_leaf: dict[tuple[str, ...], list[Scored]] = {}
    for row in ours:
        by_leaf.setdefault(_way(section.tree, row.sample.features) if heldout else (), []).append(row)
    loses = geomean([row.gain.value for row in rows]) < GEOMEAN_VENDOR - 1e-9
    why = {
        way: _reason(found, loses, section.when["mode"])
        for way, found in by_leaf.items()
        if min(row.gain.high for row in found) < WORST_VENDOR
        or (loses and geomean([row.gain.value for row in found]) < GEOMEAN_VENDOR - 1e-9)
    }
    tree = section.tree
    for way in why:
        tree = _without(tree, way, section.vendors)
    lost = {row.sample.measured.case.key for way in why for row in by_leaf[way]}
    return tree, "; ".join(why[way] for way in sorted(why)), frozenset(lost)


def _reason(rows: Sequence[Scored], loses: bool, mode: str) -> str:
    mean, worst = geomean([r.gain.value for r in rows]), min(rows, key=lambda r: r.gain.high)
    if loses and mean < GEOMEAN_VENDOR:
        return f"geomean {mean:.3f} of torch's speed on held-out shapes"
    problem = replace(worst.sample.measured.case.problem, mode=mode)
    return f"{worst.gain.value:.3f} of torch's speed on {problem.describe()}"


def _way(tree: Mapping[str, Any], features: Mapping[str, int]) -> tuple[str, ...]:
    """From the root to the leaf that the features reach."""
    way: list[str] = []
    while "use" not in tree:
        way.append("yes" if features[tree["f"]] <= tree["le"] else "no")
        tree = tree[way[-1]]
    return tuple(way)


def _without(tree: Mapping[str, Any], way: Sequence[str], vendors: Mapping[str, Any]) -> Mapping[str, Any]:
    """The tree with the vendor at the end of the way."""
    if not way:
        return {**vendors, "n": _count(tree)}
    sides = {side: _without(tree[side], way[1:], vendors) if side == way[0] else tree[side] for side in ("yes", "no")}
    if all(side.get("use") == vendors["use"] for side in sides.values()):
        return {**vendors, "n": _count(tree)}
    return {**tree, **sides}


def _count(tree: Mapping[str, Any]) -> int:
    return int(tree["n"]) if "use" in tree else _count(tree["yes"]) + _count(tree["no"])


def _score(sample: Sample, choice: str) -> Scored:
    """The oracle is picked on odd rounds; it and the choice are compared on even ones. Estimates are taken as such."""
    odd = {vid: median(g.rounds[1::2]) for vid, g in sample.gains.items() if len(g.rounds) >= 2}
    oracle = min(odd, key=lambda vid: (-odd[vid], vid), default=VENDOR)

    def even(vid: str) -> float:
        gain = sample.gains[vid]
        return median(gain.rounds[0::2]) if gain.rounds else gain.value

    return Scored(sample, choice, sample.gains[choice], oracle, even(choice) / even(oracle))
