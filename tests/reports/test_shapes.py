"""Public reports about shapes, strides and types, by their ids."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

import tritonops
from reports.support import err, grads
from tritonops.device import named_device
from tritonops.dispatch.select import choose
from tritonops.dispatch.variant import REGISTRY
from tritonops.matmul.op import describe


def test_shp_03_normalised_dimension_of_length_0(dev) -> None:
    """pytorch/pytorch#80893: rejected by the driver in the backward."""
    for norm in (lambda x, w: tritonops.layer_norm(x, w, None, 1e-5), lambda x, w: tritonops.rms_norm(x, w, 1e-5)):
        x = torch.empty(3, 0, device=dev, requires_grad=True)
        w = torch.ones(0, device=dev, requires_grad=True)
        y = norm(x, w)
        y.sum().backward()
        assert y.shape == (3, 0) and x.grad.shape == (3, 0) and w.grad.shape == (0,)
        x = torch.empty(0, 5, device=dev, requires_grad=True)
        w = torch.ones(5, device=dev, requires_grad=True)
        norm(x, w).sum().backward()
        assert x.grad.shape == (0, 5) and w.grad.eq(0).all()


@pytest.mark.parametrize("m", [300, 100_000])
def test_shp_06_two_normalised_dimensions(dev, m) -> None:
    """pytorch/pytorch#189405, intel/torch-xpu-ops#5235: flat gradient, or a scratch buffer too narrow."""
    if dev == "cpu":
        m = min(m, 300)
    x = torch.randn(m, 8, 16, device=dev)
    w = torch.randn(8, 16, device=dev, requires_grad=True)
    b = torch.zeros(8, 16, device=dev, requires_grad=True)
    tritonops.layer_norm(x, w, b, 1e-5).sum().backward()
    assert w.grad.shape == (8, 16) and b.grad.shape == (8, 16)
    assert b.grad.eq(m).all()
    want = F.layer_norm(x.double(), (8, 16)).sum(0)
    assert err(w.grad, want) < 1e-4 * m**0.5 + 1e-3 * want.abs().max().item()


@pytest.mark.parametrize("shape", [(64,), (52, 64), (52, 7, 64), (5, 3, 7, 64)])
def test_shp_07_any_rank(dev, shape) -> None:
    """flagos-ai/FlagGems#5392, #5490: the backward takes the row count from shape[0]."""
    x, w, b, g = torch.randn(shape), torch.randn(64), torch.randn(64), torch.randn(shape)
    want = grads(lambda x, w, b: F.layer_norm(x, (64,), w, b), g.double(), x.double(), w.double(), b.double())
    got = grads(lambda x, w, b: tritonops.layer_norm(x, w, b, 1e-5), g.to(dev), x.to(dev), w.to(dev), b.to(dev))
    for r, o in zip(want, got, strict=True):
        assert r.shape == o.shape and err(r, o.cpu()) < 2e-4


@pytest.mark.gpu
@pytest.mark.parametrize("exclude", [None, "vendor"])
def test_shp_10_small_matrix_with_a_huge_row_stride(exclude) -> None:
    """ROCm/aiter#467, ml-explore/mlx#3609, triton-lang/triton#832: the largest reachable offset decides."""
    big = torch.zeros(40, 2**26, device="cuda", dtype=torch.bfloat16)
    big[:, :64] = torch.randn(40, 64, device="cuda", dtype=torch.bfloat16)
    a = big[:, :64]
    b = torch.randn(64, 32, device="cuda", dtype=torch.bfloat16)
    exact = a.double() @ b.double()
    with tritonops.use(exclude=exclude):
        assert err(tritonops.matmul(a, b), exact) <= exact.abs().max().item() * 2**-7
        want = F.layer_norm(a.double(), (64,))
        assert err(tritonops.layer_norm(a, None, None, 1e-5), want) < 4e-2
        ids = torch.tensor([39, 0, 20], device="cuda")
        assert torch.equal(tritonops.embedding(ids, a), a[ids])


def test_shp_10_the_offset_predicate_looks_at_strides() -> None:
    big = torch.empty(40, 2**26, device="meta", dtype=torch.bfloat16)
    b = torch.empty(64, 32, device="meta", dtype=torch.bfloat16)
    assert describe(big[:, :64], b).traits["wide"] is True
    assert describe(torch.empty(40, 64, device="meta", dtype=torch.bfloat16), b).traits["wide"] is False


def _layouts(dev: str) -> dict[str, torch.Tensor]:
    base = torch.randn(20000, device=dev).half()
    return {
        "row stride 130 bytes": torch.as_strided(base, (64, 64), (65, 1)),
        "start at 2 bytes": torch.as_strided(base, (64, 64), (64, 1), 1),
        "transposed, 66 rows": torch.as_strided(base, (64, 66), (66, 1)).t()[:66, :64],
        "one row": torch.as_strided(base, (1, 64), (65, 1)),
        "both strides over 1": torch.as_strided(base, (64, 64), (131, 2)),
    }


def test_shp_12_operands_that_descriptors_cannot_describe(dev) -> None:
    """flagos-ai/FlagGems#2489, #4471: five layouts that crash a descriptor kernel."""
    b = torch.randn(64, 64, device=dev).half()
    for a in _layouts(dev).values():
        exact = a.double() @ b.double()
        assert err(tritonops.matmul(a, b), exact) <= exact.abs().max().item() * 2**-10


def test_shp_12_the_chooser_never_picks_a_descriptor_variant_for_them() -> None:
    b = torch.randn(64, 64).half()
    spec, device = REGISTRY["matmul"], named_device("sm_90-132")
    with tritonops.use(exclude="vendor"):
        for name, a in _layouts("cpu").items():
            chosen = choose(spec, describe(a, b), device).variant
            assert name == "one row" or not chosen.startswith("tma_persistent"), (name, chosen)
        aligned = torch.randn(128, 64).half()
        assert choose(spec, describe(aligned, b), device).variant.startswith("tma_persistent")


@pytest.mark.parametrize("k", [505, 508, 511, 512, 513, 519])
def test_shp_13_row_stride_of_1022_bytes(dev, k, request) -> None:
    """triton-lang/triton#10927, #10931: a device-made descriptor gives wrong products without an error."""
    dtype = torch.float16 if "interpreter" in request.node.callspec.id else torch.bfloat16
    a, b = torch.randn(256, k, device=dev).to(dtype), torch.randn(k, 256, device=dev).to(dtype)
    exact = a.double() @ b.double()
    assert err(tritonops.matmul(a, b), exact) <= exact.abs().max().item() * 2**-7
    k = k // 4
    a, b = torch.randn(64, k, device=dev), torch.randn(k, 64, device=dev)
    exact = a.double() @ b.double()
    assert err(tritonops.matmul(a, b), exact) <= exact.abs().max().item() * 2**-18


_BAD_IDS = """
import sys, torch, tritonops
w = torch.randn(4, 3, device=sys.argv[1])
with tritonops.use(exclude=sys.argv[3] or None):
    out = tritonops.embedding(torch.tensor(eval(sys.argv[2]), device=sys.argv[1]), w)
    torch.cuda.synchronize()
print("accepted")
"""


@pytest.mark.gpu
@pytest.mark.parametrize("exclude", ["", "vendor"])
@pytest.mark.parametrize("ids", ["[1, 4]", "[-1]", "[-5]"])
def test_shp_16_17_bad_token_ids_on_the_gpu(tmp_path, ids, exclude) -> None:
    """pytorch/pytorch#93538: garbage or an illegal access; #183636: negative ids wrap. An assert ends the context."""
    script = tmp_path / "bad.py"
    script.write_text(_BAD_IDS)
    run = subprocess.run(
        [sys.executable, str(script), "cuda", ids, exclude], capture_output=True, text=True, timeout=300
    )
    assert run.returncode != 0 and "accepted" not in run.stdout
    assert "assert" in run.stderr.lower()


@pytest.mark.parametrize("ids", [[1, 4], [-1], [-4], [-5], [2**40]])
def test_shp_16_17_bad_token_ids_on_cpu_tensors(dev, ids) -> None:
    if dev == "cuda":
        pytest.skip("in a child process, above")
    w = torch.randn(4, 3, requires_grad=True)
    with pytest.raises(IndexError):
        tritonops.embedding(torch.tensor(ids), w)


def test_shp_17_compiled_rejects_negative_ids_as_eager_does() -> None:
    compiled = torch.compile(tritonops.embedding, fullgraph=True, backend="aot_eager")
    with pytest.raises(IndexError):
        compiled(torch.tensor([-1]), torch.randn(4, 3))


def test_shp_18_negative_padding_idx(dev) -> None:
    """pytorch/pytorch#93950: -1 matches nothing and the padding row is trained."""
    w = torch.randn(10, 3, device=dev, requires_grad=True)
    idx = torch.tensor([[1, 2, 4, 9], [4, 3, 2, 9]], device=dev)
    out = tritonops.embedding(idx, w, -1)
    assert torch.equal(out, w.detach()[idx])
    out.sum().backward()
    assert w.grad[9].eq(0).all() and w.grad[4].eq(2).all()
    for bad in (10, -11):
        with pytest.raises((AssertionError, ValueError, RuntimeError)):
            tritonops.embedding(idx, w, bad)


def test_shp_20_output_is_contiguous(dev) -> None:
    """flagos-ai/FlagGems#455, #457: a lookup that returns a non-contiguous tensor."""
    for w in (
        torch.randn(10, 16, device=dev),
        torch.randn(16, 10, device=dev).t(),
        torch.randn(20, 32, device=dev)[::2, ::2],
    ):
        idx = torch.tensor([[1, 2, 3], [4, 5, 6]], device=dev).t()
        out = tritonops.embedding(idx, w)
        assert out.is_contiguous() and torch.equal(out, w[idx])
        assert out.view(-1).shape == (6 * w.shape[1],)
