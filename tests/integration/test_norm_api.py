"""tritonops.layer_norm and rms_norm as users call them: shapes, gradients, transforms, compilers, errors."""

from __future__ import annotations

import itertools
import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.func import grad, vmap
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode

import tritonops
from tritonops import layer_norm, rms_norm
from tritonops.dispatch import memo
from tritonops.norm import reference

D = torch.float64
OPS = torch.ops.tritonops
AFFINE = list(itertools.product((True, False), repeat=2))
SHAPES = [((5,), 1), ((3, 5), 1), ((2, 3, 5), 1), ((2, 3, 5), 2), ((2, 3, 5), 3), ((1, 1), 1), ((2, 1, 4, 3), 2)]
EMPTY = [((0, 5), 1), ((3, 0), 1), ((0, 0), 1), ((2, 0, 3), 2), ((3, 2, 0), 1)]


def _inputs(shape, ndim, weight=True, bias=True, dtype=D):
    tail = shape[len(shape) - ndim :]
    return (
        torch.randn(shape, dtype=dtype, requires_grad=True),
        torch.randn(tail, dtype=dtype, requires_grad=True) if weight else None,
        torch.randn(tail, dtype=dtype, requires_grad=True) if bias else None,
    )


def _there(*tensors):
    return tuple(t for t in tensors if t is not None)


@pytest.mark.parametrize(("shape", "ndim"), SHAPES + EMPTY)
@pytest.mark.parametrize(("weight", "bias"), AFFINE)
def test_values_and_gradients_are_torchs(shape, ndim, weight, bias) -> None:
    x, w, b = _inputs(shape, ndim, weight, bias)
    tail = shape[len(shape) - ndim :]
    pairs = [(layer_norm(x, w, b, 1e-3, tail), F.layer_norm(x, tail, w, b, 1e-3), _there(x, w, b))]
    if not bias:
        pairs += [(rms_norm(x, w, 1e-3, tail), F.rms_norm(x, tail, w, 1e-3), _there(x, w))]
    for got, want, leaves in pairs:
        assert got.shape == want.shape and got.is_contiguous() and torch.allclose(got, want, atol=1e-12)
        g = torch.randn_like(want)
        for ours, theirs in zip(torch.autograd.grad(got, leaves, g), torch.autograd.grad(want, leaves, g), strict=True):
            assert ours.shape == theirs.shape and torch.allclose(ours, theirs, atol=1e-11)


@pytest.mark.parametrize(("weight", "bias"), AFFINE)
def test_first_and_second_derivatives(weight, bias) -> None:
    x, w, b = _inputs((2, 3, 4), 1, weight, bias)

    def ln(*given):
        given = iter(given)
        return layer_norm(next(given), next(given) if weight else None, next(given) if bias else None)

    assert gradcheck(ln, _there(x, w, b)) and gradgradcheck(ln, _there(x, w, b))
    if not bias:
        assert gradcheck(rms_norm, _there(x, w)) and gradgradcheck(rms_norm, _there(x, w))


def test_second_derivatives_over_two_dimensions_and_third_ones() -> None:
    x, w, b = _inputs((3, 2, 2), 2)
    assert gradgradcheck(layer_norm, (x, w, b))

    def first(x):
        return torch.autograd.grad((layer_norm(x, w.detach()) ** 3).sum(), x, create_graph=True)[0]

    assert gradgradcheck(first, (x,))


def test_second_derivative_of_some_gradients_only() -> None:
    x, w, b = _inputs((3, 4), 1)
    v = torch.randn(4, dtype=D)
    for fn, torchs in ((layer_norm, F.layer_norm), (lambda x, w, b, eps: rms_norm(x, w, eps), None)):
        want_y = torchs(x, (4,), w, b, 1e-3) if torchs else F.rms_norm(x, (4,), w, 1e-3)
        for leaf in (x, w):
            got, want = (
                torch.autograd.grad((y**2).sum(), leaf, create_graph=True)[0]
                for y in (fn(x, w, b, 1e-3), want_y)
            )  # fmt: skip
            for other in (x, w):
                ours, theirs = (torch.autograd.grad((g * v).sum(), other, retain_graph=True)[0] for g in (got, want))
                assert torch.allclose(ours, theirs, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_inputs_are_computed_in_float32(dtype) -> None:
    x, w, b = (t.detach().to(dtype).requires_grad_() for t in _inputs((64, 96), 1))
    x = (x.detach() + 100).requires_grad_()
    dy = torch.randn(64, 96).to(dtype)
    half_ulp = torch.finfo(dtype).eps / 2
    y = layer_norm(x, w, b)
    oracle = reference.layer_norm(x, w, b, 1, 1e-5)[0]
    got = torch.autograd.grad(y, (x, w, b), dy)
    exact = reference.layer_norm_backward(dy, x, w, 1, 1e-5)
    got += torch.autograd.grad(rms_norm(x, w), (x, w), dy)
    exact += reference.rms_norm_backward(dy, x, w, 1, torch.finfo(torch.float32).eps)
    for g, want in zip((y, *got), (oracle, *exact), strict=True):
        assert g.dtype is dtype
        assert (g.double() - want).norm() <= (half_ulp + 2e-5) * want.norm()


def test_float32_parameters_of_16_bit_inputs() -> None:
    x = torch.randn(8, 6).half().requires_grad_()
    w, b = torch.randn(6, requires_grad=True), torch.randn(6, requires_grad=True)
    y = layer_norm(x, w, b)
    assert y.dtype is torch.float16 and rms_norm(x, w).dtype is torch.float16
    y.float().sum().backward()
    assert (x.grad.dtype, w.grad.dtype, b.grad.dtype) == (torch.float16, torch.float32, torch.float32)
    assert torch.equal(b.grad, torch.full((6,), 8.0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, D])
def test_rms_norms_default_eps_is_torchs(dtype) -> None:
    x = torch.full((1, 4), 1e-4, dtype=D).to(dtype)
    assert torch.allclose(rms_norm(x).double(), F.rms_norm(x, (4,)).double(), rtol=1e-6, atol=0)
    assert rms_norm(x, eps=1.0).double().max() < 2e-4


def test_normalized_shape() -> None:
    x = torch.randn(2, 3, 4)
    assert torch.equal(layer_norm(x), layer_norm(x, normalized_shape=4))
    assert torch.equal(layer_norm(x, torch.ones(3, 4)), layer_norm(x, normalized_shape=(3, 4)))
    assert torch.equal(layer_norm(x, None, torch.zeros(3, 4)), layer_norm(x, normalized_shape=torch.Size([3, 4])))
    assert torch.equal(rms_norm(x, torch.ones(2, 3, 4)), rms_norm(x, normalized_shape=[2, 3, 4]))
    assert not torch.equal(layer_norm(x), layer_norm(x, normalized_shape=(3, 4)))


def test_only_wanted_gradients_are_computed(monkeypatch) -> None:
    served = []
    serve = memo.serve

    def spy(spec, key, device, problem, args):
        served.append((spec.name, problem().traits.get("grads")))
        return serve(spec, key, device, problem, args)

    monkeypatch.setattr(memo, "serve", spy)
    x, w, b = _inputs((3, 4), 1)
    layer_norm(x, w.detach(), b.detach()).sum().backward()
    layer_norm(x.detach(), w, b).sum().backward()
    layer_norm(x.detach(), None, b).sum().backward()
    rms_norm(x.detach(), w).sum().backward()
    grads = [g for name, g in served if name.endswith("_backward")]
    assert grads == ["x", "wb", "b", "w"]


def _opcheck_cases():
    x, w, b = _inputs((3, 4), 1, dtype=torch.float32)
    dy = torch.randn(3, 4, requires_grad=True)
    mean, rstd = torch.randn(3), torch.rand(3) + 0.5
    strided = torch.randn(4, 3).t().requires_grad_()
    for args in (
        (x, w, b, 1),
        (x, None, None, 2),
        (x, None, b, 1),
        (strided, w, None, 1),
        (torch.randn(1, 4).expand(3, 4), w, b, 1),
        (torch.randn(0, 4), w, b, 1),
        (torch.randn(3, 0), torch.randn(0), None, 1),
        (x.detach().half(), w.detach(), b.detach().half(), 1),
    ):
        yield OPS.layer_norm.default, (*args, 1e-5, 0)
        yield OPS.rms_norm.default, (args[0], args[1], args[3], 1e-5, 1)
    for mask in itertools.product((True, False), repeat=3):
        yield OPS.layer_norm_backward.default, (dy, x, mean, rstd, w, torch.float32, 1, 1e-5, list(mask), 0)
    for mask in itertools.product((True, False), repeat=2):
        yield OPS.rms_norm_backward.default, (dy, x, rstd, w, 1, 1e-5, list(mask), 0)
    yield OPS.layer_norm_backward.default, (dy, strided, mean, rstd, None, torch.float16, 1, 1e-5, [True] * 3, 0)
    yield OPS.rms_norm_backward.default, (torch.randn(1).expand(3, 4), x, rstd, None, 1, 1e-5, [True, True], 0)
    empty = torch.randn(0, 4, requires_grad=True)
    none = torch.randn(0)
    yield OPS.layer_norm_backward.default, (empty, empty, none, none, w, torch.float32, 1, 1e-5, [True] * 3, 0)


@pytest.mark.parametrize(("operator", "args"), list(_opcheck_cases()))
def test_opcheck(operator, args) -> None:
    results = opcheck(operator, args)
    assert set(results.values()) == {"SUCCESS"} and len(results) == 4


@pytest.mark.parametrize("in_dims", [d for d in itertools.product((0, None), repeat=3) if any(i == 0 for i in d)])
@pytest.mark.parametrize("dtype", [D, torch.float16])
def test_vmap_over_each_argument(in_dims, dtype) -> None:
    full = (torch.randn(6, 2, 3, 4), torch.randn(6, 3, 4), torch.randn(6, 3, 4))
    args = [(t if d == 0 else t[0]).to(dtype) for t, d in zip(full, in_dims, strict=True)]
    exact = [a.double() for a in args]
    tolerance = {"atol": 4e-3, "rtol": 1e-3} if dtype is torch.float16 else {"atol": 1e-12}
    got = vmap(layer_norm, in_dims)(*args)
    want = vmap(lambda x, w, b: F.layer_norm(x, (3, 4), w, b), in_dims)(*exact)
    assert got.dtype is dtype and got.shape == want.shape and torch.allclose(got.double(), want, **tolerance)
    if in_dims[:2] != (None, None):
        got = vmap(rms_norm, in_dims[:2])(*args[:2])
        want = vmap(lambda x, w: F.rms_norm(x, (3, 4), w, 1.1920929e-07), in_dims[:2])(*exact[:2])
        assert got.dtype is dtype and torch.allclose(got.double(), want, **tolerance)


def test_vmap_over_an_inner_dimension() -> None:
    x = torch.randn(2, 4, 6, dtype=D)
    assert torch.allclose(vmap(layer_norm, 2)(x), layer_norm(x.permute(2, 0, 1)), atol=1e-12)


def _sum_of_squares(fn):
    return lambda *args: (fn(*args) ** 2).sum()


@pytest.mark.parametrize("in_dims", [(0, None, None), (0, 0, 0), (None, 0, None), (0, None, 0)])
def test_per_sample_gradients(in_dims) -> None:
    full = (torch.randn(6, 5, 4, dtype=D), torch.randn(6, 4, dtype=D), torch.randn(6, 4, dtype=D))
    args = [t if d == 0 else t[0] for t, d in zip(full, in_dims, strict=True)]

    def compare(ours, theirs, args, in_dims):
        leaves = tuple(range(len(args)))
        got = vmap(grad(_sum_of_squares(ours), leaves), in_dims)(*args)
        want = vmap(grad(_sum_of_squares(theirs), leaves), in_dims)(*args)
        for g, w in zip(got, want, strict=True):
            assert g.shape == w.shape and torch.allclose(g, w, atol=1e-10)

    compare(layer_norm, lambda x, w, b: F.layer_norm(x, (4,), w, b), args, in_dims)
    compare(rms_norm, lambda x, w: F.rms_norm(x, (4,), w), args[:2], in_dims[:2])


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [(layer_norm, lambda x, w: F.layer_norm(x, (4,), w)), (rms_norm, lambda x, w: F.rms_norm(x, (4,), w))],
)
def test_nested_transforms(ours, theirs) -> None:
    x, w = torch.randn(3, 4, dtype=D), torch.randn(4, dtype=D)
    for leaf in (0, 1):
        first, second = (grad(_sum_of_squares(f), leaf) for f in (ours, theirs))
        assert torch.allclose(first(x, w), second(x, w), atol=1e-11)
        first, second = (grad(_sum_of_squares(f), leaf) for f in (first, second))
        assert torch.allclose(first(x, w), second(x, w), atol=1e-9)
    first, second = (torch.func.jacrev(f)(x, w) for f in (ours, theirs))
    assert torch.allclose(first, second, atol=1e-11)
    batch = torch.randn(2, 5, 3, 4, dtype=D)
    nested = vmap(vmap(grad(_sum_of_squares(ours)), (0, None)), (0, None))(batch, w)
    assert torch.allclose(nested, vmap(vmap(grad(_sum_of_squares(theirs)), (0, None)), (0, None))(batch, w), atol=1e-10)
    hessian = torch.func.jacrev(torch.func.jacrev(_sum_of_squares(ours)))(x, w)
    assert torch.allclose(hessian, torch.func.hessian(_sum_of_squares(theirs))(x, w), atol=1e-9)


def test_forward_mode_is_refused_not_dropped() -> None:
    x = torch.randn(3, 4)
    for fn in (layer_norm, rms_norm):
        with pytest.raises((NotImplementedError, RuntimeError), match="jvp"):
            torch.func.jvp(fn, (x,), (x,))
        with forward_ad.dual_level(), pytest.raises((NotImplementedError, RuntimeError), match="jvp"):
            fn(forward_ad.make_dual(x, x))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile_fullgraph_dynamic(backend) -> None:
    def both(x, w, b):
        return layer_norm(x, w, b) + rms_norm(x.transpose(0, 1), w).transpose(0, 1)

    compiled = torch.compile(both, fullgraph=True, dynamic=True, backend=backend)
    for rows, columns in ((3, 4), (7, 4), (20, 9)):
        x, w, b = _inputs((rows, 2, columns), 1, dtype=torch.float32)
        got, want = compiled(x, w, b), both(x, w, b)
        assert torch.allclose(got, want, atol=1e-5)
        g = torch.randn_like(want)
        for ours, theirs in zip(
            torch.autograd.grad(got, (x, w, b), g), torch.autograd.grad(want, (x, w, b), g), strict=True
        ):
            assert torch.allclose(ours, theirs, atol=1e-4)


def test_one_compiled_function_takes_parameters_or_none() -> None:
    compiled = torch.compile(layer_norm, fullgraph=True, backend="aot_eager")
    x, w, b = (t.detach() for t in _inputs((4, 16), 1, dtype=torch.float32))
    for args in ((x, w, b), (x, w, None), (x, None, None), (x, None, b), (x, w, b)):
        assert torch.allclose(compiled(*args), layer_norm(*args), atol=1e-6)


def test_compiled_func_grad_is_right_or_a_clear_error() -> None:
    x = torch.randn(3, 4)
    for fn in (layer_norm, rms_norm):
        loss = _sum_of_squares(lambda x, fn=fn: fn(x) * torch.arange(4))
        try:
            got = torch.compile(grad(loss), backend="aot_eager")(x)
        except Exception as error:
            assert "tritonops" in str(error) and "grad" in str(error).lower()
        else:
            assert torch.allclose(got, grad(loss)(x), atol=1e-4)


class _Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


def test_watchers_see_the_ops() -> None:
    x, w, b = _inputs((3, 4), 1)
    with _Seen() as seen:
        (layer_norm(x, w, b) + rms_norm(x, w)).sum().backward()
    ours = [name for name in seen.ops if name.startswith("tritonops.")]
    names = ("layer_norm", "rms_norm", "layer_norm_backward", "rms_norm_backward")
    assert sorted(ours) == sorted(f"tritonops.{name}.default" for name in names)
    assert layer_norm(torch.empty(3, 4, device="meta")).shape == (3, 4)


def test_autocast_on_the_cpu_leaves_norms_alone_as_torch_does() -> None:
    x, w = torch.randn(4, 6), torch.randn(6, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for given in (x, x.bfloat16(), x.half()):
            y = layer_norm(given, w)
            assert y.dtype is F.layer_norm(given, (6,), w).dtype
            assert rms_norm(given, w.to(given.dtype)).dtype is given.dtype
        assert torch.allclose(layer_norm(x, w), F.layer_norm(x, (6,), w), atol=1e-6)
    y.float().sum().backward()
    assert w.grad.dtype is torch.float32


@pytest.fixture
def cuda_autocast():
    """CUDA autocast switched on where there is no GPU, which torch.autocast refuses."""
    before = torch.is_autocast_enabled("cuda")
    torch.set_autocast_enabled("cuda", True)
    yield
    torch.set_autocast_enabled("cuda", before)


def test_autocast_on_cuda_casts_to_float32_as_torch_does(cuda_autocast) -> None:
    with FakeTensorMode():
        x, w = torch.empty(4, 6, device="cuda", dtype=torch.float16), torch.empty(6, device="cuda")
        assert layer_norm(x, w).dtype is torch.float32 is F.layer_norm(x, (6,), w).dtype
        registered = torch._C._dispatch_has_kernel_for_dispatch_key("aten::rms_norm", "AutocastCUDA")
        assert rms_norm(x, w).dtype is (torch.float32 if registered else torch.float16)
        assert layer_norm(x.double(), w.double()).dtype is D
        torch.set_autocast_enabled("cuda", False)
        assert layer_norm(x, w).dtype is rms_norm(x, w).dtype is torch.float16


@pytest.mark.parametrize("policy", ["deterministic", "fast"])
def test_backward_runs_under_its_forwards_policy_on_another_thread(policy, monkeypatch) -> None:
    seen = []
    serve = memo.serve
    monkeypatch.setattr(memo, "serve", lambda *args: seen.append(args[3]().policy) or serve(*args))
    x, w, b = _inputs((3, 4), 1)
    with tritonops.use(policy=policy):
        out = layer_norm(x, w, b) + rms_norm(x, w)
    with tritonops.use(policy="fast" if policy == "deterministic" else "deterministic"):
        thread = threading.Thread(target=lambda: out.sum().backward())
        thread.start()
        thread.join()
    assert x.grad is not None and seen == [policy] * 4


X, W, R = torch.randn(3, 5), torch.randn(5), torch.ones(3)
ALL = [True, True, True]


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: layer_norm([1.0]), TypeError, "'x' must be Tensor, not list"),
        (lambda: layer_norm(X, 2.0), TypeError, "'weight' must be Tensor, not float"),
        (lambda: layer_norm(X, W, "b"), TypeError, "'bias' must be Tensor, not str"),
        (lambda: layer_norm(X, W, None, "eps"), TypeError, "'eps' must be float, not str"),
        (lambda: layer_norm(X, normalized_shape=2.5), TypeError, "'normalized_shape' must be an int"),
        (lambda: layer_norm(X, normalized_shape=()), RuntimeError, "'normalized_shape' to be at least 1-dimensional"),
        (lambda: layer_norm(X, normalized_shape=4), RuntimeError, r"normalized_shape=\[4\].*size\[3, 5\]"),
        (lambda: layer_norm(X, normalized_shape=(1, 3, 5)), RuntimeError, "normalized_shape"),
        (lambda: layer_norm(X, torch.randn(4)), RuntimeError, "'weight'"),
        (lambda: layer_norm(X, W, torch.randn(4)), RuntimeError, "'bias' of shape"),
        (lambda: layer_norm(X, torch.randn(4), normalized_shape=5), RuntimeError, "'weight' of shape"),
        (lambda: layer_norm(torch.tensor(1.0)), RuntimeError, "at least 1-dimensional"),
        (lambda: layer_norm(X.int()), NotImplementedError, "'x' of dtype torch.int32"),
        (lambda: layer_norm(X.to(torch.complex64)), NotImplementedError, "'x' of dtype torch.complex64"),
        (lambda: layer_norm(X, W.int()), NotImplementedError, "'weight' of dtype torch.int32"),
        (lambda: layer_norm(X, W.to("meta")), RuntimeError, "'x' is on cpu and 'weight' is on meta"),
        (lambda: layer_norm(X, None, W.to("meta")), RuntimeError, "'x' is on cpu and 'bias' is on meta"),
        (lambda: layer_norm(X.to_sparse()), NotImplementedError, "'x' must be a dense"),
        (lambda: rms_norm(X, torch.randn(4)), RuntimeError, "'weight'"),
        (lambda: rms_norm(X, W.to("meta")), RuntimeError, "'weight' is on meta"),
        (lambda: rms_norm(X, eps="1"), TypeError, "'eps' must be float"),
        (lambda: rms_norm(X.long()), NotImplementedError, "'x' of dtype torch.int64"),
        (lambda: OPS.layer_norm(X, W, None, 3, 1e-5, 0), RuntimeError, "'ndim' must be 1 to 2"),
        (lambda: OPS.layer_norm_backward(X[:2], X, R, R, W, None, 1, 0.1, ALL, 0), RuntimeError, "'dy'"),
        (lambda: OPS.layer_norm_backward(X, X, R[:2], R, W, None, 1, 0.1, ALL, 0), RuntimeError, "'mean'"),
        (lambda: OPS.rms_norm_backward(X, X, R.half(), W, 1, 0.1, ALL[:2], 0), RuntimeError, "'rstd'"),
        (lambda: OPS.rms_norm_backward(X.half(), X, R, W, 1, 0.1, ALL[:2], 0), RuntimeError, "same dtype"),
    ],
)  # fmt: skip
def test_bad_input_is_refused(call, error, words) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(error, match=words):
            call()


def _layouts():
    yield torch.randn(8, 4).t()
    yield torch.randn(1, 8).expand(5, 8)
    yield torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    yield torch.empty(0, 8)
    yield torch.empty(3, 0)
    yield torch.randn(5, 9)[:, 2:7]
    yield torch.randn(6)


def test_fake_strides_are_the_real_ones() -> None:
    def facts(outputs):
        return [(t.shape, t.stride(), t.dtype) for t in outputs]

    for x in _layouts():
        w = torch.randn(x.shape[-1]).half()
        m = x.shape[:-1].numel()
        mean, rstd = torch.zeros(m), torch.ones(m)
        calls = [
            (OPS.layer_norm, (x, w, None, 1, 1e-5, 0)),
            (OPS.rms_norm, (x, w, 1, 1e-5, 0)),
            (OPS.layer_norm_backward, (x, x, mean, rstd, w, torch.float16, 1, 1e-5, [True, True, True], 0)),
            (OPS.layer_norm_backward, (x, x, mean, rstd, None, None, 1, 1e-5, [True, True, True], 0)),
            (OPS.layer_norm_backward, (x, x, mean, rstd, w, torch.float16, 1, 1e-5, [False, False, True], 0)),
            (OPS.rms_norm_backward, (x, x, rstd, w, 1, 1e-5, [True, True], 0)),
        ]
        for operator, args in calls:
            with FakeTensorMode() as mode:
                fakes = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args]
                fake = facts(operator(*fakes))
            assert fake == facts(operator(*args))


def test_explain_names_the_problem() -> None:
    decision = tritonops.explain("layer_norm", (4096, 4608), (4608,), dtype=torch.bfloat16, device="sm_90-132")
    assert dict(decision.problem.dims) == {"M": 4096, "N": 4608} and decision.variant == "vendor"
    backward = tritonops.explain(
        "layer_norm_backward", (4096, 1024), (1024,), (1024,), dtype=torch.bfloat16, device="sm_90-132"
    )
    assert backward.problem.traits == {"weight": "bfloat16", "bias": "bfloat16", "grads": "xwb"}
    with tritonops.use(exclude="vendor"):
        own = tritonops.explain("rms_norm_backward", (32768, 1024), (1024,), dtype=torch.bfloat16, device="sm_90-132")
    assert own.variant.startswith("rows/") and own.table is not None
    assert tritonops.explain("layer_norm", X, W).problem.dims == {"M": 3, "N": 5}
    spec = tritonops.dispatch.variant.REGISTRY["layer_norm"]
    assert spec.all_features(decision.problem, decision.device) == {"M": 4096, "N": 4608, "N_low": 512}


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm", "layer_norm_backward", "rms_norm_backward"])
def test_samples_make_up_their_problem(op) -> None:
    spec = tritonops.dispatch.variant.REGISTRY[op]
    for (m, n), dtype in itertools.product(((5, 64), (3, 33), (1, 1)), (torch.float32, torch.bfloat16)):
        for aligned in (True, False):
            problem = spec.describe((m, n), (n,), dtype=dtype)
            if aligned and not problem.aligned:
                continue
            problem = tritonops.dispatch.problem.Problem(
                op, problem.dims, problem.dtype, "", aligned, traits=problem.traits
            )
            args = spec.sample(problem, "cpu")
            x = args[1] if op.endswith("_backward") else args[0]
            w = next(a for a in args[1:] if isinstance(a, torch.Tensor) and a.shape == (n,) and a.dtype is dtype)
            got = spec.describe(x, w)
            assert (got.dims, got.dtype) == (problem.dims, problem.dtype)
            assert m == 1 or got.aligned == aligned
            vendor = spec.variants()["vendor"]
            assert all(out.isfinite().all() for out in vendor.run(None, *args))
            meta = spec.sample(problem, "meta")
            assert [a.shape for a in meta if isinstance(a, torch.Tensor)] == [
                a.shape for a in args if isinstance(a, torch.Tensor)
            ]


def test_vmap_of_the_operators() -> None:
    x, w = torch.randn(3, 4, 8), torch.rand(8)
    got = torch.func.vmap(lambda x: torch.ops.tritonops.layer_norm(x, w, None, 1, 1e-5, 0)[0])(x)
    assert torch.allclose(got, F.layer_norm(x, (8,), w), atol=1e-6)
    got = torch.func.vmap(lambda x: torch.ops.tritonops.rms_norm(x, w, 1, 1e-5, 0)[0])(x)
    assert torch.allclose(got, F.rms_norm(x, (8,), w, 1e-5), atol=1e-6)
    y, mean, rstd = torch.ops.tritonops.layer_norm(x, w, None, 1, 1e-5, 0)
    stats = mean.view(3, 4), rstd.view(3, 4)
    mask = [True, True, False]
    got = torch.func.vmap(
        lambda dy, x, mean, rstd: torch.ops.tritonops.layer_norm_backward(dy, x, mean, rstd, w, None, 1, 1e-5, mask, 0)[
            0
        ]
    )(y, x, *stats)
    want = torch.ops.tritonops.layer_norm_backward(y, x, mean, rstd, w, None, 1, 1e-5, mask, 0)[0]
    assert torch.allclose(got, want, atol=1e-6)


def test_transforms_under_the_profiler() -> None:
    x = torch.randn(4, 8)
    for norm in (tritonops.layer_norm, tritonops.rms_norm):
        want = torch.func.grad(lambda x, norm=norm: norm(x).pow(3).sum())(x)
        with torch.profiler.profile() as profile:
            got = torch.func.grad(lambda x, norm=norm: norm(x).pow(3).sum())(x)
        assert torch.equal(got, want)
        assert any(e.key == f"tritonops::{norm.__name__}_backward" for e in profile.key_averages())
