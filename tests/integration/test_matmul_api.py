"""tritonops.matmul and linear as users call them: shapes, gradients, transforms, compilers, errors."""

from __future__ import annotations

import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.func import grad, vmap
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode

import tritonops
from tritonops import matmul
from tritonops.dispatch import memo

D = torch.float64

SHAPES = [
    ((3,), (3,)), ((2, 3), (3,)), ((3,), (3, 4)), ((2, 3), (3, 4)), ((5, 2, 3), (3, 4)), ((5, 2, 3), (5, 3, 4)),
    ((2, 3), (5, 3, 4)), ((5, 1, 2, 3), (6, 3, 4)), ((3,), (5, 3, 4)), ((5, 2, 3), (3,)), ((1, 1), (1, 1)),
]  # fmt: skip
EMPTY = [
    ((0, 3), (3, 4)), ((2, 0), (0, 4)), ((2, 3), (3, 0)), ((5, 0, 3), (3, 4)), ((5, 2, 0), (0, 4)),
    ((0, 2, 3), (0, 3, 4)), ((0,), (0,)), ((0, 3), (3,)), ((0, 2, 0), (0, 4)),
]  # fmt: skip


@pytest.mark.parametrize(("shape_a", "shape_b"), SHAPES + EMPTY)
def test_shapes_and_gradients_are_torchs(shape_a, shape_b) -> None:
    a, b = torch.randn(shape_a, dtype=D, requires_grad=True), torch.randn(shape_b, dtype=D, requires_grad=True)
    want, got = torch.matmul(a, b), matmul(a, b)
    assert got.shape == want.shape and torch.allclose(got, want)
    g = torch.randn_like(want)
    for x, y in zip(torch.autograd.grad(want, (a, b), g), torch.autograd.grad(got, (a, b), g), strict=True):
        assert x.shape == y.shape and torch.allclose(x, y)


@pytest.mark.parametrize(("shape_a", "shape_b"), SHAPES[:8])
def test_second_derivatives(shape_a, shape_b) -> None:
    a, b = torch.randn(shape_a, dtype=D, requires_grad=True), torch.randn(shape_b, dtype=D, requires_grad=True)
    assert gradcheck(matmul, (a, b)) and gradgradcheck(matmul, (a, b))


@pytest.mark.parametrize("activation", [None, "relu", "silu", "gelu", "gelu_tanh"])
def test_epilogue(activation) -> None:
    a, b = torch.randn(3, 4, dtype=D, requires_grad=True), torch.randn(4, 5, dtype=D, requires_grad=True)
    bias, residual = torch.randn(5, dtype=D, requires_grad=True), torch.randn(3, 5, dtype=D, requires_grad=True)
    apply = {None: lambda x: x, "relu": F.relu, "silu": F.silu, "gelu": F.gelu,
             "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}[activation]  # fmt: skip

    def ours(a, b, bias, residual):
        return matmul(a, b, bias=bias, activation=activation, residual=residual)

    assert torch.allclose(ours(a, b, bias, residual), apply(a @ b + bias) + residual)
    assert gradcheck(ours, (a, b, bias, residual))


def test_linear_is_torchs() -> None:
    x, w, bias = torch.randn(2, 3, 4), torch.randn(5, 4), torch.randn(5)
    assert torch.allclose(tritonops.linear(x, w, bias), F.linear(x, w, bias), atol=1e-6)
    assert torch.allclose(tritonops.linear(x, w[0]), F.linear(x, w[0]), atol=1e-6)


def test_gradients_lie_as_their_operands_do() -> None:
    """A weight's gradient in another layout costs a copy and the optimizer's slow path."""
    x, w = torch.randn(7, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    gx, gw = torch.autograd.grad(tritonops.linear(x, w).sum(), (x, w))
    assert gx.is_contiguous() and gw.is_contiguous()
    column = torch.randn(4, 7).t().requires_grad_()
    (gc,) = torch.autograd.grad(matmul(column, w.detach().t()).sum(), column)
    assert gc.stride() == column.stride() and torch.allclose(gc, w.detach().sum(0).expand(7, 4))


def test_only_wanted_gradients_are_computed(monkeypatch) -> None:
    served = []
    serve = memo.serve
    monkeypatch.setattr(memo, "serve", lambda *args: served.append(args[0].name) or serve(*args))
    a, b = torch.randn(3, 4, requires_grad=True), torch.randn(4, 5)
    matmul(a, b).sum().backward()
    assert served == ["matmul", "matmul"]


@pytest.mark.parametrize(
    "args",
    [
        (torch.randn(3, 4, requires_grad=True), torch.randn(4, 5, requires_grad=True), None, None, 0),
        (torch.randn(4, 3).t().requires_grad_(), torch.randn(4, 5), torch.randn(5, requires_grad=True), None, 0),
        (torch.randn(2, 3, 4, requires_grad=True), torch.randn(2, 4, 5).mT.contiguous().mT, torch.randn(5), None, 1),
        (torch.randn(3, 4).half(), torch.randn(4, 5).half(), None, torch.float32, 0),
        (torch.randn(1, 4).expand(3, 4), torch.randn(4, 5), None, None, 0),
        (torch.randn(0, 4), torch.randn(4, 5), None, None, 0),
        (torch.randn(3, 0), torch.randn(0, 5), torch.randn(5), None, 0),
        (torch.randn(1, 1), torch.randn(1, 1), None, None, 0),
    ],
)
def test_opcheck(args) -> None:
    results = opcheck(torch.ops.tritonops.matmul.default, args)
    assert set(results.values()) == {"SUCCESS"} and len(results) == 4


A, B = torch.randn(6, 3, 4), torch.randn(6, 4, 5)


@pytest.mark.parametrize(
    ("args", "in_dims"),
    [
        ((A, B), 0),
        ((A, B[0]), (0, None)),
        ((A[0], B), (None, 0)),
        ((A.permute(1, 2, 0), B), (2, 0)),
        ((torch.randn(6, 2, 3, 4), torch.randn(6, 2, 4, 5)), 0),
        ((torch.randn(2, 3, 4), torch.randn(6, 2, 4, 5)), (None, 0)),
        ((torch.randn(6, 2, 3, 4), torch.randn(2, 4, 5)), (0, None)),
    ],
)
def test_vmap(args, in_dims) -> None:
    got, want = vmap(matmul, in_dims)(*args), vmap(torch.matmul, in_dims)(*args)
    assert got.shape == want.shape and torch.allclose(got, want, atol=1e-5)


@pytest.mark.parametrize("in_dims", [(0, 0, 0), (None, None, 0), (0, None, None), (None, 0, 0)])
def test_vmap_with_bias(in_dims) -> None:
    args = [x if d == 0 else x[0] for x, d in zip((A, B, torch.randn(6, 5)), in_dims, strict=True)]
    got = vmap(lambda a, b, c: matmul(a, b, bias=c), in_dims)(*args)
    assert torch.allclose(got, vmap(lambda a, b, c: a @ b + c, in_dims)(*args), atol=1e-5)


def test_nested_transforms() -> None:
    def ours(a, b):
        return (matmul(a, b) ** 2).sum()

    def theirs(a, b):
        return ((a @ b) ** 2).sum()

    assert torch.allclose(grad(ours)(A, B), grad(theirs)(A, B), atol=1e-4)
    assert torch.allclose(vmap(grad(ours))(A, B), vmap(grad(theirs))(A, B), atol=1e-4)
    got = vmap(lambda a: vmap(matmul)(a, B))(torch.stack([A, A + 1]))
    assert torch.allclose(got, torch.stack([A, A + 1]) @ B, atol=1e-5)


def test_vmap_of_the_operator() -> None:
    got = vmap(lambda a, b: torch.ops.tritonops.matmul(a, b, None, None, 0))(A, B)
    assert torch.allclose(got, A @ B, atol=1e-5)


def test_transforms_under_a_watcher() -> None:
    """An operator has no rule for func.grad, so a watcher must not turn the call into one before the transform."""
    want = grad(lambda a: ((a @ B) ** 2).sum())(A)
    with _Seen() as seen:
        got = grad(lambda a: (matmul(a, B) ** 2).sum())(A)
    assert torch.allclose(got, want, atol=1e-4) and seen.ops.count("tritonops.matmul.default") == 2
    with torch.profiler.profile() as profile:
        got = grad(lambda a: (matmul(a, B) ** 2).sum())(A)
    assert torch.allclose(got, want, atol=1e-4)
    assert any(e.key == "tritonops::matmul" for e in profile.key_averages())


def test_gradients_in_batches() -> None:
    """torch.autograd.grad(is_grads_batched=True) brings tensors without memory of their own."""
    a = A[0].clone().requires_grad_()
    g = torch.randn(3, 3, 5)
    (got,) = torch.autograd.grad(matmul(a, B[0]), a, g, is_grads_batched=True)
    assert torch.allclose(got, g @ B[0].t(), atol=1e-5)
    for norm in (tritonops.layer_norm, tritonops.rms_norm):
        ours = torch.autograd.functional.jacobian(norm, A[0], vectorize=True)
        assert torch.allclose(ours, torch.autograd.functional.jacobian(norm, A[0]), atol=1e-5)
    ids, w = torch.tensor([1, 0, 1]), torch.randn(4, 5, requires_grad=True)
    (got,) = torch.autograd.grad(tritonops.embedding(ids, w), w, g, is_grads_batched=True)
    assert torch.allclose(got, torch.zeros(3, 4, 5).index_add_(1, ids, g), atol=1e-6)


def test_functionalize() -> None:
    assert torch.equal(torch.func.functionalize(lambda a: matmul(a, B))(A), matmul(A, B))


def test_forward_mode_is_refused_not_dropped() -> None:
    with pytest.raises(NotImplementedError, match="jvp"):
        torch.func.jvp(lambda a: matmul(a, B), (A,), (A,))
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="jvp"):
        matmul(forward_ad.make_dual(A, A), B)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile_fullgraph_dynamic(backend) -> None:
    @torch.compile(fullgraph=True, dynamic=True, backend=backend)
    def compiled(a, b):
        return matmul(a, b, activation="gelu")

    for rows in (3, 7, 20):
        a, b = torch.randn(rows, 4, requires_grad=True), torch.randn(4, 5, requires_grad=True)
        got, want = compiled(a, b), F.gelu(a @ b)
        assert torch.allclose(got, want, atol=1e-5)
        g = torch.randn_like(want)
        for x, y in zip(torch.autograd.grad(got, (a, b), g), torch.autograd.grad(want, (a, b), g), strict=True):
            assert torch.allclose(x, y, atol=1e-5)


def test_compiled_func_grad_is_right_or_a_clear_error() -> None:
    def loss(a):
        return (matmul(a, B) ** 2).sum()

    try:
        got = torch.compile(grad(loss), backend="aot_eager")(A)
    except Exception as error:
        assert "tritonops" in str(error) and "grad" in str(error).lower()
    else:
        assert torch.allclose(got, grad(loss)(A), atol=1e-4)


class _Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


def test_watchers_see_the_op() -> None:
    a = A.clone().requires_grad_()
    with _Seen() as seen:
        matmul(a, B).sum().backward()
    assert seen.ops.count("tritonops.matmul.default") == 2
    with torch.profiler.profile() as profile:
        matmul(A, B)
    assert any(e.key == "tritonops::matmul" for e in profile.key_averages())
    assert matmul(A.to("meta"), B.to("meta")).shape == (6, 3, 5)


def test_default_device_does_not_count_as_watching(monkeypatch) -> None:
    from tritonops import _watch

    torch.set_default_device("cpu")
    try:
        assert _watch.route(A, B) == _watch.DIRECT
    finally:
        torch.set_default_device(None)


def test_autocast_casts_as_torch_does() -> None:
    a, b = torch.randn(4, 6, requires_grad=True), torch.randn(6, 5, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, z = matmul(a, b), matmul(a.bfloat16(), b)
        wide = matmul(a.detach().double(), b.detach().double())
    assert y.dtype is torch.bfloat16 and z.dtype is torch.bfloat16 and wide.dtype is D
    y.sum().backward()
    assert a.grad.dtype is torch.float32 and b.grad.dtype is torch.float32
    with pytest.raises(RuntimeError, match="same dtype"):
        matmul(a.bfloat16(), b)


@pytest.mark.parametrize("policy", ["deterministic", "fast"])
def test_backward_runs_under_its_forwards_policy_on_another_thread(policy, monkeypatch) -> None:
    flags = []
    serve = memo.serve
    monkeypatch.setattr(memo, "serve", lambda *args: flags.append(args[3]().policy) or serve(*args))
    a = A.clone().requires_grad_()
    with tritonops.use(policy=policy):
        out = matmul(a, B)
    with tritonops.use(policy="fast" if policy == "deterministic" else "deterministic"):
        thread = threading.Thread(target=lambda: out.sum().backward())
        thread.start()
        thread.join()
    assert a.grad is not None and flags == [policy, policy]


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: matmul(A, [1.0]), TypeError, "'b' must be Tensor, not list"),
        (lambda: matmul(A, torch.randn(3, 3)), RuntimeError, "cannot be multiplied"),
        (lambda: matmul(A, B.double()), RuntimeError, "'a' and 'b' to have the same dtype"),
        (lambda: matmul(A, B.to("meta")), RuntimeError, "'a' is on cpu and 'b' is on meta"),
        (lambda: matmul(torch.tensor(1.0), A), RuntimeError, "at least 1-D"),
        (lambda: matmul(A, B, activation="tanh"), ValueError, "'activation'"),
        (lambda: matmul(A, B, bias=torch.randn(3)), RuntimeError, "'bias' of shape"),
        (lambda: matmul(A, B, bias=torch.randn(5).double()), RuntimeError, "'bias' to have the same dtype"),
        (lambda: matmul(A, B, bias=torch.randn(5, device="meta")), RuntimeError, "'bias' is on meta"),
        (lambda: matmul(A, B, out_dtype=torch.float16), RuntimeError, "'out_dtype'"),
        (lambda: matmul(A, B, residual=torch.randn(9, 6, 3, 5)), RuntimeError, "'residual'"),
        (lambda: matmul(A, B, residual=torch.randn(4)), RuntimeError, "'residual'"),
        (lambda: matmul(A, B, out_dtype="float32"), TypeError, "'out_dtype'"),
        (lambda: matmul(torch.randn(2, 3, 4), torch.randn(3, 4, 5)), RuntimeError, "batch dimensions"),
        (lambda: matmul(A, B.to_sparse()), NotImplementedError, "'b' must be a dense"),
        (lambda: torch.ops.tritonops.matmul(A[0], B[0, :3], None, None, 0), RuntimeError, "cannot be multiplied"),
        (lambda: torch.ops.tritonops.matmul(A, B[:2], None, None, 0), RuntimeError, "batch sizes"),
    ],
)
def test_bad_input_is_refused(call, error, words) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(error, match=words):
            call()


def test_fake_strides_are_the_real_ones() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    for a, b in [(A, B), (A.mT.contiguous().mT, B), (A[0].expand(6, 3, 4), B), (torch.empty(0, 4), B[0])]:
        real = matmul(a, b)
        with FakeTensorMode() as mode:
            fake = matmul(mode.from_tensor(a), mode.from_tensor(b))
        assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)
