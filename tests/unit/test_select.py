"""Choosing: legality, sections and their stand-ins, trees, hulls, neighbours, published tables, policies."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

import tritonops
from dispatch_cases import OURS, cuda, leaf, make_table, put, section
from tritonops import VariantUnavailable, _compat
from tritonops.device import CPU, INTERPRETER
from tritonops.dispatch import override, select, store
from tritonops.dispatch.select import Decision, choose
from tritonops.matmul import op as matmul

GPU = cuda()
OTHER = cuda("NVIDIA Other")


def decide(toy, gpu=GPU, m: int = 64, n: int = 64, **facts) -> Decision:
    store.clear()
    return choose(toy.spec, toy.problem(m, n, **facts), gpu)


# No table


def test_without_a_table_torch_comes_first_and_our_own_in_the_order_preferred(toy) -> None:
    store._warned.add("absent NVIDIA Test sm_90-132")
    got = decide(toy, cuda(""))
    assert (got.variant, got.rule, got.ranking) == ("vendor", "no table", ("vendor", "two/a", "one/a"))
    assert got.reason == "there is no usable table for sm_90-132, so torch comes first"
    assert got.unknown == ("how our variants compare with torch on sm_90-132: nothing was measured",)
    with tritonops.use(exclude="vendor"):
        got = decide(toy, cuda(""))
    assert (got.variant, got.rejected) == ("two/a", (("vendor", "excluded by use(exclude=...)"),))
    with tritonops.use(exclude=["vendor", "two"]):
        assert decide(toy, cuda("")).variant == "one/a"


def test_on_the_cpu_torch_serves(toy) -> None:
    got = decide(toy, CPU)
    assert (got.variant, got.rule, got.reason) == ("vendor", "no GPU", "on the CPU torch's own kernels serve")
    with tritonops.use(exclude="vendor"), pytest.raises(VariantUnavailable) as caught:
        decide(toy, CPU)
    assert str(caught.value) == (
        "tritonops.toy: no variant can serve toy M=64 N=64, float32, aligned, eager, fast on CPU: "
        "vendor: excluded by use(exclude=...); "
        "two/a: Triton kernels need an NVIDIA GPU, or TRITON_INTERPRET=1 on the CPU; "
        "one/a: Triton kernels need an NVIDIA GPU, or TRITON_INTERPRET=1 on the CPU"
    )


def test_under_the_interpreter_our_own_come_first(toy, monkeypatch) -> None:
    monkeypatch.setattr(_compat, "interpreter_reason", lambda: None)
    got = decide(toy, INTERPRETER)
    assert (got.variant, got.rule, got.ranking) == ("two/a", "interpreter", ("two/a", "one/a", "vendor"))


# Legality


@pytest.mark.parametrize(
    ("variant", "gpu", "facts", "why"),
    [
        ("one/a", GPU, {}, None),
        ("vendor", CPU, {}, None),
        ("plain/a", CPU, {}, None),
        ("one/a", CPU, {}, "Triton kernels need an NVIDIA GPU, or TRITON_INTERPRET=1 on the CPU"),
        ("one/a", cuda(arch="gfx942"), {}, "written for NVIDIA GPUs, this is gfx942"),
        ("picky/a", GPU, {"m": 64}, "takes whole tiles of 128 rows"),
        ("picky/a", GPU, {"m": 128}, None),
        ("dense/a", cuda(arch="sm_89"), {}, "needs tensor descriptors in hardware (sm_90 or newer), this is sm_89"),
        ("dense/a", cuda(arch="sm_121"), {}, None),
        ("dense/a", INTERPRETER, {}, None),
        ("one/a", INTERPRETER, {"dtype": "bfloat16"}, "Triton's interpreter computes bfloat16 wrongly"),
        ("one/a", INTERPRETER, {"traits": {"out": "float8_e5m2"}}, "Triton's interpreter computes float8_e5m2 wrongly"),
        ("plain/a", INTERPRETER, {"dtype": "bfloat16"}, None),
        ("loose/a", GPU, {"flags": override.pack(policy="deterministic")},
         "not deterministic, and the policy is deterministic"),
        ("one/a", GPU, {"flags": override.pack(policy="batch_invariant")}, "not batch-invariant"),
        ("vendor", GPU, {"flags": override.pack(policy="batch_invariant")}, "not batch-invariant"),
        ("steady/a", GPU, {"flags": override.pack(policy="batch_invariant")}, None),
    ],
)  # fmt: skip
def test_illegal_says_why_in_one_sentence(toy, monkeypatch, variant, gpu, facts, why) -> None:
    monkeypatch.setattr(_compat, "interpreter_reason", lambda: None)
    problem = toy.problem(**facts)
    assert select.illegal(toy.spec, toy.spec.variants()[variant], problem, gpu) == why


def test_illegal_without_triton_and_with_an_interpreter_that_cannot_be_trusted(toy, monkeypatch) -> None:
    one = toy.spec.variants()["one/a"]
    monkeypatch.setattr(_compat, "interpreter_reason", lambda: "numpy is too new")
    assert select.illegal(toy.spec, one, toy.problem(), INTERPRETER) == "numpy is too new"
    monkeypatch.setattr(_compat, "has_triton", lambda: False)
    assert select.illegal(toy.spec, one, toy.problem(), GPU) == "triton is not installed"


@pytest.mark.parametrize(
    ("needs", "gpu", "triton", "why"),
    [
        ("cluster", GPU, "3.8.0", None),
        ("cluster", GPU, "3.7.1", "needs thread-block clusters (sm_90 or newer and Triton 3.8 or newer)"),
        (
            "cluster",
            cuda(arch="sm_80"),
            "3.9.0",
            "needs thread-block clusters (sm_90 or newer and Triton 3.8 or newer)",
        ),
        ("gluon", INTERPRETER, "3.9.0", "needs gluon, which Triton's interpreter does not have"),
        ("gluon", GPU, "3.9.0", None),
        ("fp8", INTERPRETER, "3.9.0", "needs fp8, which Triton's interpreter does not have"),
        ("coresident", INTERPRETER, "3.9.0", None),
    ],
)
def test_what_a_kernel_needs(toy, monkeypatch, needs, gpu, triton, why) -> None:
    monkeypatch.setattr(_compat, "interpreter_reason", lambda: None)
    monkeypatch.setattr(_compat, "triton_version", lambda: triton)
    one = dataclasses.replace(toy.spec.variants()["one/a"], needs=frozenset({needs}))
    assert select.illegal(toy.spec, one, toy.problem(), gpu) == why


# Table, tree and hull

TREE = {"f": "M", "le": 64, "yes": leaf("one/a", "vendor"), "no": leaf("picky/a", "one/b", "vendor")}


def test_the_leaf_decides_and_the_decision_says_how(toy, tables) -> None:
    path = put(tables, make_table(section(TREE, {"M": [1, 4096], "N": [1, 4096]})))
    got = decide(toy, m=64)
    assert (got.op, got.variant, got.rule, got.path, got.table) == (
        "toy",
        "one/a",
        "table",
        ("M = 64 <= 64",),
        str(path),
    )
    assert got.reason == f"{path} says so on 3 measured shapes"
    assert got.ranking == ("one/a", "vendor", "two/a") and got.evidence == {"shapes": 3}
    assert got.provenance["kind"] == "measured" and (got.rejected, got.stale, got.unknown) == ((), (), ())
    assert got.problem == toy.problem(64) and got.device == GPU
    got = decide(toy, m=128)
    assert (got.variant, got.path) == ("picky/a", ("M = 128 > 64",))
    got = decide(toy, m=129)
    assert (got.variant, got.rejected) == ("one/b", (("picky/a", "takes whole tiles of 128 rows"),))


def test_the_text_of_a_decision(toy, tables) -> None:
    path = put(tables, make_table(section(TREE, {"M": [1, 100]}), made_with={"triton": "3.5.0"}))
    with pytest.warns(tritonops.TritonOpsWarning, match="may be out of date"):
        text = str(decide(toy, m=129))
    assert text.splitlines() == [
        "toy M=129 N=64, float32, aligned, eager, fast on NVIDIA Test: vendor [outside the table]",
        "  because nothing was measured here",
        "  table path: M = 100 > 64",
        "  evidence: shapes=3",
        "  stale: made with triton 3.5.0, running triton 3.6.0",
        "  not known: nothing was measured here: M=129 is outside [1, 100]",
    ]
    with tritonops.use(exclude="vendor"):
        lines = str(decide(toy, m=129)).splitlines()
    assert lines[0].endswith("on NVIDIA Test: one/b [outside the table]")
    assert "  not vendor: excluded by use(exclude=...)" in lines
    assert "  not picky/a: takes whole tiles of 128 rows" in lines
    assert path.exists()


@pytest.mark.parametrize(
    ("feature", "le", "m", "n", "variant"),
    [
        ("tiles128", 4, 256, 256, "one/a"),
        ("tiles128", 4, 257, 256, "one/b"),
        ("tiles128", 4, 1, 512, "one/a"),
        ("waves100", 100, 128 * 132, 128, "one/a"),
        ("waves100", 100, 128 * 133 + 1, 128, "one/b"),
        ("waves100", 0, 128, 128, "one/a"),
        ("waves100", 0, 128 * 2, 128, "one/b"),
        ("N", 7, 64, 7, "one/a"),
        ("N", 7, 64, 8, "one/b"),
    ],
)
def test_features(toy, tables, feature, le, m, n, variant) -> None:
    put(tables, make_table(section({"f": feature, "le": le, "yes": leaf("one/a"), "no": leaf("one/b")})))
    assert decide(toy, m=m, n=n).variant == variant


def test_waves_depend_on_the_devices_sms(toy, tables) -> None:
    tree = {"f": "waves100", "le": 100, "yes": leaf("one/a"), "no": leaf("one/b")}
    for sms in (132, 78):
        put(tables, make_table(section(tree), gpu=cuda(sms=sms)), cuda(sms=sms))
    assert decide(toy, cuda(sms=132), m=128 * 100, n=128).variant == "one/a"
    assert decide(toy, cuda(sms=78), m=128 * 100, n=128).variant == "one/b"


def test_matmul_features() -> None:
    def of(m: int, n: int, batch: int = 1) -> dict[str, int]:
        a, b = torch.empty(batch, m, 8, device="meta"), torch.empty(batch, 8, n, device="meta")
        return dict(matmul.features(matmul.describe(a, b), cuda(sms=132)))

    assert of(128, 128) == {"tiles128": 1, "waves100": 0}
    assert of(129, 128) == {"tiles128": 2, "waves100": 1}
    assert of(4096, 4096) == {"tiles128": 1024, "waves100": 775}
    assert of(1, 1, batch=7) == {"tiles128": 7, "waves100": 5}
    assert of(128 * 132, 128) == {"tiles128": 132, "waves100": 100}


@pytest.mark.parametrize(
    ("m", "n", "variant", "rule", "unknown"),
    [
        (8, 64, "one/a", "table", ""),
        (4096, 64, "one/b", "table", ""),
        (7, 64, "vendor", "outside the table", "M=7 is outside [8, 4096]"),
        (4097, 64, "vendor", "outside the table", "M=4097 is outside [8, 4096]"),
        (64, 65, "vendor", "outside the table", "N=65 is outside [64, 64]"),
        (7, 65, "vendor", "outside the table", "M=7 is outside [8, 4096], N=65 is outside [64, 64]"),
    ],
)
def test_hull(toy, tables, m, n, variant, rule, unknown) -> None:
    tree = {"f": "M", "le": 64, "yes": leaf("one/a"), "no": leaf("one/b")}
    put(tables, make_table(section(tree, {"M": [8, 4096], "N": [64, 64]})))
    got = decide(toy, m=m, n=n)
    assert (got.variant, got.rule) == (variant, rule)
    assert got.unknown == ((f"nothing was measured here: {unknown}",) if unknown else ())
    with tritonops.use(exclude="vendor"):  # the nearest edge's leaf
        assert decide(toy, m=m, n=n).variant == ("one/a" if m <= 64 else "one/b")


def test_outside_where_the_edge_says_torch(toy, tables) -> None:
    put(tables, make_table(section(leaf("vendor", "one/a"), {"M": [8, 16]})))
    got = decide(toy, m=17)
    assert (got.variant, got.reason) == ("vendor", "the nearest edge of the table says torch")


def test_a_feature_of_the_hull_is_clamped_on_the_way_down(toy, tables) -> None:
    tree = {"f": "tiles128", "le": 10, "yes": leaf("one/a"), "no": leaf("one/b")}
    put(tables, make_table(section(tree, {"tiles128": [20, 30]})))
    with tritonops.use(exclude="vendor"):
        got = decide(toy, m=1, n=1)
    assert (got.variant, got.path) == ("one/b", ("tiles128 = 20 > 10",))


# Sections


def one_each(*whens: dict, default: tuple[str, ...] = ("vendor",)) -> dict:
    """A section for each `when`, whose leaves are one/a, one/b, two/a, ... in order."""
    parts = [section(leaf(v, "vendor"), **when) for v, when in zip(OURS, whens, strict=False)]
    return make_table(*parts, default=list(default))


@pytest.mark.parametrize(
    ("facts", "variant"),
    [
        ({"dtype": "float16", "layout": "nt", "aligned": True, "mode": "eager"}, "one/a"),
        ({"dtype": "float16", "layout": "nn", "aligned": True, "mode": "eager"}, "one/b"),
        ({"dtype": "float16", "layout": "nt", "aligned": False, "mode": "eager"}, "two/a"),
        ({"dtype": "float16", "layout": "nt", "aligned": True, "mode": "graph"}, "steady/a"),
        ({"dtype": "float16", "layout": "nn", "aligned": True, "mode": "graph"}, "one/b"),
        ({"dtype": "bfloat16", "layout": "nt", "aligned": True, "mode": "eager"}, "vendor"),
        ({"dtype": "float16", "layout": "tt", "aligned": True, "mode": "eager"}, "vendor"),
    ],
)
def test_a_section_is_found_by_every_fact(toy, tables, facts, variant) -> None:
    put(
        tables,
        one_each(
            {"dtype": "float16", "layout": "nt", "aligned": True, "mode": "eager"},
            {"dtype": "float16", "layout": "nn", "aligned": True, "mode": "eager"},
            {"dtype": "float16", "layout": "nt", "aligned": False},
            {"dtype": "float64"},
            {"dtype": "float16", "layout": "nt", "aligned": True, "mode": "graph"},
        ),
    )
    assert decide(toy, **facts).variant == variant


def test_the_first_section_that_fits_serves(toy, tables) -> None:
    put(tables, one_each({"dtype": "float16"}, {}, {"dtype": "float16"}))
    assert decide(toy, dtype="float16").variant == "one/a"
    assert decide(toy, dtype="float32").variant == "one/b"


def test_graph_falls_back_to_eager_and_says_so(toy, tables) -> None:
    put(tables, one_each({"mode": "eager"}))
    got = decide(toy, mode="graph")
    assert (got.variant, got.unknown) == ("one/a", ("no section for mode graph, the eager one serves",))


def test_eager_does_not_fall_back_to_graph(toy, tables) -> None:
    path = put(tables, one_each({"mode": "graph"}))
    got = decide(toy, mode="eager")
    assert (got.variant, got.rule, got.reason) == ("vendor", "table default", f"{path} has no section for float32")


@pytest.mark.parametrize(
    ("whens", "variant", "note"),
    [
        ([{"policy": "fast"}, {"policy": "deterministic"}], "one/b", ()),
        ([{"policy": "fast"}], "one/a", ("no section for policy deterministic, the fast one is filtered",)),
        ([{"policy": "fast", "mode": "eager"}], "one/a", ("no section for policy deterministic",)),
        ([{"policy": "fast", "mode": "eager"}, {"policy": "deterministic", "mode": "eager"}], "one/b",
         ("no section for mode graph, the eager one serves",)),
        ([{"policy": "batch_invariant"}], "vendor", ()),
    ],
)  # fmt: skip
def test_policies_fall_back_to_fast(toy, tables, whens, variant, note) -> None:
    put(tables, one_each(*whens))
    got = decide(toy, mode="graph", flags=override.pack(policy="deterministic"))
    assert (got.variant, got.unknown) == (variant, note)


def test_the_fast_section_is_filtered_by_the_policy(toy, tables) -> None:
    put(tables, make_table(section(leaf("loose/a", "one/b", "vendor"))))
    assert decide(toy).variant == "loose/a"
    got = decide(toy, flags=override.pack(policy="deterministic"))
    assert (got.variant, got.rejected) == (
        "one/b", (("loose/a", "not deterministic, and the policy is deterministic"),)
    )  # fmt: skip


def test_no_section_means_the_tables_default_then_torch(toy, tables) -> None:
    put(tables, one_each({"dtype": "float64"}, default=("picky/a", "one/b")))
    assert decide(toy, m=128).variant == "picky/a"
    assert decide(toy, m=64).variant == "one/b"
    put(tables, one_each({"dtype": "float64"}, default=("picky/a",)))
    assert decide(toy, m=64).variant == "vendor"  # not two/a, which nobody measured


def test_an_illegal_leaf_gives_way_to_torch_before_what_nobody_measured(toy, tables) -> None:
    put(tables, make_table(section(leaf("picky/a")), default=["picky/a"]))
    got = decide(toy, m=64)
    assert (got.variant, got.ranking) == ("vendor", ("picky/a", "vendor", "two/a", "one/a"))


# Neighbours and published tables


@pytest.mark.parametrize(
    ("gain", "variant", "reason"),
    [
        (None, "vendor", "one/a has no gain on record there (1.10 is asked)"),
        (1.0999, "vendor", "one/a has a gain of 1.0999 there (1.10 is asked)"),
        (1.1, "one/a", None),
        (2.0, "one/a", None),
    ],
)
def test_a_neighbour_takes_what_is_ten_percent_ahead(toy, tables, gain, variant, reason) -> None:
    more = {} if gain is None else {"gain": gain}
    path = put(tables, make_table(section(leaf("one/a", "one/b", **more)), gpu=OTHER))
    with pytest.warns(tritonops.TritonOpsWarning, match="was made on NVIDIA Other"):
        got = decide(toy)
    assert (got.variant, got.rule) == (variant, "neighbour's table" if reason else "table")
    assert got.reason == (
        f"the table was made on NVIDIA Other; {reason}" if reason else f"{path} says so on 3 measured shapes"
    )
    assert got.unknown == ("how NVIDIA Test differs from NVIDIA Other",)
    assert decide(toy, OTHER).variant == "one/a" and decide(toy, OTHER).unknown == ()
    with tritonops.use(exclude="vendor"):
        assert decide(toy).variant == "one/a"


def test_a_neighbours_gain_is_that_of_its_first_choice_only(toy, tables) -> None:
    put(tables, make_table(section(leaf("picky/a", "one/b", gain=1.5)), gpu=OTHER))
    store._warned.add("neighbour NVIDIA Test sm_90-132")
    assert decide(toy, m=128).variant == "picky/a"
    assert decide(toy, m=64).variant == "vendor"
    assert decide(toy, OTHER, m=64).variant == "one/b"


def test_a_neighbours_default_has_no_gain_on_record(toy, tables) -> None:
    put(tables, one_each({"dtype": "float64"}, default=("one/a",)) | {"device": make_table(gpu=OTHER)["device"]})
    with pytest.warns(tritonops.TritonOpsWarning, match="was made on NVIDIA Other"):
        assert decide(toy).variant == "vendor"
    assert decide(toy, OTHER).variant == "one/a"


PUBLISHED = {"provenance": {"kind": "published", "source": "a thesis"}}


def test_a_published_table_never_prefers_ours_to_torch(toy, tables) -> None:
    put(tables, make_table(section(leaf("one/b", "one/a", gain=9.9), {"M": [8, 64]}, dtype="float32"), **PUBLISHED))
    got = decide(toy)
    assert (got.variant, got.rule, got.ranking) == ("vendor", "published table", ("vendor", "one/b", "one/a", "two/a"))
    assert got.reason == "torch comes first: a thesis ranks our own variants only"
    assert got.unknown == ("how our variants compare with torch here: the table is published, not measured",)
    with tritonops.use(exclude="vendor"):
        assert decide(toy).variant == "one/b"
        outside = decide(toy, m=65)
    assert (outside.variant, outside.rule) == ("one/b", "published table")
    assert outside.unknown[1] == "nothing was measured here: M=65 is outside [8, 64]"


def test_a_published_tables_default_does_not_come_before_torch_either(toy, tables) -> None:
    put(tables, make_table(section(leaf("one/a"), dtype="float64"), default=["one/b"], **PUBLISHED))
    assert decide(toy).variant == "vendor"
    with tritonops.use(exclude="vendor"):
        assert decide(toy).variant == "one/b"


# Forced variants


def test_a_forced_variant_is_taken_whatever_the_table_says(toy, tables) -> None:
    put(tables, make_table(section(leaf("vendor"))))
    with tritonops.use(variant="one/b"):
        got = decide(toy)
    assert (got.variant, got.rule, got.reason) == ("one/b", "forced", "use(variant=...) names one/b")


def test_a_forced_family_takes_the_tables_best_of_it_that_is_legal(toy, tables) -> None:
    put(tables, make_table(section(leaf("two/a", "one/b", "one/a"))))
    with tritonops.use(variant="one"):
        assert decide(toy).variant == "one/b"
    with tritonops.use(variant="one", exclude="one/b"):
        got = decide(toy)
    assert (got.variant, got.rejected) == ("one/a", (("one/b", "excluded by use(exclude=...)"),))
    put(tables, make_table(section(leaf("vendor"))))
    with tritonops.use(variant="one"):
        assert decide(toy).variant == "one/a"  # the op's own preference


@pytest.mark.parametrize(
    ("wish", "gpu", "facts", "why"),
    [
        ("picky", GPU, {"m": 64}, "picky/a: takes whole tiles of 128 rows"),
        ("dense/a", cuda(arch="sm_80"), {},
         "dense/a: needs tensor descriptors in hardware (sm_90 or newer), this is sm_80"),
        ("one", CPU, {}, "one/a: Triton kernels need an NVIDIA GPU, or TRITON_INTERPRET=1 on the CPU; one/b: Triton "
         "kernels need an NVIDIA GPU, or TRITON_INTERPRET=1 on the CPU"),
    ],
)  # fmt: skip
def test_a_forced_variant_that_cannot_serve_says_why(toy, wish, gpu, facts, why) -> None:
    store._warned.add(f"absent NVIDIA Test {gpu.table_name}")
    with tritonops.use(variant=wish), pytest.raises(VariantUnavailable) as caught:
        decide(toy, gpu, **facts)
    m = facts.get("m", 64)
    where = gpu.name or gpu.table_name
    assert str(caught.value) == (
        f"tritonops.toy: the forced variant {wish!r} cannot serve toy M={m} N=64, float32, aligned, eager, fast on "
        f"{where}: {why}"
    )


def test_everything_excluded_says_so(toy) -> None:
    with (
        tritonops.use(exclude=["vendor", "one", "two"]),
        pytest.raises(VariantUnavailable, match="no variant can serve"),
    ):
        decide(toy, cuda(""))


# Batch invariance


def test_batch_invariant_is_chosen_for_one_problem_that_stands_for_every_batch(toy, tables) -> None:
    tree = {"f": "M", "le": 64, "yes": leaf("one/a", "vendor"), "no": leaf("two/a", "steady/a", "vendor")}
    put(tables, make_table(section(tree, {"M": [1, 8192]}, mode="eager"), section(leaf("vendor"), mode="graph")))
    flags = override.pack(policy="batch_invariant")
    for m, layout, aligned, mode in itertools.product((1, 64, 65, 9999), ("", "x"), (True, False), ("eager", "graph")):
        got = decide(toy, m=m, layout=layout, aligned=aligned, mode=mode, flags=flags)
        assert (got.variant, got.problem.dims["M"], got.problem.mode) == ("steady/a", m, mode)
        assert got.rejected == (("two/a", "not batch-invariant"),)


def test_batch_invariant_has_nothing_else_to_give_where_its_variant_cannot_serve(toy, tables, monkeypatch) -> None:
    original = toy.spec.variants()["steady/a"]
    small = dataclasses.replace(original, requires=lambda p, d: "takes 5000 rows" if p.dims["M"] > 5000 else None)
    monkeypatch.setitem(toy.spec.variants(), "steady/a", small)
    put(tables, make_table(section(leaf("steady/a"))))
    flags = override.pack(policy="batch_invariant")
    assert decide(toy, m=5000, flags=flags).variant == "steady/a"
    with pytest.raises(VariantUnavailable, match=r"cannot serve this one .*M=5001.*: steady/a: takes 5000 rows"):
        decide(toy, m=5001, flags=flags)


def test_batch_invariant_on_the_cpu_says_why_torch_cannot(toy) -> None:
    with pytest.raises(VariantUnavailable, match="vendor: not batch-invariant"):
        decide(toy, CPU, flags=override.pack(policy="batch_invariant"))


def _operands(m: int, dtype: torch.dtype):
    """Left operands of 64 columns and m rows in every layout and alignment."""
    base = torch.empty(m * 80 + 80, dtype=dtype, device="meta")
    yield base[: m * 64].view(m, 64)
    yield base[1 : m * 64 + 1].view(m, 64)
    yield base[: m * 64].view(64, m).t()
    yield base[: m * 65].view(m, 65)[:, :64]
    yield base[: m * 72].view(m, 72)[:, :64]
    yield base[:64].expand(m, 64)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_matmul_is_batch_invariant_over_rows_layouts_alignments_and_batches(toys, tables, dtype) -> None:
    tiled = [v.id for v in tritonops.variants("matmul") if v.family == "tiled"]
    facts = itertools.product(("nn", "tn", "nt", "xn"), (True, False), ("eager", "graph"))
    parts = [
        section(leaf(v, "vendor"), layout=layout, aligned=aligned, mode=mode)
        for v, (layout, aligned, mode) in zip(itertools.cycle(tiled), facts, strict=False)
    ]
    put(tables, make_table(*parts, op="matmul", variants={v: {} for v in tiled}, kernels={}), op="matmul")
    with tritonops.use(policy="batch_invariant"):
        chosen = set()
        for m in (1, 3, 16, 17, 64, 128, 5000):
            for a in _operands(m, dtype):
                for b in (
                    torch.empty(64, 32, dtype=dtype, device="meta"),
                    torch.empty(32, 64, dtype=dtype, device="meta").t(),
                ):
                    chosen.add(tritonops.explain("matmul", a, b, device="sm_90-132").variant)
                    chosen.add(tritonops.explain("matmul", a.expand(2, m, 64), b, device="sm_90-132").variant)
        assert len(chosen) == 1
    fast = {tritonops.explain("matmul", a, a.t(), device="sm_90-132").variant for a in _operands(128, dtype)}
    assert len(fast) > 1  # the table does tell them apart


# Quarantine


def test_quarantine_is_for_one_device_and_one_op(toys) -> None:
    toy, backward = toys
    one = toy.spec.variants()["one/a"]
    assert select.quarantine("toy", "one/a", GPU, "Oops: no") and not select.quarantine("toy", "one/a", GPU, "again")
    assert select.illegal(toy.spec, one, toy.problem(), GPU) == "failed here before: Oops: no"
    assert select.illegal(toy.spec, one, toy.problem(), cuda(index=1)) is None
    assert select.illegal(backward.spec, one, backward.problem(), GPU) is None
    tritonops.clear_cache()
    assert select.illegal(toy.spec, one, toy.problem(), GPU) is None


def test_an_id_listed_twice_is_an_error(toy, monkeypatch) -> None:
    from tritonops.dispatch import variant

    monkeypatch.delitem(variant._LOADED, toy.spec.name, raising=False)
    listed = list(toy.spec.load())
    spec = dataclasses.replace(toy.spec, load=lambda: [*listed, listed[-1]])
    with pytest.raises(ValueError, match=f"lists {listed[-1].id} more than once"):
        spec.variants()
