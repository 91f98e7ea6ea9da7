"""use(): policies, forced and excluded variants, SM budget; how they nest, bind and travel in one int."""

from __future__ import annotations

import itertools
import threading

import pytest
import torch

import tritonops
from dispatch_cases import cuda, leaf, make_table, put, section
from tritonops import _compat
from tritonops.dispatch import override
from tritonops.dispatch.select import choose

GPU = cuda()


def forced(op: str = "toy") -> str | None:
    from tritonops.dispatch.variant import REGISTRY

    return override.forced(override.flags, op, REGISTRY[op].variants())


# Packing


@pytest.mark.parametrize("policy", ["fast", "deterministic", "batch_invariant"])
@pytest.mark.parametrize("budget", [None, 1, 66, 4095])
@pytest.mark.parametrize("variant", [None, "one", {"toy": "one/b"}])
@pytest.mark.parametrize("exclude", [None, "vendor", ["two", "one/a"]])
def test_packing_round_trip(toy, policy, budget, variant, exclude) -> None:
    bits = override.pack(policy, variant, exclude, budget)
    assert override.policy(bits) == policy and override.sm_budget(bits) == budget
    wishes = override.overrides(bits)
    assert wishes.forced == ((("", "one"),) if variant == "one" else (("toy", "one/b"),) if variant else ())
    assert wishes.excluded == frozenset([exclude] if isinstance(exclude, str) else exclude or ())
    assert 0 <= bits < 2**63 and override.pack(policy, variant, exclude, budget) == bits
    assert override.pack(base=bits) == bits


def test_flags_are_the_same_for_the_same_wishes_however_written(toy) -> None:
    a = override.pack(variant={"toy": "one", "toy_backward": "two"}, exclude=["vendor", "one/a"])
    b = override.pack(variant={"toy_backward": "two", "toy": "one"}, exclude=iter(("one/a", "vendor", "vendor")))
    assert a == b != 0
    assert override.pack() == 0 == override.pack(policy="fast")
    size = len(override._OVERRIDES)
    for _ in range(100):
        override.pack(exclude=["vendor", "one/a"])
    assert len(override._OVERRIDES) <= size + 1


def test_different_wishes_have_different_flags(toy) -> None:
    options = itertools.product(
        ("fast", "deterministic", "batch_invariant"), (None, "one", "one/a", {"toy": "one"}), (None, "two"), (None, 7)
    )
    bits = [override.pack(*o) for o in options]
    assert len(set(bits)) == len(bits) == 48


# Nesting


def test_blocks_nest_and_restore(toy) -> None:
    with tritonops.use(policy="deterministic", sm_budget=100):
        outer = override.flags
        with tritonops.use(variant="one", exclude="vendor"):
            assert override.policy(override.flags) == "deterministic" and override.sm_budget(override.flags) == 100
            with tritonops.use(policy="batch_invariant", exclude=["two"], variant={"toy": "one/b"}):
                assert override.policy(override.flags) == "batch_invariant" and forced() == "one/b"
                assert override.overrides(override.flags).excluded == {"vendor", "two"}
            assert forced() == "one" and override.overrides(override.flags).excluded == {"vendor"}
        assert override.flags == outer
        with tritonops.use(policy="fast", sm_budget=7):
            assert override.policy(override.flags) == "fast" and override.sm_budget(override.flags) == 7
    assert override.flags == 0


def test_an_error_in_a_block_restores(toy) -> None:
    with pytest.raises(KeyError), tritonops.use(variant="one"):
        raise KeyError
    assert override.flags == 0


def test_a_refused_use_changes_nothing(toy) -> None:
    with tritonops.use(policy="deterministic"):
        before = override.flags
        with pytest.raises(ValueError), tritonops.use(policy="batch_invariant", exclude="nonsense"):
            pass
        assert override.flags == before


def test_use_decorates_a_function(toy) -> None:
    @tritonops.use(variant="one/b")
    def inside() -> str | None:
        return forced()

    assert (inside(), forced(), inside()) == ("one/b", None, "one/b")


def test_use_is_process_wide(toy) -> None:
    seen = []
    with tritonops.use(variant="one"):
        thread = threading.Thread(target=lambda: seen.append(forced()))
        thread.start()
        thread.join()
    assert seen == ["one"]


def test_blocks_of_two_threads_that_end_in_the_other_order_leave_nothing_behind(toy) -> None:
    first = tritonops.use(policy="deterministic", exclude="two")
    second = tritonops.use(variant="one", sm_budget=9)
    first.__enter__()
    thread = threading.Thread(target=second.__enter__)
    thread.start()
    thread.join()
    assert override.policy(override.flags) == "deterministic" and forced() == "one"
    first.__exit__(None, None, None)
    assert override.policy(override.flags) == "fast" and forced() == "one"
    assert override.sm_budget(override.flags) == 9 and override.overrides(override.flags).excluded == frozenset()
    second.__exit__(None, None, None)
    assert override.flags == 0


def test_many_threads_using_at_once_leave_nothing_behind(toy) -> None:
    def work(wish: str) -> None:
        for _ in range(200):
            with tritonops.use(variant=wish), tritonops.use(policy="deterministic"):
                assert override.policy(override.flags) == "deterministic"

    threads = [threading.Thread(target=work, args=(w,)) for w in ("one", "two", "one/b", "vendor") * 2]
    for t in threads:
        t.start()
    for t in threads:
        t.join(30)
    assert override.flags == 0 and override._in_force == []


# What a wish binds


@pytest.mark.parametrize(
    ("wish", "forward", "backward"),
    [
        ("one", "one", "one"),
        ("one/a", "one/a", "one/a"),
        ("one/back", None, "one/back"),
        ({"toy": "one"}, "one", "one"),
        ({"toy": "two/a"}, "two/a", "two/a"),
        ({"toy": "one/back"}, None, "one/back"),
        ({"toy_backward": "one"}, None, "one"),
        ({"toy": "one/a", "toy_backward": "two"}, "one/a", "two"),
        ("vendor", "vendor", "vendor"),
    ],
)
def test_a_wish_binds_the_ops_that_own_it_and_their_backwards(toys, wish, forward, backward) -> None:
    with tritonops.use(variant=wish):
        assert (forced("toy"), forced("toy_backward")) == (forward, backward)


def test_a_str_binds_no_op_that_does_not_own_it(toys) -> None:
    with tritonops.use(variant="steady/a"):
        assert forced("toy") == "steady/a"
        assert forced("matmul") is None
    with tritonops.use(variant="tiled"):
        assert (forced("matmul"), forced("toy")) == ("tiled", None)


def test_an_ops_own_wish_comes_before_one_for_all(toys) -> None:
    with tritonops.use(variant="one"), tritonops.use(variant={"toy": "two"}):
        assert (forced("toy"), forced("toy_backward")) == ("two", "two")
    with tritonops.use(variant={"toy": "two"}), tritonops.use(variant="one"):
        assert (forced("toy"), forced("toy_backward")) == ("one", "one")


def test_a_layer_norm_wish_reaches_its_backward(clean) -> None:
    x = ((8, 64), (64,), (64,))
    with tritonops.use(variant={"layer_norm": "rows"}):
        for op in ("layer_norm", "layer_norm_backward"):
            got = tritonops.explain(op, *x, dtype=torch.float16, device="sm_90-132")
            assert (got.rule, got.variant.partition("/")[0]) == ("forced", "rows")
        assert tritonops.explain("rms_norm", *x[:2], dtype=torch.float16, device="sm_90-132").rule != "forced"


@pytest.mark.skipif(not _compat.has_liger(), reason="liger-kernel is not installed")
def test_a_layer_norm_wish_that_the_backward_alone_owns(clean) -> None:
    x = ((8, 64), (64,), (64,))
    with tritonops.use(variant={"layer_norm": "liger"}):
        assert tritonops.explain("layer_norm", *x, dtype=torch.float16, device="sm_90-132").rule != "forced"
        got = tritonops.explain("layer_norm_backward", *x, dtype=torch.float16, device="sm_90-132")
        assert (got.rule, got.variant.partition("/")[0]) == ("forced", "liger")


def test_excluding_a_family_a_variant_and_several(toy, tables) -> None:
    put(tables, make_table(section(leaf("one/a", "one/b", "two/a", "vendor"))))
    for exclude, variant in [
        (None, "one/a"), ("one/a", "one/b"), ("one", "two/a"), (["one", "two"], "vendor"), (("one/a", "two"), "one/b"),
        ({"one/b"}, "one/a"), ([], "one/a"),
    ]:  # fmt: skip
        with tritonops.use(exclude=exclude):
            assert choose(toy.spec, toy.problem(), GPU).variant == variant


def test_a_family_is_not_a_prefix(toy) -> None:
    assert not override.matches("one_more/a", "one") and not override.matches("one/ab", "one/a")
    assert override.matches("one/a", "one") and override.matches("vendor", "vendor")


# Refusals


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"policy": "quick"}, ValueError,
         "use(): policy: expected one of ('fast', 'deterministic', 'batch_invariant'), got 'quick'"),
        ({"policy": 1}, ValueError,
         "use(): policy: expected one of ('fast', 'deterministic', 'batch_invariant'), got 1"),
        ({"sm_budget": 0}, ValueError, "use(): sm_budget: expected 1 to 4095 SMs, got 0"),
        ({"sm_budget": -1}, ValueError, "use(): sm_budget: expected 1 to 4095 SMs, got -1"),
        ({"sm_budget": 4096}, ValueError, "use(): sm_budget: expected 1 to 4095 SMs, got 4096"),
        ({"sm_budget": 1.0}, TypeError, "use(): sm_budget: expected an int, got float"),
        ({"sm_budget": True}, TypeError, "use(): sm_budget: expected an int, got bool"),
        ({"variant": "three"}, ValueError,
         "use(): variant: 'three' is no variant or family of any op; see tritonops.variants()"),
        ({"variant": ""}, ValueError, "use(): variant: expected a variant id or family such as 'tiled', got ''"),
        ({"variant": "../x"}, ValueError,
         "use(): variant: expected a variant id or family such as 'tiled', got '../x'"),
        ({"variant": 5}, TypeError, "use(): variant: expected a str or a dict of op to str, got int"),
        ({"variant": ["one"]}, TypeError, "use(): variant: expected a str or a dict of op to str, got list"),
        ({"variant": {"toy": "tiled"}}, ValueError,
         "use(): variant: 'tiled' is no variant or family of op 'toy'; see tritonops.variants()"),
        ({"variant": {"toy": None}}, ValueError,
         "use(): variant: expected a variant id or family such as 'tiled', got None"),
        ({"exclude": 5}, TypeError, "use(): exclude: expected a str or several, got int"),
        ({"exclude": [5]}, ValueError, "use(): exclude: expected a variant id or family such as 'tiled', got 5"),
        ({"exclude": "three"}, ValueError,
         "use(): exclude: 'three' is no variant or family of any op; see tritonops.variants()"),
    ],
)  # fmt: skip
def test_bad_arguments_are_named(toy, arguments, error, message) -> None:
    with pytest.raises(error) as caught, tritonops.use(**arguments):
        pass
    assert str(caught.value) == message and override.flags == 0
    with pytest.raises(error):
        override.pack(**arguments)


def test_an_unknown_op_is_named(toy) -> None:
    with pytest.raises(ValueError, match=r"use\(\): variant: unknown op 'tyo'; ops are \[.*'toy'.*\]"):
        override.pack(variant={"tyo": "one"})


# The SM budget and torch's own switch


@pytest.mark.parametrize(("budget", "programs"), [(None, 2 * 132), (1, 2), (100, 200), (4095, 2 * 132)])
def test_the_sm_budget_bounds_a_persistent_grid(budget, programs) -> None:
    from tritonops import launch
    from tritonops.dispatch.variant import REGISTRY, Choice

    spec, wish = REGISTRY["matmul"], "persistent/128x128x64-g8-w4-s3-p2"
    if not _compat.has_triton():
        pytest.skip("triton is not installed")
    with tritonops.use(sm_budget=budget, variant={"matmul": wish}):
        got = tritonops.explain("matmul", (4096, 64), (64, 4096), dtype=torch.float16, device="sm_90-132")
        choice = Choice(spec.variants()[got.variant], got.problem, got.device, got)
        with launch.capture() as requests:
            choice.variant.run(choice, *spec.sample(got.problem, "meta"))
    assert got.variant == wish and requests[0].grid == (programs,)


def test_torchs_deterministic_switch_makes_fast_deterministic_at_every_call() -> None:
    for policy, effective in (("fast", "deterministic"), ("deterministic", "deterministic"),
                              ("batch_invariant", "batch_invariant")):  # fmt: skip
        bits = override.pack(policy=policy, sm_budget=3)
        assert override.effective(bits) == bits
        torch.use_deterministic_algorithms(True, warn_only=policy == "deterministic")
        try:
            assert override.policy(override.effective(bits)) == effective
            assert override.sm_budget(override.effective(bits)) == 3
        finally:
            torch.use_deterministic_algorithms(False)
        assert override.effective(bits) == bits


CALLS = {
    "matmul": ((8, 8), (8, 8)),
    "layer_norm": ((8, 8),),
    "layer_norm_backward": ((8, 8),),
    "rms_norm": ((8, 8),),
    "rms_norm_backward": ((8, 8),),
    "embedding": ((8,), (8, 8)),
    "embedding_backward": ((8,), (8, 8)),
}


@pytest.mark.parametrize("op", CALLS)
def test_the_policy_reaches_the_problem_of_each_op(op) -> None:
    def policy() -> str:
        return tritonops.explain(op, *CALLS[op], dtype=torch.float32, device="sm_90-132").problem.policy

    assert policy() == "fast"
    with tritonops.use(policy="deterministic"):
        assert policy() == "deterministic"
    torch.use_deterministic_algorithms(True)
    try:
        assert policy() == "deterministic"
    finally:
        torch.use_deterministic_algorithms(False)
    assert policy() == "fast"


def test_atomic_additions_are_refused_under_torchs_deterministic_switch(clean) -> None:
    def explain() -> str:
        return tritonops.explain("embedding_backward", (8,), (8, 8), dtype=torch.float32, device="sm_90-132").variant

    with tritonops.use(exclude="vendor"):
        assert explain().startswith("atomic/")
        torch.use_deterministic_algorithms(True)
        try:
            with pytest.raises(
                tritonops.VariantUnavailable, match="not deterministic, and the policy is deterministic"
            ):
                explain()
        finally:
            torch.use_deterministic_algorithms(False)
