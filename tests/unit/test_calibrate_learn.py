"""The learner on made-up times: crossovers, noise, order, few shapes, failures, weights, gaps."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import time
from fractions import Fraction

import pytest

from learn_cases import OURS, SPEC, grid, leaves, measured, raw_of, shuffled, speeds, synthetic, walk
from tritonops.calibrate.learn import Learned, LearnedSection, learn
from tritonops.calibrate.raw import Measured, Raw, RawError
from tritonops.calibrate.samples import interval
from tritonops.device import named_device
from tritonops.dispatch.problem import Problem
from tritonops.dispatch.variant import VENDOR, OpSpec, Variant

DEVICE = named_device("sm_90-132")


def part(learned: Learned, mode: str = "graph", dtype: str = "bfloat16") -> LearnedSection:
    return next(s for s in learned.sections if (s.when["mode"], s.when["dtype"]) == (mode, dtype))


def choice(learned: Learned, m: int, n: int, mode: str = "graph") -> str:
    features = SPEC.all_features(Problem(SPEC.name, {"M": m, "N": n}, "bfloat16"), DEVICE)
    return walk(part(learned, mode).tree, features)["use"][0]


def firsts(raw: Raw, mode: str = "graph") -> set[str]:
    return {leaf["use"][0] for leaf in leaves(part(learn(raw, SPEC), mode).tree)}


def equal(m: int, n: int) -> dict[str, float]:
    """All of ours are exactly the vendor's speed."""
    return dict.fromkeys(OURS, 1.0)


@pytest.mark.parametrize("noise", [0.01, 0.03, 0.1])
@pytest.mark.parametrize("seed", range(2))
def test_the_crossovers_are_found_in_the_gaps_they_lie_in(noise: float, seed: int) -> None:
    learned = learn(synthetic(noise, seed, heldout=0), SPEC)
    for m, n in grid():
        want = {"small/a", "twin/a"} if m <= 256 else {"wide/a"} if n >= 4096 else {VENDOR}
        assert choice(learned, m, n) in want, (m, n)
    assert len(leaves(part(learned).tree)) == 3
    assert part(learned).hull == {"M": [16, 8192], "N": [512, 16384]}


@pytest.mark.parametrize("below", [True, False])
def test_the_unmeasured_gap_beside_the_vendor_is_the_vendors(below: bool) -> None:
    ms = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
    learned = learn(raw_of([measured(m, 512, {"small/a": 1.3 if (m <= 256) is below else 0.7}) for m in ms]), SPEC)
    found = [choice(learned, m, 512) for m in (256, 257, 511, 512)]
    assert found == (["small/a", VENDOR, VENDOR, VENDOR] if below else [VENDOR, VENDOR, VENDOR, "small/a"])


def test_between_two_of_ours_the_gap_is_cut_at_the_geometric_mean() -> None:
    def by(m: int) -> dict[str, float]:
        return {"small/a": 2.0, "wide/a": 1.1} if m <= 100 else {"small/a": 1.1, "wide/a": 2.0}

    tree = part(learn(raw_of([measured(m, 512, by(m)) for m in (10, 20, 50, 100, 400, 900, 1600, 5000)]), SPEC)).tree
    assert (tree["f"], tree["le"]) == ("M", 200)
    assert (tree["yes"]["use"][0], tree["no"]["use"][0]) == ("small/a", "wide/a")


@pytest.mark.parametrize("noise", [0.01, 0.03, 0.1])
def test_rivals_that_are_no_faster_hardly_ever_replace_the_vendor(noise: float) -> None:
    wrong = [seed for seed in range(12) if firsts(synthetic(noise, seed, by=equal, heldout=0)) != {VENDOR}]
    assert len(wrong) <= 1


def test_a_gain_of_one_per_cent_stays_with_the_vendor_and_one_of_five_does_not() -> None:
    for gain, want in ((1.01, {VENDOR}), (1.05, {"wide/a"})):
        rows = [measured(m, n, {"wide/a": gain}, noise=0.003) for m, n in grid()]
        assert firsts(raw_of(rows)) == want


@pytest.mark.parametrize("loss", [0.9, 0.5])
def test_no_leaf_of_ours_holds_a_row_that_is_surely_slower_than_the_vendor(loss: float) -> None:
    """However large the gain of its neighbours."""
    rows = [measured(m, 512, {"wide/a": loss if m == 100 else 3.0}) for m in (16, 32, 64, 100, 128, 256, 512, 1024)]
    learned = learn(raw_of(rows), SPEC)
    assert choice(learned, 100, 512) == VENDOR and choice(learned, 512, 512) == "wide/a"
    assert all(leaf["gain"] >= 0.98 for leaf in leaves(part(learned).tree) if "gain" in leaf)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_few_shapes_are_the_vendors_unless_three_agree(count: int) -> None:
    rows = [measured(2**i, 512, {"wide/a": 1.5}) for i in range(4, 4 + count)]
    assert firsts(raw_of(rows)) == ({VENDOR} if count < 3 else {"wide/a"})


def test_a_shape_measured_with_several_ids_or_dtypes_is_one_shape() -> None:
    many = [
        measured(m, 512, {"wide/a": 1.5}, dtype=dtype, ids=ids)
        for m in (16, 32) for ids in ("uniform", "zipf1.0") for dtype in ("float16", "bfloat16")
    ]  # fmt: skip
    assert firsts(raw_of(many)) == {VENDOR}


def test_the_choice_is_good_for_both_distributions_of_ids() -> None:
    rows = [
        measured(m, 512, {"wide/a": 3.0 if ids == "uniform" else 0.8, "small/a": 1.2}, ids=ids)
        for m in (16, 32, 64, 128) for ids in ("uniform", "zipf1.0")
    ]  # fmt: skip
    assert firsts(raw_of(rows)) == {"small/a"}


def test_float16_and_bfloat16_share_a_tree() -> None:
    rows = [measured(m, 512, {"wide/a": 1.5}, dtype=d) for m, d in
            ((16, "bfloat16"), (32, "float16"), (64, "bfloat16"))]  # fmt: skip
    learned = learn(raw_of([*rows, measured(16, 512, {"wide/a": 1.5}, dtype="float32")]), SPEC)
    assert part(learned, dtype="float16").tree == part(learned, dtype="bfloat16").tree
    assert part(learned, dtype="float16").tree["use"][0] == "wide/a"
    keys = [list(s.when.values()) for s in learned.sections]
    assert len(keys) == 6 and keys == sorted(keys)
    assert all(list(s.when) == ["dtype", "layout", "aligned", "policy", "mode"] for s in learned.sections)


def test_few_rows_of_a_section_are_joined_by_those_of_the_others() -> None:
    sizes = (16, 32, 64, 128, 256, 512)
    rows = [measured(m, 512, {"wide/a": 1.5}) for m in sizes]
    few = [measured(m, 512, {"wide/a": 1.5}, dtype="float32") for m in (16, 512)]
    learned = learn(raw_of([*rows, *few]), SPEC)
    assert part(learned, dtype="float32").tree["use"][0] == "wide/a"
    assert part(learned, dtype="float32").tree["n"] == 2 and part(learned).tree["n"] == 6
    assert part(learned, dtype="float32").hull["M"] == [16, 512]


def test_what_one_section_loses_another_may_win() -> None:
    sizes = (16, 32, 64, 128, 256, 512)
    rows = [measured(m, 512, {"wide/a": 1.5}) for m in sizes]
    losers = [measured(m, 512, {"wide/a": 0.7}, dtype="float32") for m in sizes]
    learned = learn(raw_of([*rows, *losers]), SPEC)
    assert part(learned).tree["use"][0] == "wide/a"
    assert part(learned, dtype="float32").tree["use"][0] == VENDOR


def test_sizes_of_which_a_section_has_no_row_are_the_vendors_whatever_the_others_say() -> None:
    small, large = (16, 20, 24, 32), (1024, 2048, 4096, 8192)
    rows = [measured(m, 512, {"small/a": 1.5, "wide/a": 0.5}) for m in small]
    rows += [measured(m, 512, {"small/a": 0.5, "wide/a": 1.5}) for m in large]
    few = [measured(m, 512, {"small/a": 1.5, "wide/a": 0.5}, dtype="float32") for m in small]
    learned = learn(raw_of([*rows, *few]), SPEC)
    assert {leaf["use"][0] for leaf in leaves(part(learned).tree)} == {"small/a", "wide/a"}
    for leaf in leaves(part(learned, dtype="float32").tree):
        assert leaf["use"][0] == ("small/a" if leaf["n"] else VENDOR)


def test_a_leaf_may_rank_variants_so_that_the_next_serves_what_the_first_cannot() -> None:
    sizes = range(16, 160, 8)
    rows = [measured(m, 512, {"wide/a": 3.0, "slow/a": 1.3} if m % 16 else {"slow/a": 1.3}) for m in sizes]
    tree = part(learn(raw_of(rows), SPEC)).tree
    assert tree["use"][:2] == ["wide/a", "slow/a"]


def test_no_section_for_what_was_not_measured() -> None:
    assert learn(raw_of([]), SPEC).sections == ()
    held = [measured(16, 512, {"wide/a": 1.5}, heldout=True)]
    assert learn(raw_of(held), SPEC).sections == ()


def test_held_out_rows_teach_nothing() -> None:
    rows = [measured(m, n, speeds(m, n)) for m, n in grid()]
    held = [measured(m, 700, {"slow/a": 9.0}, heldout=True) for m in (20, 30, 40, 50, 60)]
    assert learn(raw_of([*rows, *held]), SPEC) == learn(raw_of(rows), SPEC)


def test_eager_times_decide_the_eager_section_and_graph_times_the_other() -> None:
    rows = [measured(m, 512, {"wide/a": 1.5}, eager={"wide/a": 0.5}) for m in (16, 32, 64, 128)]
    assert (firsts(raw_of(rows)), firsts(raw_of(rows), "eager")) == ({"wide/a"}, {VENDOR})
    bound = [measured(m, 512, {"wide/a": 1.5}) for m in (16, 32, 64, 128)]
    assert firsts(raw_of(bound), "eager") == {"wide/a"}


@pytest.mark.parametrize("mode", ["graph", "eager"])
def test_what_failed_the_gate_or_a_row_is_never_named_however_fast(mode: str) -> None:
    rows = [measured(m, n, {**speeds(m, n), "slow/a": 9.0}) for m, n in grid()]
    failed = [*rows[1:], measured(*grid()[0], {"wide/a": 1.0}, failed={"slow/a": "differs from the vendor's"})]

    def named(raw: Raw) -> set[str]:
        return {v for leaf in leaves(part(learn(raw, SPEC), mode).tree) for v in leaf["use"]}

    assert "slow/a" in named(raw_of(rows))
    assert "slow/a" not in named(raw_of(rows, gate=["slow/a"])) | named(raw_of(failed))
    found = firsts(raw_of(rows, gate=["slow/a"]), mode)
    assert "wide/a" in found and found & {"small/a", "twin/a"}


def test_out_of_memory_while_a_graph_was_captured_is_no_failure() -> None:
    why = "cannot be captured in a graph: OutOfMemoryError: CUDA out of memory"
    rows = [measured(m, 512, {"wide/a": 1.5}) for m in (16, 32, 64)] + [measured(128, 512, {}, failed={"wide/a": why})]
    assert firsts(raw_of(rows)) >= {"wide/a"}


def test_everything_failed() -> None:
    rows = [measured(m, n, {}, failed=dict.fromkeys(OURS, "raised")) for m, n in grid()]
    learned = learn(raw_of(rows), SPEC)
    assert part(learned).tree == {"use": [VENDOR], "n": len(grid())}


def test_the_next_serves_where_the_first_is_illegal() -> None:
    rows = [
        measured(m, 512, {"whole/a": 2.0, "wide/a": 1.5} if m % 128 == 0 else {"wide/a": 1.5})
        for m in (128, 200, 256, 300, 384, 400, 512, 600)
    ]
    tree = part(learn(raw_of(rows), SPEC)).tree
    for leaf in leaves(tree):
        assert "wide/a" in leaf["use"] and leaf["use"].index("wide/a") < leaf["use"].index(VENDOR)


def test_a_leaf_names_something_of_ours_for_every_policy() -> None:
    for leaf in leaves(part(learn(synthetic(heldout=0), SPEC)).tree):
        variants = [SPEC.variants()[v] for v in leaf["use"] if v != VENDOR]
        assert any(v.deterministic for v in variants) and any(v.batch_invariant for v in variants)
        assert VENDOR in leaf["use"] and len(set(leaf["use"])) == len(leaf["use"])


def test_gain_is_the_worst_measured_rounded_down() -> None:
    rows = [measured(m, 512, {"wide/a": g}, noise=1e-9) for m, g in ((16, 1.5), (32, 1.23456), (64, 1.9))]
    tree = part(learn(raw_of(rows), SPEC)).tree
    assert (tree["use"][0], tree["gain"], tree["n"]) == ("wide/a", 1.234, 3)


def test_weights_matter() -> None:
    """Where two of ours share what can be told apart by no feature, the shapes that are called most decide."""

    def rows(weight: float) -> list[Measured]:
        return [
            measured(m, 512, {"small/a": 2.0, "wide/a": 1.5} if i % 2 else {"small/a": 1.5, "wide/a": 2.0},
                     weight=weight if i % 2 else 1.0)
            for i, m in enumerate((16, 20, 24, 28, 32, 36, 40, 44))
        ]  # fmt: skip

    assert firsts(raw_of(rows(50.0))) == {"small/a"} and firsts(raw_of(rows(0.02))) == {"wide/a"}


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 0.0, -1.0])
@pytest.mark.parametrize("mode", ["graph", "eager"])
def test_times_that_are_none_are_refused_by_name(bad: float, mode: str) -> None:
    good = measured(16, 512, {"wide/a": 1.5}, eager={"wide/a": 1.5})
    times = {**getattr(good, mode), "wide/a": (0.01, bad)}
    with pytest.raises(RawError, match="learned_toy M=16 N=512.*not a positive number"):
        learn(raw_of([dataclasses.replace(good, **{mode: times})]), SPEC)


def test_no_times_of_a_variant_or_of_the_vendor_are_refused_by_name() -> None:
    good = measured(16, 512, {"wide/a": 1.5})
    with pytest.raises(RawError, match="learned_toy M=16 N=512.*not a positive number"):
        learn(raw_of([dataclasses.replace(good, graph={**good.graph, "wide/a": ()})]), SPEC)
    with pytest.raises(RawError, match="learned_toy M=16 N=512.*no time of the vendor"):
        learn(raw_of([dataclasses.replace(good, graph={"wide/a": (0.01,)})]), SPEC)


@pytest.mark.parametrize("seed", range(3))
def test_the_order_of_rows_candidates_and_keys_does_not_matter(seed: int) -> None:
    raw = synthetic(0.05, heldout=5)
    first, again = learn(raw, SPEC), learn(shuffled(raw, seed), SPEC)
    assert again == first
    assert json.dumps([s.tree for s in again.sections]) == json.dumps([s.tree for s in first.sections])


def test_interval_is_the_narrowest_that_holds_95_per_cent() -> None:
    """Of the pairs k-th smallest, k-th largest; the extremes where not even they do, under 6 values."""
    below = [Fraction(1)]  # of n values, the chance of k that lie below their distribution's median
    for n in range(1, 41):
        below = [(a + b) / 2 for a, b in zip([Fraction(0), *below], [*below, Fraction(0)], strict=True)]
        held = [k for k in range(1, n // 2 + 1) if sum(below[k : n - k + 1]) >= Fraction(95, 100)]
        k = max(held, default=1)
        values = [float(i) for i in range(1, n + 1)]
        random.Random(n).shuffle(values)
        assert interval(values) == (k, n + 1 - k), n
        assert bool(held) is (n >= 6)


def test_four_hundred_cases_of_24_variants_take_seconds() -> None:
    ids = [f"v{i}/a" for i in range(24)]
    variants = [Variant(v, lambda *a: None) for v in (VENDOR, *ids)]
    spec = OpSpec("learned_many", lambda: variants, SPEC.dims, lambda problem, device: ids, SPEC.describe, SPEC.sample,
                  SPEC.features, SPEC.feature_names)  # fmt: skip
    rng = random.Random(0)
    best = {v: (rng.uniform(4, 14), rng.uniform(6, 14)) for v in ids}
    rows = [
        measured(
            round(2**m), round(2**n), {v: 2 ** (0.6 - 0.2 * math.hypot(m - a, n - b)) for v, (a, b) in best.items()}
        )
        for m, n in ((rng.uniform(4, 14), rng.uniform(6, 14)) for _ in range(400))
    ]
    header = {**raw_of([]).header, "op": spec.name, "gate": {v: {"passed": True} for v in ids}}
    began = time.process_time()
    learned = learn(Raw(header, tuple(rows)), spec)
    assert time.process_time() - began < 20
    assert len(leaves(part(learned).tree)) > 5
