"""Of every op: results are no views, the negative bit is seen, tangents are refused, locks outlive a fork."""

from __future__ import annotations

import os
import threading

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad

import tritonops

X, W = torch.randn(2, 3, 8), torch.randn(5, 8)
IDS = torch.tensor([[1, 0], [4, 4]])

CALLS = {
    "matmul": (lambda x: tritonops.matmul(x, W.t()), lambda x: x @ W.t()),
    "linear": (lambda x: tritonops.linear(x, W), lambda x: F.linear(x, W)),
    "layer_norm": (lambda x: tritonops.layer_norm(x), lambda x: F.layer_norm(x, (8,))),
    "rms_norm": (lambda x: tritonops.rms_norm(x, None, 1e-5), lambda x: F.rms_norm(x, (8,), None, 1e-5)),
    "embedding": (
        lambda x: tritonops.embedding(IDS, x.flatten(0, 1)),
        lambda x: F.embedding(IDS, x.flatten(0, 1)),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_results_may_be_modified_in_place(name) -> None:
    ours, theirs = CALLS[name]
    x = X.clone().requires_grad_()
    got, want = ours(x), theirs(x)
    assert not got._is_view()
    got += 1
    want = want + 1
    for y in (got, want):
        x.grad = None
        y.pow(2).sum().backward(retain_graph=True)
        last, x.grad = x.grad, None
        if y is got:
            first = last
    assert torch.allclose(first, last, atol=1e-4)
    with torch.no_grad():
        y = ours(x)
    assert not y._is_view()
    y += torch.ones_like(y, requires_grad=True)
    assert y.requires_grad


@pytest.mark.parametrize("name", CALLS)
def test_first_gradients_are_no_views(name) -> None:
    x = X.clone().requires_grad_()
    (g,) = torch.autograd.grad(CALLS[name][0](x).pow(2).sum(), x, create_graph=True)
    g += 1
    assert torch.isfinite(g).all()


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("grad", [False, True])
def test_the_negative_bit_is_seen(name, grad, monkeypatch) -> None:
    """The memory of x.conj().imag holds the values with the other sign."""
    ours, theirs = CALLS[name]
    x = torch.complex(torch.randn(2, 3, 8), X).conj().imag
    assert x.is_neg()
    leaf = x.detach().requires_grad_(grad)
    assert torch.allclose(ours(leaf), theirs(X.neg()), atol=1e-5)
    # What reaches a kernel through the transforms too:
    got = torch.func.vmap(ours if name != "embedding" else lambda x: tritonops.embedding(IDS[0, :1] * 0, x))(x)
    if name != "embedding":
        assert torch.allclose(got, theirs(X.neg()), atol=1e-5)
    upstream = torch._neg_view(torch.randn(ours(X).shape))
    probe = X.clone().requires_grad_()
    (a,) = torch.autograd.grad(ours(probe), probe, upstream)
    (b,) = torch.autograd.grad(theirs(probe), probe, upstream.clone())
    assert torch.allclose(a, b, atol=1e-4)


@pytest.mark.parametrize("name", CALLS)
def test_a_tangent_is_refused_not_dropped(name) -> None:
    ours = CALLS[name][0]
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(X, torch.ones_like(X))
        with pytest.raises(NotImplementedError), torch.profiler.profile():
            ours(dual)
        with pytest.raises(NotImplementedError):
            ours(dual)
    with pytest.raises(Exception, match="jvp|forward"):
        torch.compile(lambda x: torch.func.jvp(ours, (x,), (torch.ones_like(x),))[1], backend="aot_eager")(X)
    torch._dynamo.reset()


def test_strided_and_expanded_bias() -> None:
    x, w, big = torch.randn(4, 8), torch.randn(5, 8), torch.randn(10)
    for bias in (big[::2], big[:1].expand(5)):
        assert torch.allclose(tritonops.linear(x, w, bias), F.linear(x, w, bias), atol=1e-5)


def test_complex_weight_gradients_are_resolved() -> None:
    w = torch.randn(5, 8, dtype=torch.complex64, requires_grad=True)
    tritonops.linear(torch.randn(3, 8, dtype=torch.complex64), w).abs().sum().backward()
    assert not w.grad.is_conj()
    torch.optim.AdamW([w]).step()


def test_float32_output_keeps_its_gradients_range() -> None:
    h, w = torch.randn(4, 8).half().requires_grad_(), (1e3 * torch.randn(8, 5)).half()
    (g,) = torch.autograd.grad(tritonops.matmul(h, w, out_dtype=torch.float32), h, torch.full((4, 5), 1e-8))
    want = (torch.full((4, 5), 1e-8) @ w.float().t()).half()
    assert want.abs().max() > 0 and torch.allclose(g, want, atol=1e-6, rtol=1e-2)


def test_a_fork_while_another_thread_decides() -> None:
    from tritonops.dispatch import memo

    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with memo._lock:
            held.set()
            done.wait(20)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    pid = os.fork()
    if pid == 0:
        tritonops.clear_cache()
        os._exit(7 if memo._lock.acquire(timeout=5) else 1)
    status = None
    for _ in range(200):
        pid_done, status = os.waitpid(pid, os.WNOHANG)
        if pid_done:
            break
        threading.Event().wait(0.05)
    else:
        os.kill(pid, 9)
    done.set()
    thread.join()
    assert os.waitstatus_to_exitcode(status) == 7
