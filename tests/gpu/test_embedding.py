"""Embedding variants on the GPU: exact lookups, gradients against float64 under uniform, repeated and Zipf ids."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import tritonops
from tritonops.testing import relative_error

FORWARD = [v.id for v in tritonops.variants("embedding") if v.kernel]
BACKWARD = [v.id for v in tritonops.variants("embedding_backward") if v.kernel]


def _ids(kind: str, tokens: int, rows: int) -> torch.Tensor:
    if kind == "uniform":
        return torch.randint(0, rows, (tokens,), device="cuda")
    if kind == "equal":
        return torch.full((tokens,), rows - 1, device="cuda")
    weights = 1 / torch.arange(1, rows + 1, device="cuda", dtype=torch.float64)
    return torch.multinomial((weights / weights.sum()).float(), tokens, replacement=True)


@pytest.mark.parametrize("variant", FORWARD)
@pytest.mark.parametrize("width", [1, 33, 257, 768, 4096])
def test_lookup_is_exact(variant, width) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        w = torch.randn(1000, width, device="cuda").to(dtype)
        for ids in (_ids("uniform", 777, 1000), _ids("zipf", 64, 1000).int().view(8, 8).t()):
            with tritonops.use(variant={"embedding": variant}):
                assert torch.equal(tritonops.embedding(ids, w), w[ids])


@pytest.mark.parametrize("variant", BACKWARD)
@pytest.mark.parametrize("kind", ["uniform", "zipf", "equal"])
def test_gradient_error_is_at_most_torchs(variant, kind) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for tokens, width, rows in ((5000, 257, 3000), (4096, 768, 100)):
            ids = _ids(kind, tokens, rows)
            w = torch.zeros(rows, width, device="cuda", dtype=dtype, requires_grad=True)
            dy = torch.randn(tokens, width, device="cuda").to(dtype)
            want = torch.zeros(rows, width, device="cuda", dtype=torch.float64).index_add_(0, ids, dy.double())
            (torchs,) = torch.autograd.grad(F.embedding(ids, w), w, dy)
            with tritonops.use(variant={"embedding_backward": variant}):
                (got,) = torch.autograd.grad(tritonops.embedding(ids, w), w, dy)
            assert got.dtype is dtype
            bound = max(1.05 * relative_error(torchs, want), 0.5 * torch.finfo(dtype).eps, 3e-6)
            assert relative_error(got, want) <= bound, (dtype, tokens)


@pytest.mark.parametrize("variant", [v for v in BACKWARD if v.startswith("atomic")])
def test_padding_row_gets_no_gradient(variant) -> None:
    ids = _ids("zipf", 5000, 300)
    w = torch.zeros(300, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    with tritonops.use(variant={"embedding_backward": variant}):
        (got,) = torch.autograd.grad(tritonops.embedding(ids, w, 0).float().sum(), w)
    counts = torch.bincount(ids, minlength=300).float()
    counts[0] = 0
    assert torch.equal(got.float(), counts[:, None].expand(300, 64).bfloat16().float())


def test_vendor_serves_deterministic_gradients() -> None:
    ids, dy = _ids("zipf", 20000, 500), torch.randn(20000, 96, device="cuda")
    w = torch.zeros(500, 96, device="cuda", requires_grad=True)
    with tritonops.use(policy="deterministic"):
        runs = [torch.autograd.grad(tritonops.embedding(ids, w), w, dy)[0] for _ in range(3)]
        assert "atomic" not in tritonops.explain("embedding_backward", ids, w).variant
    assert torch.equal(runs[0], runs[1]) and torch.equal(runs[0], runs[2])
