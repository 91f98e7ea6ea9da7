"""The demo's comparison of interpreted variants can fail."""

from __future__ import annotations

import pytest
import torch

import tritonops
from gpt import interpreted


@pytest.mark.parametrize("factor, good", [(1.0, True), (1.01, False), (float("nan"), False)])
def test_a_variant_beyond_its_bound_fails_the_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], factor: float, good: bool
):
    a, b = torch.randn(8, 16), torch.randn(16, 8)
    exact = (a.double() @ b.double(),)
    case = interpreted.Case("matmul", torch.float32, lambda: (tritonops.matmul(a, b),), exact, 16)
    tried = next(v for v in tritonops.variants("matmul") if v.family == "tiled")
    monkeypatch.setattr(interpreted, "cases", lambda slices, dtype: [case] if dtype == torch.float32 else [])
    monkeypatch.setattr(interpreted.tritonops, "variants", lambda op: [tried])
    honest = interpreted.forced
    monkeypatch.setattr(
        interpreted,
        "forced",
        lambda case, variant: tuple(o * (1.0 if variant == "vendor" else factor) for o in honest(case, variant)),
    )
    assert interpreted.report({}) is good
    assert ("TOO LARGE" in capsys.readouterr().out) is not good
