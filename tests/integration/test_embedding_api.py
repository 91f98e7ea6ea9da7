"""tritonops.embedding as users call it: values, gradients, transforms, compilers, errors."""

from __future__ import annotations

import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.func import grad, hessian, vmap
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode

import tritonops
from tritonops import embedding
from tritonops.dispatch import memo
from tritonops.embedding.api import gradient

V, D, B = 7, 4, 3
TABLE = torch.randn(V, D)
TABLES = torch.randn(B, V, D)
IDS = torch.tensor([[1, 2, 6], [6, 0, 6]])
BATCH = torch.tensor([[1, 2, 6, 6], [0, 6, 1, 1], [5, 5, 5, 6]])

TABLE_CASES = [TABLE, torch.randn(D, V).t(), torch.randn(2 * V, 2 * D)[::2, 1::2], torch.randn(1, D).expand(V, D)]
IDS_CASES = [
    IDS,
    IDS.t(),
    IDS.int(),
    BATCH[:, ::2],
    torch.tensor(3),
    torch.tensor([2]),
    IDS[:, 1:2],
    IDS[:1].expand(4, 3),
]
EMPTY = [((V, D), (0,)), ((V, D), (2, 0, 3)), ((V, 0), (5,)), ((0, D), (0,)), ((0, 0), (0, 2))]


@pytest.mark.parametrize("weight", TABLE_CASES)
@pytest.mark.parametrize("indices", IDS_CASES)
@pytest.mark.parametrize("padding_idx", [None, 0, 6, -1, -7])
def test_values_and_gradients_are_torchs(weight, indices, padding_idx) -> None:
    ours, theirs = weight.clone().requires_grad_(), weight.clone().requires_grad_()
    got, want = embedding(indices, ours, padding_idx), F.embedding(indices, theirs, padding_idx)
    assert torch.equal(got, want) and torch.equal(got, weight[indices.long()])
    assert got.is_contiguous() and embedding(indices, weight, padding_idx).is_contiguous()
    g = torch.randn_like(want)
    (ours_grad,), (theirs_grad,) = torch.autograd.grad(got, ours, g), torch.autograd.grad(want, theirs, g)
    assert torch.equal(ours_grad, theirs_grad) and ours_grad.is_contiguous()


@pytest.mark.parametrize(("table", "ids"), EMPTY)
def test_empty_is_torchs(table, ids) -> None:
    ours, theirs = torch.randn(table, requires_grad=True), torch.randn(table, requires_grad=True)
    indices = torch.zeros(ids, dtype=torch.int64)
    got, want = embedding(indices, ours), F.embedding(indices, theirs)
    assert got.shape == want.shape
    got.sum().backward()
    want.sum().backward()
    assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.parametrize("padding_idx", [None, 6])
def test_frequencies_divide_as_torchs(padding_idx) -> None:
    ours, theirs = TABLE.clone().requires_grad_(), TABLE.clone().requires_grad_()
    g = torch.randn(2, 3, D)
    embedding(IDS, ours, padding_idx, scale_grad_by_freq=True).backward(g)
    F.embedding(IDS, theirs, padding_idx, scale_grad_by_freq=True).backward(g)
    assert torch.allclose(ours.grad, theirs.grad, atol=1e-6)


def test_sparse_is_torchs_own() -> None:
    weight = TABLE.clone().requires_grad_()
    embedding(IDS, weight, -1, sparse=True).sum().backward()
    assert weight.grad.is_sparse
    want = torch.zeros(V, D)
    want[:3] = 1
    assert torch.equal(weight.grad.to_dense(), want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_sixteen_bit_gradients_are_rounded_once(dtype) -> None:
    weight = torch.zeros(4, 3, dtype=dtype, requires_grad=True)
    embedding(torch.zeros(5000, dtype=torch.int64), weight).sum().backward()
    assert weight.grad.dtype is dtype
    assert torch.equal(weight.grad, torch.tensor([5000.0, 0, 0, 0]).to(dtype)[:, None].expand(4, 3))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_other_dtypes_are_served_by_torch(dtype) -> None:
    weight = torch.arange(V * D).view(V, D).to(dtype)
    assert torch.equal(embedding(IDS, weight), weight[IDS])


@pytest.mark.parametrize("scale", [False, True])
@pytest.mark.parametrize("padding_idx", [None, 6])
def test_second_derivatives(padding_idx, scale) -> None:
    weight = torch.randn(V, D, dtype=torch.float64, requires_grad=True)

    def ours(w):
        return embedding(IDS, w, padding_idx, scale_grad_by_freq=scale)

    if not scale and padding_idx is None:
        assert gradcheck(ours, (weight,)) and gradgradcheck(ours, (weight,))
    g = torch.randn(2, 3, D, dtype=torch.float64, requires_grad=True)

    def backward(g):
        return torch.autograd.grad(ours(weight), weight, g, create_graph=True)[0]

    assert gradcheck(backward, (g,)) and gradgradcheck(backward, (g,))


def test_double_backward_sums_ones() -> None:
    weight, v = torch.randn(5, 3, requires_grad=True), torch.ones(2, 3, requires_grad=True)
    (g,) = torch.autograd.grad(embedding(torch.tensor([1, 1]), weight), weight, v, create_graph=True)
    g.sum().backward()
    assert torch.equal(v.grad, torch.ones(2, 3))


def test_a_gradient_nobody_asked_for_is_not_computed(monkeypatch) -> None:
    served = []
    serve = memo.serve
    monkeypatch.setattr(memo, "serve", lambda *args: served.append(args[0].name) or serve(*args))
    scale = torch.ones((), requires_grad=True)
    (embedding(IDS, TABLE) * scale).sum().backward()
    assert served == ["embedding"]
    embedding(IDS, TABLE.clone().requires_grad_()).sum().backward()
    assert served == ["embedding", "embedding", "embedding_backward"]


@pytest.mark.parametrize(
    "args",
    [
        (TABLE.clone().requires_grad_(), IDS, -1, False, 0),
        (TABLE.clone().requires_grad_(), IDS.int(), 6, False, 0),
        (TABLE.clone().requires_grad_(), IDS.t(), 6, True, 1),
        (torch.randn(D, V).t().requires_grad_(), torch.tensor(3), -1, False, 0),
        (torch.randn(1, D).expand(V, D), IDS, -1, False, 0),
        (TABLE.bfloat16(), IDS, -1, False, 0),
        (torch.randn(V, D, requires_grad=True), torch.zeros(2, 0, dtype=torch.int64), -1, False, 0),
        (torch.randn(V, 0, requires_grad=True), IDS, -1, False, 0),
    ],
)
def test_opcheck(args) -> None:
    results = opcheck(torch.ops.tritonops.embedding.default, args)
    assert set(results.values()) == {"SUCCESS"} and len(results) == 4


@pytest.mark.parametrize(
    "args",
    [
        (torch.randn(2, 3, D, requires_grad=True), IDS, V, -1, False, 0),
        (torch.randn(2, 3, D, requires_grad=True), IDS.int(), V, 6, False, 0),
        (torch.randn(3, 2, D, requires_grad=True), IDS.t(), V, 6, True, 1),
        (torch.randn(D, requires_grad=True), torch.tensor(3), V, -1, False, 0),
        (torch.randn(()).expand(2, 3, D), IDS, V, -1, False, 0),
        (torch.randn(2, 3, D).half(), IDS, V, -1, False, 0),
        (torch.randn(2, 0, D, requires_grad=True), torch.zeros(2, 0, dtype=torch.int64), V, -1, False, 0),
        (torch.randn(2, 3, 0, requires_grad=True), IDS, V, -1, False, 0),
    ],
)
def test_opcheck_backward(args) -> None:
    results = opcheck(torch.ops.tritonops.embedding_backward.default, args)
    assert set(results.values()) == {"SUCCESS"} and len(results) == 4


VMAPS = [
    (BATCH, TABLE, (0, None)),
    (BATCH.t(), TABLE, (1, None)),
    (BATCH, TABLES, (None, 0)),
    (BATCH, TABLES.permute(1, 2, 0), (None, 2)),
    (BATCH, TABLES, (0, 0)),
    (BATCH.t().int(), TABLES.movedim(0, 1), (1, 1)),
    (BATCH[:, 0], TABLES, (0, 0)),
    (torch.tensor(2), TABLES, (None, 0)),
]


@pytest.mark.parametrize(("indices", "weight", "in_dims"), VMAPS)
def test_vmap(indices, weight, in_dims) -> None:
    want = vmap(lambda i, w: F.embedding(i, w), in_dims)(indices, weight)
    operator = torch.ops.tritonops.embedding
    for ours in (embedding, lambda i, w: operator(w, i, -1, False, 0)):
        got = vmap(ours, in_dims)(indices, weight)
        assert got.shape == want.shape and torch.equal(got, want)


def _per_sample(indices, weight, in_dims):
    """The arguments of each sample of a vmap."""
    for b in range(B):
        yield tuple(x if d is None else x.select(d, b) for x, d in zip((indices, weight), in_dims, strict=True))


@pytest.mark.parametrize("scale", [False, True])
@pytest.mark.parametrize("padding_idx", [None, 6])
@pytest.mark.parametrize(("indices", "weight", "in_dims"), VMAPS)
def test_vmap_and_grad_in_both_orders(indices, weight, in_dims, padding_idx, scale) -> None:
    def loss(i, w):
        return (embedding(i, w, padding_idx, scale_grad_by_freq=scale) ** 2).sum()

    def exact(i, w):
        w = w.clone().requires_grad_()
        (F.embedding(i, w, padding_idx, scale_grad_by_freq=scale) ** 2).sum().backward()
        return w.grad

    each = [exact(i, w) for i, w in _per_sample(indices, weight, in_dims)]
    inside = vmap(grad(loss, argnums=1), in_dims)(indices, weight)
    assert torch.allclose(inside, torch.stack(each), atol=1e-5)
    outside = grad(lambda w: vmap(loss, in_dims)(indices, w).sum())(weight)
    want = sum(each) if in_dims[1] is None else torch.stack(each).movedim(0, in_dims[1])
    assert torch.allclose(outside, want, atol=1e-5)


@pytest.mark.parametrize("scale", [False, True])
@pytest.mark.parametrize("padding_idx", [-1, 6])
@pytest.mark.parametrize("in_dims", [(0, None), (None, 0), (0, 0), (1, 0), (0, 1)])
def test_vmap_of_the_gradient_and_its_gradient(in_dims, padding_idx, scale) -> None:
    dy = torch.randn(B, 4, D) if in_dims[0] is not None else torch.randn(4, D)
    ids = BATCH if in_dims[1] is not None else BATCH[0]
    dy = dy if in_dims[0] != 1 else dy.movedim(0, 1)
    ids = ids if in_dims[1] != 1 else ids.t()

    def ours(dy, ids):
        return gradient(dy, ids, V, padding_idx, scale, 0)

    def operator(dy, ids):
        return torch.ops.tritonops.embedding_backward(dy, ids, V, padding_idx, scale, 0)

    def theirs(dy, ids):
        return torch.ops.aten.embedding_dense_backward(dy, ids, V, padding_idx, scale)

    each = torch.stack([theirs(d, i) for d, i in _per_sample(dy, ids, in_dims)])
    assert torch.allclose(vmap(ours, in_dims)(dy, ids), each, atol=1e-6)
    assert torch.allclose(vmap(operator, in_dims)(dy, ids), each, atol=1e-6)
    cotangent = torch.randn(V, D)

    def dot(dy, ids):
        return (ours(dy, ids) * cotangent).sum()

    def exact(dy, ids):
        counts = torch.bincount(ids, minlength=V)[ids] if scale else torch.ones(ids.shape)
        return cotangent[ids] * (ids != padding_idx)[:, None] / counts[:, None]

    want = torch.stack([exact(d, i) for d, i in _per_sample(dy, ids, in_dims)])
    assert torch.allclose(vmap(grad(dot), in_dims)(dy, ids), want, atol=1e-6)


def test_vmapped_ids_stay_in_their_own_table() -> None:
    for bad in (-1, V, V + 2):
        ids = torch.tensor([0, bad, 1])
        for in_dims, weight in [((0, 0), TABLES), ((0, None), TABLE), ((None, 0), TABLES)]:
            with pytest.raises(IndexError, match="index out of range in self"):
                vmap(embedding, in_dims)(ids, weight)


def test_nested_transforms() -> None:
    def ours(w):
        return (embedding(IDS, w, 6) ** 3).sum()

    def theirs(w):
        return (w[IDS.clamp(max=5)] ** 3 * (IDS != 6)[..., None]).sum()

    small = TABLE.double()
    assert torch.allclose(grad(ours)(small), grad(theirs)(small))
    assert torch.allclose(hessian_by_reverse(ours, small), hessian(theirs)(small))
    got = vmap(lambda i: vmap(lambda w: embedding(i, w))(TABLES))(BATCH)
    assert torch.equal(got, TABLES[:, BATCH].movedim(0, 1))


def hessian_by_reverse(f, x):
    """Reverse over reverse: forward mode is refused."""
    return torch.func.jacrev(torch.func.jacrev(f))(x)


def test_forward_mode_is_refused_not_dropped() -> None:
    with pytest.raises(NotImplementedError, match="jvp"):
        torch.func.jvp(lambda w: embedding(IDS, w), (TABLE,), (TABLE,))
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="jvp"):
        embedding(IDS, forward_ad.make_dual(TABLE, TABLE))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("padding_idx", [None, -1])
def test_compile_fullgraph_dynamic(backend, padding_idx) -> None:
    @torch.compile(fullgraph=True, dynamic=True, backend=backend)
    def compiled(indices, weight):
        return torch.sin(embedding(indices, weight, padding_idx))

    for rows, columns, tokens in ((7, 4, 5), (9, 5, 8), (20, 6, 3)):
        indices = torch.randint(rows, (2, tokens))
        indices[0, 0] = rows - 1
        ours, theirs = (torch.randn(rows, columns, requires_grad=True) for _ in range(2))
        theirs.data.copy_(ours.data)
        got, want = compiled(indices, ours), torch.sin(F.embedding(indices, theirs, padding_idx))
        assert torch.allclose(got, want, atol=1e-6)
        g = torch.randn_like(want)
        got.backward(g)
        want.backward(g)
        assert torch.allclose(ours.grad, theirs.grad, atol=1e-6)
    for bad in (-1, 20):
        with pytest.raises(IndexError, match="index out of range in self"):
            compiled(torch.tensor([[0, bad, 1]]), torch.randn(20, 6))


def test_compiled_func_grad_is_right_or_a_clear_error() -> None:
    def loss(w):
        return (embedding(IDS, w, 6) ** 2).sum()

    eager = grad(loss)(TABLE)
    assert torch.equal(eager[6], torch.zeros(D))
    try:
        got = torch.compile(grad(loss), backend="aot_eager")(TABLE)
    except Exception as error:
        assert "tritonops" in str(error) and "grad" in str(error).lower()
    else:
        assert torch.equal(got, eager)


class _Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


def test_watchers_see_the_ops() -> None:
    weight = TABLE.clone().requires_grad_()
    with _Seen() as seen:
        embedding(IDS, weight).sum().backward()
    assert seen.ops.count("tritonops.embedding.default") == 1
    assert seen.ops.count("tritonops.embedding_backward.default") == 1
    assert embedding(IDS.to("meta"), TABLE.to("meta")).shape == (2, 3, D)


def test_autocast_leaves_the_lookup_alone() -> None:
    weight = TABLE.clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = embedding(IDS, weight)
        half = embedding(IDS, TABLE.half())
    assert out.dtype is torch.float32 and half.dtype is torch.float16
    out.sum().backward()
    assert weight.grad.dtype is torch.float32


@pytest.mark.parametrize("policy", ["deterministic", "fast", "batch_invariant"])
def test_backward_runs_under_its_forwards_policy_on_another_thread(policy, monkeypatch) -> None:
    served = []
    serve = memo.serve
    monkeypatch.setattr(memo, "serve", lambda *args: served.append(args[3]().policy) or serve(*args))
    weight = TABLE.clone().requires_grad_()
    with tritonops.use(policy=policy):
        out = embedding(IDS, weight)
    with tritonops.use(policy="fast" if policy == "deterministic" else "deterministic"):
        thread = threading.Thread(target=lambda: out.sum().backward())
        thread.start()
        thread.join()
    assert weight.grad is not None and served == [policy, policy]


def test_torchs_deterministic_switch_is_obeyed(monkeypatch) -> None:
    served = []
    serve = memo.serve
    monkeypatch.setattr(memo, "serve", lambda *args: served.append(args[3]().policy) or serve(*args))
    torch.use_deterministic_algorithms(True)
    try:
        embedding(IDS, TABLE.clone().requires_grad_()).sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert served == ["deterministic", "deterministic"]


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: embedding([1], TABLE), TypeError, "'indices' must be Tensor, not list"),
        (lambda: embedding(IDS, [1.0]), TypeError, "'weight' must be Tensor, not list"),
        (lambda: embedding(IDS.float(), TABLE), RuntimeError, "scalar types: Long, Int; but got torch.float32"),
        (lambda: embedding(IDS.short(), TABLE), RuntimeError, "scalar types: Long, Int; but got torch.int16"),
        (lambda: embedding(IDS, TABLES), RuntimeError, "'weight' must be 2-D"),
        (lambda: embedding(IDS, TABLE.to("meta")), RuntimeError, "'indices' is on cpu and 'weight' is on meta"),
        (lambda: embedding(IDS, TABLE.to_sparse()), NotImplementedError, "'weight' must be a dense"),
        (lambda: embedding(IDS, TABLE, V), AssertionError, "Padding_idx must be within num_embeddings"),
        (lambda: embedding(IDS, TABLE, -V - 1), AssertionError, "Padding_idx must be within num_embeddings"),
        (lambda: embedding(IDS, TABLE, 1.0), TypeError, "'padding_idx' must be int or None, not float"),
        (lambda: embedding(IDS, TABLE[:6]), IndexError, "index out of range in self"),
        (lambda: embedding(IDS - 1, TABLE), IndexError, "index out of range in self"),
        (lambda: embedding(torch.tensor([0]), TABLE[:0]), IndexError, "index out of range in self"),
        (lambda: tritonops.explain("embedding", IDS, TABLE, sparse=True), ValueError, "sparse=True"),
        (lambda: tritonops.explain("embedding", (2, 3), (V, D)), TypeError, "'dtype' must be given where 'weight'"),
        (
            lambda: torch.ops.tritonops.embedding_backward(TABLE, IDS, V, -1, False, 0),
            RuntimeError,
            "expected 'dy' of the shape of 'indices'",
        ),
        (
            lambda: torch.ops.tritonops.embedding_backward(TABLES[:2, :3], IDS, 6, -1, False, 0),
            IndexError,
            "index out of range in self",
        ),
        (
            lambda: torch.ops.tritonops.embedding_backward(TABLES[:2, :3], IDS, -1, -1, False, 0),
            RuntimeError,
            "'num_embeddings' is negative",
        ),
    ],
)
def test_bad_input_is_refused(call, error, words) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(error, match=words):
            call()


def test_fake_strides_are_the_real_ones() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    for weight in [*TABLE_CASES, torch.randn(V, 1), torch.randn(V, 0)]:
        for indices in [*IDS_CASES, torch.zeros(0, 2, dtype=torch.int64)]:
            out = embedding(indices, weight)
            dy = torch.randn(out.shape)
            back = torch.ops.tritonops.embedding_backward(dy, indices, V, -1, False, 0)
            with FakeTensorMode() as mode:
                fake_ids = mode.from_tensor(indices)
                fake = embedding(fake_ids, mode.from_tensor(weight))
                fake_back = torch.ops.tritonops.embedding_backward(mode.from_tensor(dy), fake_ids, V, -1, False, 0)
            assert (fake.shape, fake.stride(), fake.dtype) == (out.shape, out.stride(), out.dtype)
            assert (fake_back.shape, fake_back.stride(), fake_back.dtype) == (back.shape, back.stride(), back.dtype)
