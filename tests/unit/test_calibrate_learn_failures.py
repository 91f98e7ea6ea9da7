"""What the learner must not do: name what failed, let it hide the rest, or forget a user's own shape."""

from __future__ import annotations

import dataclasses
import json

import pytest

from learn_cases import SPEC, grid, leaves, measured, raw_of, speeds, synthetic, walk
from tritonops.calibrate.emit import emit
from tritonops.calibrate.learn import Learned, LearnedSection, learn
from tritonops.calibrate.raw import Measured, Raw
from tritonops.calibrate.verify import verify
from tritonops.device import named_device
from tritonops.dispatch.problem import Problem
from tritonops.dispatch.variant import VENDOR

DEVICE = named_device("sm_90-132")


def part(learned: Learned, mode: str = "graph", dtype: str = "bfloat16") -> LearnedSection:
    return next(s for s in learned.sections if (s.when["mode"], s.when["dtype"]) == (mode, dtype))


def named(raw: Raw) -> set[str]:
    return {v for s in learn(raw, SPEC).sections for leaf in leaves(s.tree) for v in leaf["use"]}


def firsts(raw: Raw) -> set[str]:
    return {leaf["use"][0] for leaf in leaves(part(learn(raw, SPEC)).tree)}


TRAINING = [measured(m, n, speeds(m, n)) for m, n in grid()]


def test_what_broke_the_context_before_a_time_was_taken_is_never_named() -> None:
    """The row that the sweep leaves behind then has no times at all."""
    case = measured(128, 512, {}).case
    lost = Measured(case, {}, failed={"small/a": "raised: illegal memory access"})
    assert "small/a" in named(raw_of(TRAINING)) and "small/a" not in named(raw_of([*TRAINING, lost]))


def test_what_failed_on_a_held_out_shape_is_never_named() -> None:
    """A wrong result there is one at run time; a lookup that goes on to the next would hide it."""
    held = measured(100, 700, {"wide/a": 0.9}, heldout=True, failed={"small/a": "differs from the vendor's"})
    assert "small/a" not in named(raw_of([*TRAINING, held]))


def test_a_failure_in_another_section_does_not_count() -> None:
    other = measured(100, 700, {}, dtype="float32", failed={"small/a": "raised"})
    found = learn(raw_of([*TRAINING, other]), SPEC)
    assert "small/a" in {v for leaf in leaves(part(found).tree) for v in leaf["use"]}


def test_a_fast_variant_that_failed_once_does_not_hide_the_others() -> None:
    rows = [measured(m, n, {**speeds(m, n), "slow/a": 9.0}) for m, n in grid()]
    failed = [*rows[1:], measured(*grid()[0], {"small/a": 1.3}, failed={"slow/a": "differs from the vendor's"})]
    assert firsts(raw_of(failed)) >= {"wide/a", VENDOR} and firsts(raw_of(failed)) & {"small/a", "twin/a"}


def test_what_stands_in_for_the_first_loses_nowhere_either() -> None:
    rows = [measured(m, 512, {"small/a": 1.5}) for m in (16, 32, 64, 128, 256)]
    rows += [measured(m, 512, {"wide/a": 0.6 if m == 80 else 3.0}) for m in (20, 40, 80, 100)]
    tree = part(learn(raw_of(rows), SPEC)).tree
    use = walk(tree, SPEC.all_features(Problem(SPEC.name, {"M": 80, "N": 512}, "bfloat16"), DEVICE))["use"]
    assert next(v for v in use if v != "small/a") == VENDOR


def _at(learned: Learned, m: int) -> str:
    features = SPEC.all_features(Problem(SPEC.name, {"M": m, "N": 512}, "bfloat16"), DEVICE)
    return str(walk(part(learned).tree, features)["use"][0])


def test_users_own_shapes_make_leaves_of_one_shape() -> None:
    rows = [measured(64, 512, {"wide/a": 1.5}), measured(4096, 512, {"wide/a": 0.5})]
    learned = learn(raw_of(rows, shapes=True), SPEC)
    assert (_at(learned, 64), _at(learned, 4096)) == ("wide/a", VENDOR)
    assert firsts(raw_of(rows)) == {VENDOR}


def test_two_rounds_of_noise_do_not_replace_the_vendor() -> None:
    """Two times have no 95 % interval: both are on one side of the truth half of the time."""
    wrong = []
    for seed in range(15):
        raw = synthetic(0.1, seed, by=lambda m, n: dict.fromkeys(speeds(m, n), 1.0), heldout=0)
        few = [dataclasses.replace(m, graph={v: t if v == VENDOR else t[:2] for v, t in m.graph.items()})
               for m in raw.measured[:8]]  # fmt: skip
        wrong += [seed] if firsts(raw_of(few)) != {VENDOR} else []
    assert len(wrong) <= 1


def test_a_shape_is_one_shape_whatever_the_order_of_its_dimensions() -> None:
    a, b = (measured(16, 512, {"wide/a": 1.5}, ids=ids) for ids in ("uniform", "zipf1.0"))
    turned = dataclasses.replace(b.case, problem=dataclasses.replace(b.case.problem, dims={"N": 512, "M": 16}))
    found = learn(raw_of([a, dataclasses.replace(b, case=turned)]), SPEC)
    assert part(found).evidence["shapes"] == part(found).tree["n"] == 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_shapes_of_a_section_are_those_of_its_leaves(dtype: str) -> None:
    """tests/tables holds every shipped table to this."""
    rows = [measured(m, 512, {"wide/a": 1.5}) for m in (16, 32, 64, 128)] + [measured(16, 512, {}, dtype="float16")]
    raw = raw_of(rows)
    learned = learn(raw, SPEC)
    for s in json.loads(emit(raw, learned, verify(raw, learned, SPEC), "x.jsonl.gz", "0" * 64))["sections"]:
        assert s["evidence"]["shapes"] == sum(leaf["n"] for leaf in leaves(s["tree"]))
