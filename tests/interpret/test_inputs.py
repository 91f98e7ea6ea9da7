"""Inputs whose memory is not what a kernel would take it for: strided biases, the lazy negative bit."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import tritonops


@pytest.mark.parametrize("family", ["tiled", "persistent", "tma_persistent", "padded"])
def test_strided_and_expanded_bias(family) -> None:
    k = 33 if family == "padded" else 32
    x, w, big = torch.randn(20, k), torch.randn(24, k), torch.randn(48)
    with tritonops.use(variant={"matmul": family}):
        for bias in (big[::2], big[:1].expand(24), big[24:]):
            assert torch.allclose(tritonops.linear(x, w, bias), F.linear(x, w, bias), atol=1e-4)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_the_negative_bit_is_seen(requires_grad) -> None:
    values = torch.randn(6, 8)
    x = torch._neg_view(values).requires_grad_(requires_grad)
    w, ids = torch.randn(8, 5), torch.tensor([5, 0, 0])
    dy = torch._neg_view(torch.randn(6, 8))
    with tritonops.use(exclude="vendor"):
        assert torch.allclose(tritonops.matmul(x, w), -values @ w, atol=1e-5)
        assert torch.allclose(tritonops.matmul(values, torch._neg_view(w)), -values @ w, atol=1e-5)
        assert torch.allclose(tritonops.layer_norm(x), F.layer_norm(-values, (8,)), atol=1e-5)
        assert torch.allclose(tritonops.rms_norm(x, None, 1e-5), F.rms_norm(-values, (8,), None, 1e-5), atol=1e-5)
        assert torch.equal(tritonops.embedding(ids, x), -values[ids])
        for ours, theirs in (
            (lambda v: tritonops.layer_norm(v), lambda v: F.layer_norm(v, (8,))),
            (lambda v: tritonops.embedding(torch.arange(6), v), lambda v: F.embedding(torch.arange(6), v)),
        ):
            leaf = values.clone().requires_grad_()
            (got,) = torch.autograd.grad(ours(leaf), leaf, dy)
            (want,) = torch.autograd.grad(theirs(leaf), leaf, dy.resolve_neg())
            assert torch.allclose(got, want, atol=1e-5)
