"""Public reports about autograd, by their ids."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import tritonops
from reports.support import err, ln64


@pytest.mark.parametrize("rows", [1, 30, 3000])
def test_aut_04_bias_without_weight(dev, rows) -> None:
    """pytorch/pytorch#189405: the bias gradient takes its size from the missing weight."""
    b = torch.zeros(8, device=dev, requires_grad=True)
    tritonops.layer_norm(torch.randn(rows, 8, device=dev), None, b, 1e-5).sum().backward()
    assert b.grad.shape == (8,) and b.grad.eq(rows).all()


def test_aut_06_weight_without_bias(dev) -> None:
    """candle-org/MindAct#2132, pytorch/pytorch#108078: layer_norm without a bias crashes."""
    x = torch.randn(3, 7, 5, device=dev, requires_grad=True)
    w = torch.randn(5, device=dev, requires_grad=True)
    y = tritonops.layer_norm(x, w, None, 1e-5)
    assert err(y, tritonops.layer_norm(x, w, torch.zeros(5, device=dev), 1e-5)) < 1e-6 and err(y, ln64(x, w)) < 1e-5
    y.sum().backward()
    assert w.grad.shape == (5,) and x.grad.shape == x.shape
    assert err(tritonops.layer_norm(x), ln64(x)) < 1e-5


def test_aut_07_second_derivatives(torch_dev) -> None:
    """pytorch/pytorch#76185, #58509, #91469, #9078: saved intermediates count as constants."""
    x = torch.randn(3, 5, device=torch_dev, dtype=torch.float64, requires_grad=True)
    w = torch.randn(5, device=torch_dev, dtype=torch.float64, requires_grad=True)
    b = torch.randn(5, device=torch_dev, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: tritonops.layer_norm(x, None, None, 1e-5), (x,))
    assert torch.autograd.gradgradcheck(lambda x, w, b: tritonops.layer_norm(x, w, b, 1e-5), (x, w, b))
    assert torch.autograd.gradgradcheck(lambda x, w: tritonops.rms_norm(x, w, 1e-5), (x, w))
    assert torch.autograd.gradgradcheck(tritonops.matmul, (x, w.detach().outer(w.detach()).requires_grad_()))


def test_aut_07_embedding_is_linear(dev) -> None:
    w = torch.randn(5, 3, device=dev, requires_grad=True)
    v = torch.ones(2, 3, device=dev, requires_grad=True)
    (g,) = torch.autograd.grad(tritonops.embedding(torch.tensor([1, 1], device=dev), w), w, v, create_graph=True)
    g.sum().backward()
    assert v.grad.eq(1).all()


def test_aut_07_float32_second_derivative_of_the_norms(dev) -> None:
    """The same on the kernels of the device, against torch's double backward."""
    x = torch.randn(4, 33, device=dev, requires_grad=True)
    w = torch.randn(33, device=dev, requires_grad=True)
    for ours, theirs in (
        (tritonops.layer_norm, lambda x, w: F.layer_norm(x, (33,), w)),
        (lambda x, w: tritonops.rms_norm(x, w, 1e-5), lambda x, w: F.rms_norm(x, (33,), w, 1e-5)),
    ):
        out = []
        for fn, a, b in (
            (ours, x, w),
            (theirs, x.detach().double().requires_grad_(), w.detach().double().requires_grad_()),
        ):
            gx, gw = torch.autograd.grad(fn(a, b).pow(2).sum(), (a, b), create_graph=True)
            out.append(torch.autograd.grad(gx.pow(2).sum() + gw.pow(2).sum(), (a, b)))
        for got, want in zip(*out, strict=True):
            assert float((got.double() - want).norm() / want.norm()) < 1e-4


def test_aut_09_matmul_follows_autocast(dev, request) -> None:
    """pytorch/pytorch#137033, #136482, #145588: a float32 product stays float32, mixed operands are refused."""
    low = torch.float16 if "interpreter" in request.node.callspec.id else torch.bfloat16
    a = torch.randn(4, 6, device=dev, requires_grad=True)
    b = torch.randn(6, 5, device=dev, requires_grad=True)
    with torch.autocast(dev, dtype=low):
        y = tritonops.matmul(a, b)
        z = tritonops.matmul(a.to(low), b)
    assert y.dtype is low and z.dtype is low
    y.sum().backward()
    assert a.grad.dtype is torch.float32 and b.grad.dtype is torch.float32
    with pytest.raises(RuntimeError, match="dtype"):
        tritonops.matmul(a.to(low), b)


@pytest.mark.gpu
@pytest.mark.parametrize("exclude", [None, "vendor"])
def test_aut_10_layer_norm_under_autocast(exclude) -> None:
    """NVIDIA/apex#979, #1379: half activations with float32 parameters are refused."""
    x = torch.randn(4, 32, device="cuda").half().requires_grad_()
    w, b = torch.ones(32, device="cuda", requires_grad=True), torch.zeros(32, device="cuda", requires_grad=True)
    with tritonops.use(exclude=exclude):
        with torch.autocast("cuda", dtype=torch.float16):
            y = tritonops.layer_norm(x, w, b, 1e-5)
            assert y.dtype is F.layer_norm(x, (32,), w, b).dtype
            r = tritonops.rms_norm(x, w, 1e-5)
            assert r.dtype is F.rms_norm(x, (32,), w, 1e-5).dtype
        (y.float().sum() + r.float().sum()).backward()
    assert x.grad.dtype is torch.float16 and w.grad.dtype is torch.float32 and b.grad.dtype is torch.float32


def test_aut_12_checkpointing_survives_a_change_of_variant(dev, tmp_path, request) -> None:
    """pytorch/pytorch#141896, pytorch/torchtitan#1117: the recomputed forward saves other tensors."""
    low = torch.float16 if "interpreter" in request.node.callspec.id else torch.bfloat16
    x = torch.randn(64, 64, device=dev, requires_grad=True)
    w = torch.randn(64, 64, device=dev, requires_grad=True)

    def block(x):
        with torch.autocast(dev, dtype=low):
            return tritonops.layer_norm(tritonops.matmul(x, w), None, None, 1e-5)

    plain = block(x)
    (want,) = torch.autograd.grad(plain.float().pow(2).sum(), x)
    y = checkpoint(block, x, use_reentrant=False)
    tritonops.clear_cache()
    with tritonops.use(exclude=["tma_persistent", "tiled/32x64x32-g8-w4-s3"]):
        (got,) = torch.autograd.grad(y.float().pow(2).sum(), x)
    assert torch.isfinite(got).all()
    assert float((got - want).norm() / want.norm()) < 5e-2


def test_aut_14_compiled_func_grad(dev) -> None:
    """pytorch/pytorch#193279: the op's own backward is dropped and the inlined body differentiated."""
    w = torch.randn(6, 4, device=dev)
    idx = torch.tensor([1, 0, 1], device=dev)

    def loss(w):
        return (tritonops.embedding(idx, w, 0) ** 2).sum()

    eager = torch.func.grad(loss)(w)
    assert eager[0].eq(0).all() and eager[1].ne(0).all()
    try:
        compiled = torch.compile(torch.func.grad(loss), backend="aot_eager")(w)
    except Exception as error:
        assert "tritonops" in str(error) and "grad" in str(error).lower()
    else:
        assert torch.equal(compiled, eager)
