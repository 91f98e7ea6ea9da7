"""The float64 oracle of the norms against torch's own float64 norms and autograd."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tritonops.norm import reference

D = torch.float64


@pytest.mark.parametrize(("shape", "ndim"), [((7, 5), 1), ((2, 3, 4), 2), ((6,), 1), ((4, 3), 2)])
@pytest.mark.parametrize("affine", [True, False])
def test_the_oracle_is_torchs_float64_norm(shape: tuple[int, ...], ndim: int, affine: bool) -> None:
    tail = shape[len(shape) - ndim :]
    x, dy = torch.randn(shape, dtype=D, requires_grad=True), torch.randn(shape, dtype=D)
    w = torch.randn(tail, dtype=D, requires_grad=True) if affine else None
    b = torch.randn(tail, dtype=D, requires_grad=True) if affine else None
    y = F.layer_norm(x, tail, w, b, 1e-3)
    assert torch.allclose(reference.layer_norm(x, w, b, ndim, 1e-3)[0], y, atol=1e-13)
    wanted = [x, w, b] if affine else [x]
    for got, want in zip(
        reference.layer_norm_backward(dy, x, w, ndim, 1e-3), torch.autograd.grad(y, wanted, dy), strict=False
    ):
        assert torch.allclose(got, want, atol=1e-12)
    y = F.rms_norm(x, tail, w, 1e-3)
    assert torch.allclose(reference.rms_norm(x, w, ndim, 1e-3)[0], y, atol=1e-13)
    for got, want in zip(
        reference.rms_norm_backward(dy, x, w, ndim, 1e-3), torch.autograd.grad(y, wanted[:2], dy), strict=False
    ):
        assert torch.allclose(got, want, atol=1e-12)


def test_statistics() -> None:
    x = torch.tensor([[1.0, 2.0, 6.0], [4.0, 4.0, 4.0]])
    _, mean, rstd = reference.layer_norm(x, None, None, 1, 0.25)
    assert mean.tolist() == [3.0, 4.0]
    assert torch.allclose(rstd, torch.tensor([14 / 3 + 0.25, 0.25], dtype=D).rsqrt(), atol=1e-15)


def test_error_model() -> None:
    unit = 2.0**-24
    assert reference.float32_error(1) == 4 * unit
    assert reference.float32_error(1024, condition=10, cancellation=3) == 72 * unit
    assert reference.tolerated_error(torch.float16, 1) == 2.0**-11 + 4 * unit
    assert reference.tolerated_error(D, 1) == 4 * 2.0**-53
    x = torch.tensor([[99.0, 101.0], [-1.0, 1.0]])
    assert reference.condition(x, 1, 0.0) == 100.0
    # Columns 3 - 1 and 2 + 2: the root sums of squares sqrt(10) and sqrt(8) over the sums 2 and 4.
    dy = torch.tensor([[3.0, 2.0], [-1.0, 2.0]])
    assert reference.cancellation(dy, x, None, 1, 1e-5, True)[2] == pytest.approx(max((18 / 20) ** 0.5, 1.0))
    dy = torch.tensor([[3.0, 2.0], [-2.0, -1.0]])
    assert reference.cancellation(dy, x, None, 1, 1e-5, True)[2] == pytest.approx((18 / 2) ** 0.5)
