"""Held-out scores: as run time chooses, oracle on odd rounds, losers refused, what was not held out cross-validated."""

from __future__ import annotations

import dataclasses
import json

import pytest

from learn_cases import SPEC, between, grid, measured, raw_of, shuffled, speeds, synthetic
from tritonops.calibrate import learn as learning
from tritonops.calibrate.learn import learn
from tritonops.calibrate.raw import Raw, RawError
from tritonops.calibrate.verify import Report, Score, useful, verify
from tritonops.dispatch.variant import VENDOR

TRAINING = [measured(m, n, speeds(m, n)) for m, n in grid()]


def report(raw: Raw) -> Report:
    return verify(raw, learn(raw, SPEC), SPEC)


def score(found: Report, mode: str = "graph", dtype: str = "bfloat16") -> Score:
    return next(s for s in found.scores if (s.when["mode"], s.when["dtype"]) == (mode, dtype))


@pytest.mark.parametrize("noise", [0.01, 0.03])
@pytest.mark.parametrize("seed", range(3))
def test_the_bars_are_met_on_shapes_between_those_learned_from(noise: float, seed: int) -> None:
    found = report(synthetic(noise, seed))
    evidence = score(found).evidence()
    assert found.passed and evidence["shapes"] == 40
    assert evidence["geomean_vendor"] == pytest.approx(1.205, abs=0.02)
    assert evidence["worst_vendor"] >= 0.95 and evidence["geomean_oracle"] >= 0.97
    assert 0 < evidence["noise"] < 4 * noise


@pytest.mark.parametrize("seed", range(6))
def test_ten_per_cent_of_noise_costs_gains_but_no_losses(seed: int) -> None:
    found = score(report(synthetic(0.1, seed)))
    assert min(row.gain.high for row in found.rows) >= 0.98 and not found.refused
    assert found.evidence()["geomean_vendor"] > 1.1


def test_what_gave_a_wrong_result_elsewhere_is_not_the_best_that_a_choice_is_held_to() -> None:
    held = [measured(m, n, {**speeds(m, n), "slow/a": 9.0}, heldout=True) for m, n in between(10)]
    wrong = measured(600, 5000, speeds(600, 5000), heldout=True, failed={"slow/a": "differs from the vendor's"})
    rows = score(report(raw_of([*TRAINING, *held, wrong]))).rows
    assert "slow/a" not in {row.oracle for row in rows} and min(row.of_oracle for row in rows) > 0.95
    assert {row.oracle for row in score(report(raw_of([*TRAINING, *held]))).rows} == {"slow/a"}


def test_outside_the_hull_the_vendor_is_chosen_as_at_run_time() -> None:
    """What was learned reaches from M = 16 and N = 512."""
    held = [measured(8, 512, {"small/a": 5.0}, heldout=True), measured(16, 400, {"small/a": 5.0}, heldout=True)]
    rows = score(report(raw_of([*TRAINING, *held]))).rows
    assert [r.choice for r in rows] == [VENDOR, VENDOR] and [r.gain.value for r in rows] == [1.0, 1.0]
    assert all(r.oracle == "small/a" and r.of_oracle == pytest.approx(0.2, rel=0.05) for r in rows)


def test_the_next_of_a_leaf_serves_where_the_first_has_no_time() -> None:
    rows = [measured(m, 512, {"wide/a": 2.0}) for m in (16, 32, 64, 128)]
    held = measured(50, 512, {"slow/a": 3.0}, heldout=True)
    assert score(report(raw_of([*rows, held]))).rows[0].choice == VENDOR


def test_the_oracle_is_picked_on_odd_rounds_and_scored_on_even_ones() -> None:
    """A rival that was lucky in the rounds that picked it is not held against the choice."""
    base = measured(50, 512, {}, heldout=True)
    lucky = {VENDOR: (1.0,) * 20, "wide/a": (0.5, 0.5) * 10, "slow/a": (0.6, 0.4) * 10}
    rows = [measured(m, 512, {"wide/a": 2.0}) for m in (16, 32, 64, 128)]
    row = score(report(raw_of([*rows, dataclasses.replace(base, graph=lucky)]))).rows[0]
    assert (row.choice, row.oracle) == ("wide/a", "slow/a")
    assert row.of_oracle == pytest.approx(0.6 / 0.5)


def test_a_loser_is_refused_and_named_and_the_report_fails() -> None:
    held = [measured(m, 512, {"small/a": 0.7, "twin/a": 0.7}, heldout=True) for m in (40, 100)]
    found = report(raw_of([*TRAINING, *held]))
    assert not found.passed and score(found).refused.startswith(("geomean 0.69", "geomean 0.70"))
    text = "\n".join(found.lines())
    assert "REFUSED" in text and "FAIL" in text and "M=40 N=512" in text


def test_one_bad_row_among_good_ones_is_refused_unless_it_may_be_noise() -> None:
    good = [measured(m, n, speeds(m, n), heldout=True) for m, n in between(20)]
    for noise, passes in ((0.005, False), (0.2, True)):
        bad = measured(100, 600, {"small/a": 0.92, "twin/a": 0.92}, noise=noise, heldout=True)
        found = report(raw_of([*TRAINING, *good, bad]))
        assert found.passed is passes and bool(score(found).refused) is not passes


def test_a_bad_row_costs_its_own_leaf_and_nothing_else() -> None:
    good = [measured(m, n, speeds(m, n), heldout=True) for m, n in between(40)]
    bad = measured(4000, 6000, {"wide/a": 0.8}, noise=0.005, heldout=True)
    found = score(report(raw_of([*TRAINING, *good, bad])))
    assert found.refused.startswith(("0.79", "0.80", "0.81")) and "M=4000" in found.refused
    wide, others = ([(r, t) for r, t in zip(found.rows, found.served, strict=True) if (r.choice == "wide/a") is is_wide]
                    for is_wide in (True, False))  # fmt: skip
    assert len(wide) > 5 and {t.choice for _, t in wide} == {VENDOR} and {t.gain.value for _, t in wide} == {1.0}
    assert all(r == t for r, t in others) and {r.choice for r, _ in others} & {"small/a", "twin/a"}


def test_a_section_that_loses_in_the_mean_keeps_the_leaves_that_win() -> None:
    held = [measured(m, n, {**speeds(m, n), **({"wide/a": 0.955} if m > 256 else {"small/a": 1.01, "twin/a": 1.01})},
                     noise=0.03, heldout=True) for m, n in between(40)]  # fmt: skip
    found = score(report(raw_of([*TRAINING, *held])))
    assert found.refused.startswith("geomean 0.9")
    assert {row.choice for row in found.served} <= {VENDOR, "small/a", "twin/a"}
    assert any(row.choice != VENDOR for row in found.served)
    assert found.evidence()["served"]["geomean_vendor"] > 1 > found.evidence()["geomean_vendor"]


def test_an_eager_loss_is_named_as_one() -> None:
    good = [measured(m, n, speeds(m, n), eager=speeds(m, n), heldout=True) for m, n in between(20)]
    bad = measured(40, 512, speeds(40, 512), eager={"small/a": 0.9, "twin/a": 0.9}, noise=0.005, heldout=True)
    both = [measured(m, n, speeds(m, n), eager=speeds(m, n)) for m, n in grid()]
    found = report(raw_of([*both, *good, bad]))
    assert not score(found).refused and "eager" in score(found, "eager").refused
    assert any("0.9" in line and "M=40 N=512" in line and "eager" in line for line in found.lines())


def test_cross_validated_rows_refuse_the_whole_section(monkeypatch) -> None:
    monkeypatch.setattr(learning, "LEAST_SHAPES", 1)
    rows = [measured(2**i, 512, {"wide/a": 0.5 if i in (6, 9) else 2.0}) for i in range(4, 14)]
    found = score(report(raw_of(rows)))
    assert not found.heldout and found.refused and found.tree["use"][0] == VENDOR


def test_a_section_that_always_chooses_the_vendor_has_exactly_one_and_is_not_refused() -> None:
    rows = [measured(m, n, {"slow/a": 0.6}) for m, n in grid()]
    held = [measured(m, n, {"slow/a": 0.6}, heldout=True) for m, n in between(10)]
    found = report(raw_of([*rows, *held]))
    evidence = score(found).evidence()
    assert found.passed and evidence["geomean_vendor"] == evidence["worst_vendor"] == 1.0
    assert evidence["worst_vendor_ci95"] == [1.0, 1.0]


def test_gains_that_were_missed_fail_the_report_but_refuse_nothing() -> None:
    rows = [measured(m, n, {"slow/a": 0.6}) for m, n in grid()]
    held = [measured(m, n, {"slow/a": 2.0}, heldout=True) for m, n in between(10)]
    found = report(raw_of([*rows, *held]))
    assert not found.passed and not score(found).refused
    assert score(found).evidence()["geomean_oracle"] == pytest.approx(0.5, rel=0.02)


def test_without_held_out_shapes_shapes_left_out_of_the_learning_stand_in_and_it_says_so() -> None:
    found = report(raw_of(TRAINING))
    evidence = score(found).evidence()
    assert evidence["shapes"] == 36 and "cross-validated" in evidence["method"]
    assert "cross-validated" in "\n".join(found.lines())
    assert "method" not in score(report(synthetic())).evidence()


def test_cross_validation_never_asks_a_tree_that_saw_the_shape(monkeypatch) -> None:
    """One shape alone is fast: a tree that saw it would know, one that did not cannot."""
    monkeypatch.setattr(learning, "LEAST_SHAPES", 1)
    rows = [measured(2**i, 512, {"wide/a": 3.0 if i == 9 else 0.5}) for i in range(4, 14)]
    found = score(report(raw_of(rows)))
    alone = next(r for r in found.rows if r.sample.measured.case.problem.dims["M"] == 512)
    assert alone.choice == VENDOR and alone.oracle == "wide/a"


def test_a_held_out_case_that_cannot_be_used_is_refused_by_name() -> None:
    bad = dataclasses.replace(measured(50, 512, {}, heldout=True), graph={VENDOR: (float("nan"),)})
    with pytest.raises(RawError, match="M=50 N=512"):
        report(raw_of([*TRAINING, bad]))


def test_result_rows_have_the_fields_of_every_published_measurement() -> None:
    rows = report(synthetic(heldout=3)).rows()
    graph = [r for r in rows if r["mode"] == "graph"]
    assert [r["provider"] for r in graph] == ["torch", "ours"] * 3 and len(rows) == 12
    assert set(rows[0]) == {
        "suite", "op", "pass", "shape", "dtype", "layout", "ids", "provider", "variant", "mode", "ms", "ci95", "rounds",
        "clock_mhz", "fraction", "tflops", "error", "error_torch", "failed", "heldout",
    }  # fmt: skip
    first = graph[0]
    assert (first["suite"], first["pass"], first["variant"]) == ("calibrate-heldout", "fwd", VENDOR)
    assert first["heldout"] is True
    low, high = first["ci95"]
    assert low <= first["ms"] <= high and first["rounds"] == 20
    m, n = first["shape"]["M"], first["shape"]["N"]
    assert first["fraction"] == pytest.approx(2 * m * n * 2 / (first["ms"] * 1e-3) / 4e12, rel=0.01)
    json.dumps(rows, allow_nan=False)


def test_useful_operations_and_bytes() -> None:
    assert useful("matmul", {"batch": 2, "M": 3, "N": 5, "K": 7}, 2) == (2 * 2 * 3 * 5 * 7, 2 * (21 + 35 + 15) * 2)
    assert useful("layer_norm", {"M": 8, "N": 16}, 2) == (0, 2 * 8 * 16 * 2)
    assert useful("rms_norm_backward", {"M": 8, "N": 16}, 4) == (0, 3 * 8 * 16 * 4)
    assert useful("embedding_backward", {"T": 8, "D": 16, "V": 100}, 2) == (0, (8 * 16 + 100 * 16) * 2)


def test_lines_name_the_three_worst_of_each_mode() -> None:
    held = [measured(m, n, speeds(m, n), heldout=True) for m, n in between(10)]
    found = report(raw_of([*TRAINING, *held]))
    lines = found.lines()
    worst = sorted(score(found).rows, key=lambda r: (r.gain.value, r.sample.measured.case.key))[:3]
    at = next(i for i, line in enumerate(lines) if "all, graph" in line)
    for row, line in zip(worst, lines[at + 1 : at + 4], strict=True):
        dims = row.sample.measured.case.problem.dims
        assert f"M={dims['M']} N={dims['N']}" in line and row.choice in line
    assert "pass" in lines[at]


def test_the_order_of_rows_and_candidates_does_not_matter() -> None:
    raw = synthetic(0.05)
    first, again = report(shuffled(raw, 1)), report(shuffled(raw, 2))
    assert [s.evidence() for s in again.scores] == [s.evidence() for s in first.scores]
    assert again.rows() == first.rows() and first.passed


def test_a_users_own_shapes_decide_for_themselves_and_leave_the_rest_as_it_was() -> None:
    base = synthetic()
    own = measured(1 << 20, 512, {"slow/a": 2.0, "wide/a": 0.7}, own=True, weight=40.0)
    alone, joined = report(base), report(Raw(base.header, (*base.measured, own)))
    (mine,) = score(joined).own
    assert mine.choice == "slow/a" and mine.gain.value == pytest.approx(2, rel=0.05)
    assert sum(line.startswith("  yours, ") for line in joined.lines()) == 2
    before, after = ([row.choice for row in r.rows_of("graph")] for r in (alone, joined))
    assert len(before) == len(after) and sum(a != b for a, b in zip(before, after, strict=True)) <= 2
    assert joined.passed and not any(s.own for s in alone.scores)
