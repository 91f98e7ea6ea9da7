"""Norm variants on the GPU: bf16, fp16 and fp32, forward and backward, against float64 and torch's own error."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import tritonops
from tritonops.device import device_info
from tritonops.dispatch.select import illegal
from tritonops.dispatch.variant import REGISTRY
from tritonops.testing import relative_error

SHAPES = [(777, 64), (300, 1000), (257, 4096), (129, 4608), (33, 8192), (1000, 33)]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def _norm(op: str):
    if op == "layer_norm":
        return tritonops.layer_norm, lambda x, w, b: F.layer_norm(x, w.shape, w, b)
    return (lambda x, w, b: tritonops.rms_norm(x, w, 1e-5)), (lambda x, w, b: F.rms_norm(x, w.shape, w, 1e-5))


def _run(fn, x, w, b, dy):
    leaves = [t.detach().clone().requires_grad_() for t in (x, w, b)]
    y = fn(*leaves)
    grads = torch.autograd.grad(y, leaves, dy, allow_unused=True)
    return [y.detach(), *(g for g in grads if g is not None)]


def _cells() -> list[tuple[str, str]]:
    return [
        (op, v.id)
        for op in ("layer_norm", "rms_norm", "layer_norm_backward", "rms_norm_backward")
        for v in REGISTRY[op].variants().values()
        if v.kernel
    ]


@pytest.mark.parametrize(("op", "variant"), _cells())
def test_error_is_at_most_torchs(op, variant) -> None:
    ours, theirs = _norm(op.removesuffix("_backward"))
    spec, device = REGISTRY[op], device_info(torch.device("cuda"))
    ran = 0
    for m, n in SHAPES:
        for dtype in DTYPES:
            x = (torch.randn(m, n, device="cuda") * 0.5 - 2.3).to(dtype)
            w, b = torch.rand(n, device="cuda").to(dtype), torch.randn(n, device="cuda").to(dtype)
            dy = torch.randn(m, n, device="cuda").to(dtype)
            args = (x, w, b) if op.startswith("layer_norm") else (x, w)
            if illegal(spec, spec.variants()[variant], spec.describe(*args), device):
                continue
            ran += 1
            oracle = _run(theirs, x.double(), w.double(), b.double(), dy.double())
            torchs = _run(theirs, x, w, b, dy)
            with tritonops.use(variant={op: variant}):
                got = _run(ours, x, w, b, dy)
            for o, t, g in zip(oracle, torchs, got, strict=True):
                assert g.dtype is dtype and g.shape == o.shape
                eps = torch.finfo(dtype).eps
                assert relative_error(g, o) <= max(1.05 * relative_error(t, o), 0.5 * eps, 2e-6), (m, n, dtype)
    assert ran >= 2


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_float32_parameters_with_16_bit_rows(op) -> None:
    ours, theirs = _norm(op)
    x = torch.randn(100, 200, device="cuda").bfloat16()
    w, b, dy = torch.rand(200, device="cuda"), torch.randn(200, device="cuda"), torch.randn_like(x)
    oracle = _run(theirs, x.double(), w.double(), b.double(), dy.double())
    for exclude in (None, "vendor"):
        with tritonops.use(exclude=exclude):
            got = _run(ours, x, w, b, dy)
        assert [g.dtype for g in got[:3]] == [torch.bfloat16, torch.bfloat16, torch.float32]
        for o, g in zip(oracle, got, strict=True):
            assert relative_error(g, o) < 4e-3


def test_expanded_and_sliced_operands_on_the_gpu() -> None:
    x = torch.randn(64, 512, device="cuda").bfloat16()[:, 100:400]
    dy = torch.randn(1, 300, device="cuda").bfloat16().expand(64, 300)
    w = torch.rand(300, device="cuda").bfloat16()
    oracle = _run(lambda x, w, b: F.layer_norm(x, w.shape, w, b), x.double(), w.double(), w.double(), dy.double())
    with tritonops.use(exclude="vendor"):
        got = _run(tritonops.layer_norm, x, w, w, dy)
    for o, g in zip(oracle, got, strict=True):
        assert relative_error(g, o) < 6e-3


def test_a_rows_bits_do_not_depend_on_the_batch() -> None:
    for n in (96, 1000, 4608):
        x, w = torch.randn(500, n, device="cuda").bfloat16(), torch.rand(n, device="cuda").bfloat16()
        with tritonops.use(policy="batch_invariant"):
            for norm in (tritonops.layer_norm, lambda x, w: tritonops.rms_norm(x, w, 1e-5)):
                whole = norm(x, w)
                for rows in (slice(0, 1), slice(7, 40), slice(499, 500)):
                    assert torch.equal(norm(x[rows], w), whole[rows])


def test_deterministic_policy_gives_the_same_bits() -> None:
    x, w = torch.randn(3000, 768, device="cuda"), torch.rand(768, device="cuda")
    with tritonops.use(policy="deterministic", exclude="vendor"):
        runs = [_run(tritonops.layer_norm, x, w, w, x) for _ in range(3)]
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))


def test_graph_capture_of_forward_and_backward() -> None:
    x, w = torch.randn(512, 768, device="cuda", requires_grad=True), torch.rand(768, device="cuda", requires_grad=True)
    dy = torch.randn(512, 768, device="cuda")
    with tritonops.use(exclude="vendor"):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.autograd.grad(tritonops.layer_norm(x, w), (x, w), dy)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            dx, dw = torch.autograd.grad(tritonops.layer_norm(x, w), (x, w), dy)
        with torch.no_grad():
            x.copy_(torch.randn_like(x))
        graph.replay()
        again = torch.autograd.grad(tritonops.layer_norm(x, w), (x, w), dy)
    assert torch.equal(dx, again[0]) and torch.equal(dw, again[1])
