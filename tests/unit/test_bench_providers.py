"""Providers: those that run on CPU tensors against the oracle, the others by the calls that they make."""

from __future__ import annotations

import inspect
import subprocess
import sys
from types import ModuleType

import pytest
import torch

import tritonops
from bench_cases import FakeMachine, one
from benchmarks import bench
from benchmarks.providers import NAMES, Refused, base, make, plain
from benchmarks.providers.compiled import Compile
from benchmarks.providers.tutorial import configuration
from tritonops.calibrate.case import Case
from tritonops.dispatch.variant import REGISTRY
from tritonops.testing import relative_error

ENTRIES = [
    one("48x32x24"), one("48x32x24", direction="bwd"), one("24x64", "layer_norm"), one("24x64", "layer_norm", "bwd"),
    one("24x64", "rms_norm"), one("24x64", "rms_norm", "bwd"), one("24x16x12", "embedding"),
    one("24x16x12", "embedding", "bwd"),
]  # fmt: skip
IDS = [e.case.problem.op + (" gradient" if e.op == "matmul" and e.direction == "bwd" else "") for e in ENTRIES]
every_op = pytest.mark.parametrize("entry", ENTRIES, ids=IDS)


def arguments(entry):
    return entry.case.sample(REGISTRY[entry.case.problem.op], "cpu")


def result(provider, entry, args):
    with torch.no_grad(), provider.around(entry.case), provider.poison():
        out = provider.call(entry.case)(*provider.arguments(entry.case, args))
    return out if isinstance(out, tuple | list) else (out,)


def is_right(provider, entry, tolerance=1e-6) -> None:
    args = arguments(entry)
    exact = REGISTRY[entry.case.problem.op].oracle(entry.case.problem, *args)
    got = result(provider, entry, args)
    count = {"layer_norm_backward": 3, "rms_norm_backward": 2}.get(entry.case.problem.op, 1)
    assert len(got) == count
    for mine, oracle in zip(got, exact, strict=False):
        assert relative_error(mine, oracle) < tolerance


@every_op
@pytest.mark.parametrize("name", ["torch", "ours", "ours:vendor", "torch#2"])
def test_torch_and_ours_are_right_on_the_cpu(name, entry, clean_dispatch) -> None:
    is_right(make(name), entry)


@every_op
def test_ours_in_the_runner(entry, clean_dispatch) -> None:
    """Which variant served is on file; errors are as torch's."""
    found = bench.measure(entry, [make("torch"), make("ours")], FakeMachine(), "graph")
    assert [(r["failed"], r["variant"]) for r in found] == [(None, None), (None, "vendor")]
    assert found[1]["error"] <= 1.05 * found[1]["error_torch"] + 1e-6


def test_the_forward_is_the_public_function_and_forced_variants_go_through_use(monkeypatch, clean_dispatch) -> None:
    seen = []
    monkeypatch.setattr(tritonops, "matmul", lambda *a, **k: seen.append((len(a), k)) or torch.mm(*a))
    forced = []
    use = tritonops.use
    monkeypatch.setattr(tritonops, "use", lambda **k: forced.append(k) or use(**k))
    is_right(make("ours:vendor"), ENTRIES[0])
    assert seen == [(2, {"bias": None, "out_dtype": None})] and forced == [{"variant": {"matmul": "vendor"}}]


def test_a_forced_variant_that_cannot_serve_is_a_row_with_its_reason(clean_dispatch) -> None:
    found = bench.measure(ENTRIES[0], [make("torch"), make("ours:tiled")], FakeMachine(), "graph")
    assert found[1]["ms"] is None and found[1]["failed"].startswith("raised: VariantUnavailable: ")


@every_op
def test_compile_is_right(entry) -> None:
    provider = Compile()
    provider.backend = "eager"
    if entry.case.problem.op == "rms_norm_backward":
        pytest.skip("torch has no fused RMSNorm backward on the CPU")
    is_right(provider, entry)


def test_every_shape_is_compiled_for_itself() -> None:
    """More shapes than Dynamo recompiles one code object for; with fullgraph it would raise at the limit."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    provider = Compile()
    provider.backend = backend
    for n in range(2, 2 + 2 * torch._dynamo.config.recompile_limit):
        is_right(provider, one(f"{n}x3x2"))
    assert len(graphs) == 2 * torch._dynamo.config.recompile_limit


def test_max_autotune_compiles_products_on_named_shapes(monkeypatch) -> None:
    seen = []
    monkeypatch.setattr(torch, "compile", lambda f, **k: seen.append(k) or f)
    provider = make("compile-max-autotune")
    provider.call(ENTRIES[0].case)
    make("compile").call(ENTRIES[0].case)
    same = {"fullgraph": True, "dynamic": False, "backend": "inductor"}
    assert seen == [same | {"mode": "max-autotune-no-cudagraphs"}, same]
    assert provider.skips(ENTRIES[2].case) == "has no layer_norm"


def test_the_yardstick_is_torch_mm_behind_an_operator() -> None:
    provider = make("library")
    is_right(provider, ENTRIES[0])
    operator = torch.ops.tritonops_benchmarks.mm
    assert torch._C._dispatch_has_kernel_for_dispatch_key("tritonops_benchmarks::mm", "CUDA")
    assert operator.default._schema.arguments[0].name == "a"
    assert provider.skips(ENTRIES[2].case) == "has no layer_norm"


def test_what_is_not_installed_is_absent_with_its_reason(monkeypatch) -> None:
    monkeypatch.setattr(base.importlib.util, "find_spec", lambda name: None)
    assert make("liger").available() == "liger-kernel is not installed"
    assert make("quack").available() == "quack-kernels is not installed"
    assert make("flaggems").available() == "flag-gems is not installed"
    assert make("quack#2").available() == "quack-kernels is not installed"
    monkeypatch.setattr(base.importlib.util, "find_spec", lambda name: name == "quack" or None)
    assert make("quack").available() == "nvidia-cutlass-dsl is not installed, which quack-kernels needs"


def test_adapters_import_nothing_before_they_are_called() -> None:
    code = (
        "import sys; from benchmarks.providers import NAMES, make; "
        "[(p.available(), p.version()) for p in map(make, NAMES)]; "
        "sys.exit(', '.join(m for m in ('liger_kernel', 'quack', 'flag_gems', 'triton') if m in sys.modules) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                          cwd=base.__file__.rpartition("/benchmarks/")[0])  # fmt: skip
    assert done.stderr.strip() == "" and done.returncode == 0


def test_names() -> None:
    assert [make(name).name for name in NAMES] == list(NAMES)
    assert make("ours:tiled").name == "ours:tiled" and make("ours#2").name == "ours#2"
    for wrong in ("", "Torch", "ours:", "ours:no/such", "torch:tiled"):
        with pytest.raises(ValueError, match="no provider"):
            make(wrong)


LIGER = {
    "layer_norm": ("liger_kernel.ops.layer_norm", "layer_norm_forward"),
    "layer_norm_backward": ("liger_kernel.ops.layer_norm", "layer_norm_backward"),
    "rms_norm": ("liger_kernel.ops.rms_norm", "rms_norm_forward"),
    "rms_norm_backward": ("liger_kernel.ops.rms_norm", "rms_norm_backward"),
}


@pytest.mark.parametrize("entry", ENTRIES[2:6], ids=IDS[2:6])
def test_liger_is_called_as_its_functions_are_declared(entry, monkeypatch) -> None:
    module, name = LIGER[entry.case.problem.op]
    real = getattr(pytest.importorskip(module), name)
    bound = {}
    torchs = make("torch").call(entry.case)
    args = arguments(entry)

    def stub(*a, **k):
        bound.update(inspect.signature(real).bind(*a, **k).arguments)
        return torchs(*args) if name.endswith("backward") else (torchs(*args), None)

    monkeypatch.setattr(sys.modules[module], name, stub)
    got = result(make("liger"), entry, args)
    assert all(torch.equal(a, b) for a, b in zip(got, result(make("torch"), entry, args), strict=True))
    assert bound["X"] is args[1 if name.endswith("backward") else 0]
    if name == "rms_norm_backward":
        assert bound["in_place"] is True and bound["dY"] is not args[0] and torch.equal(bound["dY"], args[0])
        assert bound["RSTD"] is args[2] and bound["W"] is args[3] and "needs_dw" not in bound
    if name == "layer_norm_backward":
        assert bound["dY"] is args[0] and bound["Mean"] is args[2] and bound["RSTD"] is args[3]
        assert bound["W"] is args[4]


def test_ligers_embedding_backward_gets_a_table_of_the_gradients_shape(monkeypatch) -> None:
    module = pytest.importorskip("liger_kernel.ops.experimental.embedding")
    entry = ENTRIES[7]

    def backward(ctx, dy):
        ids, table = ctx.saved_tensors
        return torch.zeros_like(table).index_add_(0, ids, dy), None

    monkeypatch.setattr(module.LigerEmbeddingFunction, "backward", staticmethod(backward))
    is_right(make("liger"), entry)


def test_on_the_cpu_liger_and_the_tutorial_are_rows_with_a_reason(clean_dispatch) -> None:
    found = bench.measure(ENTRIES[3], [make("torch"), make("liger"), make("tutorial")], FakeMachine(), "graph")
    assert all(r["ms"] is None and r["failed"] for r in found[1:]) and found[0]["ms"] == 1.0


def quack_functions():
    """quack.rmsnorm's functions of version 0.6.5 by their declarations, computed by torch."""
    m = ModuleType("quack.rmsnorm")

    def layernorm_fwd(x, weight, bias=None, eps=1e-6, return_rstd=False, return_mean=False):
        assert weight.dtype == bias.dtype == torch.float32
        return torch.nn.functional.layer_norm(x.float(), x.shape[1:], weight, bias, eps).to(x.dtype)

    def layernorm_bwd(x, weight, dout, rstd, mean, has_bias=True):
        assert weight.dtype == torch.float32
        return torch.ops.aten.native_layer_norm_backward(
            dout.float(), x.float(), [x.shape[1]], mean[:, None], rstd[:, None], weight, weight, [True] * 3
        )

    def rmsnorm_fwd(x, weight=None, bias=None, residual=None, out_dtype=None, residual_dtype=None, eps=1e-6):
        return torch.nn.functional.rms_norm(x, x.shape[1:], weight, eps), x, None

    def rmsnorm_bwd(x, weight, dout, rstd, dresidual_out=None, has_bias=False):
        return (*make("torch").call(ENTRIES[5].case)(dout, x, rstd, weight, 1, 1e-5, None), None, None)

    for f in (layernorm_fwd, layernorm_bwd, rmsnorm_fwd, rmsnorm_bwd):
        setattr(m, f.__name__, f)
    return m


@pytest.mark.parametrize("entry", ENTRIES[:6], ids=IDS[:6])
def test_quack_is_called_as_its_functions_are_declared(entry, monkeypatch) -> None:
    gemm, package = ModuleType("quack.gemm_interface"), ModuleType("quack")
    gemm.gemm = lambda A, B, out=None, bias=None: A @ B
    package.rmsnorm = quack_functions()
    for name, m in (("quack", package), ("quack.gemm_interface", gemm), ("quack.rmsnorm", package.rmsnorm)):
        monkeypatch.setitem(sys.modules, name, m)
    is_right(make("quack"), entry)


def test_quacks_float32_parameters_are_made_before_it_is_timed() -> None:
    provider, entry = make("quack"), one("8x64", "layer_norm", "bwd", "bfloat16")
    args = arguments(entry)
    own = provider.arguments(entry.case, args)
    assert own[4].dtype is torch.float32 and torch.equal(own[4], args[4].float()) and own[1] is args[1]


@every_op
def test_flaggems_is_called_as_its_functions_are_declared(entry, monkeypatch) -> None:
    """flag_gems.ops of version 5.0.2 by their declarations, computed by torch."""
    aten = torch.ops.aten

    def layer_norm_backward(grad_out, input, normalized_shape, mean, rstd, weight=None, bias=None, output_mask=None):
        return aten.native_layer_norm_backward(
            grad_out, input, normalized_shape, mean[:, None], rstd[:, None], weight, bias, output_mask
        )

    functions = {
        "mm": {"mm": lambda a, b: a @ b},
        "layernorm": {
            "layer_norm": lambda input, normalized_shape, weight=None, bias=None, eps=1e-5: aten.native_layer_norm(
                input, normalized_shape, weight, bias, eps
            ),
            "layer_norm_backward": layer_norm_backward,
        },
        "rms_norm": {
            "rms_norm_forward": lambda x, normalized_shape, weight, eps=1e-5: (
                torch.nn.functional.rms_norm(x, normalized_shape, weight, eps), None
            ),
            "rms_norm_backward": lambda dy, x, inv_rms, normalized_shape, weight, eps=1e-5: make("torch").call(
                ENTRIES[5].case)(dy, x, inv_rms, weight, 1, eps, None),
        },
        "embedding": {"embedding": lambda weight, indices, padding_idx=-1: weight[indices]},
        "embedding_dense_backward": {
            "embedding_dense_backward": lambda grad_output, indices, num_weights, padding_idx, scale_grad_by_freq: (
                aten.embedding_dense_backward(grad_output, indices, num_weights, padding_idx, scale_grad_by_freq)
            )
        },
    }  # fmt: skip
    for name in ("flag_gems", "flag_gems.ops"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name, members in functions.items():
        m = ModuleType(f"flag_gems.ops.{name}")
        vars(m).update(members)
        monkeypatch.setitem(sys.modules, m.__name__, m)
    is_right(make("flaggems"), entry)


def test_the_tutorials_configurations_are_fixed() -> None:
    assert configuration(one(dtype="bfloat16").case) == "tiled/128x128x64-g8-w8-s3"
    assert configuration(one(dtype="float32").case) == "tiled/32x64x32-g8-w4-s3"
    for n, tile in ((1024, 1024), (1025, 2048), (4096, 4096), (4608, 8192)):
        assert f"rows/t{tile}-" in configuration(one(f"8x{n}", "layer_norm", "bwd").case)
    with pytest.raises(Refused, match="no tile holds a row of 65536"):
        configuration(one("8x65536", "layer_norm", "bwd").case)
    for op in ("embedding", "embedding_backward"):
        direction = "bwd" if op.endswith("backward") else "fwd"
        assert configuration(one("8x16x32", "embedding", direction).case) in REGISTRY[op].variants()


def test_peers_refuse_what_they_do_not_compute() -> None:
    def with_traits(entry, **traits):
        p = entry.case.problem
        return Case(type(p)(p.op, p.dims, p.dtype, p.layout, p.aligned, traits={**p.traits, **traits})).problem

    for entry in ENTRIES:
        plain(entry.case.problem)
    for problem, why in (
        (with_traits(ENTRIES[0], bias=True), "without bias"),
        (with_traits(ENTRIES[2], weight=None), "needs weight and bias"),
        (with_traits(ENTRIES[3], grads="x"), "every gradient"),
        (with_traits(ENTRIES[7], padding=True), "padding_idx"),
    ):
        with pytest.raises(Refused, match=why):
            plain(problem)


def test_torch_leaves_out_gradients_that_are_not_asked_for() -> None:
    p = ENTRIES[3].case.problem
    case = Case(type(p)(p.op, p.dims, p.dtype, traits={**p.traits, "grads": "x"}))
    entry = type(ENTRIES[3])("own", "layer_norm", "bwd", case)
    found = bench.measure(entry, [make("torch"), make("ours")], FakeMachine(), "graph")
    assert [r["failed"] for r in found] == [None, None]
