"""Public reports about numerics, by their ids."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

import tritonops
from reports.support import err, grads, ln64
from tritonops.dispatch.variant import REGISTRY
from tritonops.matmul.op import describe


def test_num_01_float32_is_exact_under_highest_precision(dev) -> None:
    """triton-lang/triton#1800, #6265, #1190, #2654: float32 products silently through TF32."""
    torch.set_float32_matmul_precision("highest")
    a = torch.eye(46, device=dev)
    b = torch.arange(46 * 46.0, device=dev).reshape(46, 46)
    assert torch.equal(tritonops.matmul(a, b), b)
    wide = torch.arange(4096.0, device=dev).reshape(64, 64) + 2**20
    assert torch.equal(tritonops.matmul(torch.eye(64, device=dev), wide), wide)


def test_num_01_the_switch_takes_effect_on_the_next_call() -> None:
    """A choice made under one precision is not reused under another, by the old switch or the new."""
    a = torch.empty(64, 64, device="meta")
    seen = []
    try:
        for precision in ("highest", "high", "highest"):
            torch.set_float32_matmul_precision(precision)
            seen.append(describe(a, a).traits["precision"])
    finally:
        torch.set_float32_matmul_precision("highest")
    assert seen == ["ieee", "tf32", "ieee"]
    assert describe(a.half(), a.half()).traits["precision"] == "ieee"


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["tiled", "persistent", "tma_persistent"])
def test_num_01_on_the_gpu(family) -> None:
    a, b = torch.randn(256, 512, device="cuda"), torch.randn(512, 128, device="cuda")
    want = a.double() @ b.double()
    errors = {}
    try:
        for precision in ("highest", "high", "highest"):
            torch.set_float32_matmul_precision(precision)
            for variant in (family, "vendor"):
                with tritonops.use(variant=variant):
                    error = float((tritonops.matmul(a, b).double() - want).norm() / want.norm())
                errors.setdefault((variant, precision), []).append(error)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert max(errors[family, "highest"] + errors[family, "high"] + errors["vendor", "highest"]) < 2e-6
    assert 2e-5 < errors["vendor", "high"][0] < 1e-3


@pytest.mark.parametrize("n", [1, 3, 33, 65, 1536])
def test_num_05_masked_lanes_stay_out_of_the_variance(dev, n) -> None:
    """linkedin/Liger-Kernel#519: a width that is no power of two adds (0 - mean)**2 for each masked lane."""
    x = 5 + torch.randn(4, n, device=dev)
    w, b = torch.randn(n, device=dev), torch.randn(n, device=dev)
    assert err(tritonops.layer_norm(x, w, b, 1e-5), ln64(x, w, b)) < 5e-5
    rms = F.rms_norm(x.double(), (n,), w.double(), 1e-5)
    assert err(tritonops.rms_norm(x, w, 1e-5), rms) < 5e-5
    g = torch.randn(4, n, device=dev)
    pairs = [
        (
            lambda x, w: tritonops.layer_norm(x, w, b, 1e-5),
            lambda x, w: F.layer_norm(x, (n,), w, b.double(), 1e-5),
        ),
        (lambda x, w: tritonops.rms_norm(x, w, 1e-5), lambda x, w: F.rms_norm(x, (n,), w, 1e-5)),
    ]
    for ours, reference in pairs:
        got, want = grads(ours, g, x, w), grads(reference, g.double(), x.double(), w.double())
        for a, e in zip(got, want, strict=True):
            assert err(a, e) < 1e-4


def test_num_06_large_mean_small_spread(dev) -> None:
    """pytorch/pytorch#51102, #55044: variance as E[x*x] - E[x]**2 cancels."""
    x = 2000 + torch.randn(64, 4, device=dev)
    y = tritonops.layer_norm(x, None, None, 1e-5)
    assert torch.isfinite(y).all() and err(y, ln64(x)) < 5e-3
    x = (1000 + 1e-2 * torch.arange(16.0, device=dev))[None]
    assert err(tritonops.layer_norm(x, None, None, 1e-5), ln64(x)) < 2e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_num_08_sixteen_bit_table_gradient_does_not_stop_growing(dev, dtype, request) -> None:
    """flagos-ai/FlagGems#309, pytorch/pytorch#198199: a bf16 sum of ones stops at 256."""
    if dtype is torch.bfloat16 and "interpreter" in request.node.callspec.id:
        dtype = torch.float16
    w = torch.zeros(4, 3, device=dev, dtype=dtype, requires_grad=True)
    tritonops.embedding(torch.zeros(1000, dtype=torch.long, device=dev), w).sum().backward()
    assert w.grad.dtype is dtype and w.grad[0].eq(1000).all() and w.grad[1:].eq(0).all()


def test_num_12_statistics_stay_in_float32(dev, request) -> None:
    """pytorch/pytorch#140259: mean and 1/std rounded to the input type between forward and backward."""
    dtype = torch.float16 if "interpreter" in request.node.callspec.id else torch.bfloat16
    x = (100 + torch.randn(512, 256, device=dev)).to(dtype)
    w = torch.ones(256, device=dev).to(dtype).requires_grad_()
    tritonops.layer_norm(x, w, None, 1e-5).sum().backward()
    want = ln64(x).sum(0)
    assert err(w.grad, want) <= 1e-2 * want.abs().max().item() + 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize("exclude", [None, "vendor"])
def test_num_14_rows_beyond_2_to_the_23(exclude) -> None:
    """pytorch/pytorch#184826: rows far down are wrong when the row length is no multiple of 4."""
    m, c = 2**23 + 5, 6
    x = torch.randn(m, c, device="cuda", dtype=torch.bfloat16)
    w = torch.ones(c, device="cuda", dtype=torch.bfloat16)
    with tritonops.use(exclude=exclude):
        y = tritonops.layer_norm(x, w, None, 1e-5)
    for lo in (0, 2**22, m - 4096):
        assert err(y[lo : lo + 4096], ln64(x[lo : lo + 4096], w)) < 4e-2


def test_num_15_float64_has_float64_accuracy(torch_dev) -> None:
    """triton-lang/triton#5483, #8093: a block product has no float64."""
    a = torch.randn(33, 65, device=torch_dev, dtype=torch.float64)
    b = torch.randn(65, 17, device=torch_dev, dtype=torch.float64)
    out = tritonops.matmul(a, b)
    assert out.dtype is torch.float64 and err(out, a @ b) < 1e-12
    x = torch.randn(5, 33, device=torch_dev, dtype=torch.float64)
    assert err(tritonops.layer_norm(x, None, None, 1e-5), ln64(x)) < 1e-12
    assert err(tritonops.rms_norm(x, None, 1e-5), F.rms_norm(x, (33,), None, 1e-5)) < 1e-12
    w = torch.randn(4, 3, device=torch_dev, dtype=torch.float64)
    assert torch.equal(tritonops.embedding(torch.tensor([3, 0], device=torch_dev), w), w[[3, 0]])


def test_num_15_a_forced_variant_refuses_float64_by_name() -> None:
    a = torch.randn(4, 4, dtype=torch.float64)
    for op, call in {
        "matmul": lambda: tritonops.matmul(a, a),
        "layer_norm": lambda: tritonops.layer_norm(a),
        "rms_norm": lambda: tritonops.rms_norm(a),
    }.items():
        own = next(v.family for v in tritonops.variants(op) if v.kernel)
        with tritonops.use(variant={op: own}), pytest.raises(tritonops.VariantUnavailable, match="float64"):
            call()


_NUM_16 = """
import hashlib, sys, torch, tritonops
torch.use_deterministic_algorithms(True)
torch.manual_seed(0)
dev = sys.argv[1]
def digest(t): return hashlib.sha256(t.detach().float().cpu().numpy().tobytes()).hexdigest()
idx = torch.randint(0, 5, (50_000,), device=dev); g = torch.randn(50_000, 64, device=dev)
x = torch.randn(4096, 96, device=dev); a = torch.randn(64, 4096, device=dev)
def once():
    w = torch.ones(5, 64, device=dev, requires_grad=True)
    tritonops.embedding(idx, w).backward(g)
    n = torch.ones(96, device=dev, requires_grad=True); b = torch.zeros(96, device=dev, requires_grad=True)
    tritonops.layer_norm(x, n, b).backward(x)
    return [digest(t) for t in (w.grad, n.grad, b.grad, tritonops.matmul(a, x))]
first = once()
assert first == once()
print(*first)
"""


@pytest.mark.gpu
def test_num_16_same_bits_in_one_process_and_across_two(tmp_path) -> None:
    """NVIDIA/Megatron-LM#6966, pytorch/pytorch#99851, linkedin/Liger-Kernel#945: atomics change the bits."""
    script = tmp_path / "once.py"
    script.write_text(_NUM_16)
    runs = [
        subprocess.run([sys.executable, str(script), "cuda"], capture_output=True, text=True, timeout=300)
        for _ in range(2)
    ]
    assert [r.returncode for r in runs] == [0, 0], runs[0].stderr[-2000:]
    assert runs[0].stdout == runs[1].stdout and len(runs[0].stdout.split()) == 4


def test_num_16_no_atomic_variant_is_eligible_under_the_switch() -> None:
    from tritonops.device import named_device
    from tritonops.dispatch.select import illegal

    spec = REGISTRY["embedding_backward"]
    idx, w = torch.zeros(50, dtype=torch.long), torch.ones(5, 64)
    torch.use_deterministic_algorithms(True)
    try:
        problem = spec.describe(idx, w)
        assert problem.policy == "deterministic"
        for v in spec.variants().values():
            reason = illegal(spec, v, problem, named_device("sm_90-132"))
            assert v.deterministic or (reason is not None and "deterministic" in reason)
    finally:
        torch.use_deterministic_algorithms(False)
    assert {v.family for v in spec.variants().values() if not v.deterministic} == {"atomic", "liger"}
